"""All weights into engines: the way that always works, and what the cheaper ways share with it.

Next: :mod:`~torchrl_llm.weights.shared_engine` (nothing is copied),
:mod:`~torchrl_llm.weights.delta_weights` (what changed) and
:mod:`~torchrl_llm.weights.adapter_weights` (LoRA) for less work than this.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase
from torch import nn

from torchrl_llm._registry import register
from torchrl_llm.errors import ConfigError, TorchRLLLMError, WeightUpdateError
from torchrl_llm.modules.backends.backend_port import Backend
from torchrl_llm.weights.canary import CanaryCheck
from torchrl_llm.weights.weight_ledger import WeightLedger
from torchrl_llm.weights.weight_names import engine_weights
from torchrl_llm.weights.weight_source import TensorSource, WeightReceipt, WeightSource
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
        dtype: the type of the engine's weights, to send fewer bytes to engines elsewhere; see
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
        return partial(_update, source=self._counted(source), version=version)

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


def _update(backend: Backend, *, source: WeightSource, version: int) -> list[WeightReceipt]:
    return backend.update_weights(source, version=version)
