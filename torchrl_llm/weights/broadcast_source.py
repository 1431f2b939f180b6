"""Broadcast as its receivers see it: a source that joins the sender's group when it is opened.

Both ends work out from names and shapes alone how weights lie in a few flat buffers: one collective
for each of hundreds of tensors costs ten times one collective for all of them. Buffers hold one
dtype and a bounded number of bytes, so a big model never needs its size once more for sending.

Next: :mod:`torchrl_llm.weights.broadcast` for the sender and for how the two work together.
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchrl_llm.errors import ConfigError, TorchRLLLMError, WeightUpdateError, WorkerError
from torchrl_llm.modules.backends.backend_port import Backend
from torchrl_llm.weights.process_group import (
    WeightGroup,
    bounded,
    collective_device,
    join_group,
    open_store,
)
from torchrl_llm.weights.weight_receiver import WeightReceiver
from torchrl_llm.weights.weight_source import WeightSource

Metadata = Mapping[str, tuple[torch.dtype, torch.Size]]
"""Name to dtype and shape."""


class Piece(NamedTuple):
    """One tensor in a buffer.

    Attributes:
        name: of the weight.
        shape: of the weight.
        offset: of its first element.
        numel: number of its elements.
    """

    name: str
    shape: torch.Size
    offset: int
    numel: int


class Bucket(NamedTuple):
    """One buffer.

    Attributes:
        dtype: of all its elements.
        numel: number of its elements.
        pieces: what lies in it, without gaps.
    """

    dtype: torch.dtype
    numel: int
    pieces: tuple[Piece, ...]


def plan_buckets(metadata: Metadata, bucket_bytes: int, bucket_tensors: int = 0) -> list[Bucket]:
    """Which tensors share a buffer; the same on every machine.

    Args:
        metadata: of all tensors, in any order.
        bucket_bytes: most bytes a buffer; a tensor that is larger has one of its own.
        bucket_tensors: most tensors a buffer; 0 for any number.

    Returns:
        Buffers, by dtype and then by name.

    Example:
        >>> shape = torch.Size([2])
        >>> kinds = {"b": (torch.float32, shape), "a": (torch.float32, shape)}
        >>> [[piece.name for piece in bucket.pieces] for bucket in plan_buckets(kinds, 1024)]
        [['a', 'b']]
        >>> [[piece.name for piece in bucket.pieces] for bucket in plan_buckets(kinds, 8)]
        [['a'], ['b']]
    """
    if bucket_bytes < 1:
        raise ConfigError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    if bucket_tensors < 0:
        raise ConfigError(f"bucket_tensors must be at least 0, got {bucket_tensors}")
    buckets: list[Bucket] = []
    open_dtype: torch.dtype | None = None
    pieces: list[Piece] = []
    numel = 0

    def close() -> None:
        if pieces:
            buckets.append(Bucket(open_dtype, numel, tuple(pieces)))

    for name, (dtype, shape) in sorted(metadata.items(), key=lambda x: (str(x[1][0]), x[0])):
        size = shape.numel()
        full = (numel + size) * dtype.itemsize > bucket_bytes or len(pieces) == bucket_tensors > 0
        if dtype != open_dtype or full:
            close()
            open_dtype, pieces, numel = dtype, [], 0
        pieces.append(Piece(name, shape, numel, size))
        numel += size
    close()
    return buckets


def flatten(bucket: Bucket, weights: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """The buffer with the values of its tensors, ``[numel]``; a lone tensor is not copied."""
    parts = [weights[piece.name].reshape(-1) for piece in bucket.pieces]
    if len(parts) == 1:
        return parts[0].to(device).contiguous()
    buffer = torch.empty(bucket.numel, dtype=bucket.dtype, device=device)
    for piece, part in zip(bucket.pieces, parts, strict=True):
        buffer[piece.offset : piece.offset + piece.numel].copy_(part)
    return buffer


def split(bucket: Bucket, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Names and views of the tensors in a buffer."""
    for piece in bucket.pieces:
        values = buffer[piece.offset : piece.offset + piece.numel]
        yield piece.name, values.view(piece.shape)


def metadata_to_json(metadata: Metadata) -> tuple[str, str]:
    """Metadata as text, and a short name for it by which its readers may keep it."""
    rows = [
        [name, str(dtype).removeprefix("torch."), list(shape)]
        for name, (dtype, shape) in sorted(metadata.items())
    ]
    text = json.dumps(rows)
    return text, hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def metadata_from_json(text: str) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """What :func:`metadata_to_json` wrote."""
    return {
        name: (getattr(torch, dtype), torch.Size(shape)) for name, dtype, shape in json.loads(text)
    }


Kind = Literal["full", "delta"]

GO = "go"
"""What the sender's store holds for a group whose members are all there."""


class Announcement(NamedTuple):
    """What the sender says of one update before it begins.

    Attributes:
        sequence: 1, 2, 3, ... of this sender.
        version: of the weights.
        kind: see :class:`~torchrl_llm.weights.weight_source.WeightSource`.
        group: name of the group that it goes through.
        num_receivers: members of the group without the sender.
        layout: name of the metadata of what is sent.
        bucket_bytes: see :func:`~torchrl_llm.weights.broadcast_source.plan_buckets`.
        bucket_tensors: see there.
        device: ``"cpu"`` for gloo, ``"cuda"`` for NCCL.
    """

    sequence: int
    version: int
    kind: Kind
    group: str
    num_receivers: int
    layout: str
    bucket_bytes: int
    bucket_tensors: int
    device: str


class Deadline:
    """The moment at which an update has taken too long.

    Args:
        timeout_s: seconds from now.

    Attributes:
        timeout_s: as given.
    """

    def __init__(self, timeout_s: float) -> None:
        self._at = time.monotonic() + timeout_s
        self.timeout_s = timeout_s

    @property
    def left_s(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self._at - time.monotonic())


class _Member:
    """One process's connection to a sender and its place in the sender's group."""

    def __init__(self, address: str, port: int, timeout_s: float) -> None:
        self._address = address
        self.store = open_store(address, port, host=False, timeout_s=timeout_s)
        self._group: WeightGroup | None = None
        self._group_name = ""
        self._layouts: dict[str, Metadata] = {}
        bounded(lambda: self.store.add("hello", 1), timeout_s=timeout_s, what="the sender's store")

    def read(self, key: str, deadline: Deadline) -> str:
        """The value of a key, as soon as there is one."""

        def wait() -> str:
            self.store.wait([key], timedelta(seconds=max(deadline.left_s, 0.001)))
            return self.store.get(key).decode()

        return bounded(wait, timeout_s=deadline.left_s + 0.5, what=f"{key} in the sender's store")

    def group(self, update: Announcement, deadline: Deadline) -> WeightGroup:
        """This process's place in the update's group, taken where it has none."""
        if self._group is None or self._group_name != update.group:
            self.leave()
            name, size = update.group, update.num_receivers + 1
            rank = bounded(
                lambda: self.store.add(f"members/{name}", 1),
                timeout_s=deadline.left_s,
                what="the sender's store",
            )
            if rank >= size:
                raise WorkerError(
                    f"update {update.sequence} goes to {update.num_receivers} receivers, and as "
                    "many have joined; this one waits for the next"
                )
            # Forming a group cannot be broken off, so nobody begins before all are there.
            if self.read(f"go/{name}", deadline) != GO:
                raise WorkerError("the sender gave the update up, for not all receivers came")
            self._group = join_group(
                self.store,
                name,
                rank=rank,
                world_size=size,
                device=collective_device("cpu" if update.device == "cpu" else None),
                address=self._address,
                timeout_s=deadline.left_s,
            )
            self._group_name = name
        return self._group

    def layout(self, name: str, deadline: Deadline) -> Metadata:
        """Names, dtypes and shapes, fetched once."""
        if name not in self._layouts:
            self._layouts[name] = metadata_from_json(self.read(f"layout/{name}", deadline))
        return self._layouts[name]

    def leave(self) -> None:
        """Give the place in the group up."""
        if self._group is not None:
            self._group.close()
        self._group = None


# Places in groups that this process holds and that no receiver uses at the moment. A process may
# hold several, one for each backend in it.
_idle: defaultdict[tuple[str, int, str], list[_Member]] = defaultdict(list)
_idle_lock = threading.Lock()


class BroadcastSource(WeightSource):
    """An update that is being broadcast; opening it joins its group.

    Args:
        address: of the sender's store.
        port: of the sender's store.
        sender: tells this sender from another one at the same address.
        update: which update.
        timeout_s: most seconds from opening it to the last byte.
    """

    reusable = False

    def __init__(
        self, address: str, port: int, sender: str, update: Announcement, *, timeout_s: float
    ) -> None:
        self._where = (address, port, sender)
        self._update, self._timeout_s = update, timeout_s
        self.kind, self.counter = update.kind, sender
        self.digest = None

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`WeightSource.receive`; the digest is known at the end."""
        deadline = Deadline(self._timeout_s)
        member: _Member | None = None
        whole = False
        try:
            member = self._member()
            yield from self._receive(member, deadline)
            self.digest = member.read(f"digest/{self._update.sequence}", deadline)
            if not self.digest:
                raise WorkerError("the sender gave the update up half-way")
            whole = True
        except WorkerError as error:
            raise WeightUpdateError(
                f"version {self._update.version} of the weights did not arrive: {error}"
            ) from None
        finally:
            if whole:
                with _idle_lock:
                    _idle[self._where].append(member)
            elif member is not None:
                # Half of an update lies in this place's pipes: nobody may use it again.
                member.leave()

    def _member(self) -> _Member:
        address, port, sender = self._where
        with _idle_lock:
            if _idle[self._where]:
                return _idle[self._where].pop()
            # Where another sender listens now, the one before it is gone.
            gone = [at for at in _idle if at[:2] == (address, port) and at[2] != sender]
            left = [member for at in gone for member in _idle.pop(at)]
        for member in left:
            member.leave()
        return _Member(address, port, self._timeout_s)

    def _receive(self, member: _Member, deadline: Deadline) -> Iterator[tuple[str, Tensor]]:
        update = self._update
        metadata = member.layout(update.layout, deadline)
        group = member.group(update, deadline)
        for bucket in plan_buckets(metadata, update.bucket_bytes, update.bucket_tensors):
            buffer = torch.empty(bucket.numel, dtype=bucket.dtype, device=group.device)
            group.broadcast(buffer, timeout_s=deadline.left_s)
            yield from split(bucket, buffer)


_WAIT_S = 1.0
_RECONNECT_S = 0.2


class BroadcastReceiver(WeightReceiver):
    """Takes part in the broadcasts of whatever sender is at an address.

    When the sender dies, the weights and their version stay, and the backend serves on; a new
    sender at the address is found by the next :meth:`poll_and_apply`.

    Args:
        backend: gets the weights.
        address: of the sender's store.
        port: of the sender's store.
        timeout_s: most seconds that one update may take.
    """

    def __init__(
        self, backend: Backend, *, address: str = "127.0.0.1", port: int, timeout_s: float = 120.0
    ) -> None:
        super().__init__(backend)
        self._address, self._port, self._timeout_s = address, port, timeout_s
        self._store: dist.Store | None = None
        self._sender = ""
        self._next = 1

    def poll_and_apply(self, timeout: float = 180.0) -> bool:
        """See :meth:`WeightReceiver.poll_and_apply`."""
        deadline = time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                update = self._find_update(left)
            except WorkerError:
                # No sender, or one that is dying: there may be another before the time is up.
                self._store, update = None, None
                time.sleep(min(_RECONNECT_S, left))
            if update is not None:
                self._take(update)
                return True
            if time.monotonic() >= deadline:
                return False

    def _find_update(self, timeout_s: float) -> Announcement | None:
        wait_s = min(timeout_s, _WAIT_S)
        if self._store is None:
            self._connect(max(wait_s, 1.0))
        look = functools.partial(_look, self._store, self._next, wait_s)
        self._next, text = bounded(look, timeout_s=wait_s + 5, what="the sender's store")
        if text is None:
            return None
        self._next += 1
        return Announcement(*json.loads(text))

    def _connect(self, limit: float) -> None:
        store = open_store(self._address, self._port, host=False, timeout_s=limit)
        sender = bounded(lambda: store.get("sender").decode(), timeout_s=limit, what="the sender")
        if sender != self._sender:
            # Of a sender that is new to us the last update counts, if it still waits for somebody.
            self._next = bounded(lambda: _first_open(store), timeout_s=limit, what="the sender")
        self._store, self._sender = store, sender

    def _take(self, update: Announcement) -> None:
        source = BroadcastSource(
            self._address, self._port, self._sender, update, timeout_s=self._timeout_s
        )
        try:
            receipts = self.apply_weights(source, version=update.version)
        except TorchRLLLMError as error:
            self._answer(update, {"error": str(error)})
            raise
        self._answer(update, {"receipts": receipts})

    def _answer(self, update: Announcement, answer: dict[str, Any]) -> None:
        store = self._store

        def send() -> None:
            if "error" in answer:
                store.add(f"refusals/{update.sequence}", 1)
            # The answer first, then the count: whoever counts may read.
            number = store.add(f"numbers/{update.sequence}", 1)
            store.set(f"answers/{update.sequence}/{number}", json.dumps(answer))
            store.add(f"answers/{update.sequence}", 1)

        try:
            bounded(send, timeout_s=self._timeout_s, what="the sender's store")
        except WorkerError:
            # The sender is gone; what was loaded stays loaded.
            self._store = None


def _first_open(store: dist.Store) -> int:
    """The update that is under way, or the next one."""
    if not store.check(["sequence"]):
        return 1
    last = int(store.get("sequence"))
    return last + 1 if store.check([f"done/{last}"]) else last


def _look(store: dist.Store, wanted: int, wait_s: float) -> tuple[int, str | None]:
    """The number to look for, and its announcement when there is one."""
    # Updates that went by without this receiver are gone.
    wanted = max(wanted, _first_open(store))
    key = f"update/{wanted}"
    try:
        store.wait([key], timedelta(seconds=max(wait_s, 0.001)))
    except dist.DistStoreError:  # nothing came in this time
        return wanted, None
    return wanted, store.get(key).decode()
