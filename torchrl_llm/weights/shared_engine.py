"""Trainer and vLLM engine run in one process and share one copy of the weights.

Both use vLLM's memory. vLLM's parameters are fused and padded, so each parameter of the Hugging
Face model becomes a view of some rows of vLLM's parameters. An in-place optimizer then trains the
engine directly, and an update copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_llm._registry import register
from torchrl_llm.errors import ConfigError, WeightUpdateError
from torchrl_llm.modules.backends.backend_port import Backend
from torchrl_llm.modules.backends.vllm.local_engine import LocalEngine
from torchrl_llm.weights.canary import CanaryCheck
from torchrl_llm.weights.engine_updaters import Sender, Weights
from torchrl_llm.weights.fingerprint import WeightLedger
from torchrl_llm.weights.sleeping_engine import SleepingEngineWeights
from torchrl_llm.weights.vllm_layout import weight_slots
from torchrl_llm.weights.vllm_loading import engine_model
from torchrl_llm.weights.weight_names import engine_weights
from torchrl_llm.weights.weight_source import TensorSource, WeightReceipt


class SharedStorage:
    """Turns a model's parameters into views of an engine's memory, and checks that they stay views.

    The constructor copies the model's weights into the engine once. The engine may have been
    started with ``load_format="dummy"``.

    Args:
        model: the trained Hugging Face model, in the engine's dtype and on its device; not sharded,
            without adapters. Its ``Parameter`` objects stay the same, so an optimizer may already
            exist.
        llm: a ``vllm.LLM`` in this process. After this call, its backends release only its cache
            when it sleeps; ``llm.sleep()`` itself would free the trainer's weights.

    Attributes:
        num_tensors: number of shared parameters; tied parameters count once.
        num_bytes: bytes of the shared parameters.

    Raises:
        ConfigError: one side lacks a weight of the other; a shape, dtype or device differs; weights
            are tied on one side only; or the engine does not support sharing.
    """

    def __init__(self, model: nn.Module, llm: Any) -> None:
        _check_sleep(llm.llm_engine.vllm_config)
        self._model = model
        self._slots, padding = weight_slots(engine_model(llm))
        self._check_fits()
        LocalEngine.of(llm).sleep.share_weights()
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
            # Tied weights must be tied on both sides, otherwise one of two values would be lost.
            if owners.setdefault(slot.data_ptr(), parameter) is not parameter:
                raise ConfigError(f"{name} is tied in the engine and not in the model")
        if len(owners) != len({id(parameter) for parameter in parameters.values()}):
            raise ConfigError("weights are tied in the model that are not tied in the engine")

    @torch.no_grad()
    def bind(self) -> list[str]:
        """Copy unshared parameters into the engine, and share them.

        Returns:
            Names of the newly shared parameters.

        Raises:
            ConfigError: the model has changed its shape or dtype.
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
        """Return the names of parameters outside the engine's memory."""
        slots = self._slots
        return [
            name
            for name, parameter in self._parameters().items()
            if name not in slots or parameter.data_ptr() != slots[name].data_ptr()
        ]

    def changes(self) -> tuple[int, ...]:
        """Return the number of in-place writes per parameter; equal tuples mean equal weights."""
        # torch counts these for autograd.
        return tuple(parameter._version for parameter in self._parameters().values())

    def check(self) -> None:
        """Raise if a parameter is outside the engine's memory; only addresses are compared.

        Raises:
            WeightUpdateError: lists the parameters.
        """
        gone = self.unshared()
        if gone:
            raise WeightUpdateError(
                f"{len(gone)} weights of the model are no longer the engine's memory: {gone[:4]}. "
                "Something gave them new storage (.to(), .half(), load_state_dict(assign=True), "
                "resize_token_embeddings); the engine would go on with the old values"
            )


def _check_sleep(config: Any) -> None:
    """Raise if the memory of the cache cannot be released without that of the weights."""
    if not config.model_config.enable_sleep_mode:
        return
    by = config.model_config.sleep_mode_backend
    if by != "cumem":
        raise ConfigError(
            f"the weights of an engine that sleeps by sleep_mode_backend={by!r} are not there "
            "while it does, and the trainer's with them: choose 'cumem', which gives back the "
            "cache alone, or bring the weights by SleepingEngineWeights"
        )
    if config.kv_transfer_config is not None:
        raise ConfigError(
            "vLLM does not give back the cache alone while a connector (kv_transfer_config) moves "
            "it: leave that out, or build the engine with enable_sleep_mode=False"
        )


@register("weights", "shared")
class SharedEngineWeights(SleepingEngineWeights):
    """Updater for a trained model and a vLLM engine that share memory in one process.

    The constructor copies the model's weights into the engine once and turns each parameter into a
    view of the engine's memory. After that, every in-place optimizer step also changes the engine.
    A push checks the address of each parameter, clears the engine's cache and counts the version.

    The engine has new weights as soon as the optimizer steps. So push before the next sampling, and
    do not sample while the optimizer steps (collect and train in turns, not in parallel). Before
    each rollout, a collector with this updater checks that all parameters are still shared and that
    the weights were not trained since the last push.

    Between :meth:`sleep` and the next push the engine has no cache, and the trainer can use that
    memory (on a GPU, this needs ``enable_sleep_mode=True``). The weights stay in memory.

    Args:
        model: the trained Hugging Face model; see
            ``SharedStorage`` for the requirements.
        backend: a :class:`~torchrl_llm.modules.backends.vllm.VLLMBackend`.
        rebind: if a parameter is outside the engine's memory, copy its values into the engine and
            share it again, instead of raising an error. This does not help an optimizer that holds
            a different ``Parameter`` object.
        fingerprint: hash all weights at each push, so that batches can be checked against their
            digest. Hashing reads every weight once. Without ``fingerprint``, the digest only states
            that the memory is shared.
        canary: see :class:`EngineWeights`.
        ledger: see :class:`EngineWeights`.

    Attributes:
        storage: the shared memory, with counts of tensors and bytes.

    Raises:
        ConfigError: model and engine cannot share memory.
    """

    def __init__(
        self,
        model: nn.Module,
        backend: Backend,
        *,
        rebind: bool = False,
        fingerprint: bool = True,
        canary: CanaryCheck | None = None,
        ledger: WeightLedger | None = None,
    ) -> None:
        super().__init__(
            backend, model=model, canary=canary, ledger=ledger, fingerprint=fingerprint
        )
        engine = getattr(backend, "engine", None)
        if engine is None:
            raise ConfigError(
                f"SharedEngineWeights needs a vLLM engine in this process; {type(backend).__name__}"
                " has none (a TransformersBackend shares by being built on the trained model)"
            )
        self._rebind = rebind
        with backend.exclusive():
            self.storage = SharedStorage(model, engine)
            backend.weights_changed(backend.version)
        self._pushed = self.storage.changes()

    def sleep(self) -> None:
        """Release the engine's cache for the trainer; sampling is not possible until the next push.

        Raises:
            BackendError: the engine is already asleep.
            ConfigError: a GPU engine was built without ``enable_sleep_mode=True``.
        """
        super().sleep()

    def _rest(self, backend: Any) -> None:
        backend.release_cache()

    def _make_room(self, backend: Any) -> None:
        """Do nothing: the weights are still in memory."""

    def register_collector(self, collector: Any) -> None:
        """Bind to a collector; its rollouts then start with :meth:`check_rollout`.

        Args:
            collector: see :meth:`~torchrl_llm.weights.WeightUpdater.register_collector`.
        """
        fresh = self.collector is None
        super().register_collector(collector)
        if fresh and hasattr(collector, "pre_collect_hook"):
            hook = collector.pre_collect_hook
            collector.pre_collect_hook = self.check_rollout if hook is None else _both(hook, self)

    def check_rollout(self) -> None:
        """Raise if the weights have changed without a push.

        Raises:
            WeightUpdateError: a parameter is outside the engine's memory, or the weights were
                trained since the last push.
        """
        self.storage.check()
        if self.storage.changes() != self._pushed:
            raise WeightUpdateError(
                "the shared weights were changed since they were last pushed: the engine would "
                "sample with them under an old version's number, and with an old cache; push after "
                "every optimizer step (train.weight_update_frequency=1)"
            )

    def check(self) -> None:
        """Raise if a parameter is outside the engine's memory, or share it again with ``rebind``.

        Raises:
            WeightUpdateError: lists the parameters.
        """
        if self._rebind:
            self.storage.bind()
        self.storage.check()

    def _sender(self, weights: Weights, version: int) -> Sender:
        own = engine_weights(self._model)
        given = own if weights is self._model else engine_weights(weights)
        other = [
            name
            for name in own.keys() | given.keys()
            if name not in own or name not in given or _address(own, name) != _address(given, name)
        ]
        if other:
            raise ConfigError(
                f"{len(other)} of the given weights are not those that are shared: "
                f"{sorted(other)[:3]}; push the model that SharedEngineWeights was built with, or "
                "nothing"
            )

        def send(backend: Backend) -> list[WeightReceipt]:
            with backend.exclusive():
                self.check()
                self._pushed = self.storage.changes()
                if self._fingerprint:
                    # All weights are already in place, so the loader copies none.
                    source = self._counted(TensorSource(engine_weights(self._model)))
                    return backend.update_weights(source, version=version)
                backend.weights_changed(version)
            tensors = self.storage.num_tensors
            return [WeightReceipt(version, f"shared-{version}", tensors, 0, 0.0)]

        return send


def _both(hook: Callable[[], None], updater: SharedEngineWeights) -> Callable[[], None]:
    def run() -> None:
        hook()
        updater.check_rollout()

    return run


def _address(weights: dict[str, Tensor], name: str) -> int:
    return weights[name].data_ptr()
