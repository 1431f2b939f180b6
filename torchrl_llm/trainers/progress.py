"""Stop requests without loss."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self


class Cut(BaseException):
    """Ends optional work when a run has to stop; see :meth:`StopRequest.at_once`."""


class _Held:
    """Whether the main thread's body delays a :class:`Cut`, and whether a ``Cut`` waits."""

    depth, waiting = 0, False


@contextlib.contextmanager
def uncut() -> Iterator[None]:
    """Run the body to its end: a ``Cut`` that arrives meanwhile is raised after it.

    Used for steps that several processes take together.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _Held.depth += 1
    try:
        yield
    finally:
        _Held.depth -= 1
    if _Held.waiting and not _Held.depth:
        _Held.waiting = False
        raise Cut


class StopRequest:
    """Turns Ctrl-C, SIGTERM and SIGHUP into a request that the loop serves at the end of its step.

    A context manager. The first signal sets :attr:`requested`; a second Ctrl-C interrupts at once.
    A signal that the process ignores (SIGHUP under ``nohup``) stays ignored. Outside of the main
    thread it does nothing, because signals cannot be caught there.

    Args:
        notice: called once, when the first signal arrives (:meth:`TrainingRun.say` with a text).
        presses: number of signals after which a Ctrl-C interrupts at once; this Ctrl-C counts.

    Attributes:
        signal: the first one that arrived, ``None`` before.

    Example:
        >>> with StopRequest() as stop:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     stop.requested
        True
    """

    def __init__(self, notice: Any = None, *, presses: int = 2) -> None:
        self._presses = presses
        self.signal: signal.Signals | None = None
        self._notice, self._cuts = notice, False
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal arrived."""
        return self.signal is not None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Restore the previous signal handlers while the body runs; the body may never return."""
        self.__exit__(None, None, None)
        yield
        self.__enter__()

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Let a signal end the body with a ``Cut``, including a signal that arrived before.

        Used for work that changes nothing and can take longer than a scheduler waits: evaluations.
        """
        self._cuts, _Held.waiting = True, False
        try:
            if self.requested:
                raise Cut
            yield
        finally:
            self._cuts = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._presses -= 1
        if self.requested and number == signal.SIGINT and self._presses <= 0:
            raise KeyboardInterrupt
        first, self.signal = self.signal is None, self.signal or signal.Signals(number)
        if first and self._notice is not None:
            self._notice()
        if self._cuts and _Held.depth:
            _Held.waiting = True
        elif self._cuts:
            raise Cut
