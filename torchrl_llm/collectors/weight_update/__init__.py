"""TorchRL's names of weight updaters; the machinery is :mod:`torchrl_llm.weight_update`."""

from __future__ import annotations

from torchrl_llm.collectors.weight_update.vllm import vLLMUpdater, vLLMUpdaterV2

__all__ = ["vLLMUpdater", "vLLMUpdaterV2"]
