"""Channel from many collecting processes to one trainer, with accounting of all tokens.

A :class:`RowChannel` has two ends. Workers ``claim`` the right to collect, ``report`` the number of
sampled tokens, and ``put`` deliveries. The learner grants rows with ``grant``, takes deliveries
with ``get``, and announces its version of the weights. The counts of both ends include every
sampled token, even those of a killed worker: tokens that were sampled but never delivered are lost.

The implementations are :class:`LocalChannel` for threads of one process, a channel over a Ray
actor, and a channel over Redis.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

from torchrl_llm._checked import Ge, checked
from torchrl_llm.data.saved_state import SavedState
from torchrl_llm.data.wire import PackedRows
from torchrl_llm.errors import WorkerError


class ChannelClosedError(WorkerError):
    """The learner needs no further rows, so the worker must end."""


def closed_error() -> ChannelClosedError:
    """Return the error for a worker that calls a closed channel."""
    return ChannelClosedError("the channel was closed; no further rows are wanted")


def forgotten_error(worker: str) -> WorkerError:
    """Return the error for a worker that was dropped.

    Args:
        worker: name of the worker.
    """
    return WorkerError(
        f"worker {worker!r} was taken for dead and forgotten; its claims went to others. Start it "
        "again under another name"
    )


@dataclass(frozen=True)
class Delivery:
    """Rows of one worker, with their accounting.

    Args:
        rows: packed rows, one per turn.
        worker: name of the worker, different after each restart.
        sequence: number 0, 1, 2, ... of this worker's delivery; a gap means a lost delivery.
        claimed: number of claimed rows that this delivery uses.
        generated: number of tokens that the worker has sampled since its start, including these
            rows.
        sent: number of tokens that the worker has delivered, including these rows; ``None`` if not
            counted.
        digests: digests of the weights that sampled these rows, by version.
    """

    rows: PackedRows
    worker: str
    sequence: int
    claimed: int = 0
    generated: int = 0
    sent: int | None = None
    digests: Mapping[int, str] = field(default_factory=dict)


@dataclass
class WorkerCounts:
    """Counts of one worker.

    Attributes:
        claimed: number of rows claimed but not delivered.
        generated: number of tokens that the worker reported as sampled.
        delivered: number of the worker's deliveries.
        sent: number of sampled tokens in these deliveries, if counted.
        seen_s: ``time.time()`` of its last heartbeat; every call is a heartbeat.
    """

    claimed: int = 0
    generated: int = 0
    delivered: int = 0
    sent: int = 0
    seen_s: float = 0.0

    @property
    def in_flight(self) -> int:
        """Number of tokens sampled but not delivered; they are lost if the worker dies now."""
        return max(self.generated - self.sent, 0)


class RowChannel(ABC):
    """Bounded channel with many writers and one reader; every call has a time limit.

    The state is a single :class:`ChannelState`; a subclass defines its location and how to call it.
    Handles may be copied to threads and (except for :class:`LocalChannel`) pickled to processes.
    The conformance tests are ``test/conformance/channels.py``.
    """

    @abstractmethod
    def _do(self, method: str, *args: Any) -> Any:
        """Call a method of the state."""

    @abstractmethod
    def _wait(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Call a method of the state repeatedly until it returns a true value or time runs out."""

    # -- the workers' end ---------------------------------------------------------------------

    def put(self, delivery: Delivery, *, timeout_s: float) -> None:
        """Deliver rows; wait while the channel is full.

        A delivery with a known sequence number is ignored. So a worker may retry if it did not
        receive the answer.

        Raises:
            queue.Full: the channel stayed full, and the delivery was not accepted. Retry.
            ChannelClosedError: the channel is closed.
            WorkerError: the channel does not answer, or this worker was dropped.
        """
        if not self._wait("try_put", delivery, timeout_s=timeout_s):
            raise queue.Full

    def claim(self, worker: str, num_rows: int, *, timeout_s: float) -> bool:
        """Request the right to collect rows.

        Args:
            worker: name of the worker.
            num_rows: number of rows; all or none are granted.
            timeout_s: most seconds to wait for the learner to grant more.

        Returns:
            Whether the rows were granted.

        Raises:
            ChannelClosedError: the channel is closed.
            WorkerError: the channel does not answer, or this worker was dropped.
        """
        return self._wait("try_claim", worker, num_rows, timeout_s=timeout_s)

    def report(self, worker: str, *, generated: int) -> None:
        """Report the number of tokens sampled since the worker's start. The call is a heartbeat.

        Raises:
            ChannelClosedError: the channel is closed.
            WorkerError: the channel does not answer, or this worker was dropped.
        """
        self._do("report", worker, generated)

    def version(self) -> int:
        """Return the version of the learner's weights."""
        return self._do("version")

    # -- the learner's end --------------------------------------------------------------------

    def get(self, *, timeout_s: float) -> Delivery:
        """Return the next delivery; deliveries of one worker arrive in order.

        Raises:
            queue.Empty: no delivery arrived in time.
            WorkerError: the channel does not answer.
        """
        delivery = self._wait("try_get", timeout_s=timeout_s)
        if delivery is None:
            raise queue.Empty
        return delivery

    def grant(self, num_rows: int) -> None:
        """Allow workers to claim more rows.

        Args:
            num_rows: number of rows; a negative number withdraws unclaimed rows, as far as
                possible.
        """
        self._do("grant", num_rows)

    def set_version(self, version: int) -> None:
        """Announce the version of the learner's weights."""
        self._do("set_version", version)

    def workers(self) -> dict[str, WorkerCounts]:
        """Return copies of the counts of all workers that called and were not dropped."""
        return self._do("workers")

    def forget(self, worker: str) -> WorkerCounts:
        """Drop a dead worker: free its claims for other workers, and return its last counts.

        Its deliveries can still be received; its undelivered tokens are lost. If the worker is
        still alive, its further calls are rejected, because other workers may have its claims.
        """
        return self._do("forget", worker)

    def forgotten(self) -> dict[str, WorkerCounts]:
        """Return the last counts of the dropped workers; their tokens in flight are lost."""
        return self._do("forgotten")

    def __len__(self) -> int:
        """Return the number of waiting deliveries."""
        return self._do("size")

    def close(self) -> None:
        """Close the channel: worker calls, even waiting ones, fail; deliveries can be received."""
        self._do("close")


class ChannelState:
    """The state of a channel; every call returns at once.

    The class is not thread-safe. Channels with their state in one Python process wrap it.

    Args:
        max_size: most waiting deliveries.

    Raises:
        ConfigError: the size is below 1.
    """

    @checked
    def __init__(self, max_size: Annotated[int, Ge(1)]) -> None:
        self.max_size = max_size
        self.waiting: deque[Delivery] = deque()
        self._version = 0
        self.closed = False
        self._granted = 0
        self._workers: dict[str, WorkerCounts] = {}
        self._forgotten: dict[str, WorkerCounts] = {}

    def _counts(self, worker: str) -> WorkerCounts:
        if self.closed:
            raise closed_error()
        if worker in self._forgotten:
            raise forgotten_error(worker)
        counts = self._workers.setdefault(worker, WorkerCounts())
        counts.seen_s = time.time()
        return counts

    def try_put(self, delivery: Delivery) -> bool:
        """Put if there is room, and return whether there was. See :meth:`RowChannel.put`."""
        counts = self._counts(delivery.worker)
        if delivery.sequence < counts.delivered:
            return True
        if len(self.waiting) >= self.max_size:
            return False
        self.waiting.append(delivery)
        counts.claimed -= delivery.claimed
        counts.delivered = delivery.sequence + 1
        counts.sent = counts.sent if delivery.sent is None else delivery.sent
        counts.generated = max(counts.generated, delivery.generated)
        return True

    def try_get(self) -> Delivery | None:
        """Return the next delivery, or ``None``; see :meth:`RowChannel.get`."""
        return self.waiting.popleft() if self.waiting else None

    def try_claim(self, worker: str, num_rows: int) -> bool:
        """Claim if possible, and return whether it was. See :meth:`RowChannel.claim`."""
        counts = self._counts(worker)
        if self._granted < num_rows:
            return False
        self._granted -= num_rows
        counts.claimed += num_rows
        return True

    def report(self, worker: str, generated: int) -> None:
        """See :meth:`RowChannel.report`."""
        counts = self._counts(worker)
        counts.generated = max(counts.generated, generated)

    def grant(self, num_rows: int) -> None:
        """See :meth:`RowChannel.grant`."""
        self._granted = max(self._granted + num_rows, 0)

    def set_version(self, version: int) -> None:
        """See :meth:`RowChannel.set_version`."""
        self._version = version

    def version(self) -> int:
        """See :meth:`RowChannel.version`."""
        return self._version

    def size(self) -> int:
        """See :meth:`RowChannel.__len__`."""
        return len(self.waiting)

    def close(self) -> None:
        """See :meth:`RowChannel.close`."""
        self.closed = True

    def workers(self) -> dict[str, WorkerCounts]:
        """See :meth:`RowChannel.workers`."""
        return {name: replace(counts) for name, counts in self._workers.items()}

    def forget(self, worker: str) -> WorkerCounts:
        """See :meth:`RowChannel.forget`."""
        if worker not in self._forgotten:
            self._forgotten[worker] = self._workers.pop(worker, WorkerCounts())
            self._granted += max(self._forgotten[worker].claimed, 0)
        return replace(self._forgotten[worker])

    def forgotten(self) -> dict[str, WorkerCounts]:
        """See :meth:`RowChannel.forgotten`."""
        return {name: replace(counts) for name, counts in self._forgotten.items()}


WAKING = frozenset({"try_put", "try_get", "grant", "forget", "close"})
"""Calls of a :class:`ChannelState` that may wake waiting callers."""


class LocalChannel(RowChannel):
    """A channel between threads of one process.

    Args:
        max_size: most waiting deliveries.

    Raises:
        ConfigError: the size is below 1.

    Example:
        >>> channel = LocalChannel(max_size=2)
        >>> channel.grant(8)
        >>> channel.claim("a", 8, timeout_s=0), channel.claim("b", 8, timeout_s=0)
        (True, False)
    """

    def __init__(self, max_size: int = 8) -> None:
        self._state = ChannelState(max_size)
        self._changed = threading.Condition()

    def _do(self, method: str, *args: Any) -> Any:
        with self._changed:
            found = getattr(self._state, method)(*args)
            if method in WAKING:
                self._changed.notify_all()
            return found

    def _wait(self, method: str, *args: Any, timeout_s: float) -> Any:
        with self._changed:
            found = self._changed.wait_for(partial(getattr(self._state, method), *args), timeout_s)
            if found and method in WAKING:
                self._changed.notify_all()
            return found


@dataclass
class TokenAccounts(SavedState):
    """Counts of received and lost tokens.

    After a resume from a checkpoint, the learner counts all tokens that were delivered after the
    checkpoint as lost, because its weights were not trained on them.

    Attributes:
        received: tokens of all accepted deliveries.
        lost: tokens that will never arrive, or were rejected.
        settled: number of received or lost tokens of each worker.
        gone: dropped workers whose loss has been counted.
        taken: losses already returned by :meth:`take_lost`.

    Example:
        >>> from torchrl_llm.data.wire import pack_rows
        >>> accounts = TokenAccounts()
        >>> accounts.receive(Delivery(pack_rows([]), "a", 0, sent=4), 4)
        >>> accounts.receive(Delivery(pack_rows([]), "a", 2, sent=12), 4)  # number 1 never came
        >>> accounts.forget({"a": WorkerCounts(generated=15, sent=12)})  # and then it died
        >>> accounts.received, accounts.lost
        (8, 7)
    """

    saved = ("received", "lost", "settled", "gone", "taken")

    received: int = 0
    lost: int = 0
    settled: dict[str, int] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    taken: int = 0

    def receive(self, delivery: Delivery, num_tokens: int) -> None:
        """Count a delivery, and tokens that were sent before it but never arrived.

        Args:
            delivery: the delivery. If ``sent`` is ``None``, gaps are not detected.
            num_tokens: number of sampled tokens of its rows.
        """
        settled = self.settled.get(delivery.worker, 0)
        sent = settled + num_tokens if delivery.sent is None else delivery.sent
        self.lost += max(sent - num_tokens - settled, 0)
        self.settled[delivery.worker] = max(sent, settled)
        self.received += num_tokens

    def refuse(self, num_tokens: int) -> None:
        """Move tokens from received to lost."""
        self.received -= num_tokens
        self.lost += num_tokens

    def forget(self, forgotten: Mapping[str, WorkerCounts]) -> None:
        """Count undelivered tokens of dead workers, once per worker.

        Args:
            forgotten: result of :meth:`~torchrl_llm.collectors.transport.RowChannel.forgotten`.
        """
        for name, counts in forgotten.items():
            if name not in self.gone:
                self.gone.append(name)
                self.lost += counts.in_flight

    def take_lost(self) -> int:
        """Return the number of tokens lost since the last call, for the ledger of a step."""
        new, self.taken = self.lost - self.taken, self.lost
        return new
