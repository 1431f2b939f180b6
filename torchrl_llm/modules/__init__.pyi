from torchrl_llm.compat.buffer_dataset import TorchRLBufferDataset as TorchRLBufferDataset
from torchrl_llm.compat.vllm_group import (
    stateless_init_process_group as stateless_init_process_group,
    stateless_init_process_group_async as stateless_init_process_group_async,
    vLLMWorker as vLLMWorker,
)
from torchrl_llm.data.views import (
    ChatHistory as ChatHistory,
    LogProbs as LogProbs,
    Masks as Masks,
    Text as Text,
    Tokens as Tokens,
)
from torchrl_llm.modules.continued_adapter import base_of as base_of, find_adapter as find_adapter
from torchrl_llm.modules.backends import (
    Answer as Answer,
    Backend as Backend,
    Completion as Completion,
    FakeBackend as FakeBackend,
    OpenAIBackend as OpenAIBackend,
    SamplingParams as SamplingParams,
    TransformersBackend as TransformersBackend,
    VLLMServer as VLLMServer,
    sampling_mode as sampling_mode,
)
from torchrl_llm.modules.backends.head import ValueHead as ValueHead
from torchrl_llm.modules.backends.vllm import VLLMBackend as VLLMBackend
from torchrl_llm.modules.backends.vllm.async_engine import (
    AsyncVLLM as AsyncVLLM,
    make_async_vllm_engine as make_async_vllm_engine,
    make_vllm_worker as make_vllm_worker,
)
from torchrl_llm.modules.model_loading import (
    context_length as context_length,
    empty_model as empty_model,
    end_token_ids as end_token_ids,
    load_model as load_model,
    load_reward_model as load_reward_model,
    load_tokenizer as load_tokenizer,
)
from torchrl_llm.modules.policies import (
    ChatServerPolicy as ChatServerPolicy,
    FakeWrapper as FakeWrapper,
    LLMWrapperBase as LLMWrapperBase,
    LogProbDistribution as LogProbDistribution,
    PolicyRouter as PolicyRouter,
    RemoteTransformersWrapper as RemoteTransformersWrapper,
    TransformersWrapper as TransformersWrapper,
    vLLMWrapper as vLLMWrapper,
)
from torchrl_llm.modules.reference import (
    AdapterAsLoaded as AdapterAsLoaded,
    AdapterDisabled as AdapterDisabled,
)
from torchrl_llm.modules.remote import EnginePool as EnginePool, LoadBalancer as LoadBalancer
from torchrl_llm.modules.reward_model import HFRewardModelWrapper as HFRewardModelWrapper
