"""Loads new weights into a vLLM engine of this process, all or none.

New weights replace the old ones in place; then the prefix cache is cleared. An engine over several
devices has one worker process per device. Received weights are then written to one file, every
worker loads its part (:mod:`torchrl_llm.weights.vllm_extension`), and all return the same digest.

A LoRA adapter needs an engine that was started with ``enable_lora=True``. vLLM reads adapters from
a folder, and every request names its adapter. In torchrl_llm an engine has one adapter, which each
version replaces in place. Running requests continue with the new adapter, as with full weights.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from torchrl_llm._imports import require
from torchrl_llm.errors import BackendError, ConfigError, TorchRLLLMError, WeightUpdateError
from torchrl_llm.weights.vllm_layout import (
    NewExperts,
    check_loadable,
    checkpoint_names,
    derive_again,
    is_derived,
    is_spread,
    slots_known,
    weight_slots,
)
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


# vLLM may read the files again at any time, so they are kept as long as the engine exists.
_active: WeakKeyDictionary[Any, _Loaded] = WeakKeyDictionary()


def active_adapter(llm: Any) -> Any:
    """Return the ``vllm.lora.request.LoRARequest`` for requests to an engine.

    Args:
        llm: a ``vllm.LLM``.

    Returns:
        The request of the loaded adapter; ``None`` before the first.
    """
    loaded = _active.get(llm)
    return None if loaded is None else loaded.request


def drop_adapter(llm: Any) -> None:
    """Drop the adapter, because the newly loaded weights are the whole model.

    Args:
        llm: a ``vllm.LLM``.
    """
    if _active.pop(llm, None) is not None:
        llm.llm_engine.remove_lora(_NUMBER)


def load_adapter(llm: Any, source: WeightSource, version: int) -> WeightReceipt:
    """Load an adapter; it replaces the previous one.

    Args:
        llm: a ``vllm.LLM`` with ``enable_lora=True`` and a sufficient ``max_lora_rank``.
        source: an :class:`~torchrl_llm.weights.weight_source.AdapterSource`.
        version: its number.

    Raises:
        ConfigError: the engine does not support adapters, or not this rank.
        WeightUpdateError: the adapter did not arrive intact, or vLLM rejected it; the previous one
            stays.
    """
    lora = llm.llm_engine.vllm_config.lora_config
    if lora is None:
        raise ConfigError(
            "this engine takes no adapters: start it with enable_lora=True, or send merged weights "
            "(EngineWeights or DeltaWeights)"
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
    folder = tempfile.TemporaryDirectory(prefix="adapter-", ignore_cleanup_errors=True)
    tensors = {name: value.detach().cpu().contiguous() for name, value in incoming.weights.items()}
    save_file(tensors, Path(folder.name, "adapter_model.safetensors"))
    Path(folder.name, "adapter_config.json").write_text(json.dumps(source.config))
    try:
        # vLLM reads the new adapter before it removes the old one.
        replacing = request_type(_NAME, _NUMBER, folder.name, load_inplace=True)
        taken = llm.llm_engine.add_lora(replacing)
    except Exception as error:
        # vLLM passes on any exception of its loader.
        raise WeightUpdateError(
            f"vLLM refused the adapter of version {version} ({type(error).__name__}: {error}); the "
            "one before stays"
        ) from error
    if not taken:
        raise WeightUpdateError(f"vLLM did not take the adapter of version {version}")
    _active[llm] = _Loaded(request_type(_NAME, _NUMBER, folder.name), folder)
    incoming.took_version(llm)
    return incoming.receipt


EXTENSION = "torchrl_llm.weights.vllm_extension.WeightReceiver"
"""Value of ``--worker-extension-cls`` for loading weights."""

_MEMORY = "/dev/shm"


def num_workers(llm: Any) -> int:
    """Return the number of processes of an engine's model.

    Args:
        llm: a ``vllm.LLM``.
    """
    return int(llm.llm_engine.vllm_config.parallel_config.world_size)


def agree(model: nn.Module, error: Exception | None) -> None:
    """Wait for all workers of an engine: all continue, or none. Each worker must call it.

    Args:
        model: this worker's model.
        error: why this worker cannot continue; ``None`` if it can.

    Raises:
        Exception: ``error``.
        WeightUpdateError: a different worker cannot continue.
    """
    if is_spread(model):
        from vllm.distributed import get_world_group

        failed = torch.tensor(int(error is not None))
        torch.distributed.all_reduce(failed, group=get_world_group().cpu_group)
        if error is None and failed:
            error = WeightUpdateError(f"{int(failed)} other workers of this engine refused")
    if error is not None:
        raise error


def load_into_workers(llm: Any, source: WeightSource, version: int) -> WeightReceipt:
    """Load new weights into every worker of an engine, or into none.

    Args:
        llm: a ``vllm.LLM`` of this process that ``build_engine`` built.
        source: all weights or a delta, by Hugging Face names.
        version: their number.

    Returns:
        The common receipt of all workers.

    Raises:
        ConfigError: the workers were built without the weight extension.
        WeightUpdateError: the weights did not arrive, or a worker rejected them; all keep the old
            ones.
        BackendError: a worker died, and the engine with it.
    """
    extension = llm.llm_engine.vllm_config.parallel_config.worker_extension_cls
    if not extension:
        raise ConfigError(
            "this engine's workers take no weights: build it by VLLMBackend(model, num_devices=...)"
            f", or with worker_extension_cls={EXTENSION!r}"
        )
    incoming = open_source(source, version=version)
    order = incoming.order
    # Copy tensors that share memory, which the format does not support.
    tensors = {
        name: value.detach().cpu().contiguous().clone() for name, value in incoming.weights.items()
    }
    with tempfile.TemporaryDirectory(prefix="weights-", dir=_place(incoming.receipt)) as folder:
        order["path"] = str(Path(folder, "weights.safetensors"))
        try:
            save_file(tensors, order["path"])
        except Exception as error:  # a full disk raises an exception of the format
            raise WeightUpdateError(f"could not write {order['path']}: {error}") from error
        try:
            answers = llm.collective_rpc("torchrl_llm_load", args=(json.dumps(order),))
        except Exception as error:  # vLLM passes on any exception of a worker
            raise BackendError(
                f"a worker of this engine failed while it took version {version} of the weights, "
                f"and what the others hold is unknown: build the engine again ({error})"
            ) from error
    errors = [answer["error"] for answer in answers if "error" in answer]
    if errors:
        # Workers without an error of their own only report that a different worker had one.
        told = [text for text in errors if "other workers of this engine" not in text]
        raise WeightUpdateError(
            f"the {len(answers)} workers of the engine keep the weights that they had: "
            f"{(told or errors)[0]}"
        )
    receipts = [WeightReceipt(**answer) for answer in answers]
    if len({receipt[:-1] for receipt in receipts}) != 1:
        raise WeightUpdateError(f"the workers of the engine took different weights: {receipts}")
    return receipts[0]._replace(seconds=incoming.receipt.seconds + receipts[0].seconds)


def _place(receipt: WeightReceipt) -> str | None:
    """Return ``/dev/shm`` if there is room, otherwise the temporary folder."""
    room = Path(_MEMORY).is_dir() and shutil.disk_usage(_MEMORY).free > 2 * receipt.num_bytes
    return _MEMORY if room else None


def engine_model(llm: Any) -> nn.Module:
    """Return the model of an engine that runs in this process.

    Args:
        llm: a ``vllm.LLM``.

    Raises:
        ConfigError: the engine runs in a process of its own, or on several devices.
    """
    executor = getattr(llm.llm_engine, "model_executor", None)
    if num_workers(llm) > 1:
        raise ConfigError(
            f"this engine's model is spread over {num_workers(llm)} worker processes, whose memory "
            "nothing here can share: bring its weights by EngineWeights, DeltaWeights or "
            "AdapterWeights (weight_sync.type=load, delta or adapter), or build it with "
            "num_devices=1"
        )
    if getattr(executor, "driver_worker", None) is None:
        raise ConfigError(
            "this engine's model is in a process of its own: build it by VLLMBackend(model), or "
            "with VLLM_ENABLE_V1_MULTIPROCESSING=0 and distributed_executor_backend='uni'"
        )
    # Nothing is sent: the function runs in this process.
    return llm.apply_model(_itself)[0]


def check_engine(llm: Any) -> None:
    """Reject an engine whose weights cannot be replaced.

    Args:
        llm: a ``vllm.LLM``.

    Raises:
        ConfigError: the error states the reason.
    """
    quantization = llm.llm_engine.vllm_config.model_config.quantization
    if quantization is not None:
        raise ConfigError(
            f"this engine's weights are quantized ({quantization}), which nothing can be loaded "
            "into: build it from a model without quantization, or train an adapter alone "
            "(AdapterWeights, weight_sync.type=adapter)"
        )
    if num_workers(llm) == 1:
        check_loadable(engine_model(llm))


def _itself(model: nn.Module) -> nn.Module:
    return model


def load_weights(llm: Any, source: WeightSource, version: int) -> WeightReceipt:
    """Load new weights into an engine, and clear its prefix cache.

    No engine step may run during the load. Running requests continue with the new weights, and
    recompute the keys and values of the tokens that they already have.

    Args:
        llm: a ``vllm.LLM`` in this process.
        source: source of the weights. An adapter needs an engine that was started with
            ``enable_lora=True``. Each request must then name
            :func:`~torchrl_llm.weights.vllm_loading.active_adapter`, until full weights are loaded
            again.
        version: their number.

    Raises:
        ConfigError: the engine cannot load them.
        WeightUpdateError: the weights did not arrive intact, or do not belong to this model; the
            engine keeps the old weights.
    """
    if source.kind == "adapter":
        receipt = load_adapter(llm, source, version)
    else:
        if active_adapter(llm) is not None and llm.llm_engine.has_unfinished_requests():
            raise WeightUpdateError(
                "requests are being sampled with an adapter, which other weights would replace: "
                "wait for them or abort them (in_flight='wait' or 'abort')"
            )
        if num_workers(llm) > 1:
            receipt = load_into_workers(llm, source, version)
        else:
            receipt = load_into_vllm_model(engine_model(llm), source, version)
        drop_adapter(llm)
    engine = llm.llm_engine
    if not engine.reset_prefix_cache():
        # Running requests hold parts of the cache. They recompute these parts with the new weights.
        engine.reset_prefix_cache(reset_running_requests=True)
    return receipt


def load_into_vllm_model(model: nn.Module, source: WeightSource, version: int) -> WeightReceipt:
    """Load new weights into vLLM's own model; for code that runs inside an engine's worker.

    Args:
        model: the worker's model, or its part of a model. Every worker of an engine must call this
            function; either all workers load the weights or none.
        source: all weights or a delta, by Hugging Face names.
        version: their number.

    Raises:
        ConfigError: the model cannot load the weights.
        WeightUpdateError: see :func:`load_weights`.
    """
    error = None
    try:
        incoming = open_source(source, version=version)
        incoming.check_base(model)
    except (TorchRLLLMError, OSError) as raised:
        error = raised
    agree(model, error)
    if slots_known(model) and not is_spread(model):
        slots, padding = weight_slots(model)
        required = list(slots) if source.kind == "full" else []
        incoming.copy_into(slots, required=required)
        for rows in padding:
            rows.zero_()
    else:
        _load_by_vllm(model, incoming.weights, whole=source.kind == "full")
    return incoming.accepted(model)


def _load_by_vllm(model: nn.Module, weights: dict[str, Tensor], *, whole: bool) -> None:
    """Load weights whose layout only vLLM knows, with the model's own loader."""
    check_loadable(model)
    with NewExperts(model) as experts:
        own = {
            name: parameter
            for name, parameter in model.named_parameters()
            if not is_derived(model, name)
        }
        before = {n: p.detach().clone() for n, p in own.items() if n not in experts.names}
        failure = None
        try:
            loaded = model.load_weights(iter(checkpoint_names(model, weights).items()))
            experts.turn()
            # An engine with LoRA wraps its layers, and vLLM's loaders do not report the wrapped
            # names.
            needed = {name.replace(".base_layer.", ".") for name in own}
            missing = sorted((needed - set(loaded or needed)) | experts.missing) if whole else []
            if missing:
                raise WeightUpdateError(
                    f"{len(missing)} weights of the engine were not sent: {missing[:3]}"
                )
        except WeightUpdateError as error:
            failure = error
        except Exception as error:  # vLLM's loaders raise any kind of exception
            failure = WeightUpdateError(
                f"vLLM could not load these weights ({type(error).__name__}: {error}); the old "
                "ones are in place again"
            )
            failure.__cause__ = error
        try:
            agree(model, failure)
        except WeightUpdateError:
            # A partial load must not stay.
            with torch.no_grad():
                for name, value in before.items():
                    own[name].copy_(value)
            raise
        experts.take()
    derive_again(model)
