from torchrl_llm.modules.backends.backend_port import (
    Backend as Backend,
    Completion as Completion,
    EngineStatus as EngineStatus,
    SamplingParams as SamplingParams,
)
from torchrl_llm.modules.backends.classifier_scorer import ClassifierScorer as ClassifierScorer
from torchrl_llm.modules.backends.fake import (
    Answer as Answer,
    BigramModel as BigramModel,
    FakeBackend as FakeBackend,
)
from torchrl_llm.modules.backends.openai import OpenAIBackend as OpenAIBackend
from torchrl_llm.modules.backends.server import VLLMServer as VLLMServer
from torchrl_llm.modules.backends.token_scorer import CausalScorer as CausalScorer
from torchrl_llm.modules.backends.head import sampling_mode as sampling_mode
from torchrl_llm.modules.backends.transformers import TransformersBackend as TransformersBackend
from torchrl_llm.weights.weight_source import (
    AdapterSource as AdapterSource,
    DeltaSource as DeltaSource,
    TensorSource as TensorSource,
    WeightReceipt as WeightReceipt,
    WeightSource as WeightSource,
)
