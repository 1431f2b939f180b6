"""Updaters of engines: all weights, only changed weights, or only the LoRA adapter.

Each push is verified: the engine returns the digest of the received weights, and its log-probs
match the trainer's. The updater in :mod:`~torchrl_llm.weights.shared_engine` copies nothing.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_llm._imports import require
from torchrl_llm._registry import register
from torchrl_llm.errors import ConfigError, TorchRLLLMError, WeightUpdateError
from torchrl_llm.modules.backends.backend_port import Backend
from torchrl_llm.modules.policies.llm_wrapper import LLMWrapperBase
from torchrl_llm.weights.canary import CanaryCheck
from torchrl_llm.weights.fingerprint import WeightDigest, WeightLedger
from torchrl_llm.weights.weight_names import engine_weights, whole_tensor
from torchrl_llm.weights.weight_source import (
    AdapterSource,
    DeltaSource,
    TensorSource,
    WeightReceipt,
    WeightSource,
)
from torchrl_llm.weights.weight_updater import WeightUpdater

Weights = nn.Module | TensorDictBase | Mapping[str, Any]
Sender = Callable[[Backend], list[WeightReceipt]]
Source = TypeVar("Source", bound=WeightSource)


@register("weights", "load")
class EngineWeights(WeightUpdater):
    """Sends all weights to one or more engines and verifies their arrival.

    In each push the engine clears its cache, counts the new version, and returns the digest of the
    received weights. With a ``canary``, its log-probs are also compared with the trainer's. If this
    verification fails, the push raises an error, but the version is still counted. Further samples
    then belong neither to the old version nor to a verified new one, and a
    :class:`~torchrl_llm.weights.WeightLedger` rejects them. If the weights did not arrive, the
    engine keeps the old weights and their version.

    Args:
        *backends: the engines; by default the engine of the collector's policy.
        model: default for :meth:`push_weights`.
        canary: compares log-probs after each push.
        ledger: records version and digest of each verified push.
        dtype: dtype of the engine's weights, to send fewer bytes to remote engines; see
            :func:`engine_weights`. Within one process, the copy changes the dtype.
        fingerprint: hash the weights, so that the engine's receipt and batches can be verified. On
            the CPU, hashing costs half as much as the copy. Weights on an accelerator are first
            copied to the CPU.

    Raises:
        ConfigError: the weights of an engine in this process cannot be replaced, for example if
            they are quantized.

    Attributes:
        version: number of the last push; 0 before the first. With a collector that counts versions,
            this is the collector's number.
        receipts: receipts of the last push.

    Example:
        >>> from torchrl_llm.modules.backends import FakeBackend
        >>> trained = FakeBackend(vocab_size=16, eos_token_ids=(2,), seed=1)
        >>> sampler = FakeBackend(vocab_size=16, eos_token_ids=(2,))
        >>> updater = EngineWeights(sampler, canary=CanaryCheck(trained))
        >>> updater.push_weights(trained.module)
        >>> [receipt.version for receipt in updater.receipts]
        [1]
    """

    def __init__(
        self,
        *backends: Backend,
        model: Weights | None = None,
        canary: CanaryCheck | None = None,
        ledger: WeightLedger | None = None,
        dtype: torch.dtype | None = None,
        fingerprint: bool = True,
    ) -> None:
        self._dtype, self._fingerprint = dtype, fingerprint
        self._name = uuid.uuid4().hex[:12]
        for backend in backends:
            if not isinstance(backend, Backend):
                raise ConfigError(
                    f"{type(self).__name__} takes backends, got {type(backend).__name__}; that of "
                    "a policy is policy.backend"
                )
            self._check(backend)
        self._backends, self._model = backends, model
        self.canary, self.ledger = canary, ledger
        self.version = 0
        self.receipts: list[WeightReceipt] = []

    def _check(self, backend: Backend) -> None:
        backend.check_updates()

    @property
    def backends(self) -> Sequence[Backend]:
        """The engines that receive the weights.

        Raises:
            ConfigError: no engines were given, and no collector has a policy with an engine.
        """
        if self._backends:
            return self._backends
        backend = getattr(self.policy, "backend", None)
        if not isinstance(backend, Backend):
            raise ConfigError(
                f"the collector's policy, a {type(self.policy).__name__}, has no backend; pass it "
                f"to {type(self).__name__}(backend)"
            )
        return (backend,)

    def push_weights(self, policy_or_weights: Weights | None = None) -> None:
        """Send the weights, and return after their arrival is verified.

        Args:
            policy_or_weights: the trained module, its state dict or a tensordict; ``None`` for the
                model given at construction.

        Raises:
            ConfigError: there are no weights to push, or an engine cannot load them.
            WeightUpdateError: the weights did not arrive, arrived changed, or the engine does not
                compute with them.
        """
        weights = self._model if policy_or_weights is None else policy_or_weights
        if weights is None:
            raise ConfigError(
                f"{type(self).__name__} has no weights to push: give push_weights (or the "
                "collector's update_policy_weights_) the trained model, or pass model= here"
            )
        version = self._next_version()
        receipts: list[WeightReceipt] = []
        try:
            self._deliver(weights, version, receipts)
            self._prove(receipts, version)
        except TorchRLLLMError:
            if receipts:
                # Samples after this line must not have the old version number.
                self._count(version)
            raise
        self.receipts, self.version = receipts, version
        if self.ledger is not None:
            self.ledger.record(version, receipts[0].digest)

    def _deliver(self, weights: Weights, version: int, receipts: list[WeightReceipt]) -> None:
        """Send a version to every engine; receipts are added as they arrive, even before errors."""
        send = self._sender(weights, version)
        for backend in self.backends:
            receipts += send(backend)

    def _sender(self, weights: Weights, version: int) -> Sender:
        """Return a function that sends a version to one engine; common work is done once here."""
        source = TensorSource(engine_weights(weights, dtype=self._dtype))
        source.hashed = self._fingerprint
        return partial(update_backend, source=self._counted(source), version=version)

    def _counted(self, source: Source) -> Source:
        """Give a source a version number of this updater."""
        source.counter = self._name
        return source

    def _next_version(self) -> int:
        counted = getattr(self.collector, "policy_version", None)
        return (counted if isinstance(counted, int) else self.version) + 1

    def _count(self, version: int) -> None:
        self.version = version
        if isinstance(getattr(self.collector, "policy_version", None), int):
            self.collector.increment_version()

    def _prove(self, receipts: Sequence[WeightReceipt], version: int) -> None:
        digests = {receipt.digest for receipt in receipts}
        versions = {receipt.version for receipt in receipts}
        if len(digests) != 1 or versions != {version}:
            raise WeightUpdateError(
                f"version {version} of the weights was sent, and the engines answer with versions "
                f"{sorted(versions)} and digests {sorted(digests)}"
            )
        if self.canary is not None:
            target = self.canary.target()
            for backend in self.backends:
                # An engine that has only its weights awake is checked when it has a cache again.
                check = partial(self.canary.check, backend, version=version, target=target)
                backend.when_awake(check)


def update_backend(backend: Backend, *, source: WeightSource, version: int) -> list[WeightReceipt]:
    """Send weights to one backend.

    Args:
        backend: the receiver.
        source: source of the weights.
        version: their number.
    """
    return backend.update_weights(source, version=version)


@register("weights", "delta")
class DeltaWeights(EngineWeights):
    """Sends only tensors whose digest has changed since the last push.

    The first push sends all weights. Each later push also sends the digest of the weights before
    the changes. An engine with different weights (it was rebuilt, or missed a version) rejects the
    changes, and then gets all weights. Hashing reads every weight once, which is cheaper than
    sending it.

    Attributes:
        num_sent: number of tensors in the last push, for the engine that received most.
        num_bytes_sent: bytes of the last push, over all engines.

    Example:
        >>> from torchrl_llm.modules.backends import FakeBackend
        >>> trained = FakeBackend(vocab_size=16, eos_token_ids=(2,), seed=1).module
        >>> updater = DeltaWeights(FakeBackend(vocab_size=16, eos_token_ids=(2,)), model=trained)
        >>> updater.push_weights()
        >>> first = updater.num_sent
        >>> _ = next(trained.parameters()).data.mul_(2)
        >>> updater.push_weights()
        >>> first, updater.num_sent
        (2, 1)
    """

    num_sent: int = 0
    num_bytes_sent: int = 0
    _held: WeakKeyDictionary[Backend, dict[str, int]] | None = None

    def _check(self, backend: Backend) -> None:
        super()._check(backend)
        if not self._fingerprint:
            raise ConfigError("DeltaWeights finds what changed by its fingerprint: leave that on")

    def _sender(self, weights: Weights, version: int) -> Sender:
        named = engine_weights(weights, dtype=self._dtype)
        digest = WeightDigest()
        for name, value in named.items():
            digest.update(name, value)
        if self._held is None:
            self._held = WeakKeyDictionary()
        self.num_sent = self.num_bytes_sent = 0

        def send(backend: Backend) -> list[WeightReceipt]:
            receipts = self._send_to(backend, named, digest, version)
            self._held[backend] = digest.parts
            return receipts

        return send

    def _send_to(
        self, backend: Backend, named: dict[str, Tensor], digest: WeightDigest, version: int
    ) -> list[WeightReceipt]:
        parts, held = digest.parts, self._held.pop(backend, {})
        if held.keys() == parts.keys():
            changed = {name: value for name, value in named.items() if held[name] != parts[name]}
            base = WeightDigest.of_parts(held)
            try:
                source = self._counted(DeltaSource(changed, base=base, result=digest.value))
                receipts = backend.update_weights(source, version=version)
            except WeightUpdateError:
                # The engine has different weights: it was rebuilt, or loaded by other code.
                pass
            else:
                self._count_sent(changed)
                return receipts
        self._count_sent(named)
        source = self._counted(TensorSource(named, digest=digest.value))
        return backend.update_weights(source, version=version)

    def _count_sent(self, sent: dict[str, Tensor]) -> None:
        self.num_sent = max(self.num_sent, len(sent))
        self.num_bytes_sent += sum(value.numel() * value.element_size() for value in sent.values())


@register("weights", "adapter")
class AdapterWeights(EngineWeights):
    """Sends the adapter of a PEFT model to engines with the model's base weights.

    An engine with LoRA (vLLM with ``enable_lora=True``, or a
    :class:`~torchrl_llm.modules.backends.TransformersBackend` on its own PEFT model) loads the
    adapter itself. Other engines need merged weights: :class:`EngineWeights` sends all weights, and
    :class:`DeltaWeights` sends only the adapted layers after the first push.

    The engine must have the same base weights as the model; only a ``canary`` notices different
    ones.

    Args:
        *backends: see :class:`EngineWeights`.
        model: the PEFT model; needed here or in :meth:`push_weights`.
        canary: see :class:`EngineWeights`; its reference must score with the adapter.
        ledger: see :class:`EngineWeights`.
    """

    def __init__(
        self,
        *backends: Backend,
        model: nn.Module | None = None,
        canary: CanaryCheck | None = None,
        ledger: WeightLedger | None = None,
    ) -> None:
        super().__init__(*backends, model=model, canary=canary, ledger=ledger)

    def _check(self, backend: Backend) -> None:
        """Accept any engine: an adapter does not change the base weights."""

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
        return partial(update_backend, source=self._counted(_adapter(weights)), version=version)


def _adapter(model: nn.Module) -> WeightSource:
    peft = require("peft", extra="peft", feature="AdapterWeights")
    name = model.active_adapter
    state: dict[str, Tensor] = peft.get_peft_model_state_dict(model, adapter_name=name)
    # Convert to plain JSON values: PEFT's configuration contains sets and enums.
    held = json.dumps(model.peft_config[name].to_dict(), default=_plain)
    config = json.loads(held) | {"inference_mode": True}
    weights = {key: whole_tensor(value.detach()) for key, value in sorted(state.items())}
    return AdapterSource(weights, config=config)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)


def _unwrapped(weights: Any) -> Any:
    """Return the model inside DDP and ``torch.compile``, which PEFT's functions do not unwrap."""
    while isinstance(weights, nn.Module):
        inside = weights._modules.get("_orig_mod") or weights._modules.get("module")
        if inside is None:
            break
        weights = inside
    return weights
