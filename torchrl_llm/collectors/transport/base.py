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
from collections.abc import Mapping
from dataclasses import dataclass, field

from torchrl_llm.data.wire import PackedRows

__all__ = ["Delivery", "LocalChannel", "RowChannel", "WorkerCounts"]


@dataclass(frozen=True)
class Delivery:
    """Rows of one worker, and what the learner must know about them.

    Args:
        rows: in wire form; a row a turn.
        worker: name of the worker, unique over restarts.
        sequence: 0, 1, 2, ... of this worker; a gap is a loss.
        claimed: rows that were claimed for this delivery, which these rows use up.
        generated: tokens that the worker has sampled since it started, these rows included.
        digests: version of the weights to their digest, for the versions that sampled these rows.
    """

    rows: PackedRows
    worker: str
    sequence: int
    claimed: int = 0
    generated: int = 0
    digests: Mapping[int, str] = field(default_factory=dict)


@dataclass
class WorkerCounts:
    """What is known of one worker.

    Attributes:
        claimed: rows that it may collect and has not delivered.
        generated: tokens that it says it has sampled.
        delivered: deliveries of it that were put.
        seen_s: ``time.time()`` of its last sign of life.
    """

    claimed: int = 0
    generated: int = 0
    delivered: int = 0
    seen_s: float = 0.0


class RowChannel(ABC):
    """Bounded, many writers, one reader; every call returns or raises within its limit of time."""

    # -- the workers' end ---------------------------------------------------------------------

    @abstractmethod
    def put(self, delivery: Delivery, *, timeout_s: float) -> None:
        """Hand rows over; waits while the channel is full.

        Raises:
            queue.Full: nobody made room in time. The delivery was not taken; try again.
            WorkerError: the channel is gone.
        """

    @abstractmethod
    def claim(self, worker: str, num_rows: int, *, timeout_s: float) -> bool:
        """Ask for the right to collect rows.

        Args:
            worker: who asks.
            num_rows: all of them or none.
            timeout_s: how long to wait for the learner to grant more.

        Returns:
            Whether they were granted.
        """

    @abstractmethod
    def report(self, worker: str, *, generated: int) -> None:
        """Say how many tokens were sampled since the worker started; also a sign of life."""

    @abstractmethod
    def version(self) -> int:
        """The version of the learner's weights."""

    # -- the learner's end --------------------------------------------------------------------

    @abstractmethod
    def get(self, *, timeout_s: float) -> Delivery:
        """The next delivery.

        Raises:
            queue.Empty: none came in time.
            WorkerError: the channel is gone.
        """

    @abstractmethod
    def grant(self, num_rows: int) -> None:
        """Allow workers to claim so many more rows; negative takes back what nobody claimed."""

    @abstractmethod
    def set_version(self, version: int) -> None:
        """Say which version of the weights the learner is at."""

    @abstractmethod
    def workers(self) -> dict[str, WorkerCounts]:
        """What is known of every worker that ever called."""

    @abstractmethod
    def forget(self, worker: str) -> WorkerCounts:
        """Take a dead worker's claims back for others, and return its last counts."""

    @abstractmethod
    def __len__(self) -> int:
        """Deliveries that wait to be got."""

    @abstractmethod
    def close(self) -> None:
        """Refuse further calls of workers; what waits may still be got."""


class LocalChannel(RowChannel):
    """A channel between threads of one process.

    Args:
        max_size: deliveries that may wait.

    Example:
        >>> channel = LocalChannel(max_size=2)
        >>> channel.grant(8)
        >>> channel.claim("a", 8, timeout_s=0), channel.claim("b", 8, timeout_s=0)
        (True, False)
    """

    def __init__(self, max_size: int = 8) -> None:
        self._queue: queue.Queue[Delivery] = queue.Queue(max_size)
        self._changed = threading.Condition()
        self._granted = 0
        self._version = 0
        self._workers: dict[str, WorkerCounts] = {}
        self._closed = False

    def _counts(self, worker: str) -> WorkerCounts:
        counts = self._workers.setdefault(worker, WorkerCounts())
        counts.seen_s = time.time()
        return counts

    def put(self, delivery: Delivery, *, timeout_s: float) -> None:
        """See :meth:`RowChannel.put`."""
        if self._closed:
            raise queue.Full
        self._queue.put(delivery, timeout=timeout_s)
        with self._changed:
            counts = self._counts(delivery.worker)
            counts.claimed -= delivery.claimed
            counts.delivered += 1
            counts.generated = max(counts.generated, delivery.generated)

    def claim(self, worker: str, num_rows: int, *, timeout_s: float) -> bool:
        """See :meth:`RowChannel.claim`."""
        with self._changed:
            granted = self._changed.wait_for(
                lambda: self._closed or self._granted >= num_rows, timeout_s
            )
            if not granted or self._closed:
                return False
            self._granted -= num_rows
            self._counts(worker).claimed += num_rows
            return True

    def report(self, worker: str, *, generated: int) -> None:
        """See :meth:`RowChannel.report`."""
        with self._changed:
            counts = self._counts(worker)
            counts.generated = max(counts.generated, generated)

    def version(self) -> int:
        """See :meth:`RowChannel.version`."""
        return self._version

    def get(self, *, timeout_s: float) -> Delivery:
        """See :meth:`RowChannel.get`."""
        return self._queue.get(timeout=timeout_s)

    def grant(self, num_rows: int) -> None:
        """See :meth:`RowChannel.grant`."""
        with self._changed:
            self._granted += num_rows
            self._changed.notify_all()

    def set_version(self, version: int) -> None:
        """See :meth:`RowChannel.set_version`."""
        self._version = version

    def workers(self) -> dict[str, WorkerCounts]:
        """See :meth:`RowChannel.workers`."""
        with self._changed:
            return dict(self._workers)

    def forget(self, worker: str) -> WorkerCounts:
        """See :meth:`RowChannel.forget`."""
        with self._changed:
            counts = self._workers.pop(worker, WorkerCounts())
            self._granted += counts.claimed
            self._changed.notify_all()
            return counts

    def __len__(self) -> int:
        return self._queue.qsize()

    def close(self) -> None:
        """See :meth:`RowChannel.close`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
