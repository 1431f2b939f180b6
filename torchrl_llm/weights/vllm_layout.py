"""Layout of weights in a vLLM model: the place of each weight, and special forms.

vLLM stores query, key and value in one matrix, gate and up in a second one, and pads the
vocabulary. So a Hugging Face weight is a block of rows of vLLM's parameter: a view that can be
written, hashed, or used as storage of the trainer's parameter. :class:`WeightSlots` supports only
known layouts: plain dense decoders in a floating dtype on one device.

vLLM converts the experts of a mixture to its kernel's layout once, after the first load. Later
loads would write to wrong places without an error. So new experts are loaded into separate memory,
converted in the same way, and copied over the old experts.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchrl_llm.errors import ConfigError, WeightUpdateError

# Families whose parameters match those of the Hugging Face model by name and slicing; tested.
_FAMILIES = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})


class WeightSlots(NamedTuple):
    """The memory of a vLLM model, under Hugging Face names.

    Attributes:
        slots: a view of the engine's memory for each name; tied names have the same view.
        padding: rows of the vocabulary without a token.
    """

    slots: dict[str, Tensor]
    padding: list[Tensor]


def is_spread(model: nn.Module) -> bool:
    """Return whether this is one worker's part of a model that is split over processes.

    Args:
        model: vLLM's.
    """
    return any(
        getattr(part, "tp_size", 1) != 1 or type(part).__name__ == "PPMissingLayer"
        for part in model.modules()
    )


def slots_known(model: nn.Module) -> bool:
    """Return whether :func:`weight_slots` knows this family of models.

    Args:
        model: vLLM's.
    """
    return type(model).__name__ in _FAMILIES


def weight_slots(model: nn.Module) -> WeightSlots:
    """Find every weight of a vLLM model.

    Args:
        model: vLLM's own implementation, after loading.

    Returns:
        Views of its parameters; valid as long as the engine exists.

    Raises:
        ConfigError: an unknown family, an engine on several devices, quantized weights, or weights
            that vLLM packed into a different form at its start.
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
            "torchrl_llm.modules.backends.vllm.build before"
        )
    if not parameter.dtype.is_floating_point or parameter.dtype.itemsize < 2:
        raise ConfigError(
            f"{name} is quantized ({parameter.dtype}); its weights cannot be replaced"
        )


_RELOAD = "vllm.model_executor.model_loader.reload"
_EXPERTS = "UnquantizedFusedMoEMethod"
# Their post-processing does not move weights, because packing is off.
_IN_PLACE = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
# The checkpoint of this family also has the experts of a layer in one tensor, transposed.
_FUSED_CHECKPOINTS = frozenset({"GptOssRoutedExperts"})


def check_loadable(model: nn.Module) -> None:
    """Reject a model whose kernels would ignore newly loaded weights.

    Args:
        model: vLLM's.

    Raises:
        ConfigError: weights that are quantized or packed by vLLM.
    """
    if any(p.numel() == 0 for name, p in model.named_parameters() if not is_derived(model, name)):
        raise ConfigError(
            "vLLM packed this model's weights into a form of its own when it started; let "
            "torchrl_llm build the engine, which turns packing off"
        )
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        kind = type(method).__name__
        if hasattr(method, "process_weights_after_loading") and kind not in {_EXPERTS, *_IN_PLACE}:
            raise ConfigError(
                f"vLLM computes {name} with {kind}, which keeps its weights in a form that new "
                "ones cannot be loaded into: take the model without quantization"
            )


def is_derived(model: nn.Module, name: str) -> bool:
    """Return whether attention layers derive a parameter from others after loading.

    Args:
        model: vLLM's.
        name: its name.
    """
    return _derives(model.get_submodule(name.rpartition(".")[0]))


def _derives(module: nn.Module) -> bool:
    return callable(getattr(module, "process_weights_after_loading", None))


def derive_again(model: nn.Module) -> None:
    """Recompute the derived parameters of attention layers from the current weights.

    Args:
        model: vLLM's.
    """
    for module in model.modules():
        if hasattr(module, "kv_b_proj") and _derives(module):
            module.process_weights_after_loading(module.kv_b_proj.weight.dtype)
        sinks = getattr(module, "sinks", None)
        if not isinstance(sinks, nn.Parameter):
            continue
        for child in module.children():
            # Some kernels convert sinks to a different dtype in their first step.
            kept = getattr(getattr(child, "impl", None), "sinks", sinks)
            if kept.data_ptr() != sinks.data_ptr():
                with torch.inference_mode():
                    kept.copy_(sinks)


def _expert_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if type(getattr(module, "quant_method", None)).__name__ == _EXPERTS:
            yield path, module


def checkpoint_names(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename weights to the names of the model's checkpoint, which vLLM's loaders expect.

    transformers stores the experts of a layer in ``mlp.experts.gate_up_proj`` and ``down_proj``,
    but checkpoints have ``mlp.experts.0.gate_proj.weight`` (Qwen, DeepSeek),
    ``block_sparse_moe.experts.0.w1.weight`` (Mixtral).

    Args:
        model: vLLM's.
        weights: with names of transformers or of the checkpoint.

    Returns:
        Name to the same values; experts are views.

    Raises:
        WeightUpdateError: unknown experts, which vLLM's loaders would skip.
    """
    # model.layers.0.<block>.experts.routed_experts
    blocks = {}
    for path, layer in _expert_layers(model):
        block = path.rpartition(".experts")[0]
        blocks[block.rpartition(".")[0]] = block, layer
    named: dict[str, Tensor] = {}
    for name, value in weights.items():
        above, _, rest = name.partition(".mlp.")
        block, layer = blocks.get(above, (None, None))
        if block is None:
            named[name] = value
        elif value.dim() != 3 or type(layer).__name__ in _FUSED_CHECKPOINTS:
            named[f"{block}.{rest}"] = value
        else:
            gate, up = layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name
            leaves = [layer.ckpt_down_proj_name] if rest == "experts.down_proj" else [gate, up]
            for expert, both in enumerate(value):
                for leaf, part in zip(leaves, both.chunk(len(leaves)), strict=True):
                    named[f"{block}.experts.{expert}.{leaf}.weight"] = part
    known = {block: layer.moe_config.num_logical_experts for block, layer in blocks.values()}
    for name in named:
        block, _, rest = name.partition(".experts.")
        number = rest.partition(".")[0]
        if number.isdigit() and int(number) >= known.get(block, int(number) + 1):
            raise WeightUpdateError(f"{name} was sent; {block} has {known[block]} experts")
    return named


class NewExperts:
    """Memory for new weights of all experts; inside the context, vLLM's loaders write there.

    Args:
        model: vLLM's.

    Attributes:
        names: names of the parameters with new memory.
        missing: names of the parameters without new values.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = dict(_expert_layers(model))
        self._new = {path: _blank(layer) for path, layer in self._layers.items()}
        self._live: dict[str, dict[str, nn.Parameter]] = {}
        self._turned: list[tuple[Tensor, Tensor]] = []
        self.names = {f"{path}.{leaf}" for path, new in self._new.items() for leaf in new}
        self.missing: set[str] = set()

    def __enter__(self) -> NewExperts:
        for path, layer in self._layers.items():
            self._live[path] = {leaf: layer._parameters[leaf] for leaf in self._new[path]}
            layer._parameters.update(self._new[path])
        return self

    def __exit__(self, *exc: object) -> None:
        for path, layer in self._layers.items():
            layer._parameters.update(self._live[path])

    @torch.no_grad()
    def turn(self) -> None:
        """Convert the loaded weights to the kernels' layout.

        Raises:
            WeightUpdateError: only some experts of a layer were loaded.
        """
        for path, layer in self._layers.items():
            loaded = []
            for leaf, new in self._new[path].items():
                given = int(new.isnan().logical_not_().sum())
                wanted = getattr(new, "weight_loader_numel", new.numel())
                if given == 0:
                    self.missing.add(f"{path}.{leaf}")
                elif given < wanted:
                    raise WeightUpdateError(
                        f"{given} of {wanted} values of {path}.{leaf} were sent, or are numbers; "
                        "a kernel takes those of all experts together: send them all"
                    )
                else:
                    loaded.append(leaf)
                # Padding of the kernel.
                new.nan_to_num_(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
            if not loaded:
                continue
            method = layer.quant_method
            method.process_weights_after_loading(layer)
            # vLLM skips this step after the first time.
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)
            live = self._live[path]
            self._turned += [(live[leaf], layer._parameters[leaf]) for leaf in loaded]

    @torch.no_grad()
    def take(self) -> None:
        """Copy the converted weights into the kernels' memory."""
        for live, new in self._turned:
            live.copy_(new)


def _blank(layer: nn.Module) -> dict[str, nn.Parameter]:
    """Weights with the shapes before the first load, filled with NaN."""
    recorded = importlib.import_module(f"{_RELOAD}.layerwise").get_layerwise_info(layer)
    meta = importlib.import_module(f"{_RELOAD}.meta")
    sanitize = importlib.import_module(f"{_RELOAD}.sanitize")
    parameters = {}
    for leaf, found in recorded.restore_metadata[0].items():
        with torch.device(layer._parameters[leaf].device):
            blank = sanitize.restore_layer_refs(meta.materialize_meta_tensor(found), layer)
        parameters[leaf] = blank.fill_(torch.nan)
    return parameters
