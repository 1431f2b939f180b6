"""A broadcast as its receivers see it: a source that joins the sender's group when it is opened.

Next: :mod:`torchrl_llm.weights.broadcast` for the sender and for how the two work together.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchrl_llm.errors import WeightUpdateError, WorkerError
from torchrl_llm.weights.buckets import (
    Metadata,
    metadata_from_json,
    plan_buckets,
    split,
)
from torchrl_llm.weights.process_group import (
    WeightGroup,
    bounded,
    collective_device,
    join_group,
    open_store,
)
from torchrl_llm.weights.weight_source import WeightSource

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
        num_receivers: members of the group beside the sender.
        layout: name of the metadata of what is sent.
        bucket_bytes: see :func:`~torchrl_llm.weights.buckets.plan_buckets`.
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
