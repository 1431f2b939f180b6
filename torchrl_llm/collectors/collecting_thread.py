"""Thread that collects next to training until it is stopped, and gates that pause it."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torchrl._utils import logger

from torchrl_llm.errors import ConfigError

_EXIT_TIMEOUT_S = 10.0
_POLL_S = 0.05
_HURRY_S = 0.5


class PauseGate:
    """Lets one kind of work through until another thread asks for a pause.

    A plain lock would do but for its unfairness: a loop that takes it again at once can keep others
    waiting for ever.

    Example:
        >>> gate = PauseGate()
        >>> with gate.work():
        ...     pass
        >>> with gate.pause():
        ...     pass
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._workers: list[int] = []
        self._pausers: list[int] = []

    @contextmanager
    def work(self, stop: threading.Event | None = None) -> Iterator[bool]:
        """Work inside this context; entered when nobody else has asked for a pause.

        Args:
            stop: gives up waiting when it is set.

        Yields:
            Whether to work: ``False`` when ``stop`` was set while the gate was closed.
        """
        own = threading.get_ident()
        with self._changed:
            while any(pauser != own for pauser in self._pausers):
                if stop is not None and stop.is_set():
                    break
                self._changed.wait(_POLL_S)
            enters = all(pauser == own for pauser in self._pausers)
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
    def pause(self, hurry: Callable[[], None] | None = None) -> Iterator[None]:
        """No work of other threads inside this context; what is under way is finished first.

        Args:
            hurry: called once nothing new begins, and again at growing intervals while something
                goes on: work that has begun may not yet be where it can be cut short.
        """
        own = threading.get_ident()
        with self._changed:
            self._pausers.append(own)
        # Whoever is interrupted while it waits must not leave the gate closed.
        try:
            interval_s = _HURRY_S
            while hurry is not None:
                hurry()
                if self._wait_for_others(own, interval_s):
                    break
                interval_s *= 2
            self._wait_for_others(own, None)
            yield
        finally:
            with self._changed:
                self._pausers.remove(own)
                self._changed.notify_all()

    def _wait_for_others(self, own: int, timeout_s: float | None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while any(worker != own for worker in self._workers):
                if deadline is not None and time.monotonic() >= deadline:
                    return False
                self._changed.wait(_POLL_S)
        return True


def _stop_at_exit(stop: threading.Event, thread: threading.Thread) -> None:
    # A daemon thread that is inside torch while the interpreter goes down may crash the process.
    stop.set()
    if thread is not threading.current_thread():
        thread.join(_EXIT_TIMEOUT_S)


class BackgroundLoop:
    """Calls a function again and again in a daemon thread.

    Args:
        work: called until it returns ``False``, raises, or :meth:`stop` is called.
        name: of the thread.

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
            TimeoutError: it still runs; it will stop after its current call.
        """
        self.stopping.set()
        if self._thread is threading.current_thread() or self._thread.ident is None:
            return
        # Joined in slices, because a join without limit cannot be interrupted on every platform.
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._thread.is_alive():
            self._thread.join(
                0.2 if deadline is None else max(0.0, min(0.2, deadline - time.monotonic()))
            )
            if deadline is not None and self._thread.is_alive() and time.monotonic() >= deadline:
                raise TimeoutError(
                    f"the thread {self._thread.name!r} did not end within {timeout_s} s; it stops "
                    "after the call that it is in"
                )

    def _run(self) -> None:
        try:
            while not self.stopping.is_set() and self._work():
                pass
        # Anything at all must reach the thread that waits for rows, or it would wait for ever.
        except BaseException as error:
            self.failure = error
            logger.error(f"{self._thread.name} stopped: {type(error).__name__}: {error}")


class BesideTraining:
    """Part of :class:`~torchrl_llm.collectors.LLMCollector` that runs in a thread.

    Attributes:
        replay_buffer: what is filled, or ``None``.
        queue: what is filled instead, or ``None``.
    """

    env: Any
    replay_buffer: Any
    queue: Any
    _background: BackgroundLoop | None
    _batches: PauseGate
    _closed: bool

    def start(self) -> None:
        """Collect into the buffer or queue in its own thread, until :meth:`shutdown`.

        An error of policy or environment ends the thread; it is logged at once, and raised by the
        next call of :meth:`wait_for_rows`, :meth:`update_policy_weights_`, :meth:`state_dict` or
        :meth:`shutdown`.

        Raises:
            ConfigError: there is neither buffer nor queue, or it was started before.
        """
        if self.replay_buffer is None and self.queue is None:
            raise ConfigError("start() needs a replay_buffer or a queue to collect into")
        self._check_usable()
        if self._background is not None:
            raise ConfigError("this collector was started before")
        self._background = BackgroundLoop(self._collect_once, name="LLMCollector")
        self._background.start()

    def _collect_once(self) -> bool:
        if self.exhausted:
            return False
        with self._batches.work(self._background.stopping) as enters:
            if enters:
                batch = self.rollout()
                # Written before anyone may save: a batch must not be neither here nor there.
                if self.replay_buffer is not None:
                    self._deliver(batch)
        # A full queue is waited for outside: whoever empties it may be the one that pauses.
        if enters and self.replay_buffer is None:
            self._deliver(batch)
        return True

    @property
    def is_running(self) -> bool:
        """Whether the thread of :meth:`start` collects."""
        return self._background is not None and self._background.is_running

    def wait_for_rows(self, num_rows: int, *, timeout_s: float | None = None) -> None:
        """Wait until the buffer has enough rows.

        Args:
            num_rows: rows that the buffer must hold.
            timeout_s: seconds to wait; ``None`` for no limit.

        Raises:
            TimeoutError: they have not come in time.
            ConfigError: the collector does not run, so they will never come.
            Exception: whatever ended the collector's thread.
        """
        if self.replay_buffer is None:
            raise ConfigError("wait_for_rows needs a replay_buffer")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while len(self.replay_buffer) < num_rows:
            self._raise_failure()
            # Asked before the length is read again: the last rows may have come in between.
            running = self.is_running
            if len(self.replay_buffer) >= num_rows:
                return
            if not running:
                self._raise_failure()
                raise ConfigError(
                    f"the buffer holds {len(self.replay_buffer)} of {num_rows} rows, and the "
                    "collector does not run: start() it, raise total_dialog_turns, or see whether "
                    "a transform of the buffer holds rows back"
                )
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(
                    f"the buffer holds {len(self.replay_buffer)} of {num_rows} rows after "
                    f"{timeout_s} s"
                )
            time.sleep(_POLL_S)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """No batch is collected inside this context; the one under way is written first.

        Save collector and buffer inside it, so that they belong together.
        """
        with self._batches.pause():
            yield

    def _raise_failure(self) -> None:
        if self._background is not None and self._background.failure is not None:
            failure, self._background.failure = self._background.failure, None
            raise failure

    def _check_usable(self) -> None:
        if self._closed:
            raise ConfigError("this collector was shut down")

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Stop the thread, close the environment, and raise what the thread failed of.

        Args:
            timeout: seconds to wait for the batch under way; ``None`` for as long as it takes.
            close_env: close the environment.
            raise_on_error: raise an error of the thread that was not raised yet.

        Raises:
            TimeoutError: the thread still runs; the environment is left open then.
        """
        if self._background is not None:
            self._background.stop(timeout)
        if close_env and not self._closed:
            self.env.close(raise_if_closed=False)
        self._closed = True
        if raise_on_error:
            self._raise_failure()
