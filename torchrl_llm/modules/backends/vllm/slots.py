"""Where in a vLLM model's memory each weight of the Hugging Face model lies.

vLLM keeps query, key and value in one matrix, gate and up in another, and pads the vocabulary. A
weight by its Hugging Face name is then a run of rows of vLLM's parameter: a view that may be
written to, hashed, or made the storage of the trainer's own parameter
(:mod:`torchrl_llm.modules.backends.vllm.sharing`).

Only what is known to lie like this is answered: plain dense decoders in a floating dtype on one
device. Everything else is refused, with the reason.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from torchrl_llm.errors import ConfigError

# Families whose parameters are all named and cut as their Hugging Face twins are, by test.
_FAMILIES = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})


class WeightSlots(NamedTuple):
    """The memory of a vLLM model by Hugging Face names.

    Attributes:
        slots: name to a view of the engine's memory; names that are tied have the same view.
        padding: rows of the vocabulary that no token has.
    """

    slots: dict[str, Tensor]
    padding: list[Tensor]


def is_spread(model: nn.Module) -> bool:
    """Whether this is one worker's part of a model, of which other processes have the rest.

    Args:
        model: vLLM's.
    """
    return any(
        getattr(part, "tp_size", 1) != 1 or type(part).__name__ == "PPMissingLayer"
        for part in model.modules()
    )


def slots_known(model: nn.Module) -> bool:
    """Whether :func:`weight_slots` knows this family of models.

    Args:
        model: vLLM's.
    """
    return type(model).__name__ in _FAMILIES


def weight_slots(model: nn.Module) -> WeightSlots:
    """Find every weight of a vLLM model.

    Args:
        model: vLLM's own implementation, after loading.

    Returns:
        Views of its parameters; they stay valid as long as the engine lives.

    Raises:
        ConfigError: another family, an engine on several devices, quantized weights, or weights
            that vLLM packed into another form when it started.
    """
    if not slots_known(model):
        raise ConfigError(
            f"the place of each weight is known in {sorted(_FAMILIES)}, not in "
            f"{type(model).__name__}; bring the weights by EngineWeights"
        )
    fused = model.packed_modules_mapping
    slots: dict[str, Tensor] = {}
    padding: list[Tensor] = []
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, parameter in module.named_parameters(recurse=False):
            # An engine with LoRA wraps its layers.
            name = path.replace(".base_layer", "")
            _check(f"{name}.{leaf}", module, parameter)
            parent, _, last = name.rpartition(".")
            if last in fused:
                sizes = module.output_sizes
                for part, rows in zip(fused[last], parameter.data.split(sizes), strict=True):
                    slots[f"{parent}.{part}.{leaf}"] = rows
            elif hasattr(module, "org_vocab_size"):
                size = module.org_vocab_size
                slots[f"{name}.{leaf}"] = parameter.data[:size]
                padding.append(parameter.data[size:])
            else:
                slots[f"{name}.{leaf}"] = parameter.data
    return WeightSlots(slots, padding)


def _check(name: str, module: nn.Module, parameter: Tensor) -> None:
    if getattr(module, "tp_size", 1) != 1:
        raise ConfigError(
            f"{name} is spread over {module.tp_size} devices; bring its weights by EngineWeights "
            "(weight_sync.type=load)"
        )
    if parameter.numel() == 0:
        raise ConfigError(
            f"vLLM packed {name} into a form of its own when it started, which nothing can be "
            "loaded into; let torchrl_llm build the engine (it turns packing off), or call "
            "torchrl_llm.modules.backends.vllm.engine_environment before"
        )
    if not parameter.dtype.is_floating_point or parameter.dtype.itemsize < 2:
        raise ConfigError(
            f"{name} is quantized ({parameter.dtype}); its weights cannot be replaced"
        )
