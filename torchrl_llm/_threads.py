"""Threads of this process: a loop that works until it is stopped, and a gate that pauses work."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchrl._utils import logger

_EXIT_TIMEOUT_S = 10.0
_POLL_S = 0.05
_HURRY_S = 0.5


class PauseGate:
    """Lets any number of threads work in parallel until one requests exclusive access.

    A thread that waits for exclusive access precedes all later threads: with a plain lock, a loop
    that acquires it again at once could block others forever. A thread never waits for itself.

    Example:
        >>> gate = PauseGate()
        >>> with gate.work() as enters:
        ...     enters
        True
        >>> with gate.pause() as is_alone:
        ...     is_alone
        True
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._workers: list[int] = []
        self._pausers: list[int] = []
        self._alone: int | None = None

    @property
    def num_working(self) -> int:
        """Number of threads that are working."""
        return len(self._workers)

    @contextmanager
    def work(
        self, stop: threading.Event | None = None, *, timeout_s: float = float("inf")
    ) -> Iterator[bool]:
        """Work inside this context; entered when no other thread has requested a pause.

        Args:
            stop: ends the wait when it is set.
            timeout_s: most seconds to wait.

        Yields:
            Whether to work: ``False`` if the gate stayed closed.
        """
        own = threading.get_ident()

        def is_open() -> bool:
            is_inside = own == self._alone or own in self._workers
            return is_inside or all(pauser == own for pauser in self._pausers)

        with self._changed:
            enters = self._wait(is_open, timeout_s, stop)
            if enters:
                self._workers.append(own)
        try:
            yield enters
        finally:
            with self._changed:
                if enters:
                    self._workers.remove(own)
                self._changed.notify_all()

    @contextmanager
    def pause(
        self, hurry: Callable[[], None] | None = None, *, timeout_s: float = float("inf")
    ) -> Iterator[bool]:
        """Keep other threads from working inside this context, after running work has finished.

        Args:
            hurry: called when no new work can start, and again at growing intervals while work is
                running, because running work can be interrupted only at some points.
            timeout_s: most seconds to wait; without ``hurry`` only.

        Yields:
            Whether no thread works: ``False`` if that took too long.
        """
        own = threading.get_ident()

        def is_still() -> bool:
            return self._alone in (None, own) and all(worker == own for worker in self._workers)

        with self._changed:
            self._pausers.append(own)
        # A thread that is interrupted while it waits must not leave the gate closed.
        try:
            interval_s = timeout_s if hurry is None else _HURRY_S
            while True:
                if hurry is not None:
                    hurry()
                with self._changed:
                    is_alone = self._wait(is_still, interval_s)
                    self._alone = own if is_alone else self._alone
                if is_alone or hurry is None:
                    break
                interval_s *= 2
            yield is_alone
        finally:
            with self._changed:
                self._pausers.remove(own)
                if self._alone == own and own not in self._pausers:
                    self._alone = None
                self._changed.notify_all()

    def _wait(
        self, is_true: Callable[[], bool], timeout_s: float, stop: threading.Event | None = None
    ) -> bool:
        """Wait until a condition is true; polls, because a stop sends no notification."""
        deadline = time.monotonic() + timeout_s
        while not is_true():
            if time.monotonic() >= deadline or (stop is not None and stop.is_set()):
                return False
            self._changed.wait(_POLL_S)
        return True


def _stop_at_exit(stop: threading.Event, thread: threading.Thread) -> None:
    # A daemon thread that runs torch code while the interpreter exits may crash the process.
    stop.set()
    if thread is not threading.current_thread():
        thread.join(_EXIT_TIMEOUT_S)


class BackgroundLoop:
    """Calls a function again and again in a daemon thread.

    Args:
        work: called until it returns ``False``, raises, or :meth:`stop` is called.
        name: name of the thread.

    Example:
        >>> left = [3]
        >>> def work():
        ...     left[0] -= 1
        ...     return left[0] > 0
        >>> loop = BackgroundLoop(work, name="example")
        >>> loop.start(); loop.stop(); loop.failure is None
        True
    """

    def __init__(self, work: Callable[[], bool], *, name: str) -> None:
        self._work = work
        self.failure: BaseException | None = None
        self.stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()
        weakref.finalize(self, _stop_at_exit, self.stopping, self._thread)

    @property
    def is_running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread.is_alive()

    def stop(self, timeout_s: float | None = None) -> None:
        """Ask the thread to stop and wait for the end of its current call.

        Args:
            timeout_s: seconds to wait; ``None`` for as long as it takes.

        Raises:
            TimeoutError: the thread still runs; it stops after its current call.
        """
        self.stopping.set()
        if self._thread is threading.current_thread() or self._thread.ident is None:
            return
        # Joined in slices, because a join without limit cannot be interrupted on every platform.
        deadline = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
        while self._thread.is_alive():
            self._thread.join(max(0.0, min(0.2, deadline - time.monotonic())))
            if self._thread.is_alive() and time.monotonic() >= deadline:
                raise TimeoutError(
                    f"the thread {self._thread.name!r} did not end within {timeout_s} s; it stops "
                    "after the call that it is in"
                )

    def _run(self) -> None:
        try:
            while not self.stopping.is_set() and self._work():
                pass
        # Every exception must reach the thread that waits for rows, which would otherwise wait
        # forever.
        except BaseException as error:
            self.failure = error
            logger.error(f"{self._thread.name} stopped: {type(error).__name__}: {error}")
