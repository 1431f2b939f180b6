"""Policies: rows of a tensordict through a backend and back."""

from __future__ import annotations

from torchrl_llm.data.containers import ChatHistory, LogProbs, Masks, Text, Tokens
from torchrl_llm.modules.policies.distributions import LogProbDistribution, TokenDistribution
from torchrl_llm.modules.policies.fake_wrapper import FakeWrapper
from torchrl_llm.modules.policies.llm_wrapper import LLMWrapperBase
from torchrl_llm.modules.policies.remote_wrapper import RemoteTransformersWrapper
from torchrl_llm.modules.policies.transformers_wrapper import TransformersWrapper
from torchrl_llm.modules.policies.vllm_wrapper import vLLMWrapper

__all__ = [
    "ChatHistory",
    "FakeWrapper",
    "LLMWrapperBase",
    "LogProbDistribution",
    "LogProbs",
    "Masks",
    "RemoteTransformersWrapper",
    "Text",
    "TokenDistribution",
    "Tokens",
    "TransformersWrapper",
    "vLLMWrapper",
]
