"""Build a vLLM engine inside this process from explicit options."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from typing import Any

import torch

from torchrl_llm.assets import embedded_model_path
from torchrl_llm.errors import ConfigError, ResourceError, TorchRLLLMError
from torchrl_llm.modules.backends.server import EXTENSION
from torchrl_llm.modules.backends.vllm.engine_environment import (
    prepare_vllm,
    runs_on_cpu,
    undisturbed,
)

_CPU_CACHE_BYTES = 1 << 30
_LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# How vLLM speaks of memory and devices that are not there; nothing else of it says which they are.
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
    """The arguments of ``vllm.LLM`` (or ``AsyncEngineArgs``) for sampling that trains a model.

    What shapes sampling is never read from the model's generation config; the log-probs that come
    back are those of the distribution that was sampled; all of the vocabulary may be asked for.

    Args:
        model: name or folder; ``None`` for the embedded model.
        dtype: of weights and cache, see vLLM.
        max_model_len: most tokens of prompt and response, plus one; the model's context by default.
        num_devices: GPUs of this engine (tensor parallel), each with a worker process on this
            machine; on the CPU so many processes.
        gpu_memory_utilization: fraction of a GPU's memory; vLLM's default when ``None``.
        enforce_eager: no CUDA graphs and no compilation; always so on the CPU.
        enable_prefix_caching: keep the cache of prompts that begin alike.
        enable_fp32_lm_head: compute logits in float32 whatever the dtype of the weights.
        cpu: for an engine on the CPU.
        **options: more arguments of vLLM's ``EngineArgs``, which win.

    Returns:
        Keyword arguments.

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
        # A token must be sampled by the weights whose version it gets.
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
    if options.get("enable_lora"):
        # With an adapter on the head, vLLM fails on log-probs of prompts (it takes the indices of
        # sampled tokens for those of the prompt's).
        arguments["lora_target_modules"] = list(_LORA_MODULES)
    if cpu:
        # A prompt that is read in two steps makes vLLM turn its seed back, which generators on the
        # CPU cannot: "CPU Generator does not use offset".
        arguments["enable_chunked_prefill"] = False
    if num_devices > 1:
        # In a placement group of Ray's vLLM would look for workers in actors of its own.
        arguments["distributed_executor_backend"] = "mp"
        arguments["worker_extension_cls"] = EXTENSION
    elif cpu:
        arguments["distributed_executor_backend"] = "uni"
    if cpu and gpu_memory_utilization is None:
        arguments["kv_cache_memory_bytes"] = _CPU_CACHE_BYTES
    return {**arguments, **options}


def build_engine(model: str | os.PathLike[str] | None = None, **options: Any) -> Any:
    """A ``vllm.LLM`` whose weights can be updated.

    The random numbers, the threads and the default dtype of the process are left as they were.

    Args:
        model: name or folder; ``None`` for the embedded model.
        **options: see :func:`engine_arguments`.

    Raises:
        MissingExtraError: vLLM is not installed.
        ConfigError: an unsupported version, an unknown option or one that vLLM refuses.
        ResourceError: model or cache do not fit; the message has vLLM's numbers.
    """
    vllm = prepare_vllm("A vLLM engine")
    cpu = runs_on_cpu()
    _check_devices(options.get("num_devices", 1), cpu)
    arguments = engine_arguments(model, cpu=cpu, **options)
    _check_names(arguments)
    with undisturbed():
        try:
            _add_expert_group()
            return vllm.LLM(**arguments)
        except TorchRLLLMError:
            raise
        except Exception as error:
            raise _explained(error, arguments) from error


def _add_expert_group() -> None:
    """Let a mixture of experts be built beside a dense model, whose groups lack that of experts.

    The engines of a process share vLLM's groups, which are made for its first model.
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
        raise ResourceError(f"an engine over {wanted} GPUs was asked for, and {found} are here")


def _check_names(arguments: Mapping[str, Any]) -> None:
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    for name in arguments:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise ConfigError(f"vLLM's engine has no option {name!r}{hint}")


def _explained(error: Exception, arguments: Mapping[str, Any]) -> TorchRLLLMError:
    text = str(error)
    kind = ConfigError
    if any(word in text.lower() for word in _RESOURCES):
        kind = ResourceError
    return kind(f"vLLM built no engine for {arguments['model']!r}: {text}")
