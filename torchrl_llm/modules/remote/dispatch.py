"""Sends the parts of a call to replicas; if a replica dies, its parts go to a different one.

A :class:`Dispatcher` is one process's view of a pool: the replicas, their last known loads, and the
later requests of this process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from torchrl_llm._ray import RemoteObject, get, require_ray
from torchrl_llm.errors import BackendError, ConfigError, WorkerError
from torchrl_llm.modules.remote.balancer import LoadBalancer, LoadBook, LoadSnapshot
from torchrl_llm.modules.remote.replica import VersionMismatch
from torchrl_llm.modules.remote.replica_supervisor import PoolTable
from torchrl_llm.modules.remote.revived_actor import Life

_REFRESH_S = 0.5
_PAUSE_S = 0.1


@dataclass(eq=False)
class Part:
    """Some rows of a call, for one replica.

    Attributes:
        method: name of a method of :class:`~torchrl_llm.modules.remote.replica.Replica`.
        args: its arguments.
        num_rows: number of rows.
        prompt: ids of the first prompt, for balancers that use the prompt.
        pinned: the only replica that may run it; ``None`` for any.
        tried: replicas that failed to run it.
        failures: their errors.
        result: result of a replica; ``None`` without an answer.
    """

    method: str
    args: tuple[Any, ...]
    num_rows: int
    prompt: Tensor | Sequence[int] | str | None
    pinned: int | None = None
    tried: set[int] = field(default_factory=set)
    failures: list[Exception] = field(default_factory=list)
    result: Any = None


class Dispatcher:
    """Sends parts to replicas, for any number of threads.

    Args:
        supervisor: supervisor of the pool.
        num_replicas: number of replicas of the pool.
        what: description of the pool, the start of error messages.
        balance: function that builds the load balancer.
        max_retries: most retries of a part.
    """

    def __init__(
        self,
        supervisor: RemoteObject,
        *,
        num_replicas: int,
        what: str,
        balance: Callable[[Dispatcher], LoadBalancer],
        max_retries: int,
    ) -> None:
        self.supervisor = supervisor
        self._num_replicas, self._what, self._max_retries = num_replicas, what, max_retries
        self._lock = threading.Lock()
        self._refreshing = threading.Lock()
        self._table: PoolTable | None = None
        self._lives: dict[int, Life] = {}
        self._seen_s = 0.0
        self._book = LoadBook()
        self._balancer = balance(self)

    def serving(self) -> dict[int, RemoteObject]:
        """Ask the supervisor for the replicas that serve now."""
        self.table()
        with self._lock:
            return {index: self._lives[index].remote for index in sorted(self._lives)}

    def loads(self) -> list[LoadSnapshot]:
        """Return the known loads of the replicas, including all requests of this process so far."""
        self.table(_REFRESH_S)
        with self._lock:
            return self._book.loads()

    def recent(self) -> PoolTable:
        """Return a recent table of the supervisor."""
        return self.table(_REFRESH_S)

    def table(self, age_s: float = 0.0) -> PoolTable:
        """Return the supervisor's table, at most this many seconds old.

        Raises:
            WorkerError: the supervisor died.
        """
        asked = time.monotonic()
        table = self._table
        if table is not None and asked - self._seen_s < age_s:
            return table
        # While one thread asks, threads that accept an older table continue with it.
        if not self._refreshing.acquire(blocking=table is None or age_s == 0.0):
            return table
        try:
            if self._table is not None and self._seen_s > asked:
                return self._table
            known = -1 if self._table is None else self._table.membership
            table = self.supervisor.call("poll", known, timeout_s=60.0)
            with self._lock:
                self._table, self._seen_s = table, time.monotonic()
                self._book.told(table.loads)
                if table.lives is not None:
                    self._lives = dict(table.lives)
            return table
        finally:
            self._refreshing.release()

    def run(self, parts: Sequence[Part], *, timeout_s: float) -> None:
        """Run all parts; parts that no replica answers get no result.

        Args:
            parts: what to run.
            timeout_s: most seconds for all parts together.

        Raises:
            WorkerError: every replica was abandoned, or the supervisor died.
            BackendError: a part broke the engine of every replica that tried it.
            Exception: any other exception of a replica.
        """
        ray = require_ray(self._what)
        deadline = time.monotonic() + timeout_s
        waiting: list[Part] = list(parts)
        running: dict[Any, tuple[Part, int, Life]] = {}
        try:
            while waiting or running:
                waiting = [part for part in waiting if not self._send(part, running)]
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                pause = min(left, _PAUSE_S) if waiting else left
                if not running:
                    time.sleep(pause)
                    continue
                for ref in ray.wait(list(running), num_returns=1, timeout=pause)[0]:
                    part, index, life = running.pop(ref)
                    self._count(index, -part.num_rows)
                    if not self._take(part, ref, index, life):
                        waiting.append(part)
        finally:
            for part, index, _ in running.values():
                self._count(index, -part.num_rows)
        if running:
            self.supervisor.submit("suspect")

    def _send(self, part: Part, running: dict[Any, Any]) -> bool:
        """Send a part to a replica; return ``False`` if it must wait for a replica."""
        loads = self.loads()
        if part.pinned is None:
            allowed = loads
        else:
            allowed = [load for load in loads if load.index == part.pinned]
            if not allowed:
                raise ConfigError(f"there is no replica {part.pinned} of {self._num_replicas}")
        if not any(load.serving for load in allowed):
            self._check_alive()
            self.table(_PAUSE_S)
            return False
        index = self._balancer.select_actor_index(part.prompt, exclude=part.tried, loads=allowed)
        with self._lock:
            life = self._lives.get(index)
        if life is None:
            return False
        ref = life.remote.submit(part.method, *part.args)
        self._count(index, part.num_rows)
        running[ref] = (part, index, life)
        return True

    def _take(self, part: Part, ref: Any, index: int, life: Life) -> bool:
        """Receive the answer; returns whether the part is finished."""
        try:
            part.result = get(ref, timeout_s=60.0, what=life.remote.what)
            return True
        except VersionMismatch:
            # The replica is about to receive the weights or to be rebuilt; both take a moment.
            part.tried.add(index)
            time.sleep(_PAUSE_S)
            self.table()
            return False
        except BackendError as error:
            part.tried.add(index)
            part.failures.append(error)
            if isinstance(error, WorkerError):
                self._report(index, life, error)
            else:
                # The engine of the replica may have died; the supervisor checks this.
                self.supervisor.submit("suspect")
            if len(part.failures) <= self._max_retries:
                return False
            if all(not isinstance(failure, WorkerError) for failure in part.failures):
                raise
            return True

    def _report(self, index: int, life: Life, error: Exception) -> None:
        with self._lock:
            if self._lives.get(index) is life:
                del self._lives[index]
                self._book.lost(index)
        reason = f"a client saw {type(error).__name__}: {error}"
        self.supervisor.call("report", index, life.number, reason, timeout_s=60.0)
        self.table()

    def _check_alive(self) -> None:
        failed = self.table(_PAUSE_S).failed
        if len(failed) == self._num_replicas:
            reasons = "; ".join(f"replica {i}: {why}" for i, why in sorted(failed.items())[:3])
            raise WorkerError(f"{self._what}: every replica was given up: {reasons}")

    def _count(self, index: int, rows: int) -> None:
        with self._lock:
            self._book.count(index, rows)
