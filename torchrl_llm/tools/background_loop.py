"""A thread with an asyncio loop, for tools that use asynchronous libraries.

Tools are called from ordinary threads. The connections of :mod:`torchrl_llm.tools.mcp_client` run
in one loop, and the pages of :mod:`torchrl_llm.tools.browser_driver` in a different loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class BackgroundLoop:
    """Runs coroutines in a background thread; the calling threads wait for the results.

    The daemon thread starts with the first coroutine. It ends with :meth:`close`, with the process,
    or when the object is garbage-collected; a later call starts a new one.

    Args:
        name: name of the thread.

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
            work: the coroutine; it is cancelled if it takes too long.
            timeout_s: largest number of seconds to wait.

        Raises:
            TimeoutError: when the coroutine took longer.
            Exception: an exception that the coroutine raised.
        """
        future = self.submit(work)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done() and not future.cancelled():
                raise  # raised by the coroutine itself
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
                started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
                thread = threading.Thread(
                    target=lambda: asyncio.run(_until_ended(started)), name=self.name, daemon=True
                )
                thread.start()
                self._loop, end = started.result()
                self._finalizer = weakref.finalize(self, _end, self._loop, end, thread)
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancel all coroutines, wait for their cleanup, and end the thread; may be called twice.

        Args:
            last: a coroutine to run before the others are cancelled, for at most 30 seconds, if the
                thread runs.
        """
        try:
            if last is not None and self.running:
                self.run(last(), timeout_s=30.0)
        finally:
            with self._lock:
                finalizer, self._finalizer, self._loop = self._finalizer, None, None
            if finalizer is not None:
                finalizer()


async def _until_ended(started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
    end = asyncio.Event()
    started.set_result((asyncio.get_running_loop(), end))
    await end.wait()


def _end(loop: asyncio.AbstractEventLoop, end: asyncio.Event, thread: threading.Thread) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has already ended
        loop.call_soon_threadsafe(end.set)
    if thread is not threading.current_thread():
        thread.join(10.0)
