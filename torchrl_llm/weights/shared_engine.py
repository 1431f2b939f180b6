"""Weights that trainer and engine share: an update copies nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from torchrl_llm._registry import register
from torchrl_llm.errors import ConfigError, WeightUpdateError
from torchrl_llm.modules.backends.backend_port import Backend
from torchrl_llm.modules.backends.vllm.sharing import SharedStorage
from torchrl_llm.weights.canary import CanaryCheck
from torchrl_llm.weights.weight_ledger import WeightLedger
from torchrl_llm.weights.weight_names import engine_weights
from torchrl_llm.weights.weight_source import TensorSource, WeightReceipt
from torchrl_llm.weights.whole_model import EngineWeights, Sender, Weights


@register("weights", "shared")
class SharedEngineWeights(EngineWeights):
    """The trained model and a vLLM engine of the same process live in the same memory.

    When this is constructed, the model's weights are copied into the engine once and each of its
    parameters becomes a view of the engine's. From then on every optimizer step that works in place
    is a step of the engine. A push checks the address of each parameter, drops the engine's cache
    and counts the version.

    The engine has new weights as soon as the optimizer stepped: push before anything is sampled
    again, and let nothing be sampled while the optimizer steps (a loop that collects and trains in
    turns; not one that does both at once). A collector with this updater checks before each rollout
    that nothing left the shared memory, and that nothing was trained since the last push.

    Args:
        model: the trained Hugging Face model; see
            :class:`~torchrl_llm.modules.backends.vllm.sharing.SharedStorage` for what it must be.
        backend: a :class:`~torchrl_llm.modules.backends.vllm.VLLMBackend`.
        rebind: when a parameter has left the engine's memory, copy its values there and share it
            again, instead of raising. An optimizer that holds another ``Parameter`` than the
            model's is not helped by it.
        fingerprint: hash all weights at each push, so that batches can be checked against their
            digest. That reads every weight once; without it the digest says only that the memory
            is shared.
        canary: see :class:`EngineWeights`.
        ledger: see :class:`EngineWeights`.

    Attributes:
        storage: the shared memory, with counts of tensors and bytes.

    Raises:
        ConfigError: the two cannot share.
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

    def register_collector(self, collector: Any) -> None:
        """Bind to a collector, whose rollouts then begin with :meth:`check_rollout`.

        Args:
            collector: see :meth:`~torchrl_llm.weights.WeightUpdater.register_collector`.
        """
        fresh = self.collector is None
        super().register_collector(collector)
        if fresh and hasattr(collector, "pre_collect_hook"):
            hook = collector.pre_collect_hook
            collector.pre_collect_hook = self.check_rollout if hook is None else _both(hook, self)

    def check_rollout(self) -> None:
        """Refuse to sample with weights that no push has counted as a version.

        Raises:
            WeightUpdateError: a parameter has left the engine's memory, or the weights were trained
                since the last push.
        """
        self.storage.check()
        if self.storage.changes() != self._pushed:
            raise WeightUpdateError(
                "the shared weights were changed since they were last pushed: the engine would "
                "sample with them under an old version's number, and with an old cache; push after "
                "every optimizer step (train.weight_update_frequency=1)"
            )

    def check(self) -> None:
        """Raise when a parameter has left the engine's memory, or share it again with ``rebind``.

        Raises:
            WeightUpdateError: names the parameters.
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
                    # The loader finds each weight where it belongs, and copies none.
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
