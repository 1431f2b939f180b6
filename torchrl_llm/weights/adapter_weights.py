"""Only the LoRA adapter: what is trained, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from torchrl_llm._imports import require
from torchrl_llm._registry import register
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules.backends.backend_port import Backend
from torchrl_llm.modules.policies.llm_wrapper import LLMWrapperBase
from torchrl_llm.weights.canary import CanaryCheck
from torchrl_llm.weights.weight_ledger import WeightLedger
from torchrl_llm.weights.weight_names import engine_weights, normalized_name, whole_tensor
from torchrl_llm.weights.weight_source import (
    AdapterSource,
    TensorSource,
    WeightSource,
)
from torchrl_llm.weights.whole_model import EngineWeights, Sender


@register("weights", "adapter")
class AdapterWeights(EngineWeights):
    """Sends the adapter of a PEFT model to engines that have the model's base weights.

    An engine with LoRA (vLLM with ``enable_lora=True``, or a
    :class:`~torchrl_llm.modules.backends.TransformersBackend` on a PEFT model of its own) takes the
    adapter as it is. With ``merge`` the engine needs none: it gets the full weights of the adapted
    layers, each with the adapter added, and keeps the others.

    The engine must have been built from the model's base; nothing but a ``canary`` would notice
    another one.

    Args:
        *backends: see :class:`EngineWeights`.
        model: the PEFT model; needed here or in :meth:`push_weights`.
        merge: send merged weights.
        canary: see :class:`EngineWeights`; its reference must score with the adapter.
        ledger: see :class:`EngineWeights`.
    """

    def __init__(
        self,
        *backends: Backend,
        model: nn.Module | None = None,
        merge: bool = False,
        canary: CanaryCheck | None = None,
        ledger: WeightLedger | None = None,
    ) -> None:
        self._merge = merge
        super().__init__(*backends, model=model, canary=canary, ledger=ledger)

    def _check(self, backend: Backend) -> None:
        # An adapter leaves the weights of its base alone.
        if self._merge:
            super()._check(backend)

    def _sender(self, weights: Any, version: int) -> Sender:
        if isinstance(weights, LLMWrapperBase):
            weights = weights.backend.module
        weights = _unwrapped(weights)
        if not isinstance(weights, nn.Module) or not isinstance(
            getattr(weights, "active_adapter", None), str
        ):
            raise ConfigError(
                "AdapterWeights pushes a PEFT model with one active adapter, got "
                f"{type(weights).__name__}; a model without adapter goes by EngineWeights"
            )
        source = self._counted(_merged(weights) if self._merge else _adapter(weights))
        return lambda backend: backend.update_weights(source, version=version)


def _adapter(model: nn.Module) -> WeightSource:
    peft = require("peft", extra="peft", feature="AdapterWeights")
    name = model.active_adapter
    state: dict[str, Tensor] = peft.get_peft_model_state_dict(model, adapter_name=name)
    config = {key: _plain(value) for key, value in model.peft_config[name].to_dict().items()}
    config["inference_mode"] = True
    weights = {key: whole_tensor(value.detach()) for key, value in sorted(state.items())}
    return AdapterSource(weights, config=config)


def _unwrapped(weights: Any) -> Any:
    """The model inside DDP and ``torch.compile``, which PEFT's own functions do not look into."""
    while isinstance(weights, nn.Module):
        inside = weights._modules.get("_orig_mod") or weights._modules.get("module")
        if inside is None:
            break
        weights = inside
    return weights


def _merged(model: nn.Module) -> WeightSource:
    """The merged weights of the adapted layers alone."""
    adapted = {
        normalized_name(path)
        for path, part in model.named_modules()
        if hasattr(part, "base_layer") or hasattr(part, "modules_to_save")
    }
    weights = {
        name: value
        for name, value in engine_weights(model).items()
        if name.rpartition(".")[0] in adapted
    }
    return TensorSource(weights, kind="delta")


def _plain(value: Any) -> Any:
    """As JSON has it: PEFT's configuration holds sets and enums."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
