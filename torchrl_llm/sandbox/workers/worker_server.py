"""The server of a worker pool: loads a function once and forks processes that call it.

The server runs as a script in a bare interpreter and needs only the standard library, so workers
load only the imports of the function. ``multiprocessing`` cannot do this, for three reasons. Its
spawned processes run the program's file again. Its fork server is shared by the whole program, and
lives as long as any fork holds its pipe. And it reaps a dead ``Process`` whenever a new process
starts, so that a kill could hit a reused process id. This module uses only the connections of
``multiprocessing``.

After loading, this process runs no user code, so it can always fork, kill and report exit codes.
When the program that started the server ends, the server ends all workers. If the server is killed,
the kernel ends the workers. The program pickles requests. Answers are JSON, so a malicious worker
can at worst return a wrong answer.

Only :mod:`torchrl_llm.sandbox.workers.worker_pool` uses this module.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import json
import multiprocessing
import os
import pickle
import resource
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
from contextlib import suppress
from multiprocessing import connection, reduction
from typing import Any, NoReturn

_LONGEST_MESSAGE = 2000
_MOST_FRAMES = 50
_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.5
_KILL_S = 5.0

# While this variable is set, the pool does not start processes, because a program without `if
# __name__ == "__main__":` would start itself repeatedly.
torchrl_llm_is_loading = False


class Server:
    """Forks and ends the processes of one pool.

    Args:
        control: connection of the pool's requests.
    """

    def __init__(self, control: connection.Connection) -> None:
        self._control = control
        self._children: set[int] = set()

    def run(self) -> None:
        """Serve until the pool or its program ends."""
        try:
            self._setup = self._control.recv()
            reply = self._load()
            self._control.send_bytes(_packed(reply))
            if "error" not in reply:
                self._serve()
        except (EOFError, OSError):
            pass  # the pool has ended
        finally:
            for pid in list(self._children):
                self._end(pid)

    def _load(self) -> dict[str, Any]:
        try:
            self._function, self._start = _load(self._setup)
        except BaseException as error:
            return _failure(error)
        self._can_fork = _is_alone()
        gc.freeze()  # keep the pages of loaded modules shared with the workers
        return {"ready": True}

    def _serve(self) -> None:
        ended = _when_ended(self._setup["pid"])
        sources = [self._control] if ended is None else [self._control, ended]
        while True:
            ready = connection.wait(sources, _LOOK_S if ended is None else None)
            if ended in ready or os.getppid() != self._setup["pid"]:
                return
            if not ready:
                continue
            what, pid = self._control.recv()
            if what == "quit":
                return
            answer = self._start_one() if what == "fork" else self._end(pid)
            self._control.send_bytes(_packed(answer))

    def _start_one(self) -> dict[str, Any]:
        """Start a process that serves the connection sent with the request."""
        handle = reduction.recv_handle(self._control)
        try:
            pid = self._fork(handle) if self._can_fork else self._spawn(handle)
        except OSError as error:
            return {"error": os.strerror(error.errno or 1)}
        finally:
            os.close(handle)
        with suppress(OSError):  # the child also does this; the first call wins
            os.setpgid(pid, pid)
        self._children.add(pid)
        return {"pid": pid}

    def _fork(self, handle: int) -> int:
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._control.close()
                _seed_again()
                serve(handle, self._setup, self._function, self._start, server)
            finally:
                os._exit(1)
        return pid

    def _spawn(self, handle: int) -> int:
        """Start a process that loads everything again; used because threads make a fork unsafe."""
        theirs, ours = multiprocessing.Pipe(duplex=False)
        with theirs, ours:
            process = subprocess.Popen(
                [sys.executable, "-I", __file__, str(theirs.fileno()), str(handle)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), handle],
            )
            process.returncode = 0  # this server waits for it, not the Popen object
            theirs.close()
            with suppress(BrokenPipeError):
                ours.send({**self._setup, "pid": os.getpid()})
        return process.pid

    def _end(self, pid: int) -> int | None:
        """End a process and its children; return its exit code if it can be reaped."""
        if pid not in self._children:
            return None
        self._children.discard(pid)
        below = _descendants(pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        for one in (pid, *below):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL)
        deadline = time.monotonic() + _KILL_S
        while time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.001)
        return None


def serve(handle: int, setup: dict[str, Any], function: Any, start: Any, parent: int) -> NoReturn:
    """Main loop of a worker: call the function until the pool ends.

    Args:
        handle: connection of the pool's requests.
        setup: settings of the pool.
        function: the function.
        start: function that is called once before; ``None`` for no function.
        parent: the process that started this one.
    """
    with suppress(OSError):
        os.setpgid(0, 0)  # the worker's children are killed with it
    _end_with_parent(parent)
    pool = connection.Connection(handle)
    # A fork made by the function must not keep the connection open or return and answer.
    os.register_at_fork(after_in_child=pool.close)
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
            pool.send_bytes(content)
            request = pool.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)  # the pool has ended
        try:
            content = _packed({"value": _plain(function(*pickle.loads(request)))})
        except BaseException as error:  # includes SystemExit, which must not end the worker
            content = _packed(_failure(error))


def _packed(reply: Any) -> bytes:
    return json.dumps(reply).encode()


def _failure(error: BaseException) -> dict[str, Any]:
    try:
        message = str(error)
    except BaseException:  # even str() of an exception may raise
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
    """Convert a value for JSON: numbers, strings, lists of them, and named tuples by field."""
    if hasattr(value, "_asdict"):
        return {name: _plain(item) for name, item in value._asdict().items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return float(value)


def _load(setup: dict[str, Any]) -> tuple[Any, Any]:
    """Load the function, and the start function of each process."""
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
        if setup["prepare"] is not None:
            getattr(module, setup["prepare"])()
        return getattr(module, name), None
    finally:
        torchrl_llm_is_loading = False


def _import_main(kind: str, what: str) -> None:
    """Import the program's own file, under the name that ``multiprocessing`` gives it."""
    run = {"path": runpy.run_path, "module": runpy.run_module}[kind]
    content = run(what, run_name="__mp_main__")
    module = types.ModuleType("__mp_main__")
    module.__dict__.update(content)
    sys.modules["__mp_main__"] = sys.modules["__main__"] = module


def _is_alone() -> bool:
    """Whether there is no other thread, whose locks a fork would leave locked forever."""
    try:
        number = len(os.listdir("/proc/self/task"))
    except OSError:
        number = threading.active_count()
    torch = sys.modules.get("torch")
    return number == 1 and not (torch is not None and torch.cuda.is_initialized())


def _seed_again() -> None:
    """Reseed numpy's generator; ``random`` reseeds itself after a fork."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        numpy.random.seed()


def _end_with_parent(parent: int) -> None:
    """Let the kernel end this process with its parent, if supported."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _when_ended(pid: int) -> int | None:
    """Return a descriptor that becomes readable when a process ends; ``None`` if unsupported."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _descendants(pid: int) -> list[int]:
    """Return all descendants of a process, including descendants in other process groups."""
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
    """Run a server or, with a second argument, a worker of a server that cannot fork.

    Args:
        arguments: descriptors of the orders and of the worker's requests.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # output of a function must not reach the answers
    asked = connection.Connection(int(arguments[0]))
    if len(arguments) == 2:
        with asked:
            setup = asked.recv()
        try:
            function, start = _load(setup)
        except BaseException as error:
            raise SystemExit(f"it cannot be loaded again: {error!r}") from error
        serve(int(arguments[1]), setup, function, start, setup["pid"])
    Server(asked).run()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
