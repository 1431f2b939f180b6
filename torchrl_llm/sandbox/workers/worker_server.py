"""The other end of a pool of processes: loads a function once and forks processes that call it.

It is run as a script, in a bare interpreter, and needs the standard library alone: what the
function does not import, its processes do not load. This process runs nothing of the user's after
loading, so it can always fork, kill and tell how a process ended; when the program that started it
is gone, it ends all of them, and where it is killed itself, the kernel does. Requests are pickled
by that program; answers are JSON, so that whatever a function is given can at worst answer wrongly.

Its only user is :mod:`torchrl_llm.sandbox.workers.worker_pool`.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import json
import os
import pickle
import resource
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import types
from contextlib import suppress
from typing import Any, BinaryIO, NoReturn

_LENGTH = struct.Struct("!Q")
_COMMAND = struct.Struct("!cq")  # what to do, and with which process
_ANSWER = struct.Struct("!q")
_LONGEST_MESSAGE = 2000
_MOST_FRAMES = 50
_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.5
_KILL_S = 5.0
_NO_CODE = 1 << 32  # of a process that the kernel does not let go

# The pool refuses to start processes while this is set: a program without `if __name__ ==
# "__main__":` would start itself over and over.
torchrl_llm_is_loading = False


class Server:
    """Forks and ends the processes of one pool.

    Args:
        control: the socket on which the pool asks.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._pid = os.getpid()
        self._children: set[int] = set()

    def run(self) -> None:
        """Serve until the pool, or the program that has it, is gone."""
        try:
            stream = self._control.makefile("rb", buffering=0)
            self._setup = pickle.loads(_content(stream))
            reply = self._load()
            self._control.sendall(_packed(reply))
            if "error" not in reply:
                self._serve()
        except (EOFError, OSError):
            pass  # nobody asks any more
        finally:
            for pid in list(self._children):
                self._end(pid)

    def _load(self) -> dict[str, Any]:
        try:
            self._function, self._start = _load(self._setup)
        except BaseException as error:
            return _failure(error)
        self._can_fork = _is_alone()
        gc.freeze()  # the pages of what was loaded stay shared with the processes
        return {"ready": True}

    def _serve(self) -> None:
        ended = _when_ended(self._setup["pid"])
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        if ended is not None:
            poll.register(ended, select.POLLIN)
        while True:
            events = poll.poll(None if ended is not None else 1000 * _LOOK_S)
            if any(fd == ended for fd, _ in events) or os.getppid() != self._setup["pid"]:
                return
            if not events:
                continue
            command, descriptors, _, _ = socket.recv_fds(self._control, _COMMAND.size, 1)
            if len(command) < _COMMAND.size:
                return
            what, pid = _COMMAND.unpack(command)
            if what == b"Q":
                return
            answer = self._start_one(descriptors[0]) if what == b"F" else self._end(pid)
            self._control.sendall(_ANSWER.pack(answer))

    def _start_one(self, descriptor: int) -> int:
        """Start a process that serves a socket; its pid, or an error number, negative."""
        try:
            pid = self._fork(descriptor) if self._can_fork else self._spawn(descriptor)
        except OSError as error:
            return -(error.errno or 1)
        finally:
            os.close(descriptor)
        with suppress(OSError):  # it does so, too: whoever is first
            os.setpgid(pid, pid)
        self._children.add(pid)
        return pid

    def _fork(self, descriptor: int) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                self._control.close()
                _seed_again()
                serve(descriptor, self._setup, self._function, self._start, self._pid)
            finally:
                os._exit(1)
        return pid

    def _spawn(self, descriptor: int) -> int:
        """Start a process that loads everything again, where threads make a fork unsafe."""
        process = subprocess.Popen(
            [sys.executable, "-I", __file__, "alone", str(descriptor)],
            stdin=subprocess.PIPE,
            pass_fds=[descriptor],
        )
        process.returncode = 0  # this server waits for it, that object does not
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(_with_length(pickle.dumps({**self._setup, "pid": self._pid})))
        return process.pid

    def _end(self, pid: int) -> int:
        """End a process and what it has started; its exit code."""
        if pid not in self._children:
            return _NO_CODE
        below = _descendants(pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        for one in (pid, *below):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL)
        self._children.discard(pid)
        deadline = time.monotonic() + _KILL_S
        while time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.001)
        return _NO_CODE


def serve(descriptor: int, setup: dict[str, Any], function: Any, start: Any, parent: int) -> None:
    """Call the function until nobody asks: the life of a process.

    Args:
        descriptor: the socket on which the pool asks.
        setup: of the pool.
        function: what is called.
        start: what is called once, before; ``None`` for nothing.
        parent: the process that started this one.
    """
    with suppress(OSError):
        os.setpgid(0, 0)  # what it starts is killed with it
    _end_with_parent(parent)
    stream = socket.socket(fileno=descriptor).makefile("rwb")
    # A fork of the function's must not keep the socket open, nor come back and answer.
    os.register_at_fork(after_in_child=lambda: os.close(descriptor))
    try:
        if setup["memory_bytes"] is not None:
            resource.setrlimit(resource.RLIMIT_AS, (setup["memory_bytes"],) * 2)
        if start is not None:
            start()
        reply = {"ready": True}
    except BaseException as error:
        reply = _failure(error)
    content = _packed(reply)
    while True:
        try:
            stream.write(content)
            stream.flush()
            request = _content(stream)
        except (EOFError, OSError):
            os._exit(0)  # nobody asks any more
        try:
            content = _packed({"value": _plain(function(*pickle.loads(request)))})
        except BaseException as error:  # also SystemExit: one that gives up is no reason to
            content = _packed(_failure(error))


def _content(stream: BinaryIO) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(stream, _LENGTH.size))
    return _exactly(stream, length)


def _exactly(stream: BinaryIO, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = stream.read(length - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def _with_length(content: bytes) -> bytes:
    return _LENGTH.pack(len(content)) + content


def _packed(reply: dict[str, Any]) -> bytes:
    return _with_length(json.dumps(reply).encode())


def _failure(error: BaseException) -> dict[str, Any]:
    try:
        message = str(error)
    except BaseException:  # an exception may not even have a text
        message = ""
    frames = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename != __file__
    ]
    return {
        "error": type(error).__name__,
        "message": message[:_LONGEST_MESSAGE],
        "frames": frames[-_MOST_FRAMES:],
    }


def _plain(value: Any) -> Any:
    """A value as JSON takes it: numbers, strings, lists of them, and named tuples by field."""
    if hasattr(value, "_asdict"):
        return {"fields": {name: _plain(item) for name, item in value._asdict().items()}}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return {"items": [_plain(item) for item in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return float(value)


def _load(setup: dict[str, Any]) -> tuple[Any, Any]:
    """The function, and what each process calls before it."""
    global torchrl_llm_is_loading
    sys.path[:] = setup["path"]
    kind, what, name = setup["target"]
    torchrl_llm_is_loading = True
    try:
        if setup["main"] is not None:
            _import_main(*setup["main"])
        if kind == "pickle":
            return pickle.loads(what)
        spec = importlib.util.spec_from_file_location("worker_function", what)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, name), None
    finally:
        torchrl_llm_is_loading = False


def _import_main(kind: str, what: str) -> None:
    """The program's own file as a module, under the name that ``multiprocessing`` gives it."""
    importlib.import_module("multiprocessing")  # which takes that name for what now runs
    run = {"path": runpy.run_path, "module": runpy.run_module}[kind]
    content = run(what, run_name="__mp_main__")
    module = types.ModuleType("__mp_main__")
    module.__dict__.update(content)
    sys.modules["__mp_main__"] = sys.modules["__main__"] = module


def _is_alone() -> bool:
    """Whether no other thread is there, whose locks a fork would leave locked for ever."""
    try:
        number = len(os.listdir("/proc/self/task"))
    except OSError:
        number = threading.active_count()
    torch = sys.modules.get("torch")
    return number == 1 and not (torch is not None and torch.cuda.is_initialized())


def _seed_again() -> None:
    """The generator of numpy; that of ``random`` does so by itself after a fork."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        numpy.random.seed()


def _end_with_parent(parent: int) -> None:
    """Let the kernel end this process with its parent, where it can."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _when_ended(pid: int) -> int | None:
    """A descriptor that can be read when a process has ended; ``None`` where there is no such."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _descendants(pid: int) -> list[int]:
    """What a process has started, and these, groups of their own included."""
    children: dict[int, list[int]] = {}
    try:
        names = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
    for name in names:
        with suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
            parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found = [pid]
    for one in found:
        found.extend(children.get(one, ()))
    return found[1:]


def main(*arguments: str) -> NoReturn:
    """Be a server (its socket is the argument), or (``alone``) a process of one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # what a function prints is no answer
    if arguments[0] == "alone":
        setup = pickle.loads(_content(sys.stdin.buffer))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        function = start = None
        try:
            function, start = _load(setup)
        except BaseException as error:
            raise SystemExit(f"it cannot be loaded again: {error!r}") from error
        serve(int(arguments[1]), setup, function, start, setup["pid"])
    Server(socket.socket(fileno=int(arguments[0]))).run()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
