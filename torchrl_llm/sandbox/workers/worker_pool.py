"""Worker processes that can be killed during a function, and threads that can be abandoned.

:class:`DaemonThreads` are for work that waits. :class:`WorkerPool` is for CPU-bound work, because
processes run in parallel and Python's threads do not. It is also for work that may not end, because
a process can be killed at any point and a thread cannot be stopped. The function cannot access the
trainer's memory, but this is not a sandbox: the function is the user's own and has the trainer's
rights.

Next: ``torchrl_llm.sandbox.workers.worker_server`` is the server side.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

from torchrl_llm._checked import Ge, checked
from torchrl_llm.errors import ConfigError, TorchRLLLMError

_SCRIPT = Path(__file__).with_name("worker_server.py")
_MAIN = ("__main__", "__mp_main__")
# Time limit of the start: enough for an interpreter that imports torch on a busy machine.
_START_TIMEOUT_S = 600.0
_CONTROL_TIMEOUT_S = 60.0


class DaemonThreads:
    """A pool of daemonic threads.

    A thread cannot be stopped from outside. If its work takes too long, the thread is abandoned and
    replaced. It is daemonic, so the interpreter does not wait for it at the end. Abandoned threads
    are counted.

    Args:
        max_threads: largest number of working threads, not counting abandoned threads.

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
            job: function that must not raise; it returns true if :meth:`replace` was called for its
                thread.
        """
        with self._lock:
            self._jobs.put(job)
            self._idle -= 1
            if self._idle < 0 and self._alive < self._max:
                self._spawn()

    def replace(self) -> None:
        """Abandon one thread: it ends with its job, and a new thread may start at once."""
        with self._lock:
            self._alive -= 1
            if self._idle < 0 and not self._closed:
                self._spawn()

    def close(self) -> None:
        """End the threads when they are idle; may be called twice."""
        with self._lock:
            self._closed = True
            for _ in range(self._alive):
                self._jobs.put(None)

    def _spawn(self) -> None:
        # The idle count is the number of waiting threads minus the number of waiting jobs.
        self._alive += 1
        self._idle += 1
        threading.Thread(target=_work, args=(self,), name="tool", daemon=True).start()


def _work(pool: DaemonThreads) -> None:
    jobs = pool._jobs
    while (job := jobs.get()) is not None:
        if job():
            return
        del job  # the job references the caller's data
        with pool._lock:
            pool._idle += 1


class RemoteCallError(TorchRLLLMError, RuntimeError):
    """Raised when a call in a process returned no value, or no process could be started."""


class RemoteRaisedError(RemoteCallError):
    """Raised when the function raised an exception.

    Args:
        kind: name of the exception's type.
        message: message of the exception.
        frames: file, line and function of each frame from the function on, innermost last.
    """

    def __init__(self, kind: str, message: str, frames: Sequence[tuple[str, int, str]]) -> None:
        super().__init__(message)
        self.kind, self.frames = kind, frames


class RemoteTimeoutError(RemoteCallError, TimeoutError):
    """Raised when the call took too long and its process was killed."""


class RemoteDiedError(RemoteCallError):
    """Raised when the process died.

    Args:
        exit_code: exit status of the process, negative for a signal; ``None`` if unknown.
    """

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(f"the process died ({_status(exit_code)})")
        self.exit_code = exit_code


class WorkerPool:
    """Calls one function in worker processes.

    The function's modules are imported once, in a server process. Workers are forked from the
    server on demand and kept. If an imported module has started threads, workers are separate
    interpreters instead. A worker that takes too long is killed with all its children. A dead
    worker is replaced; the other workers are not affected. All workers end with the pool, and with
    the program, even if the program is killed.

    Args:
        target: a picklable function or callable object, so its module must be importable by name;
            or a Python file and the name of a function in it, which then only loads the imports of
            that file. If the function is defined in the program's own file, the file is run again
            under a different name and needs ``if __name__ == "__main__":``, as in all programs with
            ``multiprocessing``.
        num_workers: number of processes; further callers wait.
        memory_bytes: address space of each process; ``None`` for no limit.
        start: function that each process calls once at its start, outside the time limit of a call.
            It is pickled together with ``target``, and may be a method of the same object.
        prepare: if ``target`` is a file, the name of a function in it that imports modules. It is
            called once, before the processes are forked.

    Raises:
        ConfigError: for a target that a different process cannot import, or invalid numbers.

    Example:
        >>> import operator
        >>> pool = WorkerPool(operator.truediv, num_workers=1)
        >>> pool.call(1, 4), pool.close()
        (0.25, None)
    """

    @checked
    def __init__(
        self,
        target: Callable[..., Any] | tuple[str | Path, str],
        *,
        num_workers: Annotated[int, Ge(1)] = 2,
        memory_bytes: Annotated[int, Ge(1)] | None = None,
        start: Callable[[], Any] | None = None,
        prepare: str | None = None,
    ) -> None:
        self.num_workers = num_workers
        self._setup = {**_importable(target, start, prepare), "memory_bytes": memory_bytes}
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._free = threading.Semaphore(self.num_workers)
        self._idle: list[_Worker] = []
        self._servers: list[_Server] = []  # none or one
        self._end = weakref.finalize(self, _stop_all, self._servers, self._pid)

    def __getstate__(self) -> dict[str, Any]:
        # Workers belong to the process that started them.
        return {"num_workers": self.num_workers, "_setup": self._setup}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def start(self) -> None:
        """Start to import the function's modules without waiting; a call also starts the import.

        Raises:
            RemoteCallError: when no process could be started.
            ConfigError: when this program is running a second time, to load one of its own
                functions.
        """
        self._server()

    def call(self, *arguments: Any, timeout: float | None = None) -> Any:
        """Call the function in one of the processes; thread-safe.

        Args:
            arguments: arguments of the function; they are pickled.
            timeout: time limit of the call in seconds, from the time when a process is ready. After
                it the process is killed.

        Returns:
            The result of the function: a number, a string, a list of these, or a dict of the fields
            of a named tuple.

        Raises:
            RemoteTimeoutError: when there is no answer in time.
            RemoteRaisedError: when the function raised.
            RemoteDiedError: when the process died.
            RemoteCallError: when no process could be started.
        """
        self._own()
        content = pickle.dumps(arguments)
        with self._free:
            worker = self._take()
            try:
                reply = worker.ask(content, timeout)
            except BaseException:
                worker.end()  # the worker is busy or dead
                raise
            with self._lock:
                if worker.server in self._servers:
                    self._idle.append(worker)
                else:
                    worker.close()  # the pool was closed meanwhile
        if "error" in reply:
            raise RemoteRaisedError(reply["error"], reply["message"], reply["frames"])
        return reply["value"]

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        self._own()
        with self._lock:
            servers, self._servers[:] = list(self._servers), []
            workers, self._idle = self._idle, []
        _stop_all(servers, self._pid)
        for worker in workers:
            worker.close()

    def _own(self) -> None:
        if self._pid != os.getpid():
            self._end.detach()  # after a fork, the processes belong to the parent
            self._forget()

    def _server(self) -> _Server:
        self._own()
        with self._lock:
            if self._servers and self._servers[0].gone:
                self._servers.pop().stop()
                self._idle.clear()
            if not self._servers:
                self._servers.append(_Server(self._setup))
            return self._servers[0]

    def _take(self) -> _Worker:
        while True:
            server = self._server()
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None:
                worker = server.fork()
                try:
                    worker.wait_until_ready()
                except BaseException:
                    worker.end()
                    raise
                return worker
            if worker.is_waiting():
                return worker
            worker.end()  # the worker was killed while idle


class _Server:
    """The server process, which has loaded the function and forks the workers."""

    def __init__(self, setup: dict[str, Any]) -> None:
        if getattr(sys.modules.get("__main__"), "torchrl_llm_is_loading", False):
            raise ConfigError(
                "the program's own file starts processes when it is imported; put what it does "
                'under `if __name__ == "__main__":`'
            )
        self.gone = False
        self._ready = False
        self._failure = ""
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        self._control, theirs = Pipe()
        try:
            self._process = subprocess.Popen(
                # Isolated: neither the script's folder nor the environment changes its path.
                [sys.executable, "-I", str(_SCRIPT), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        except OSError as error:
            self._control.close()
            raise RemoteCallError(f"no process could be started: {error}") from error
        finally:
            theirs.close()
        self._pending = {**setup, "path": list(sys.path), "pid": os.getpid()}

    def fork(self) -> _Worker:
        """Start a new process.

        Raises:
            RemoteCallError: when the function cannot be loaded, or no process could be started.
        """
        ours, theirs = Pipe()
        try:
            started = self._ask("fork", passed=theirs)
            if "error" in started:
                raise RemoteCallError(f"no process could be started: {started['error']}")
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return _Worker(self, ours, started["pid"])

    def end(self, pid: int) -> int | None:
        """Kill a process, and return its exit code."""
        try:
            return self._ask("end", pid)
        except RemoteCallError:  # the server has ended, and its processes with it
            return None

    def _ask(self, what: str, pid: int = 0, passed: Connection | None = None) -> Any:
        with self._lock:
            if self._failure:
                raise RemoteCallError(self._failure)
            try:
                self._wait_until_ready()
                self._control.send((what, pid))
                if passed is not None:
                    reduction.send_handle(self._control, passed.fileno(), self._process.pid)
                return _answer(self._control, _CONTROL_TIMEOUT_S)
            except (OSError, EOFError) as error:
                self._abandon()
                raise RemoteCallError(
                    f"the process that starts the others died ({_status(self._process.returncode)})"
                ) from error
            except BaseException:
                self._abandon()  # an answer may arrive after its caller stopped waiting
                raise

    def _wait_until_ready(self) -> None:
        if self._ready:
            return
        if self._pending is not None:
            self._control.send(self._pending)
            self._pending = None
        reply = _answer(self._control, _START_TIMEOUT_S)
        if "error" in reply:
            self._failure = (
                f"the function cannot be loaded in a process: {reply['error']}: {reply['message']}"
            )
            raise RemoteCallError(self._failure)
        self._ready = True

    def _abandon(self) -> None:
        self.gone = not self._failure
        with suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with self._closing:  # two threads may end the process at the same time
            self._control.close()

    def stop(self) -> None:
        """End the server and all of its processes."""
        # Does not take the lock, because its holder may wait for an import that never ends.
        self.gone = True
        if self._ready:
            with suppress(OSError, subprocess.TimeoutExpired), self._lock:
                self._control.send(("quit", 0))
                self._process.wait(_CONTROL_TIMEOUT_S)
        self._abandon()


class _Worker:
    """One worker process."""

    def __init__(self, server: _Server, pipe: Connection, pid: int) -> None:
        self.server, self.pid = server, pid
        self._pipe = pipe
        self._ended = False

    def wait_until_ready(self) -> None:
        """Wait until the worker is ready for its first call."""
        reply = self.ask(None, _START_TIMEOUT_S)
        if "error" in reply:
            raise RemoteCallError(
                f"the function cannot be started in a process: {reply['error']}: {reply['message']}"
            )

    def is_waiting(self) -> bool:
        """Whether the worker is alive and idle."""
        return not self._pipe.poll()

    def ask(self, request: bytes | None, timeout: float | None) -> dict[str, Any]:
        """Send an optional request and wait for the answer."""
        try:
            if request is not None:
                self._pipe.send_bytes(request)
            return _answer(self._pipe, timeout)
        except TimeoutError:
            raise RemoteTimeoutError(f"no answer within {timeout:g} s") from None
        except (OSError, EOFError) as error:
            raise RemoteDiedError(self.end()) from error

    def end(self) -> int | None:
        """Kill the worker and its children; return its exit code, but only the first time."""
        if self._ended:
            return None
        self._ended = True
        self._pipe.close()
        return self.server.end(self.pid)

    def close(self) -> None:
        """Release a worker that has ended."""
        self._pipe.close()


def _answer(source: Connection, timeout: float | None) -> Any:
    if not source.poll(timeout):
        raise TimeoutError
    return json.loads(source.recv_bytes())


def _stop_all(servers: list[_Server], pid: int) -> None:
    if pid == os.getpid():  # a fork that ends must not end its parent's workers
        for server in list(servers):
            server.stop()


def _status(code: int | None) -> str:
    if code is None:
        return "nobody knows how"
    if code >= 0:
        return f"exit status {code}"
    with suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


class _Pickler(pickle.Pickler):
    """Notices objects defined in the program's own file."""

    uses_main = False

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType)) and obj.__module__ in _MAIN:
            self.uses_main = True
        return NotImplemented


def _importable(target: Any, start: Any, prepare: str | None) -> dict[str, Any]:
    """Return data with which a different process can load the function."""
    if isinstance(target, tuple):
        path, name = target
        if start is not None:
            raise ConfigError("`start` goes with a function, not with a file and a name")
        return {"target": ("file", str(path), name), "main": None, "prepare": prepare}
    if prepare is not None:
        raise ConfigError("`prepare` goes with a file and a name, not with a function")
    content = io.BytesIO()
    pickler = _Pickler(content)
    try:
        pickler.dump((target, start))
    except Exception as error:
        raise ConfigError(
            f"{target!r} cannot be sent to another process: {error}; define it at the top of a "
            "module, not inside a function, and no lambda"
        ) from error
    main = _program() if pickler.uses_main else None
    return {"target": ("pickle", content.getvalue(), ""), "main": main}


def _program() -> tuple[str, str]:
    """Return how the running program can be imported again."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return "module", spec.name
    path = getattr(main, "__file__", None)
    if path is None or not os.path.isfile(path):
        raise ConfigError(
            "what is defined at a prompt, in a notebook or by `python -c` cannot be imported by "
            "another process; put it into a module of its own"
        )
    return "path", os.path.abspath(path)
