"""Sources of new weights, and the receipts that backends return.

A :class:`WeightSource` is small and picklable. It describes the location of weights: a file, mapped
memory, an object store, or a collective that the receiver joins. The receiver opens it. The senders
are in :mod:`torchrl_llm.weights`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from torchrl_llm.errors import WeightUpdateError
from torchrl_llm.weights.fingerprint import WeightDigest, weights_digest

UNHASHED = "unhashed-"
"""Prefix of the digest of weights that were not hashed; their version follows."""


class WeightReceipt(NamedTuple):
    """A receiver's report about the weights that it received.

    Attributes:
        version: version number of the weights.
        digest: digest of the received bytes, see
            :class:`~torchrl_llm.weights.fingerprint.WeightDigest`. After a delta with a known base,
            the digest of all weights of the receiver, so that it can be compared with the digest of
            a receiver of all weights.
        num_tensors: number of received tensors.
        num_bytes: bytes of these tensors.
        seconds: time from opening the source to the last copy.
    """

    version: int
    digest: str
    num_tensors: int
    num_bytes: int
    seconds: float


class WeightSource(ABC):
    """Describes where weights are, and opens them.

    Attributes:
        kind: ``full`` for every weight of the model, ``delta`` for the weights that changed since
            the last version, ``adapter`` for the weights of a LoRA adapter.
        digest: digest of the sent weights; a receiver with a different digest rejects them.
            ``None`` if the sender could not compute it beforehand.
        reusable: whether it can be opened again later, by an engine that was rebuilt. A broadcast
            can be received only once.
        hashed: whether the weights are hashed. Without hashes, their arrival cannot be verified.
        in_hand: whether the tensors are the sender's own tensors in this process.
        canary: the log-probs that an engine with these weights computes, a
            :class:`~torchrl_llm.weights.CanaryTarget`, for receivers that check them; ``None`` if
            the sender has none.
        counter: name of the sender that counts the versions. Version numbers of different counters
            are not compared.
        recounted: whether the same version number may have belonged to different weights before,
            because the trainer was resumed from a checkpoint. The code that sets it must keep rows
            of the two apart.
    """

    kind: Literal["full", "delta", "adapter"] = "full"
    digest: str | None = None
    reusable: bool = True
    hashed: bool = True
    in_hand: bool = False
    canary: Any = None
    counter: str | None = None
    recounted: bool = False

    @abstractmethod
    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name (as in the Hugging Face model) and the value of each weight once.

        Raises:
            WeightUpdateError: the weights are not available, or did not arrive in time.
        """


class TensorSource(WeightSource):
    """Weights in memory, for one process, or small enough to be sent in the message.

    Without a digest, the receiver's digest is used for both sides, because nothing can change the
    weights within one process. When the source is pickled for a different process, the digest is
    computed and sent with it.

    Args:
        weights: name to tensor.
        kind: see :class:`WeightSource`.
        digest: see :class:`WeightSource`.
    """

    in_hand = True

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        *,
        kind: Literal["full", "delta", "adapter"] = "full",
        digest: str | None = None,
    ) -> None:
        self._weights = dict(weights)
        self.kind, self.digest = kind, digest

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`WeightSource.receive`."""
        yield from self._weights.items()

    def __getstate__(self) -> dict[str, Any]:
        digest = self.digest
        if digest is None and self.hashed:
            digest = weights_digest(self._weights)
        return {**self.__dict__, "digest": digest, "in_hand": False}


class DeltaSource(TensorSource):
    """Only the weights that changed since a version that the receiver must already have.

    Args:
        weights: name to tensor, for the changed weights.
        base: digest of all weights before the change.
        result: digest of all weights after the change.

    Attributes:
        base: as given.
        result: as given.
    """

    def __init__(self, weights: Mapping[str, Tensor], *, base: str, result: str) -> None:
        super().__init__(weights, kind="delta")
        self.base, self.result = base, result


class AdapterSource(TensorSource):
    """A LoRA adapter, with the names and the configuration of an adapter that PEFT saves.

    Args:
        weights: ``base_model.model.<module>.lora_A.weight`` and so on to tensor.
        config: the content of ``adapter_config.json``.

    Attributes:
        config: as given.
    """

    def __init__(self, weights: Mapping[str, Tensor], *, config: Mapping[str, Any]) -> None:
        super().__init__(weights, kind="adapter")
        self.config = dict(config)


# The digests of the last received weights of each module, weight by weight. Do not send deltas to a
# module that trains, or that receives weights without these functions.
_held: WeakKeyDictionary[nn.Module, dict[str, int]] = WeakKeyDictionary()


class _Given(NamedTuple):
    """The weights of a receiver's last version; one version has one value."""

    version: int
    parts: dict[str, int]
    counter: str | None


_given: WeakKeyDictionary[Any, _Given] = WeakKeyDictionary()


class Incoming(WeightSource):
    """Weights that arrived and match the sent digest, but are not in the model yet.

    Args:
        source: the source that they came from.
        version: their number.
        weights: name to tensor.
        started: when the source was opened.
        digest: digest of the weights; ``None`` if they are hashed later during the copy, or not at
            all.

    Attributes:
        source: as given.
        version: as given.
        weights: as given.
        seconds: time from opening the source to the arrival.
    """

    def __init__(
        self,
        source: WeightSource,
        version: int,
        weights: dict[str, Tensor],
        started: float,
        digest: WeightDigest | None,
    ) -> None:
        self.source, self.version, self.weights = source, version, weights
        self.kind, self.hashed, self.recounted = source.kind, source.hashed, source.recounted
        self.canary, self.reusable, self.counter = source.canary, source.reusable, source.counter
        self._started, self._digest = started, digest
        self.seconds = time.perf_counter() - started

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`WeightSource.receive`."""
        yield from self.weights.items()

    @property
    def _counted(self) -> WeightDigest:
        if self._digest is None:
            self._digest = WeightDigest()
            for name, tensor in self.weights.items():
                self._digest.update(name, tensor)
        return self._digest

    @property
    def _parts(self) -> dict[str, int]:
        return self._counted.parts if self.hashed else {}

    @property
    def receipt(self) -> WeightReceipt:
        """The receipt of the arrival; :meth:`accepted` returns the receipt of the load."""
        digest = self._counted.value if self.hashed else f"{UNHASHED}{self.version}"
        size = sum(tensor.numel() * tensor.element_size() for tensor in self.weights.values())
        return WeightReceipt(self.version, digest, len(self.weights), size, self.seconds)

    @property
    def order(self) -> dict[str, Any]:
        """The data that a remote worker needs besides the weights, as JSON values."""
        order = {"version": self.version, "kind": self.kind, "digest": self.receipt.digest}
        order |= {"counter": self.counter, "recounted": self.recounted}
        if isinstance(self.source, DeltaSource):
            order |= {"base": self.source.base, "result": self.source.result}
        return order

    def copy_into(self, targets: Mapping[str, Tensor], *, required: Iterable[str] = ()) -> None:
        """Copy the weights into their targets; hash them too if they have no digest.

        Args:
            targets: see :func:`copy_checked`.
            required: see there.

        Raises:
            WeightUpdateError: see there.
        """
        if self._digest is not None or not self.hashed:
            copy_checked(self.weights, targets, required=required)
            return
        _check_targets(self.weights, targets, required)
        digest = WeightDigest()
        with torch.no_grad():
            for name, tensor in self.weights.items():
                there = targets[name].data_ptr() == tensor.data_ptr()
                digest.update(name, tensor, target=None if there else targets[name])
        self._digest = digest

    def check_version(self, holder: Any) -> None:
        """Reject different weights with the receiver's version; the same weights may come again.

        Args:
            holder: the receiver of the weights.

        Raises:
            WeightUpdateError: the receiver has different weights with this version.
        """
        given = _given.get(holder)
        if given is None or self.recounted:
            return
        if (given.version, given.counter) != (self.version, self.counter):
            return
        whole = self.kind == "full"
        other = [
            name
            for name, digest in self._parts.items()
            # A full set of weights contains names that the earlier changes did not.
            if given.parts.get(name, digest if whole else None) != digest
        ]
        if other:
            raise WeightUpdateError(
                f"this sampler holds version {given.version} already, and {len(other)} weights "
                f"came with other values under the same number: {sorted(other)[:3]}. Tokens name "
                f"their weights by it: number these {given.version + 1} or higher"
            )

    def check_base(self, holder: nn.Module) -> None:
        """Reject a version number with different weights, and a delta of a different base.

        Args:
            holder: the module that receives the weights.

        Raises:
            WeightUpdateError: the module has different weights, or its weights are unknown.
        """
        self.check_version(holder)
        if not isinstance(self.source, DeltaSource):
            return
        held = _held.get(holder)
        digest = None if held is None else WeightDigest.of_parts(held)
        if digest != self.source.base:
            raise WeightUpdateError(
                f"version {self.version} came as the changes since the weights "
                f"{self.source.base}; this sampler holds {digest or 'none that it was sent'}: "
                "send it all weights"
            )
        after = WeightDigest.of_parts({**held, **self._parts})
        if after != self.source.result:
            raise WeightUpdateError(
                f"with the changes of version {self.version} the weights are {after} and "
                f"should be {self.source.result}"
            )

    def took_version(self, holder: Any) -> None:
        """Record the weights of the version; part of :meth:`accepted`."""
        before = _given.get(holder)
        if self.kind == "full" or before is None:
            parts = self._parts
        else:
            parts = {**before.parts, **self._parts}
        _given[holder] = _Given(self.version, parts, self.counter)

    def accepted(self, holder: nn.Module) -> WeightReceipt:
        """Record a module's weights and return the receipt; call it after the last copy.

        Args:
            holder: the module that received the weights.
        """
        receipt = self.receipt
        digest = receipt.digest
        self.took_version(holder)
        if self.kind == "full":
            _held[holder] = self._parts
        elif isinstance(self.source, DeltaSource):
            _held[holder] = {**_held[holder], **self._parts}
            digest = self.source.result
        elif self.kind == "delta":
            # The base of the change is unknown, so no later delta can build upon it.
            _held.pop(holder, None)
        seconds = time.perf_counter() - self._started
        return receipt._replace(digest=digest, seconds=seconds)


def open_source(source: WeightSource, *, version: int) -> Incoming:
    """Receive all weights of a source and compare their digest with the sent digest.

    Args:
        source: source of the weights; weights that have already arrived are returned unchanged.
        version: their number, for the receipt.

    Raises:
        WeightUpdateError: the received bytes differ from the sent bytes.
    """
    if isinstance(source, Incoming):
        return source
    started = time.perf_counter()
    if not source.hashed or (source.in_hand and source.digest is None):
        return Incoming(source, version, dict(source.receive()), started, None)
    digest, weights = WeightDigest(), {}
    for name, tensor in source.receive():
        digest.update(name, tensor)
        weights[name] = tensor
    if source.digest is not None and source.digest != digest.value:
        raise WeightUpdateError(
            f"version {version} of the weights arrived as {digest.value} ({digest.num_tensors} "
            f"tensors, {digest.num_bytes} bytes) and was sent as {source.digest}"
        )
    return Incoming(source, version, weights, started, digest)


def load_into(module: nn.Module, source: WeightSource, *, version: int) -> WeightReceipt:
    """Copy weights into a torch module in place, all or none.

    Args:
        module: has every weight that the source names. With ``kind="full"`` the source names all of
            its parameters, a tied parameter by any of its names. With ``kind="adapter"`` it is a
            PEFT model, and its active adapter receives the weights.
        source: where the weights are.
        version: their number, for the receipt.

    Raises:
        WeightUpdateError: the module lacks a name or shape, a weight is missing, the received bytes
            differ from the sent bytes, or a delta belongs to different weights than the module's.

    Example:
        >>> sampler, trained = nn.Linear(1, 1), nn.Linear(1, 1)
        >>> receipt = load_into(sampler, TensorSource(dict(trained.state_dict())), version=3)
        >>> receipt.version, receipt.num_tensors, torch.equal(sampler.weight, trained.weight)
        (3, 2, True)
    """
    incoming = open_source(source, version=version)
    incoming.check_base(module)
    own = module.state_dict(keep_vars=True)
    if source.kind == "adapter":
        copy_checked(_of_active_adapter(module, incoming.weights, own), own)
    else:
        full = source.kind == "full"
        incoming.copy_into(own, required=[n for n, _ in module.named_parameters()] if full else [])
    return incoming.accepted(module)


def copy_checked(
    weights: Mapping[str, Tensor], targets: Mapping[str, Tensor], *, required: Iterable[str] = ()
) -> None:
    """Check all names and shapes, then copy the weights into their targets.

    Args:
        weights: name to value; a value that already is in its target's memory is not copied.
        targets: name to the sampler's memory.
        required: targets that must get a value, under this name or a different name of the same
            memory.

    Raises:
        WeightUpdateError: the sampler lacks a name or shape, or a weight is missing; nothing is
            copied then.
    """
    _check_targets(weights, targets, required)
    with torch.no_grad():
        for name, tensor in weights.items():
            if targets[name].data_ptr() != tensor.data_ptr():
                targets[name].copy_(tensor)


def _check_targets(
    weights: Mapping[str, Tensor], targets: Mapping[str, Tensor], required: Iterable[str]
) -> None:
    for name, tensor in weights.items():
        if name not in targets or targets[name].shape != tensor.shape:
            found = tuple(targets[name].shape) if name in targets else "no such weight"
            raise WeightUpdateError(
                f"{name!r} was sent with shape {tuple(tensor.shape)}; the sampler has {found}"
            )
    given = {targets[name].data_ptr() for name in weights}
    missing = [name for name in required if targets[name].data_ptr() not in given]
    if missing:
        raise WeightUpdateError(
            f"{len(missing)} weights of the sampler were not sent: {missing[:3]}"
        )


def _of_active_adapter(
    module: nn.Module, weights: Mapping[str, Tensor], own: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the weights of an adapter under their names in a PEFT model."""
    active = getattr(module, "active_adapter", None)
    if not isinstance(active, str):
        raise WeightUpdateError(
            "an adapter was sent, and this sampler is no PEFT model with one active adapter: wrap "
            "it with peft.get_peft_model, or send merged weights (EngineWeights or DeltaWeights)"
        )
    named: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        # PEFT saves lora_A.<adapter's name>.weight of the model as lora_A.weight.
        module_name, _, leaf = name.rpartition(".")
        inside = f"{module_name}.{active}.{leaf}"
        named[inside if inside in own else f"{name}.{active}"] = tensor
    missing = [name for name in own if f".{active}" in name and name not in named]
    if missing:
        raise WeightUpdateError(
            f"{len(missing)} weights of the sampler's adapter were not sent: {missing[:3]}"
        )
    return named
