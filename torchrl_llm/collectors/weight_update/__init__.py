"""TorchRL's names of weight updaters; the machinery is :mod:`torchrl_llm.weights`."""

from __future__ import annotations

from torchrl_llm._imports import lazy

__all__ = ["vLLMUpdater", "vLLMUpdaterV2"]

_LAZY = {"torchrl_llm.compat.vllm_weight_sync": "vLLMUpdater vLLMUpdaterV2"}
__getattr__ = lazy(__name__, _LAZY)
