"""Runs a reward function over rows, sequentially or in threads, with an optional time limit.

The result of every call is an :class:`Outcome`: a value or an error, and the seconds of the call.
This module does not use tensordicts.

Next: :mod:`torchrl_llm.sandbox.workers.worker_pool` runs a function in processes that can be
stopped.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

from torchrl._utils import logger

from torchrl_llm.data.failures import NO_FAILURE, Failure, Frame
from torchrl_llm.data.watchdog import watching
from torchrl_llm.errors import ConfigError, RewardError, RewardTimeoutError
from torchrl_llm.sandbox.workers import (
    DaemonThreads,
    RemoteCallError,
    RemoteRaisedError,
    RemoteTimeoutError,
    WorkerPool,
)

SLOW_S = 60.0
"""Seconds after which a warning is logged for a call without a limit."""


class RemoteRewardError(RewardError):
    """An exception that a reward raised in a different process.

    Args:
        kind: name of the exception type.
        message: message of the exception.
        frames: file, line and function of each frame, innermost last.
    """

    def __init__(self, kind: str, message: str, frames: Sequence[Frame] = ()) -> None:
        super().__init__(message)
        self.kind, self.frames = kind, frames


def call_reward(pool: WorkerPool, *arguments: Any, timeout: float | None = None) -> Any:
    """Call a reward function in a process of a pool.

    Args:
        pool: pool of processes.
        arguments: arguments of the function.
        timeout: time limit in seconds, not including the wait for a free process. After it the
            process is killed.

    Returns:
        The result of :meth:`~torchrl_llm.sandbox.workers.worker_pool.WorkerPool.call`.

    Raises:
        RewardTimeoutError: when there is no result within the time limit.
        RemoteRewardError: when the function raised.
        RewardError: when the process died or could not start.

    Example:
        >>> import operator
        >>> pool = WorkerPool(operator.truediv, num_workers=1)
        >>> call_reward(pool, 1, 4, timeout=60.0), pool.close()
        (0.25, None)
    """
    try:
        return pool.call(*arguments, timeout=timeout)
    except RemoteRaisedError as error:
        raise RemoteRewardError(error.kind, str(error), error.frames) from None
    except RemoteTimeoutError:
        raise RewardTimeoutError(f"no reward within {timeout:g} s") from None
    except RemoteCallError as error:
        raise RewardError(f"no reward from another process: {error}") from error


class Outcome(NamedTuple):
    """Result of one row.

    Attributes:
        value: result of the function; ``None`` if it failed.
        seconds: wall-clock time of the row.
        failure: the failure, if any.
    """

    value: Any = None
    seconds: float = 0.0
    failure: Failure = NO_FAILURE

    @classmethod
    def failed(cls, error: BaseException, seconds: float = 0.0) -> Outcome:
        """Make the outcome of an exception.

        Example:
            >>> outcome = Outcome.failed(ZeroDivisionError("by zero"))
            >>> outcome.error, outcome.message
            ('ZeroDivisionError', 'by zero')
        """
        if isinstance(error, RemoteRewardError):
            return cls(None, seconds, Failure.told(error.kind, str(error), error.frames))
        return cls(None, seconds, Failure.of(error))

    def of(self, source: str) -> Outcome:
        """Return the outcome with the name of the failed part."""
        return self._replace(failure=self.failure._replace(source=source)) if self.error else self

    @property
    def error(self) -> str:
        """Name of the exception type; empty without an error."""
        return self.failure.kind

    @property
    def message(self) -> str:
        """Message of the error, at most 2,000 characters."""
        return self.failure.message


def run_rows(
    function: Callable[..., Any],
    rows: Sequence[tuple[Any, ...]],
    *,
    num_threads: int = 0,
    timeout: float | None = None,
) -> list[Outcome]:
    """Call a function once per row.

    A row that exceeds its limit gets a ``RewardTimeoutError``, and the other rows continue. Its
    thread cannot be stopped; the thread ends when the function returns.

    Args:
        function: called with the row's arguments. In threads it is called for several rows at once.
        rows: arguments of each call.
        num_threads: number of threads; 0 uses the calling thread.
        timeout: time limit per row in seconds, from the start of the row; needs threads.

    Returns:
        One outcome per row, in order.

    Raises:
        ConfigError: for a time limit without threads, or a time limit that is not above zero.

    Example:
        >>> outcomes = run_rows(lambda a, b: a / b, [(1, 2), (1, 0)])
        >>> [(outcome.value, outcome.error) for outcome in outcomes]
        [(0.5, ''), (None, 'ZeroDivisionError')]
    """
    check_limits(num_threads, timeout)
    if not num_threads or not rows:
        return _in_this_thread(function, rows)
    run = _Run(function, rows, timeout)
    threads = DaemonThreads(min(num_threads, len(rows)))
    try:
        for index in range(len(rows)):
            threads.submit(lambda index=index: run.work(index))
        run.wait(threads)
    finally:
        run.close()
        threads.close()
    return run.outcomes


def check_limits(num_threads: int, timeout: float | None) -> None:
    """Raise ``ConfigError`` for settings that :func:`run_rows` cannot honour."""
    if num_threads < 0:
        raise ConfigError(f"num_threads must not be negative, got {num_threads}")
    if timeout is None:
        return
    if not timeout > 0:
        raise ConfigError(f"timeout must be above 0 seconds, got {timeout}")
    if not num_threads:
        raise ConfigError(
            "a time limit needs threads or processes: what runs in the caller's own thread cannot "
            "be left behind; set num_threads"
        )


def _in_this_thread(function: Callable[..., Any], rows: Sequence[tuple[Any, ...]]) -> list[Outcome]:
    """Run rows in this thread; an exception of a signal handler ends all of them."""
    outcomes: list[Outcome] = []
    begun: float | None = time.monotonic()

    def tell() -> float | None:
        if begun is None or (left := begun + SLOW_S - time.monotonic()) > 0:
            return None if begun is None else left
        _tell_slow(function, len(outcomes))
        return None

    with _Interrupts() as interrupts, watching(SLOW_S, tell):
        for row in rows:
            begun = time.monotonic()
            outcomes.append(_timed(function, row))
            if interrupts.raised is not None:
                raise interrupts.raised
        begun = None
    return outcomes


def _tell_slow(function: Callable[..., Any], index: int) -> None:
    function = getattr(function, "func", function)
    name = getattr(function, "__qualname__", type(function).__name__)
    logger.warning(
        f"{name} has been at answer {index} of its batch for {SLOW_S:g} s, and has no time limit "
        "(said once a batch). A part of the reward may have one: reward.components.NAME.timeout, "
        "with run=threads or processes. Ctrl-C ends the run"
    )


def _timed(function: Callable[..., Any], row: tuple[Any, ...]) -> Outcome:
    begun = time.perf_counter()
    try:
        value = function(*row)
    except BaseException as error:  # includes SystemExit: a score must not end the run
        return Outcome.failed(error, time.perf_counter() - begun)
    return Outcome(value, time.perf_counter() - begun)


class _Interrupts:
    """Records the exceptions that the handlers of Ctrl-C and SIGTERM raise.

    This distinguishes Ctrl-C from a ``KeyboardInterrupt`` that a score raises, even if the score
    catches the exception of Ctrl-C.
    """

    def __init__(self) -> None:
        self.raised: BaseException | None = None
        self._before: dict[int, Callable[..., Any]] = {}

    def __enter__(self) -> _Interrupts:
        if threading.current_thread() is threading.main_thread():  # only it gets signals
            for number in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(number)
                if callable(handler):
                    self._before[number] = handler
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            self._before[number](number, frame)
        except BaseException as error:
            self.raised = error
            raise


class _Run:
    """The rows of one batch while they run."""

    def __init__(
        self, function: Callable[..., Any], rows: Sequence[tuple[Any, ...]], timeout: float | None
    ) -> None:
        self.function, self.rows, self.timeout = function, rows, timeout
        self.outcomes: list[Any] = [None] * len(rows)
        self.running: dict[int, float] = {}  # maps a row to its start time
        self.num_open = len(rows)
        self.closed = self.told = False
        self.changed = threading.Condition()

    def work(self, index: int) -> bool:
        """Run one row, and return whether its time limit expired meanwhile."""
        with self.changed:
            if self.closed:
                return False
            self.running[index] = time.monotonic()
        outcome = _timed(self.function, self.rows[index])
        with self.changed:
            if self.outcomes[index] is not None:
                return True
            self._put(index, outcome)
        return False

    def wait(self, threads: DaemonThreads) -> None:
        """Wait until every row is done or timed out."""
        with self.changed:
            while self.num_open:
                left = SLOW_S if self.timeout is None else self._give_up(threads)
                if self.num_open and not self.changed.wait(left) and self.timeout is None:
                    self._tell()

    def close(self) -> None:
        """Do not start the remaining rows."""
        with self.changed:
            self.closed = True

    def _give_up(self, threads: DaemonThreads) -> float:
        """Time out rows over their limit, and return the seconds until the next check."""
        now = time.monotonic()
        for index, begun in list(self.running.items()):
            if now - begun >= self.timeout:
                told = f"no reward within {self.timeout:g} s; the call goes on in its thread"
                self._put(index, Outcome.failed(RewardTimeoutError(told), now - begun))
                threads.replace()
        return self.timeout + min(self.running.values(), default=now) - now

    def _tell(self) -> None:
        """Log once which row has not returned."""
        slow = [at for at, begun in self.running.items() if time.monotonic() - begun >= SLOW_S]
        if slow and not self.told:
            self.told = True
            _tell_slow(self.function, slow[0])

    def _put(self, index: int, outcome: Outcome) -> None:
        self.outcomes[index] = outcome
        self.running.pop(index, None)
        self.num_open -= 1
        if not self.num_open:
            self.changed.notify()
