"""Channel between processes of a Ray cluster; one actor stores the queue and the counts.

The actor only moves bytes and never unpacks rows. It reserves no CPU. Because it is asynchronous, a
thousand waiting workers need no threads.
"""

from __future__ import annotations

import asyncio
import pickle
import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from torchrl_llm._checked import Ge, Gt, checked
from torchrl_llm._ray import START_TIMEOUT_S, get, require_ray
from torchrl_llm.collectors.transport.channel import WAKING, ChannelState, Delivery, RowChannel

_CALLS_AT_ONCE = 10_000


class _Server:
    """The object in the actor; it has a single thread, so it needs no lock."""

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

    async def do(self, method: str, *args: Any) -> Any:
        found = getattr(self._state, method)(*args)
        if method in WAKING:
            self._notify()
        return found

    async def wait(self, method: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        found = await self._until(partial(getattr(self._state, method), *args), timeout_s)
        if found and method in WAKING:
            self._notify()
        return found

    async def get(self, taken: int, timeout_s: float) -> tuple[int, Delivery] | None:
        # A delivery is kept until the reader asks for the next delivery, so that a lost answer can
        # be sent again.
        if self._handed[1] is None or taken >= self._handed[0]:
            found = await self.wait("try_get", (), timeout_s)
            if found is None:
                return None
            self._handed = (self._handed[0] + 1, found)
        return self._handed


class RayChannel(RowChannel):
    """A channel in a Ray actor; its handles can be pickled and passed to any actor or task.

    The actor ends when the process that created it ends, after :meth:`shutdown`, or when no handle
    is left. A reader that missed its last delivery (because of a restart, for example) gets it
    again.

    Args:
        max_size: most waiting deliveries.
        timeout_s: seconds beyond the call's own wait after which the channel counts as dead.

    Raises:
        ConfigError: the size is below 1, or the timeout is not positive.
        MissingExtraError: Ray is not installed.
        ResourceError: Ray is not running.
        WorkerError: the actor did not start in time.
    """

    @checked
    def __init__(
        self, max_size: Annotated[int, Ge(1)] = 8, *, timeout_s: Annotated[float, Gt(0)] = 60.0
    ) -> None:
        ray = require_ray("RayChannel")
        self.timeout_s = timeout_s
        actor = ray.remote(num_cpus=0, max_concurrency=_CALLS_AT_ONCE)(_Server)
        self._actor = actor.remote(max_size)
        self._taken = 0
        self._reading = threading.Lock()
        get(
            self._actor.do.remote("version"),
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
        what = f"{method if method == 'get' else args[0]} of the RayChannel"
        ref = getattr(self._actor, method).remote(*args)
        return get(ref, timeout_s=waits_s + self.timeout_s, what=what)

    def _do(self, method: str, *args: Any) -> Any:
        return self._call("do", method, *args)

    def _wait(self, method: str, *args: Any, timeout_s: float) -> Any:
        return self._call("wait", method, args, timeout_s, waits_s=timeout_s)

    def put(self, delivery: Delivery, *, timeout_s: float) -> None:
        """See :meth:`RowChannel.put`."""
        rows = pickle.dumps(delivery.rows, pickle.HIGHEST_PROTOCOL)
        super().put(replace(delivery, rows=rows), timeout_s=timeout_s)

    def get(self, *, timeout_s: float) -> Delivery:
        """See :meth:`RowChannel.get`."""
        # Otherwise two readers of one handle would get the same delivery.
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

    def shutdown(self) -> None:
        """End the actor; waiting deliveries are lost."""
        ray = require_ray("RayChannel", running=False)
        if ray.is_initialized():
            ray.kill(self._actor)
