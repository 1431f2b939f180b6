"""One copy of the weights for the trainer and an engine in the same process.

vLLM's memory is the one that both use: its parameters are fused and padded, so each parameter of
the Hugging Face model is made a run of rows of them. An optimizer that works in place then trains
the engine, and an update has nothing to copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchrl_llm.errors import ConfigError, WeightUpdateError
from torchrl_llm.modules.backends.vllm.slots import weight_slots
from torchrl_llm.modules.backends.vllm.weight_loading import engine_model


class SharedStorage:
    """Makes a model's parameters views of an engine's memory, and watches that they stay so.

    The model's weights are copied into the engine once, when this is constructed. The engine may
    have been started with ``load_format="dummy"``.

    Args:
        model: the trained Hugging Face model, in the engine's dtype and on its device. Not sharded,
            without adapters. Its ``Parameter`` objects stay, so an optimizer may exist already.
        llm: a ``vllm.LLM`` in this process, without sleep mode: what sleeps is unmapped, and the
            trainer's weights with it.

    Attributes:
        num_tensors: parameters that are shared, a tied one once.
        num_bytes: of them.

    Raises:
        ConfigError: a weight of one side that the other does not have, another shape, dtype or
            device, weights that are tied on one side only, or an engine that cannot share.
    """

    def __init__(self, model: nn.Module, llm: Any) -> None:
        if getattr(llm.llm_engine.vllm_config.model_config, "enable_sleep_mode", False):
            raise ConfigError(
                "an engine with enable_sleep_mode=True unmaps its weights when it sleeps, and the "
                "trainer's with them: switch it off, or bring the weights by EngineWeights"
            )
        self._model = model
        self._slots, padding = weight_slots(engine_model(llm))
        self._check_fits()
        self.bind()
        for rows in padding:
            rows.zero_()
        owned = {slot.data_ptr(): slot for slot in self._slots.values()}
        self.num_tensors = len(owned)
        self.num_bytes = sum(slot.numel() * slot.element_size() for slot in owned.values())

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._model.named_parameters(remove_duplicate=False))

    def _check_fits(self) -> None:
        parameters = self._parameters()
        alone = sorted(set(parameters) - set(self._slots))
        unused = sorted(set(self._slots) - set(parameters))
        if alone or unused:
            raise ConfigError(
                f"model and engine do not have the same weights: {len(alone)} only the model "
                f"{alone[:4]}, {len(unused)} only the engine {unused[:4]}. Sharing is for a bare "
                "model; for one with adapters take AdapterWeights or EngineWeights"
            )
        owners: dict[int, Tensor] = {}
        for name, parameter in parameters.items():
            slot = self._slots[name]
            if type(parameter.data) is not Tensor:
                raise ConfigError(
                    f"{name} is a {type(parameter.data).__name__}, not a whole weight"
                )
            for what in ("shape", "dtype", "device"):
                ours, theirs = getattr(parameter, what), getattr(slot, what)
                if ours != theirs:
                    raise ConfigError(
                        f"{name} has {what} {ours} in the model and {theirs} in the engine; shared "
                        "weights are the same memory (start the engine in the model's dtype)"
                    )
            # Tied weights must be tied on both sides, or one of two values would be lost.
            if owners.setdefault(slot.data_ptr(), parameter) is not parameter:
                raise ConfigError(f"{name} is tied in the engine and not in the model")
        if len(owners) != len({id(parameter) for parameter in parameters.values()}):
            raise ConfigError("weights are tied in the model that are not tied in the engine")

    @torch.no_grad()
    def bind(self) -> list[str]:
        """Copy what is not shared into the engine, and share it.

        Returns:
            Names of the parameters that were not shared before.

        Raises:
            ConfigError: the model has changed in shape or dtype since.
        """
        self._check_fits()
        bound = self.unshared()
        parameters = self._parameters()
        for name in bound:
            parameter, slot = parameters[name], self._slots[name]
            if parameter.data_ptr() != slot.data_ptr():
                slot.copy_(parameter)
                parameter.data = slot
        return bound

    def unshared(self) -> list[str]:
        """Names of parameters whose memory is not the engine's."""
        slots = self._slots
        return [
            name
            for name, parameter in self._parameters().items()
            if name not in slots or parameter.data_ptr() != slots[name].data_ptr()
        ]

    def changes(self) -> tuple[int, ...]:
        """How often each parameter was written to in place; equal tuples mean equal weights."""
        # torch counts these for autograd, which has to notice the same thing.
        return tuple(parameter._version for parameter in self._parameters().values())

    def check(self) -> None:
        """Raise when a parameter has left the engine's memory; a look at each address, no more.

        Raises:
            WeightUpdateError: names the parameters.
        """
        gone = self.unshared()
        if gone:
            raise WeightUpdateError(
                f"{len(gone)} weights of the model are no longer the engine's memory: {gone[:4]}. "
                "Something gave them new storage (.to(), .half(), load_state_dict(assign=True), "
                "resize_token_embeddings); the engine would go on with the old values"
            )
