"""Policies over language models, and the backends that run these."""

from __future__ import annotations

from torchrl_llm.data.containers import ChatHistory, LogProbs, Masks, Text, Tokens
from torchrl_llm.data.interop import TorchRLBufferDataset
from torchrl_llm.modules.backends import (
    Answer,
    Backend,
    Completion,
    FakeBackend,
    OpenAIBackend,
    SamplingParams,
    TransformersBackend,
    VLLMServer,
    sampling_mode,
)
from torchrl_llm.modules.loading import load_model, load_tokenizer
from torchrl_llm.modules.policies import (
    FakeWrapper,
    LLMWrapperBase,
    LogProbDistribution,
    TransformersWrapper,
    vLLMWrapper,
)
from torchrl_llm.modules.reference import AdapterDisabled
from torchrl_llm.modules.reward_model import HFRewardModelWrapper
from torchrl_llm.modules.value_head import ValueHead

__all__ = [
    "AdapterDisabled",
    "Answer",
    "Backend",
    "ChatHistory",
    "Completion",
    "FakeBackend",
    "FakeWrapper",
    "HFRewardModelWrapper",
    "LLMWrapperBase",
    "LogProbDistribution",
    "LogProbs",
    "Masks",
    "OpenAIBackend",
    "SamplingParams",
    "Text",
    "Tokens",
    "TorchRLBufferDataset",
    "TransformersBackend",
    "TransformersWrapper",
    "VLLMServer",
    "ValueHead",
    "load_model",
    "load_tokenizer",
    "sampling_mode",
    "vLLMWrapper",
]
