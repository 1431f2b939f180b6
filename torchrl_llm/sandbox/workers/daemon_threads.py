"""Worker threads that can be given up: what runs in them may never end.

A thread cannot be stopped from outside. One whose work takes too long is left alone (it is
daemonic, so the interpreter does not wait for it) and another takes its place; how many are in
that state is counted.

Next: :mod:`torchrl_llm.sandbox.workers.worker_pool` for what must be stopped.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class DaemonThreads:
    """A pool of daemonic threads.

    Args:
        max_threads: how many work at a time, those that were given up not counted.

    Example:
        >>> threads, done = DaemonThreads(2), threading.Event()
        >>> threads.submit(done.set)
        >>> done.wait(10), threads.close()
        (True, None)
    """

    def __init__(self, max_threads: int) -> None:
        self._max = max_threads
        self._jobs: queue.SimpleQueue[Callable[[], bool | None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._alive = 0
        self._idle = 0
        self._closed = False

    def submit(self, job: Callable[[], bool | None]) -> None:
        """Run a job as soon as a thread is free.

        Args:
            job: must not raise; it returns true if :meth:`replace` was called for its thread.
        """
        with self._lock:
            self._jobs.put(job)
            self._idle -= 1
            if self._idle < 0 and self._alive < self._max:
                self._spawn()

    def replace(self) -> None:
        """Give one thread up: it ends when its job does, and another may start at once."""
        with self._lock:
            self._alive -= 1
            if self._idle < 0 and not self._closed:
                self._spawn()

    def close(self) -> None:
        """Let the threads end when they have nothing to do; may be called twice."""
        with self._lock:
            self._closed = True
            for _ in range(self._alive):
                self._jobs.put(None)

    def _spawn(self) -> None:
        # The idle count is of threads that wait, less the jobs that wait for one.
        self._alive += 1
        self._idle += 1
        threading.Thread(target=_work, args=(self,), name="tool", daemon=True).start()


def _work(pool: DaemonThreads) -> None:
    jobs = pool._jobs
    while (job := jobs.get()) is not None:
        if job():
            return
        del job  # it holds the caller's data
        with pool._lock:
            pool._idle += 1
