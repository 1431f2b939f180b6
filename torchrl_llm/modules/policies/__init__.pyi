from torchrl_llm.data.views import (
    ChatHistory as ChatHistory,
    LogProbs as LogProbs,
    Masks as Masks,
    Text as Text,
    Tokens as Tokens,
)
from torchrl_llm.modules.policies.chat_server import ChatServerPolicy as ChatServerPolicy
from torchrl_llm.modules.policies.llm_wrapper import LLMWrapperBase as LLMWrapperBase
from torchrl_llm.modules.policies.model_wrappers import (
    FakeWrapper as FakeWrapper,
    RemoteTransformersWrapper as RemoteTransformersWrapper,
    TransformersWrapper as TransformersWrapper,
    vLLMWrapper as vLLMWrapper,
)
from torchrl_llm.modules.policies.policy_arguments import PolicyOptions as PolicyOptions
from torchrl_llm.modules.policies.policy_router import PolicyRouter as PolicyRouter
from torchrl_llm.compat.mixins.policy_distributions import (
    LogProbDistribution as LogProbDistribution,
    TokenDistribution as TokenDistribution,
)
