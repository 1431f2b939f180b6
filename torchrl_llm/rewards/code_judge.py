"""The program that tests code inside a sandbox; it needs only the standard library.

It runs in two processes. The *candidate* runs the code that a model wrote. The *judge* holds the
tests and a secret, and sends one call after the other to the candidate. Results come back as plain
data, so an object that claims to equal everything is not accepted. The tests and the secret are
never in a process, a file or an environment variable that the code can read. A verdict counts only
if its line begins with the secret, so printing a verdict or calling ``os._exit(0)`` has no effect.

Do not import this module for its functions: :class:`torchrl_llm.rewards.code.CodeRunner` sends its
source to a sandbox and reads the printed lines.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import os
import pickle
import select
import signal
import sys
import time
import types
from collections.abc import Callable
from typing import Any

_MAX_REPLY_BYTES = 32 << 20
_PR_SET_DUMPABLE = 4


class _Over(BaseException):
    """The candidate cannot be called any more; args: run status, message."""


# The candidate


def _plain(value: Any) -> Any:
    """The value as plain data: subclasses of the built-in types become those."""
    if value is None or type(value) in (bool, int, float, str, bytes, complex):
        return value
    for kind in (int, float, complex, str, bytes):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return kind([_plain(item) for item in value])
    if isinstance(value, bytearray):
        return bytearray(value)
    raise TypeError(f"a result must be plain data, got {type(value).__name__}")


def _write(fd: int, message: Any) -> None:
    try:
        data = pickle.dumps(message, protocol=5)
    except (pickle.PicklingError, AttributeError, TypeError):  # classes of the tests
        data = pickle.dumps(_plain(message), protocol=5)
    data = len(data).to_bytes(8, "little") + data
    while data:
        data = data[os.write(fd, data[: 1 << 20]) :]


def _read_exactly(fd: int, size: int, deadline: float | None = None) -> bytes:
    parts = []
    while size:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                raise _Over("timeout", "the code took too long")
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _load(sources: list[str], prelude: str, entry_point: str) -> tuple[str, str, Any]:
    """Return the compile status, a message, and the function."""
    code, message = None, ""
    for source in sources:
        try:
            code = compile(source, "<solution>", "exec")
            break
        except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
            message = message or _describe(error)
    if code is None:
        return "syntax", message, None
    # A separate module, because dataclasses and others look up their defining module.
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    try:
        exec(compile(prelude, "<prelude>", "exec"), module.__dict__)
        module.__dict__.pop(entry_point, None)
        exec(code, module.__dict__)
    except BaseException as error:
        return ("import" if isinstance(error, ImportError) else "unknown"), _describe(error), None
    function = module.__dict__.get(entry_point)
    if not callable(function):
        return "unknown", f"the code defines no function {entry_point!r}", None
    return "success", "", function


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except BaseException:
        return type(error).__name__[:500]


def _candidate(requests: int, replies: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    size = int.from_bytes(_read_exactly(requests, 8), "little")
    status, message, function = _load(**pickle.loads(_read_exactly(requests, size)))
    _write(replies, (status, message))
    while True:
        size = int.from_bytes(_read_exactly(requests, 8), "little")
        args, kwargs = pickle.loads(_read_exactly(requests, size))
        try:
            reply = ("value", _plain(function(*args, **kwargs)), "")
        except BaseException as error:
            kind = next(
                (t.__name__ for t in type(error).__mro__ if getattr(builtins, t.__name__, 0) is t),
                "Exception",
            )
            reply = ("raised", kind, _describe(error))
        _write(replies, reply)


# The judge


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("builtins", "complex"), ("builtins", "bytearray")):
            return getattr(builtins, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no plain data")


class _Judge:
    def __init__(self, job: dict[str, Any], pid: int, requests: int, replies: int) -> None:
        self.job, self.pid, self.requests, self.replies = job, pid, requests, replies
        self.deadline = time.monotonic() + job["timeout_s"]
        self.status, self.message = "success", ""
        self.passed = 0

    def say(self, **facts: Any) -> None:
        sys.stdout.write(f"\n{self.job['secret']}{json.dumps(facts)}\n")
        sys.stdout.flush()

    def _receive(self) -> Any:
        size = int.from_bytes(_read_exactly(self.replies, 8, self.deadline), "little")
        if size > _MAX_REPLY_BYTES:
            raise _Over("memory", f"a result of {size} bytes is too large")
        data = _read_exactly(self.replies, size, self.deadline)
        return _PlainUnpickler(io.BytesIO(data)).load()

    def ask(self, message: Any) -> Any:
        try:
            _write(self.requests, message)
            return self._receive()
        except (EOFError, BrokenPipeError):
            raise _Over(*self._death()) from None
        except (pickle.UnpicklingError, ValueError, TypeError, IndexError, KeyError) as error:
            raise _Over("runtime", f"no reply that can be read: {_describe(error)}") from None

    def _death(self) -> tuple[str, str]:
        for _ in range(100):  # the pipe of the process may close a moment before the process ends
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                break
            time.sleep(0.01)
        else:
            return "runtime", "the code closed the connection to its tests"
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGXCPU:
            return "timeout", "the code took too much CPU time"
        if code < 0:
            return "killed", f"the process of the code was ended by signal {-code}"
        return "runtime", f"the process of the code left with exit code {code}"

    def call(self, *args: Any, **kwargs: Any) -> Any:
        reply = self.ask((args, kwargs))
        if reply[0] == "value":
            return reply[1]
        kind = getattr(builtins, str(reply[1]), Exception)
        kind = kind if isinstance(kind, type) and issubclass(kind, Exception) else Exception
        try:
            error = kind(str(reply[2]))
        except TypeError:  # some exceptions, such as UnicodeDecodeError, take more than a message
            error = Exception(str(reply[2]))
        error.from_code = str(reply[1])
        raise error

    def case(self, index: int, error: BaseException | None) -> None:
        if error is None:
            self.passed += 1
            self.say(passed=self.passed)
            return
        if isinstance(error, _Over):
            self._fail(*error.args)
            raise error
        kind = getattr(error, "from_code", "")
        status = "memory" if kind == "MemoryError" else "runtime" if kind else "wrong"
        self._fail(status, f"case {index}: {_describe(error)}")
        if self.job["stop_early"]:
            raise _Over(status, self.message)

    def _fail(self, status: str, message: str) -> None:
        if self.status == "success":
            self.status, self.message = status, message

    def run(self) -> None:
        job = self.job
        try:
            loaded, message = self.ask({key: job[key] for key in _LOAD_KEYS})
        except _Over as over:
            status = "timeout" if over.args[0] == "timeout" else "unknown"
            self.say(compile=status, run="not_run", passed=0, message=over.args[1])
            return
        if loaded != "success":
            self.say(compile=str(loaded), run="not_run", passed=0, message=str(message))
            return
        namespace: dict[str, Any] = {"__name__": "tests"}
        exec(compile(job["prelude"], "<prelude>", "exec"), namespace)
        namespace |= {job["entry_point"]: self.call, "__case__": self.case}
        try:
            exec(compile(job["tests"], "<tests>", "exec"), namespace)
            if "check" in namespace:
                namespace["check"](self.call)
        except _Over as over:
            self._fail(*over.args)
        except BaseException as error:  # raised by a statement that is not a case
            self._fail("runtime", _describe(error))
        self.say(compile="success", run=self.status, passed=self.passed, message=self.message)


_LOAD_KEYS = ("sources", "prelude", "entry_point")


def _hide() -> None:
    """Deny other processes of this user access to this process's memory and files.

    Raises:
        ImportError: when this Python lacks ``ctypes``.
        OSError: when the kernel refuses.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    if ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError("the process that judges cannot be hidden from the code")


def _pair(candidate: Callable[[int, int], None]) -> tuple[int, int, int]:
    """Start the candidate; return its process, and the pipes to write to and to read from."""
    requests, replies = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(requests[1])
            os.close(replies[0])
            candidate(requests[0], replies[1])
        finally:
            os._exit(1)
    os.close(requests[0])
    os.close(replies[1])
    return pid, requests[1], replies[0]


def main() -> None:
    """Read a job from standard input, judge, and write the verdict to standard output."""
    _hide()
    # The tests must not import modules from the folder that the code can write to.
    here = os.path.realpath(os.getcwd())
    sys.path[:] = [path for path in sys.path if os.path.realpath(path) != here]
    # Started before the job is read, so the candidate's memory holds neither tests nor secret.
    pid, requests, replies = _pair(_candidate)
    judge = _Judge(json.loads(sys.stdin.buffer.read()), pid, requests, replies)
    judge.say(ready=True)
    judge.run()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
