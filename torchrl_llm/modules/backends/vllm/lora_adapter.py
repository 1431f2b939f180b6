"""A LoRA adapter for a vLLM engine that was started with ``enable_lora=True``.

vLLM reads adapters from a folder, and every request names the one that it wants. Here an engine has
one, which each version replaces where it is: requests under way go on with the new one, as they do
when all weights change.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torchrl_llm._imports import require
from torchrl_llm.errors import ConfigError, WeightUpdateError
from torchrl_llm.weights.weight_source import (
    AdapterSource,
    WeightReceipt,
    WeightSource,
    open_source,
)

_NAME, _NUMBER = "trained", 1


class _Loaded(NamedTuple):
    request: Any
    folder: tempfile.TemporaryDirectory[str]


# vLLM may read the files again at any time, so they stay as long as the engine does.
_active: WeakKeyDictionary[Any, _Loaded] = WeakKeyDictionary()


def active_adapter(llm: Any) -> Any:
    """The ``vllm.lora.request.LoRARequest`` that requests to an engine have to carry.

    Args:
        llm: a ``vllm.LLM``.

    Returns:
        That of the adapter that was loaded; ``None`` before the first.
    """
    loaded = _active.get(llm)
    return None if loaded is None else loaded.request


def drop_adapter(llm: Any) -> None:
    """Forget the adapter: the weights that came since are the whole model.

    Args:
        llm: a ``vllm.LLM``.
    """
    if _active.pop(llm, None) is not None:
        llm.llm_engine.remove_lora(_NUMBER)


def load_adapter(llm: Any, source: WeightSource, version: int) -> WeightReceipt:
    """Load an adapter in the place of the one before.

    Args:
        llm: a ``vllm.LLM`` with ``enable_lora=True`` and a ``max_lora_rank`` that is enough.
        source: an :class:`~torchrl_llm.weights.weight_source.AdapterSource`.
        version: its number.

    Raises:
        ConfigError: the engine takes no adapters, or none of this rank.
        WeightUpdateError: the adapter did not arrive, not as it was sent, or vLLM refused it; the
            one before stays.
    """
    lora = llm.llm_engine.vllm_config.lora_config
    if lora is None:
        raise ConfigError(
            "this engine takes no adapters: start it with enable_lora=True, or send merged weights "
            "(AdapterWeights(merge=True))"
        )
    incoming = open_source(source, version=version)
    source = incoming.source
    if not isinstance(source, AdapterSource):
        raise ConfigError(
            "an adapter comes as an AdapterSource, which holds its configuration too; got "
            f"{type(source).__name__}"
        )
    rank = source.config.get("r", 0)
    if rank > lora.max_lora_rank:
        raise ConfigError(
            f"the adapter has rank {rank} and the engine takes {lora.max_lora_rank}: start it with "
            f"max_lora_rank={rank} or the next rank that vLLM knows"
        )
    incoming.check_version(llm)
    request_type = require("vllm.lora.request", extra="vllm", feature="load_adapter").LoRARequest
    safetensors = require("safetensors.torch", extra="vllm", feature="load_adapter")
    folder = tempfile.TemporaryDirectory(prefix="adapter-", ignore_cleanup_errors=True)
    tensors = {name: value.detach().cpu().contiguous() for name, value in incoming.weights.items()}
    safetensors.save_file(tensors, Path(folder.name, "adapter_model.safetensors"))
    Path(folder.name, "adapter_config.json").write_text(json.dumps(source.config))
    try:
        # vLLM reads the new one before it takes the old one away.
        replacing = request_type(_NAME, _NUMBER, folder.name, load_inplace=True)
        taken = llm.llm_engine.add_lora(replacing)
    except Exception as error:
        # vLLM raises whatever its loader met.
        raise WeightUpdateError(
            f"vLLM refused the adapter of version {version} ({type(error).__name__}: {error}); the "
            "one before stays"
        ) from error
    if not taken:
        raise WeightUpdateError(f"vLLM did not take the adapter of version {version}")
    _active[llm] = _Loaded(request_type(_NAME, _NUMBER, folder.name), folder)
    incoming.took_version(llm)
    return incoming.receipt
