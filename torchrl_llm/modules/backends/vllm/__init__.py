"""vLLM as a backend: token ids in, token ids and log-probs out.

Nothing here imports vLLM before an engine is built.
"""

from __future__ import annotations

from torchrl_llm._imports import lazy
from torchrl_llm.modules.backends.vllm.backend import VLLMBackend
from torchrl_llm.modules.backends.vllm.build import build_engine, engine_arguments

_LAZY = {
    "torchrl_llm.weights.shared_engine": "SharedStorage",
    "torchrl_llm.weights.vllm_loading": "active_adapter load_into_vllm_model load_weights",
}
__all__ = [
    "SharedStorage",
    "VLLMBackend",
    "active_adapter",
    "build_engine",
    "engine_arguments",
    "load_into_vllm_model",
    "load_weights",
]
__getattr__ = lazy(__name__, _LAZY)
