"""An asyncio loop in a thread of its own, for tools whose libraries are asynchronous.

Tools are called from ordinary threads; the connections of
:mod:`torchrl_llm.tools.mcp_client` and the pages of
:mod:`torchrl_llm.tools.browser_driver` live in one loop each. It knows nothing of
either.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

Result = TypeVar("Result")


class BackgroundLoop:
    """Runs coroutines for threads that wait for them.

    The thread is a daemon that starts with the first coroutine and ends with :meth:`close`, with
    the process, or when nobody holds the object any more; after that a new one starts.

    Args:
        name: of the thread.

    Example:
        >>> async def work():
        ...     return 3
        >>> loop = BackgroundLoop("example")
        >>> loop.run(work(), timeout_s=10.0)
        3
        >>> loop.close()
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._finalizer: weakref.finalize | None = None

    @property
    def running(self) -> bool:
        """Whether the thread runs."""
        return self._loop is not None

    def run(self, work: Coroutine[Any, Any, Result], *, timeout_s: float) -> Result:
        """Run a coroutine in the loop and wait for it.

        Args:
            work: the coroutine; cancelled where it takes too long.
            timeout_s: most seconds to wait.

        Raises:
            TimeoutError: it took longer.
            Exception: what the coroutine raised.
        """
        future = self.submit(work)
        try:
            return future.result(timeout_s)
        except FutureTimeout:
            if future.done() and not future.cancelled():
                raise  # the coroutine's own
            raise TimeoutError(f"not done within {timeout_s:g} s") from None
        finally:
            future.cancel()

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Start a coroutine in the loop.

        Args:
            work: the coroutine.
        """
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                thread = threading.Thread(
                    target=_serve, args=(self._loop,), name=self.name, daemon=True
                )
                thread.start()
                self._finalizer = weakref.finalize(self, _end, self._loop, thread)
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel what runs, wait for its cleaning up, and end the thread; may be called twice."""
        with self._lock:
            finalizer, self._finalizer, self._loop = self._finalizer, None, None
        if finalizer is not None:
            finalizer()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():
        thread.join(10.0)
