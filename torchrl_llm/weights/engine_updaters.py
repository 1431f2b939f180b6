"""Updaters of engines: all weights, those that changed, or the LoRA adapter alone.

Each push is proven: the engine answers with the digest of what it got, and computes what the
trainer computes. Next: :mod:`~torchrl_llm.weights.shared_engine`, where nothing is copied.
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
    """Sends all weights to one or more engines, and proves that they arrived.

    After each push the engine has dropped what it had cached, counts the new version, and has
    echoed the digest of what it got; with a ``canary`` it also computes the same log-probs as the
    trainer. If that proof fails, the push raises and the version is counted all the same: what the
    engine samples from then on is neither the old version nor a proven new one, and a
    :class:`~torchrl_llm.weights.WeightLedger` refuses it. If the weights did not arrive at
    all, the engine keeps the old ones and their version.

    Args:
        *backends: the engines; by default that of the collector's policy.
        model: what is pushed when :meth:`push_weights` is given nothing.
        canary: compares log-probs after each push.
        ledger: gets version and digest of each proven push.
        dtype: the type of the engine's weights, to send fewer bytes to remote engines; see
            :func:`engine_weights`. In one process the copy casts.
        fingerprint: hash the weights, so that the engine's receipt says what it got and batches can
            be checked against it. On the CPU it costs half of the copy; weights on an
            accelerator have to be copied to the CPU for it.

    Raises:
        ConfigError: an engine of this process whose weights cannot be replaced, such as quantized
            ones.

    Attributes:
        version: number of the last push; 0 before the first. With a collector that counts versions
            it follows that count.
        receipts: of the last push.

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
        """The engines that get the weights.

        Raises:
            ConfigError: none were given, and there is no collector whose policy has one.
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
        """Send the weights, and return when they are proven to be there.

        Args:
            policy_or_weights: the trained module, its state dict or a tensordict; ``None`` for the
                model given at construction.

        Raises:
            ConfigError: nothing to push, or engines that cannot take it.
            WeightUpdateError: the weights did not arrive, or not as they were sent, or the engine
                does not compute with them.
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
                # Nobody may call what is sampled from now on by the old version's number.
                self._count(version)
            raise
        self.receipts, self.version = receipts, version
        if self.ledger is not None:
            self.ledger.record(version, receipts[0].digest)

    def _deliver(self, weights: Weights, version: int, receipts: list[WeightReceipt]) -> None:
        """Bring a version to every engine; receipts are added as they come, even before errors."""
        send = self._sender(weights, version)
        for backend in self.backends:
            receipts += send(backend)

    def _sender(self, weights: Weights, version: int) -> Sender:
        """What brings a version to one engine; everything that all need is done once, here."""
        source = TensorSource(engine_weights(weights, dtype=self._dtype))
        source.hashed = self._fingerprint
        return partial(update_backend, source=self._counted(source), version=version)

    def _counted(self, source: Source) -> Source:
        """A source whose version is one of this updater."""
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
                # An engine that is awake with its weights only is asked when it has a cache again.
                check = partial(self.canary.check, backend, version=version, target=target)
                backend.when_awake(check)


def update_backend(backend: Backend, *, source: WeightSource, version: int) -> list[WeightReceipt]:
    """Tell a backend of weights; what a sender is made of.

    Args:
        backend: gets them.
        source: where they are.
        version: their number.
    """
    return backend.update_weights(source, version=version)


@register("weights", "delta")
class DeltaWeights(EngineWeights):
    """Sends the tensors whose digest is another than at the last push.

    Each engine is told which weights the changes are a change of, and refuses them when it holds
    others (it was rebuilt, or missed a version); it is then sent all weights. The first push is
    whole. Hashing reads every weight once, which is cheaper than sending it anywhere.

    Attributes:
        num_sent: tensors of the last push, to the engine that got most.
        num_bytes_sent: of the last push, to all engines together.

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
                # It holds others than it was sent: rebuilt, or loaded by somebody else.
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
    """Sends the adapter of a PEFT model to engines that have the model's base weights.

    An engine with LoRA (vLLM with ``enable_lora=True``, or a
    :class:`~torchrl_llm.modules.backends.TransformersBackend` on a PEFT model of its own) takes the
    adapter as it is. Others get merged weights, by :class:`EngineWeights` all of them, by
    :class:`DeltaWeights` those of the adapted layers alone once they have the others.

    The engine must have been built from the model's base; nothing but a ``canary`` would notice
    another one.

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
        """Any will do: an adapter leaves the weights of its base alone."""

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
    # Plain, as JSON has it: PEFT's configuration holds sets and enums.
    held = json.dumps(model.peft_config[name].to_dict(), default=_plain)
    config = json.loads(held) | {"inference_mode": True}
    weights = {key: whole_tensor(value.detach()) for key, value in sorted(state.items())}
    return AdapterSource(weights, config=config)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)


def _unwrapped(weights: Any) -> Any:
    """The model inside DDP and ``torch.compile``, which PEFT's own functions do not look into."""
    while isinstance(weights, nn.Module):
        inside = weights._modules.get("_orig_mod") or weights._modules.get("module")
        if inside is None:
            break
        weights = inside
    return weights
