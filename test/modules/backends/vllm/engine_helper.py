"""One set of engine settings for all tests: small, float32, on the CPU, and quick to start."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from unittest import mock

from fork_server import fork_server

from torchrl_llm.assets import embedded_model_path
from torchrl_llm.modules.backends.vllm import VLLMBackend, build_engine

SETTINGS = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 64 << 20,
}


def small_engine(model=None, **options):
    """A ``vllm.LLM`` of the embedded model, or of a folder."""
    settings = {**SETTINGS, **options}
    with quick_workers():
        return build_engine(embedded_model_path() if model is None else model, **settings)


class _QuickSpawn:
    """What vLLM starts its workers with: each has imported vLLM, and this process's variables."""

    def __getattr__(self, name):
        return getattr(fork_server(), name)

    def Process(self, *, target, **options):
        given = dict(os.environ), target
        return fork_server().Process(target=_with_variables, args=given, **options)


def _with_variables(environ, target, **options):
    os.environ.clear()
    os.environ.update(environ)
    target(**options)


def quick_workers():
    """Engines that are built within start their processes without seconds of imports."""
    return mock.patch("vllm.v1.executor.multiproc_executor.get_mp_context", _QuickSpawn)


def small_backend(model=None, *, engine_options=None, **options):
    """A backend over an engine of its own."""
    return VLLMBackend(small_engine(model, **(engine_options or {})), **options)


def saved_tiny_model(folder, make_tiny_model, tokenizer, **overrides):
    """The shared tiny Qwen2 with heads as large as vLLM's CPU kernels need, saved with tokenizer.

    Returns:
        The model.
    """
    model = make_tiny_model(num_attention_heads=2, num_key_value_heads=1, **overrides)
    # As models with several ends of a turn have it.
    model.generation_config.eos_token_id = [2, 9]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


_SHARED = {}


def shared_tiny(make_tiny_model, tokenizer):
    """An engine over the shared tiny model, and that model: one a test process.

    Its weights must be left alone. Versions counted by the tests of other modules are forgotten.

    Returns:
        The ``vllm.LLM`` and the model.
    """
    if not _SHARED:
        # The folder stays: vLLM may read from it again.
        folder = tempfile.mkdtemp(prefix="tiny-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        model = saved_tiny_model(folder, make_tiny_model, tokenizer)
        _SHARED["both"] = small_engine(folder, max_model_len=512), model
    vars(_SHARED["both"][0]).pop("_torchrl_llm_engine", None)
    return _SHARED["both"]
