"""Thread that looks after calls which may never return: ends them, or says that they take long.

A call costs a microsecond: it is entered into a dict, and one thread of the process looks there.
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
# A call that is taken out by the one side is no longer there for the other.
_calls: dict[object, tuple[float, Callable[[], float | None]]] = {}
_watcher: tuple[int, threading.Thread] | None = None


class _LateError(BaseException):
    """Raised in a thread whose call has had its time; no call may take it for an error of its."""


@contextlib.contextmanager
def watching(seconds: float, act: Callable[[], float | None]) -> Iterator[None]:
    """Do something, in another thread, if the block has not ended after a while.

    Args:
        seconds: how long it may take.
        act: called then, and again after the seconds that it returns, ``None`` for no more. It may
            be called once when the block is just over.
    """
    token = _enter(seconds, act)
    try:
        yield
    finally:
        _calls.pop(token, None)


def with_limit(function: Callable[[], T], seconds: float) -> T:
    """What a function of pure Python returns, unless it takes too long.

    Args:
        function: without arguments; a single operation in C that takes long is not interrupted.
        seconds: how long it may take.

    Raises:
        TimeoutError: it was ended.

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
        raise TimeoutError(f"it was ended after {seconds:g} s") from None


def _enter(seconds: float, act: Callable[[], float | None]) -> object:
    global _watcher
    if _watcher is None or _watcher[0] != os.getpid() or not _watcher[1].is_alive():
        _calls.clear()  # of the process that this one was forked from
        thread = threading.Thread(target=_watch, name="torchrl_llm-watchdog", daemon=True)
        _watcher = (os.getpid(), thread)
        thread.start()
    token = object()
    _calls[token] = (time.monotonic() + seconds, act)
    return token


def _settle(token: object) -> None:
    """Leave the list; the interrupt of a call that is not there any more arrives here."""
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
