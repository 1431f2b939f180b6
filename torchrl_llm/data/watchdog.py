"""Watchdog thread that ends calls that may never return, or reports that they take long.

Watching a call costs a microsecond: the call is added to a dict, which one thread of the process
polls.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

T = TypeVar("T")

_PAUSE_S = 0.25
# Either the caller or the watcher removes a call, never both.
_calls: dict[object, tuple[float, Callable[[], float | None]]] = {}
_watcher: tuple[int, threading.Thread] | None = None


class _LateError(BaseException):
    """Raised in a thread whose call exceeded its time; ``except Exception`` misses it."""


@contextlib.contextmanager
def watching(seconds: float, act: Callable[[], float | None]) -> Iterator[None]:
    """Call ``act`` in a different thread if the block has not ended after a time limit.

    Args:
        seconds: the time limit.
        act: function that is called after the limit, and again after the number of seconds that it
            returns (``None`` for no more calls). It may be called once just after the block has
            ended.
    """
    token = _enter(seconds, act)
    try:
        yield
    finally:
        _calls.pop(token, None)


def with_limit(function: Callable[[], T], seconds: float) -> T:
    """Run a pure Python function and return its result, with a time limit.

    Args:
        function: takes no arguments; a single long operation in C is not interrupted.
        seconds: the time limit.

    Raises:
        TimeoutError: the limit was exceeded.

    Example:
        >>> with_limit(lambda: 7, 10.0)
        7
    """
    token = _enter(seconds, partial(_interrupt, threading.get_ident()))
    try:
        try:
            result = function()
        except _LateError:
            raise
        except BaseException:
            _settle(token)
            raise
        _settle(token)
        return result
    except _LateError:
        raise TimeoutError(f"interrupted after {seconds:g} s") from None


def _enter(seconds: float, act: Callable[[], float | None]) -> object:
    global _watcher
    if _watcher is None or _watcher[0] != os.getpid() or not _watcher[1].is_alive():
        _calls.clear()  # calls of the parent process, if this one was forked
        thread = threading.Thread(target=_watch, name="torchrl_llm-watchdog", daemon=True)
        _watcher = (os.getpid(), thread)
        thread.start()
    token = object()
    _calls[token] = (time.monotonic() + seconds, act)
    return token


def _settle(token: object) -> None:
    """Remove the call; if the watcher already removed it, wait here for its interrupt."""
    if _calls.pop(token, None) is None:
        while True:
            time.sleep(_PAUSE_S)


def _interrupt(thread: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_LateError))


def _watch() -> None:
    while True:
        time.sleep(_PAUSE_S)
        now = time.monotonic()
        for token, (until, _) in list(_calls.items()):
            late = _calls.pop(token, None) if until <= now else None
            if late is not None and (again := late[1]()) is not None:
                _calls[token] = (now + again, late[1])
