"""vLLM as a backend: token ids in, token ids and log-probs out.

Nothing here imports vLLM before an engine is built.
"""

from __future__ import annotations

from torchrl_llm.modules.backends.vllm.backend import VLLMBackend
from torchrl_llm.modules.backends.vllm.build import build_engine, engine_arguments

__all__ = ["VLLMBackend", "build_engine", "engine_arguments"]
