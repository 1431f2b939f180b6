"""New weights into a vLLM engine of this process.

What is new replaces what is there in place, all of it or nothing; then the prefix cache is
dropped. The workers of an engine over several devices
(:mod:`torchrl_llm.modules.backends.vllm.workers`) and engines elsewhere take weights through a
worker extension, and do the same there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchrl_llm.errors import ConfigError, TorchRLLLMError, WeightUpdateError
from torchrl_llm.modules.backends.vllm.experts import (
    NewExperts,
    check_loadable,
    checkpoint_names,
    derive_again,
    is_derived,
)
from torchrl_llm.modules.backends.vllm.lora_adapter import (
    active_adapter,
    drop_adapter,
    load_adapter,
)
from torchrl_llm.modules.backends.vllm.slots import is_spread, slots_known, weight_slots
from torchrl_llm.modules.backends.vllm.workers import agree, load_into_workers, num_workers
from torchrl_llm.weights.weight_source import (
    WeightReceipt,
    WeightSource,
    open_source,
)


def engine_model(llm: Any) -> nn.Module:
    """The model of an engine that runs in this process.

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
    # Nothing is sent anywhere: the function is called here.
    return llm.apply_model(_itself)[0]


def check_engine(llm: Any) -> None:
    """Refuse an engine whose weights cannot be replaced.

    Args:
        llm: a ``vllm.LLM``.

    Raises:
        ConfigError: says why not.
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
    """Take new weights into an engine, and drop its prefix cache.

    No step of the engine may run meanwhile. Requests that are under way go on with the new weights,
    and compute the keys and values of what they have so far again.

    Args:
        llm: a ``vllm.LLM`` in this process.
        source: where the weights are. An adapter needs an engine that was started with
            ``enable_lora=True``; it is then
            :func:`~torchrl_llm.modules.backends.vllm.lora_adapter.active_adapter`, which each
            request has to name, until other weights come: those are the whole model.
        version: their number.

    Raises:
        ConfigError: an engine that cannot take them.
        WeightUpdateError: they did not arrive, not as they were sent, or are not those of this
            model; the engine keeps the old ones.
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
        # Running requests hold parts of the cache: they compute theirs again, with the new weights.
        engine.reset_prefix_cache(reset_running_requests=True)
    return receipt


def load_into_vllm_model(model: nn.Module, source: WeightSource, version: int) -> WeightReceipt:
    """Take new weights into vLLM's own model; for code that runs inside an engine's worker.

    Args:
        model: the worker's model, or its part of one. Every worker of an engine has to call this,
            and they take the weights together or not at all.
        source: all weights or a delta, by Hugging Face names.
        version: their number.

    Raises:
        ConfigError: a model that cannot take them.
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
    """Let the model's own loader place weights whose layout only vLLM knows."""
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
            # An engine with LoRA wraps its layers, of which vLLM's loaders say nothing.
            needed = {name.replace(".base_layer.", ".") for name in own}
            missing = sorted((needed - set(loaded or needed)) | experts.missing) if whole else []
            if missing:
                raise WeightUpdateError(
                    f"{len(missing)} weights of the engine were not sent: {missing[:3]}"
                )
        except WeightUpdateError as error:
            failure = error
        except Exception as error:  # vLLM's loaders raise whatever they meet
            failure = WeightUpdateError(
                f"vLLM could not load these weights ({type(error).__name__}: {error}); the old "
                "ones are in place again"
            )
            failure.__cause__ = error
        try:
            agree(model, failure)
        except WeightUpdateError:
            # Half a load must not stay.
            with torch.no_grad():
                for name, value in before.items():
                    own[name].copy_(value)
            raise
        experts.take()
    derive_again(model)
