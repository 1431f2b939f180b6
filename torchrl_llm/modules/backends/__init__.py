"""Backends: models that take and return token ids."""

from __future__ import annotations

from torchrl_llm.modules.backends.backend_port import (
    Backend,
    Completion,
    EngineStatus,
    SamplingParams,
)
from torchrl_llm.modules.backends.fake import Answer, BigramModel, FakeBackend
from torchrl_llm.modules.backends.openai import OpenAIBackend
from torchrl_llm.modules.backends.server import VLLMServer
from torchrl_llm.modules.backends.token_scorer import CausalScorer
from torchrl_llm.modules.backends.transformers import TransformersBackend, sampling_mode
from torchrl_llm.weights.weight_source import (
    AdapterSource,
    DeltaSource,
    TensorSource,
    WeightReceipt,
    WeightSource,
)

__all__ = [
    "AdapterSource",
    "Answer",
    "Backend",
    "BigramModel",
    "CausalScorer",
    "Completion",
    "DeltaSource",
    "EngineStatus",
    "FakeBackend",
    "OpenAIBackend",
    "SamplingParams",
    "TensorSource",
    "TransformersBackend",
    "VLLMServer",
    "WeightReceipt",
    "WeightSource",
    "sampling_mode",
]
