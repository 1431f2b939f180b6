"""Renames the weights of a wrapped model to the names of the bare Hugging Face model.

Trainers wrap models. PEFT puts ``base_model.model.`` before every name and ``.base_layer`` into
some names. DDP adds ``module.``. FSDP1, ``torch.compile`` and activation checkpointing add their
own words. FSDP2 shards the tensors. Engines support none of this, so all weights that leave the
process go through :func:`engine_weights`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_llm.errors import ConfigError, WeightUpdateError
from torchrl_llm.modules.policies.llm_wrapper import LLMWrapperBase
from torchrl_llm.modules.quantization import is_quantized
from torchrl_llm.weights.weight_updater import named_weights

# Words that wrappers insert between the names of a parent and its child, at any level.
_SEGMENTS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# Tables that every engine computes. A tensordict of a module contains them, its state dict does
# not.
_TABLES = ("rotary_emb.inv_freq", "rotary_emb.original_inv_freq")
_PEFT_ROOT = "base_model.model."
_PEFT_MODULES = (".lora_", ".modules_to_save.", ".original_module.")

Weights = nn.Module | TensorDictBase | Mapping[str, Any]


def normalized_name(name: str) -> str:
    """Return the name of a weight in the bare Hugging Face model.

    Args:
        name: name of the weight in the wrapped model.

    Returns:
        The name without the words of DDP, FSDP1, ``torch.compile``, activation checkpointing and
        PEFT.

    Example:
        >>> normalized_name("module._orig_mod.base_model.model.model.norm.base_layer.weight")
        'model.norm.weight'
    """
    name = ".".join(part for part in name.split(".") if part not in _SEGMENTS)
    # Only at the start: a submodule of the model itself may be called "module".
    name = name.removeprefix("module.").removeprefix(_PEFT_ROOT)
    return name.replace(".base_layer.", ".")


def engine_weights(source: Weights, *, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return all weights of a model in the form that a sampling engine needs, sorted by name.

    The names are those of the bare Hugging Face model. A tied weight appears under one name. LoRA
    layers are merged into copies; the model itself is not changed. Shards of FSDP2 are gathered, so
    every rank must call this function.

    Args:
        source: the trained module with any wrappers, a policy that contains it, its state dict, or
            a tensordict of its weights.
        dtype: dtype of the engine's weights. Weights with more bits are cast to it, so that fewer
            bytes are sent. Weights that a ``transformers`` model always keeps in float32 (in some
            models the routers of experts) are not cast.

    Returns:
        Name to detached tensor. The tensors are the source's own, unless they were merged, gathered
        or cast.

    Raises:
        ConfigError: for any other kind of source, quantized weights, or a state dict with adapters
            (only the module can merge them).
        WeightUpdateError: two weights have the same name without the words of the wrappers, or only
            one of two tied layers has an adapter.

    Example:
        >>> sorted(engine_weights(nn.Sequential(nn.Linear(1, 1))))
        ['0.bias', '0.weight']
    """
    if isinstance(source, LLMWrapperBase):
        source = source.backend.module
    if isinstance(source, nn.Module) and is_quantized(source):
        raise ConfigError(
            "quantized weights are not sent, nor adapters merged into them: send the adapter alone "
            "(weight_sync.type=adapter)"
        )
    adapted = isinstance(source, nn.Module) and _has_adapters(source)
    pairs = _merged(source) if adapted else named_weights(source).items()
    kept = set() if dtype is None else _kept_precise(source)
    weights: dict[str, Tensor] = {}
    seen: set[tuple[Any, ...]] = set()
    for raw, value in pairs:
        name = normalized_name(raw)
        if name.endswith(_TABLES):
            continue
        if any(part in f".{name}" for part in _PEFT_MODULES):
            raise ConfigError(
                f"{raw!r} belongs to an adapter; give the module instead of its state dict, so that"
                " the adapter can be merged, or send the adapter alone (weight_sync.type: adapter)"
            )
        if name in weights:
            raise WeightUpdateError(f"two weights are called {name!r}, one of them was {raw!r}")
        # Keep one name for a tied weight: engines tie it again, and some reject the second name.
        place = _place(value)
        if value.numel() and place in seen:
            continue
        seen.add(place)
        whole = whole_tensor(value)
        fits = dtype is None or not whole.is_floating_point() or whole.itemsize <= dtype.itemsize
        weights[name] = whole if fits or _is_kept(name, kept) else whole.to(dtype)
    return dict(sorted(weights.items()))


def _kept_precise(source: Weights) -> set[str]:
    """Return parts of names; a ``transformers`` model keeps weights with these parts in float32."""
    parts = source.modules() if isinstance(source, nn.Module) else ()
    names = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    return {word for part in parts for name in names for word in getattr(part, name, None) or ()}


def _is_kept(name: str, kept: set[str]) -> bool:
    return any(f".{word}." in f".{name}." for word in kept)


def get_model_metadata(model: Weights) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return the names, dtypes and shapes of the weights that will be sent for a model.

    Args:
        model: see ``source`` of :func:`engine_weights`.

    Returns:
        Name to ``(dtype, shape)``, sorted by name.

    Example:
        >>> get_model_metadata(nn.Linear(2, 1, bias=False))
        {'weight': (torch.float32, torch.Size([1, 2]))}
    """
    weights = engine_weights(model)
    return {name: (value.dtype, value.shape) for name, value in weights.items()}


def _place(value: Tensor) -> tuple[Any, ...]:
    local = getattr(value, "_local_tensor", value)
    return local.untyped_storage().data_ptr(), local.storage_offset(), local.shape, local.stride()


def whole_tensor(value: Tensor) -> Tensor:
    """Gather a sharded tensor; return any other tensor unchanged."""
    gather = getattr(value, "full_tensor", None)
    return value if gather is None else gather()


def _has_adapters(module: nn.Module) -> bool:
    # PEFT is optional; a model with its layers exists only if PEFT was imported.
    return any(hasattr(part, "base_layer") or _is_saved(part) for part in module.modules())


def _is_saved(part: nn.Module) -> bool:
    return hasattr(part, "original_module") and hasattr(part, "modules_to_save")


def _merged(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a model name by name, with its active adapters merged into copies."""
    inside: list[str] = []
    replaced: dict[str, nn.Module] = {}
    untied: dict[tuple[Any, ...], str] = {}
    for name, part in module.named_modules():
        if any(name.startswith(prefix) for prefix in inside):
            continue
        if hasattr(part, "base_layer"):
            original, replaced[name] = part.base_layer, _merged_layer(part)
        elif _is_saved(part):
            original = part.original_module
            replaced[name] = part.modules_to_save[part.active_adapters[0]]
        else:
            continue
        inside.append(f"{name}.")
        untied |= {_place(value): name for value in named_weights(original).values()}
    for name, value in named_weights(module).items():
        if any(name.startswith(prefix) for prefix in inside):
            continue
        if _place(value) in untied:
            raise WeightUpdateError(
                f"{name!r} is tied to {untied[_place(value)]!r}, which has an adapter of its own: "
                "merged, the two differ, and an engine that ties them would get one of them wrong. "
                "Take the tied layer out of the adapter's target modules"
            )
        yield name, value
    for name, part in replaced.items():
        for inner, value in named_weights(part).items():
            yield f"{name}.{inner}", value


def _merged_layer(layer: nn.Module) -> nn.Module:
    """Return the base layer of a copy of ``layer``, with the adapters merged into it."""
    if layer.merged:
        return layer.base_layer
    # Copies one layer at a time, because merging the model itself would end its training.
    with torch.no_grad():
        twin = copy.deepcopy(layer)
        twin.merge(safe_merge=True)
    return twin.base_layer
