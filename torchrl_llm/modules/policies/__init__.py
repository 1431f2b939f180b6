"""Policies: rows of a tensordict through a backend and back."""

from __future__ import annotations

from torchrl_llm.compat.mixins.policy_distributions import LogProbDistribution, TokenDistribution
from torchrl_llm.data.views import ChatHistory, LogProbs, Masks, Text, Tokens
from torchrl_llm.modules.policies.chat_server import ChatServerPolicy
from torchrl_llm.modules.policies.llm_wrapper import LLMWrapperBase
from torchrl_llm.modules.policies.model_wrappers import (
    FakeWrapper,
    RemoteTransformersWrapper,
    TransformersWrapper,
    vLLMWrapper,
)
from torchrl_llm.modules.policies.policy_arguments import PolicyOptions
from torchrl_llm.modules.policies.policy_router import PolicyRouter

__all__ = [
    "ChatHistory",
    "ChatServerPolicy",
    "FakeWrapper",
    "LLMWrapperBase",
    "LogProbDistribution",
    "LogProbs",
    "Masks",
    "PolicyOptions",
    "PolicyRouter",
    "RemoteTransformersWrapper",
    "Text",
    "TokenDistribution",
    "Tokens",
    "TransformersWrapper",
    "vLLMWrapper",
]
