"""Processes that run one function, and can be stopped in the middle of it.

For rewards that keep a CPU busy (several run at once, which Python's threads do not), and for those
that may not end: a thread cannot be stopped, a process can, in the middle of a computation that
never looks at a signal. It keeps the trainer's memory out of reach of what runs there, but it is no
sandbox: the function is the user's own.

Next: :mod:`torchrl_llm.envs.reward.worker_process` is the other end.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchrl_llm.envs.reward.running import RemoteRewardError
from torchrl_llm.errors import ConfigError, RewardError, RewardTimeoutError

__all__ = ["WorkerPool"]

_SCRIPT = Path(__file__).with_name("worker_process.py")
_LENGTH = struct.Struct("!Q")
# An interpreter that imports torch on a machine that is busy with much else.
_START_TIMEOUT_S = 600.0


class WorkerPool:
    """Calls one function in processes of its own.

    Processes start when they are needed and are kept; one that was stopped, or died, is replaced.
    They end with the pool, with the process that made it, or, at work, soon after that.

    Args:
        target: a function or callable object that can be pickled, which means that its module can
            be imported by name; or a file of Python and the name of a function in it, which then
            runs without anything that the file does not import.
        num_workers: processes at a time; more callers than that wait for one.
        memory_bytes: address space of each process; ``None`` for no limit.

    Raises:
        ConfigError: a target that another process cannot import, or impossible numbers.

    Example:
        >>> import operator
        >>> pool = WorkerPool(operator.truediv, num_workers=1)
        >>> pool.call(1, 4), pool.close()
        (0.25, None)
    """

    def __init__(
        self,
        target: Callable[..., Any] | tuple[str | Path, str],
        *,
        num_workers: int = 2,
        memory_bytes: int | None = None,
    ) -> None:
        if num_workers < 1:
            raise ConfigError(f"num_workers must be at least 1, got {num_workers}")
        self.num_workers = num_workers
        self._setup = {"target": _importable(target), "memory_bytes": memory_bytes}
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._free = threading.Semaphore(self.num_workers)
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._end = weakref.finalize(self, _stop_all, self._all)

    def __getstate__(self) -> dict[str, Any]:
        # Processes belong to the process that started them.
        return {"num_workers": self.num_workers, "_setup": self._setup}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def call(self, *arguments: Any, timeout: float | None = None) -> Any:
        """Call the function in one of the processes.

        Args:
            arguments: its arguments; they are pickled.
            timeout: seconds that the call may take, once the process is up. Then it is stopped.

        Returns:
            Its value: a number, a string, a list of these, or a dict of the fields of a named
            tuple.

        Raises:
            RewardTimeoutError: no answer in time.
            RemoteRewardError: what the function raised.
            RewardError: the process died, or could not start.
        """
        if self._pid != os.getpid():
            self._end.detach()  # after a fork: they are the parent's
            self._forget()
        content = pickle.dumps(arguments)
        with self._free:
            worker = self._take()
            try:
                worker.wait_until_ready()
                reply = worker.ask({"arguments": content, "seconds": timeout}, timeout)
            except BaseException:
                # It is in the middle of something, or dead.
                self._replace(worker)
                raise
            with self._lock:
                self._idle.append(worker)
        if "error" in reply:
            raise RemoteRewardError(reply["error"], reply["message"])
        return _value(reply["value"])

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        with self._lock:
            workers, self._idle = list(self._all), []
            self._all.clear()
        _stop_all(workers)

    def _take(self) -> _Worker:
        with self._lock:
            if self._idle:
                return self._idle.pop()
            worker = _Worker(self._setup)
            self._all.add(worker)
            return worker

    def _replace(self, worker: _Worker) -> None:
        worker.stop()
        with self._lock:
            self._all.discard(worker)
            if worker.was_ready:  # not for ever where it cannot even start
                new = _Worker(self._setup)
                self._all.add(new)
                self._idle.append(new)


class _Worker:
    """One process."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.was_ready = False
        ours, theirs = socket.socketpair()
        self._socket = ours
        try:
            self._process = subprocess.Popen(
                # Isolated: neither the script's folder nor the environment adds to its path.
                [sys.executable, "-I", str(_SCRIPT), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        except OSError as error:
            ours.close()
            raise RewardError(f"no process could be started: {error}") from error
        finally:
            theirs.close()
        self._setup = {**setup, "path": list(sys.path)}

    def wait_until_ready(self) -> None:
        if self.was_ready:
            return
        reply = self.ask(self._setup, _START_TIMEOUT_S)
        if "error" in reply:
            raise RewardError(
                f"the reward cannot be loaded in a process: {reply['error']}: {reply['message']}"
            )
        self.was_ready = True

    def ask(self, request: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        deadline = None if timeout is None else time.monotonic() + timeout
        content = pickle.dumps(request)
        try:
            self._limit(deadline)
            self._socket.sendall(_LENGTH.pack(len(content)) + content)
            (length,) = _LENGTH.unpack(self._receive(_LENGTH.size, deadline))
            return json.loads(self._receive(length, deadline))
        except TimeoutError:
            raise RewardTimeoutError(f"no reward within {timeout:g} s") from None
        except OSError as error:
            self.stop()
            raise RewardError(
                f"the process of the reward died ({_status(self._process.returncode)})"
            ) from error

    def _receive(self, length: int, deadline: float | None) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            self._limit(deadline)
            part = self._socket.recv(min(length - len(parts), 1 << 20))
            if not part:
                raise ConnectionResetError
            parts += part
        return bytes(parts)

    def _limit(self, deadline: float | None) -> None:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)

    def stop(self) -> None:
        """End it and what it started."""
        self._socket.close()
        with suppress(ProcessLookupError):
            if self._process.returncode is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _stop_all(workers: Any) -> None:
    for worker in list(workers):
        worker.stop()


def _status(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    with suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def _value(value: Any) -> Any:
    if isinstance(value, dict) and "items" in value:
        return [_value(item) for item in value["items"]]
    if isinstance(value, dict):
        return {name: _value(item) for name, item in value["fields"].items()}
    return value


def _importable(target: Any) -> tuple[Any, ...]:
    if isinstance(target, tuple):
        path, name = target
        return "file", str(path), name
    try:
        content = pickle.dumps(target)
    except Exception as error:
        raise ConfigError(
            f"{target!r} cannot be brought to another process: {error}; define it at the top of a "
            "module, not inside a function"
        ) from error
    if b"__main__" in content:
        raise ConfigError(
            f"{target!r} is defined in the program that runs, which another process cannot import; "
            "put it into a module of its own"
        )
    return "pickle", content
