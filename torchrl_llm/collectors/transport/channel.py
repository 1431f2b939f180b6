"""Rows from many collecting processes to one that trains, with nothing lost unnoticed.

A :class:`RowChannel` has two ends. Workers ``claim`` the right to collect, ``report`` what they
have sampled, and ``put`` deliveries; the learner grants rows with ``grant``, takes deliveries with
``get``, and says which version of the weights it is at. From the counts on both ends follows what
every sampled token became, also those of a worker that was killed: sampled but never delivered is
lost.

Implementations: :class:`LocalChannel` for threads of one process, one over a Ray actor, one over
Redis.
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
    """The learner wants no further rows; a worker ends."""


def closed_error() -> ChannelClosedError:
    """What a worker gets to know that calls a closed channel."""
    return ChannelClosedError("the channel was closed; no further rows are wanted")


def forgotten_error(worker: str) -> WorkerError:
    """What a worker gets to know that was given up.

    Args:
        worker: its name.
    """
    return WorkerError(
        f"worker {worker!r} was taken for dead and forgotten; its claims went to others. Start it "
        "again under another name"
    )


@dataclass(frozen=True)
class Delivery:
    """Rows of one worker, and what the learner must know about them.

    Args:
        rows: in wire form; a row a turn.
        worker: name of the worker, unique over restarts.
        sequence: 0, 1, 2, ... of this worker; a gap is a loss.
        claimed: rows that were claimed for this delivery, which these rows use up.
        generated: tokens that the worker has sampled since it started, these rows included.
        sent: how many of those tokens it has delivered, these rows included; ``None`` where it does
            not count them.
        digests: version of the weights to their digest, for the versions that sampled these rows.
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
    """What is known of one worker.

    Attributes:
        claimed: rows that it may collect and has not delivered.
        generated: tokens that it says it has sampled.
        delivered: deliveries of it that were put.
        sent: sampled tokens of these, as far as it counts them.
        seen_s: ``time.time()`` of its last heartbeat; every call of it is one.
    """

    claimed: int = 0
    generated: int = 0
    delivered: int = 0
    sent: int = 0
    seen_s: float = 0.0

    @property
    def in_flight(self) -> int:
        """Tokens that it has sampled and not delivered; lost if it dies now."""
        return max(self.generated - self.sent, 0)


class RowChannel(ABC):
    """Bounded, many writers, one reader; every call returns or raises within its limit of time.

    What is known lies in one place, in the form of a :class:`ChannelState`; a subclass says where
    that is and how to call it. Handles may be copied to threads and, but for :class:`LocalChannel`,
    pickled to processes. The conformance tests are ``test/conformance/channels.py``.
    """

    @abstractmethod
    def _do(self, method: str, *args: Any) -> Any:
        """What a method of the state returns."""

    @abstractmethod
    def _wait(self, method: str, *args: Any, timeout_s: float) -> Any:
        """What a method of the state returns, tried again until that is true or time is over."""

    # -- the workers' end ---------------------------------------------------------------------

    def put(self, delivery: Delivery, *, timeout_s: float) -> None:
        """Hand rows over; waits while the channel is full.

        A delivery whose sequence number was taken before is not taken twice, so a worker that is in
        doubt (an answer that was lost) may put it again.

        Raises:
            queue.Full: nobody made room in time. The delivery was not taken; try again.
            ChannelClosedError: it is closed.
            WorkerError: the channel is gone, or this worker was forgotten.
        """
        if not self._wait("try_put", delivery, timeout_s=timeout_s):
            raise queue.Full

    def claim(self, worker: str, num_rows: int, *, timeout_s: float) -> bool:
        """Ask for the right to collect rows.

        Args:
            worker: who asks.
            num_rows: all of them or none.
            timeout_s: how long to wait for the learner to grant more.

        Returns:
            Whether they were granted.

        Raises:
            ChannelClosedError: it is closed.
            WorkerError: the channel is gone, or this worker was forgotten.
        """
        return self._wait("try_claim", worker, num_rows, timeout_s=timeout_s)

    def report(self, worker: str, *, generated: int) -> None:
        """Say how many tokens were sampled since the worker started; also a heartbeat.

        Raises:
            ChannelClosedError: it is closed.
            WorkerError: the channel is gone, or this worker was forgotten.
        """
        self._do("report", worker, generated)

    def version(self) -> int:
        """The version of the learner's weights."""
        return self._do("version")

    # -- the learner's end --------------------------------------------------------------------

    def get(self, *, timeout_s: float) -> Delivery:
        """The next delivery, those of one worker in the order of their sequence.

        Raises:
            queue.Empty: none came in time.
            WorkerError: the channel is gone.
        """
        delivery = self._wait("try_get", timeout_s=timeout_s)
        if delivery is None:
            raise queue.Empty
        return delivery

    def grant(self, num_rows: int) -> None:
        """Allow workers to claim so many more rows.

        Args:
            num_rows: negative takes back what nobody claimed, as far as there is any.
        """
        self._do("grant", num_rows)

    def set_version(self, version: int) -> None:
        """Say which version of the weights the learner is at."""
        self._do("set_version", version)

    def workers(self) -> dict[str, WorkerCounts]:
        """What is known of every worker that called and was not forgotten; copies."""
        return self._do("workers")

    def forget(self, worker: str) -> WorkerCounts:
        """Take a dead worker's claims back for others, and return its last counts.

        What it has put may still be got; what it sampled and did not put is lost. Should it be
        alive after all, its further calls are refused: others may have its claims by now.
        """
        return self._do("forget", worker)

    def forgotten(self) -> dict[str, WorkerCounts]:
        """Last counts of the workers that were forgotten; what they had in flight is lost."""
        return self._do("forgotten")

    def __len__(self) -> int:
        """Deliveries that wait to be got."""
        return self._do("size")

    def close(self) -> None:
        """Refuse further calls of workers, those that wait now included; what waits may be got."""
        self._do("close")


class ChannelState:
    """The book-keeping of a channel, without any waiting: every call returns at once.

    Not thread-safe. Channels whose state lives in one process of Python wrap it.

    Args:
        max_size: deliveries that may wait.

    Raises:
        ConfigError: for a size below 1.
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
        """Whether there was room; see :meth:`RowChannel.put`."""
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
        """The next delivery, ``None`` where none waits; see :meth:`RowChannel.get`."""
        return self.waiting.popleft() if self.waiting else None

    def try_claim(self, worker: str, num_rows: int) -> bool:
        """Whether they were granted; see :meth:`RowChannel.claim`."""
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
"""Calls of a :class:`ChannelState` that may end a wait of others."""


class LocalChannel(RowChannel):
    """A channel between threads of one process.

    Args:
        max_size: deliveries that may wait.

    Raises:
        ConfigError: for a size below 1.

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
    """Tokens received and lost.

    A learner that goes on from a checkpoint counts as lost what was delivered to the one before it
    since then: nothing that it trains with has seen those tokens.

    Attributes:
        received: tokens of all deliveries that came and were not refused.
        lost: tokens that will never come, or were refused.
        settled: worker to its tokens that were received or lost.
        gone: workers that were forgotten, and whose loss was counted.
        taken: losses that :meth:`take_lost` has handed out.

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
        """Count a delivery, and what was sent before it and never came.

        Args:
            delivery: as it came. Where ``sent`` is ``None`` no gap is seen.
            num_tokens: sampled tokens of its rows.
        """
        settled = self.settled.get(delivery.worker, 0)
        sent = settled + num_tokens if delivery.sent is None else delivery.sent
        self.lost += max(sent - num_tokens - settled, 0)
        self.settled[delivery.worker] = max(sent, settled)
        self.received += num_tokens

    def refuse(self, num_tokens: int) -> None:
        """Count tokens as lost that :meth:`receive` has counted as received."""
        self.received -= num_tokens
        self.lost += num_tokens

    def forget(self, forgotten: Mapping[str, WorkerCounts]) -> None:
        """Count what dead workers had sampled and not put, once for each.

        Args:
            forgotten: of :meth:`~torchrl_llm.collectors.transport.RowChannel.forgotten`.
        """
        for name, counts in forgotten.items():
            if name not in self.gone:
                self.gone.append(name)
                self.lost += counts.in_flight

    def take_lost(self) -> int:
        """Tokens lost since the last call, for the ledger of a step."""
        new, self.taken = self.lost - self.taken, self.lost
        return new
