"""Backends: models that take and return token ids."""

from __future__ import annotations

from torchrl_llm._imports import lazy

_LAZY = {
    "torchrl_llm.modules.backends.backend_port": "Backend Completion EngineStatus SamplingParams",
    "torchrl_llm.modules.backends.fake": "Answer BigramModel FakeBackend",
    "torchrl_llm.modules.backends.openai": "OpenAIBackend",
    "torchrl_llm.modules.backends.server": "VLLMServer",
    "torchrl_llm.modules.backends.token_scorer": "CausalScorer",
    "torchrl_llm.modules.backends.transformers": "sampling_mode TransformersBackend",
    "torchrl_llm.weights.weight_source": (
        "AdapterSource DeltaSource TensorSource WeightReceipt WeightSource"
    ),
}
__getattr__ = lazy(__name__, _LAZY)
