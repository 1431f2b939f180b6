"""Rows between processes of a Ray cluster: one actor keeps the queue and the books.

The actor moves bytes: it never unpacks rows. It needs no CPU of its own, and waits of a thousand
workers cost it no thread each, for it is asynchronous.
"""

from __future__ import annotations

import asyncio
import pickle
import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torchrl_llm._ray import START_TIMEOUT_S, get, require_ray
from torchrl_llm.collectors.transport.channel import (
    ChannelState,
    Delivery,
    RowChannel,
    WorkerCounts,
)
from torchrl_llm.errors import ConfigError

_CALLS_AT_ONCE = 10_000


class _Server:
    """What runs in the actor; a single thread, so nothing here needs a lock."""

    def __init__(self, max_size: int) -> None:
        self._state = ChannelState(max_size)
        self._changed = asyncio.Event()
        self._handed: tuple[int, Delivery | None] = (0, None)

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _until(self, condition: Callable[[], Any], timeout_s: float) -> Any:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not (value := condition()) and (left := deadline - loop.time()) > 0:
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                continue
        return value

    async def put(self, delivery: Delivery, timeout_s: float) -> bool:
        taken = await self._until(lambda: self._state.try_put(delivery), timeout_s)
        self._notify()
        return taken

    async def claim(self, worker: str, num_rows: int, timeout_s: float) -> bool:
        return await self._until(lambda: self._state.try_claim(worker, num_rows), timeout_s)

    async def report(self, worker: str, generated: int) -> None:
        self._state.report(worker, generated)

    async def get(self, taken: int, timeout_s: float) -> tuple[int, Delivery] | None:
        # What was handed out is kept until the reader asks for the next one: an answer that was
        # lost on its way is given again.
        if self._handed[1] is not None and taken < self._handed[0]:
            return self._handed
        if not await self._until(lambda: self._state.waiting, timeout_s):
            return None
        self._handed = (self._handed[0] + 1, self._state.waiting.popleft())
        self._notify()
        return self._handed

    async def grant(self, num_rows: int) -> None:
        self._state.grant(num_rows)
        self._notify()

    async def forget(self, worker: str) -> WorkerCounts:
        counts = self._state.forget(worker)
        self._notify()
        return counts

    async def set_version(self, version: int) -> None:
        self._state.version = version

    async def close(self) -> None:
        self._state.closed = True
        self._notify()

    async def read(self, what: str) -> Any:
        match what:
            case "version":
                return self._state.version
            case "workers":
                return self._state.workers()
            case "forgotten":
                return self._state.forgotten()
            case _:
                return len(self._state.waiting)


class RayChannel(RowChannel):
    """A channel in a Ray actor; its handles are picklable and may be given to any actor or task.

    The actor ends with the process that made it, with :meth:`shutdown`, or when nobody holds a
    handle. A reader that never got its last answer (it was restarted, say) gets it again.

    Args:
        max_size: deliveries that may wait.
        timeout_s: seconds, beyond what a call waits for by itself, after which the channel is taken
            for gone.

    Raises:
        ConfigError: for a size below 1 or a limit of nothing.
        MissingExtraError: Ray is not installed.
        ResourceError: Ray is not running.
        WorkerError: the actor did not start in time.
    """

    def __init__(self, max_size: int = 8, *, timeout_s: float = 60.0) -> None:
        ray = require_ray("RayChannel")
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s must be positive, got {timeout_s}")
        ChannelState(max_size)  # an impossible size is refused here and not in the actor
        self.timeout_s = timeout_s
        actor = ray.remote(num_cpus=0, max_concurrency=_CALLS_AT_ONCE)(_Server)
        self._actor = actor.remote(max_size)
        self._taken = 0
        self._reading = threading.Lock()
        get(
            self._actor.read.remote("version"),
            timeout_s=START_TIMEOUT_S,
            what="the start of the RayChannel",
        )

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        del state["_reading"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _reading=threading.Lock())

    def _call(self, method: str, *args: Any, waits_s: float = 0.0) -> Any:
        ref = getattr(self._actor, method).remote(*args)
        return get(ref, timeout_s=waits_s + self.timeout_s, what=f"{method} of the RayChannel")

    def put(self, delivery: Delivery, *, timeout_s: float) -> None:
        """See :meth:`RowChannel.put`."""
        packed = replace(delivery, rows=pickle.dumps(delivery.rows, pickle.HIGHEST_PROTOCOL))
        if not self._call("put", packed, timeout_s, waits_s=timeout_s):
            raise queue.Full

    def claim(self, worker: str, num_rows: int, *, timeout_s: float) -> bool:
        """See :meth:`RowChannel.claim`."""
        return self._call("claim", worker, num_rows, timeout_s, waits_s=timeout_s)

    def report(self, worker: str, *, generated: int) -> None:
        """See :meth:`RowChannel.report`."""
        self._call("report", worker, generated)

    def version(self) -> int:
        """See :meth:`RowChannel.version`."""
        return self._call("read", "version")

    def get(self, *, timeout_s: float) -> Delivery:
        """See :meth:`RowChannel.get`."""
        # Two readers of one handle would both be handed the same delivery.
        if not self._reading.acquire(timeout=timeout_s):
            raise queue.Empty
        try:
            found = self._call("get", self._taken, timeout_s, waits_s=timeout_s)
            if found is None:
                raise queue.Empty
            self._taken, delivery = found
        finally:
            self._reading.release()
        return replace(delivery, rows=pickle.loads(delivery.rows))

    def grant(self, num_rows: int) -> None:
        """See :meth:`RowChannel.grant`."""
        self._call("grant", num_rows)

    def set_version(self, version: int) -> None:
        """See :meth:`RowChannel.set_version`."""
        self._call("set_version", version)

    def workers(self) -> dict[str, WorkerCounts]:
        """See :meth:`RowChannel.workers`."""
        return self._call("read", "workers")

    def forget(self, worker: str) -> WorkerCounts:
        """See :meth:`RowChannel.forget`."""
        return self._call("forget", worker)

    def forgotten(self) -> dict[str, WorkerCounts]:
        """See :meth:`RowChannel.forgotten`."""
        return self._call("read", "forgotten")

    def __len__(self) -> int:
        return self._call("read", "waiting")

    def close(self) -> None:
        """See :meth:`RowChannel.close`."""
        self._call("close")

    def shutdown(self) -> None:
        """End the actor; what waits in it is gone."""
        ray = require_ray("RayChannel", running=False)
        if ray.is_initialized():
            ray.kill(self._actor)
