"""What a backend is told about new weights, and what it answers.

A :class:`WeightSource` is small and picklable: it says where weights are (a file, memory that is
mapped, an object store, a collective that the receiver joins), and is opened where they are needed.
The senders are in :mod:`torchrl_llm.weights`.
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
"""What the digest of weights that nobody hashed begins with; their version follows."""


class WeightReceipt(NamedTuple):
    """What one receiver got.

    Attributes:
        version: number of the weights.
        digest: of the received bytes, see :class:`~torchrl_llm.weights.fingerprint.WeightDigest`;
            after a delta with a known base, of all weights that the receiver then holds, so that it
            can be compared with that of a receiver which got them all.
        num_tensors: how many.
        num_bytes: of all of them.
        seconds: from opening the source to the last copy.
    """

    version: int
    digest: str
    num_tensors: int
    num_bytes: int
    seconds: float


class WeightSource(ABC):
    """Where weights are.

    Attributes:
        kind: ``full`` names every weight of the model, ``delta`` those that changed since the last
            version, ``adapter`` those of a LoRA adapter.
        digest: of what was sent; a receiver that finds another one refuses. ``None`` where the
            sender could not know it beforehand.
        reusable: whether it can be opened again later, by an engine that was rebuilt; what is
            broadcast comes once.
        hashed: whether the weights are fingerprinted; without it nothing tells what arrived.
        in_hand: whether the tensors are the sender's own, in this process.
        canary: what an engine computes that has these weights, a
            :class:`~torchrl_llm.weights.CanaryTarget`, for receivers that check it; ``None``
            where the sender does not say.
        counter: who counts the versions; numbers of two are not compared.
        recounted: whether its version may have been the number of other weights before, because the
            trainer that counts came back from a checkpoint. Whoever sets it sees to it that rows
            of both do not meet.
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
        """Names (those of the Hugging Face model) and values, each once.

        Raises:
            WeightUpdateError: they cannot be had, or not in time.
        """


class TensorSource(WeightSource):
    """Weights in hand: for one process, or small enough to be sent with the message.

    Without a digest the receiver's stands for both: in one process there is nothing between the
    two. When it is pickled for another process, it takes the digest with it.

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
    """Only the weights that changed since a version that the receiver must hold.

    Args:
        weights: name to tensor, those that changed.
        base: digest of all weights that they are a change of.
        result: digest of all weights after it.

    Attributes:
        base: as given.
        result: as given.
    """

    def __init__(self, weights: Mapping[str, Tensor], *, base: str, result: str) -> None:
        super().__init__(weights, kind="delta")
        self.base, self.result = base, result


class AdapterSource(TensorSource):
    """A LoRA adapter, by the names and the configuration with which PEFT saves one.

    Args:
        weights: ``base_model.model.<module>.lora_A.weight`` and so on to tensor.
        config: what ``adapter_config.json`` holds.

    Attributes:
        config: as given.
    """

    def __init__(self, weights: Mapping[str, Tensor], *, config: Mapping[str, Any]) -> None:
        super().__init__(weights, kind="adapter")
        self.config = dict(config)


# The digests of what each receiving module was given last, weight by weight. A module that trains,
# or gets weights past these functions, must not be sent deltas.
_held: WeakKeyDictionary[nn.Module, dict[str, int]] = WeakKeyDictionary()


class _Given(NamedTuple):
    """What a receiver got under its last version, which has one value."""

    version: int
    parts: dict[str, int]
    counter: str | None


_given: WeakKeyDictionary[Any, _Given] = WeakKeyDictionary()


class Incoming(WeightSource):
    """Weights that are here and were compared with what was sent, and are not yet in the model.

    Args:
        source: where they came from.
        version: their number.
        weights: name to tensor.
        started: when the source was opened.
        digest: of the weights; ``None`` where they are hashed when they are copied, or not at all.

    Attributes:
        source: as given.
        version: as given.
        weights: as given.
        seconds: from opening the source to the arrival.
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
        """Of the arrival; :meth:`accepted` gives that of the load."""
        digest = self._counted.value if self.hashed else f"{UNHASHED}{self.version}"
        size = sum(tensor.numel() * tensor.element_size() for tensor in self.weights.values())
        return WeightReceipt(self.version, digest, len(self.weights), size, self.seconds)

    @property
    def order(self) -> dict[str, Any]:
        """What a remote worker has to know besides the weights, as JSON has it."""
        order = {"version": self.version, "kind": self.kind, "digest": self.receipt.digest}
        order |= {"counter": self.counter, "recounted": self.recounted}
        if isinstance(self.source, DeltaSource):
            order |= {"base": self.source.base, "result": self.source.result}
        return order

    def copy_into(self, targets: Mapping[str, Tensor], *, required: Iterable[str] = ()) -> None:
        """Copy the weights to where they belong, and hash them on the way if nobody has.

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
        """Refuse other weights under the version that a receiver has; the same ones may come again.

        Args:
            holder: what shall get them.

        Raises:
            WeightUpdateError: it has other weights under this number.
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
            # All weights name some that the changes before them left out.
            if given.parts.get(name, digest if whole else None) != digest
        ]
        if other:
            raise WeightUpdateError(
                f"this sampler holds version {given.version} already, and {len(other)} weights "
                f"came with other values under the same number: {sorted(other)[:3]}. Tokens name "
                f"their weights by it: number these {given.version + 1} or higher"
            )

    def check_base(self, holder: nn.Module) -> None:
        """Refuse a version that has other weights, and a delta of others than a module was given.

        Args:
            holder: the module that shall get them.

        Raises:
            WeightUpdateError: it holds others, or nobody knows what it holds.
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
        """Remember what the version is; part of :meth:`accepted`."""
        before = _given.get(holder)
        if self.kind == "full" or before is None:
            parts = self._parts
        else:
            parts = {**before.parts, **self._parts}
        _given[holder] = _Given(self.version, parts, self.counter)

    def accepted(self, holder: nn.Module) -> WeightReceipt:
        """Remember what a module holds now, and say so; call it after the last copy.

        Args:
            holder: the module that got them.
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
            # Nobody said of what it is a change, so nobody can build upon it.
            _held.pop(holder, None)
        seconds = time.perf_counter() - self._started
        return receipt._replace(digest=digest, seconds=seconds)


def open_source(source: WeightSource, *, version: int) -> Incoming:
    """Take everything that a source gives and compare it with the digest of what was sent.

    Args:
        source: where the weights are; what has arrived already is returned as it is.
        version: their number, for the receipt.

    Raises:
        WeightUpdateError: other bytes arrived than were sent.
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
        module: has every weight that the source names; with ``kind="full"`` the source names all of
            its parameters, a tied one by any of its names; with ``kind="adapter"`` it is a PEFT
            model, and the active adapter is meant.
        source: where the weights are.
        version: their number, for the receipt.

    Raises:
        WeightUpdateError: a name or shape that the module does not have, a weight that is missing,
            other bytes than were sent, or the changes of other weights than those it holds.

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
    """Copy weights to where they belong, after all names and shapes were found right.

    Args:
        weights: name to value; what lies in its target's memory already is not copied.
        targets: name to the sampler's memory.
        required: targets that must get a value, by this name or another of the same memory.

    Raises:
        WeightUpdateError: for a name or shape that the sampler does not have, or a weight that is
            missing; nothing was copied then.
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
    """Weights of an adapter by the names that they have in a PEFT model."""
    active = getattr(module, "active_adapter", None)
    if not isinstance(active, str):
        raise WeightUpdateError(
            "an adapter was sent, and this sampler is no PEFT model with one active adapter: wrap "
            "it with peft.get_peft_model, or send merged weights (EngineWeights or DeltaWeights)"
        )
    named: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        # What PEFT saves as lora_A.weight is lora_A.<adapter's name>.weight in the model.
        module_name, _, leaf = name.rpartition(".")
        inside = f"{module_name}.{active}.{leaf}"
        named[inside if inside in own else f"{name}.{active}"] = tensor
    missing = [name for name in own if f".{active}" in name and name not in named]
    if missing:
        raise WeightUpdateError(
            f"{len(missing)} weights of the sampler's adapter were not sent: {missing[:3]}"
        )
    return named
