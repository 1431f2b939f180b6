"""vLLM as a backend: token ids in, token ids and log-probs out.

Nothing here imports vLLM before an engine is built.
"""

from __future__ import annotations

from torchrl_llm.modules.backends.vllm.backend import VLLMBackend
from torchrl_llm.modules.backends.vllm.build import build_engine, engine_arguments
from torchrl_llm.modules.backends.vllm.lora_adapter import active_adapter
from torchrl_llm.modules.backends.vllm.sharing import SharedStorage
from torchrl_llm.modules.backends.vllm.weight_loading import load_into_vllm_model, load_weights

__all__ = [
    "SharedStorage",
    "VLLMBackend",
    "active_adapter",
    "build_engine",
    "engine_arguments",
    "load_into_vllm_model",
    "load_weights",
]
