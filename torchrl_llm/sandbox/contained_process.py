"""A process in a sandbox, and sessions of several pieces of code.

:class:`Contained` runs one program. :class:`PipeSession` keeps an interpreter running and sends it
pieces of code. Answers come on a separate pipe, so text that the code prints cannot be mistaken for
the end of an answer. Output on standard error alone is not a failure. Output of background work
between two pieces is returned with the later piece.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import queue
import signal
import struct
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path, PurePosixPath
from typing import TypeVar

from torchrl_llm._checked import checked
from torchrl_llm.sandbox.cgroups import control_group
from torchrl_llm.sandbox.interface import Limits, SandboxResult, SandboxSession, Seconds
from torchrl_llm.sandbox.process_watch import Capture, Feed, Tree, classify, cpu_seconds, pump

GRACE_S = 1.5
"""Time limit in seconds for a killed process to end."""

INTERPRETER = Path(__file__).with_name("interpreter.py")
_T = TypeVar("_T")
_ANSWER_BYTES = 4096
_IDLE_S = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A program for a sandbox.

    Attributes:
        argv: program and arguments, with paths inside the sandbox.
        limits: limits of the run.
        files: maps a path inside the program's folder to the contents.
        stdin: descriptor for the standard input; ``None`` for ``/dev/null``.
        pass_fds: further descriptors to pass.
        env: variables in addition to the sandbox's variables.
        folder: working directory on this machine, read-only; by default a new folder.
        network: whether the program shares the network of this machine.
    """

    argv: Sequence[str]
    limits: Limits
    files: Mapping[PurePosixPath, bytes] = dataclasses.field(default_factory=dict)
    stdin: int | None = None
    pass_fds: Sequence[int] = ()
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    folder: str | None = None
    network: bool = False


class Contained:
    """A process in a sandbox with its output pipes; as a context manager it cleans up at the end.

    Args:
        program: the program.
        argv: the whole command line, including the sandbox.
        env: the complete environment.
        pass_fds: descriptors for the sandbox, in addition to the program's.

    Raises:
        OSError: when the sandbox program cannot be started.
        ValueError: when ``argv`` is not a valid command line.

    Attributes:
        overhead: number of processes of the sandbox itself.
        grouped: whether to count the memory with a control group, if possible.
    """

    overhead = 0
    grouped = True

    def __init__(
        self,
        program: Program,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.program, limits = program, program.limits
        group = control_group(limits.memory_bytes, limits.file_bytes) if self.grouped else None
        self.group = group
        out_r, out_w = os.pipe()
        err_r, err_w = os.pipe()
        self.stdout = Capture(out_r, limits.output_bytes)
        self.stderr = Capture(err_r, limits.output_bytes)
        try:
            self.process = subprocess.Popen(
                argv if group is None else [*group.argv, *argv],
                stdin=subprocess.DEVNULL if program.stdin is None else program.stdin,
                stdout=out_w,
                stderr=err_w,
                env=dict(env),
                cwd="/",
                pass_fds=(*pass_fds, *program.pass_fds),
                start_new_session=True,
            )
        except BaseException:
            self.close_pipes()
            if group is not None:
                group.close()
            raise
        finally:
            os.close(out_w)
            os.close(err_w)
        self.tree = Tree(self.process.pid, limits, overhead=self.overhead, group=group)

    @property
    def outputs(self) -> tuple[Capture, ...]:
        """All pipes that must be read while the process runs."""
        return (self.stdout, self.stderr)

    def interrupt(self) -> None:
        """Request the end of the process; the watching thread will end it."""
        self.process.terminate()

    def kill(self) -> None:
        """End the process and all processes that it started, and wait until they have ended."""
        self.process.kill()
        self.wait()

    def wait(self) -> None:
        """Wait for the process itself for a short while."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_S)

    def exit_code(self) -> int | None:
        """Exit code, negative for a signal; ``None`` if the sandbox failed to run it."""
        return self.process.returncode

    @property
    def out_of_memory(self) -> bool:
        """Whether the process, or a child process, was killed for its memory."""
        return self.group is not None and self.group.exceeded

    def close_pipes(self) -> None:
        """Close the reading ends."""
        for output in self.outputs:
            output.close()

    def close(self) -> None:
        """Remove the process, its children and its files; may be called twice."""
        self.kill()
        self.close_pipes()
        if self.group is not None:
            self.group.close()

    def __enter__(self) -> Contained:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def interpreter_argv(python: str, *places: str | int) -> list[str]:
    """Return the command line of an interpreter that keeps its names.

    Args:
        python: path of the interpreter inside the sandbox.
        places: see :mod:`torchrl_llm.sandbox.interpreter`.
    """
    return [python, "-E", "-s", "-B", "-c", INTERPRETER.read_text(), *map(str, places)]


class _Answers(Capture):
    """The pipe for the interpreter's answers, one frame per piece."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, keep=_ANSWER_BYTES)

    def complete(self) -> bool:
        """Whether a whole frame, or an invalid one, has arrived."""
        if len(self.kept) < 4:
            return False
        (length,) = struct.unpack(">I", self.kept[:4])
        return len(self.kept) - 4 >= min(length, _ANSWER_BYTES - 4)

    def take_answer(self) -> tuple[int, bool] | None:
        """Return the exit code and whether memory ran out; ``None`` without a valid frame."""
        frame = bytes(self.kept[4:])
        self.reset()
        try:
            values = json.loads(frame)
            return int(values["exit_code"]), bool(values["memory"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return None


class PipeSession(SandboxSession):
    """A session with a pipe for code and a pipe for the interpreter's answers.

    Args:
        start: function that starts the interpreter with the two inner descriptors.
        limits: limits of the session.
        answers_fd: descriptor of the answers, if different from the second inner descriptor.
    """

    def __init__(
        self,
        start: Callable[[int, int], Contained],
        limits: Limits,
        *,
        answers_fd: int | None = None,
    ) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._seconds = 0.0
        self._contained: Contained | None = None
        self._why_over = "the session was closed"
        code_r, self._code_w = os.pipe()
        answers_r, answers_w = os.pipe()
        if answers_fd is not None:
            os.close(answers_r)
        self._answers = _Answers(answers_r if answers_fd is None else answers_fd)
        try:
            self._contained = _keeper().call(lambda: start(code_r, answers_w))
        except (OSError, ValueError) as error:
            self._why_over = f"the interpreter cannot be started: {error}"
        finally:
            os.close(code_r)
            os.close(answers_w)
        # Also runs if the session is never closed, and when the process ends.
        self._finalizer = weakref.finalize(
            self, _let_go, self._contained, self._answers, self._code_w, os.getpid()
        )
        if self._contained is None:
            self._finalizer()
        else:
            _keeper().sessions.add(self)

    @property
    def alive(self) -> bool:
        """See :attr:`SandboxSession.alive`."""
        contained = self._contained
        return contained is not None and contained.process.poll() is None

    @checked
    def run(self, code: str, *, wall_s: Seconds | None = None) -> SandboxResult:
        """See :meth:`SandboxSession.run`; runs one piece at a time, and other callers wait."""
        with self._lock:
            if not self.alive:
                self._end("the interpreter ended between two pieces of code")
                return SandboxResult(
                    status="sandbox_error", stderr=f"{self._why_over}; open another session"
                )
            return self._run(
                self._contained, code, self._limits.wall_s if wall_s is None else wall_s
            )

    def _run(self, contained: Contained, code: str, wall_s: float) -> SandboxResult:
        start = time.monotonic()
        for output in (contained.stdout, contained.stderr):
            output.reset()
        payload = json.dumps({"code": code}).encode()
        ended = pump(
            contained.process,
            (*contained.outputs, self._answers),
            deadline=start + wall_s,
            tree=contained.tree,
            feed=Feed(self._code_w, struct.pack(">I", len(payload)) + payload),
            ready=self._answers.complete,
        )
        answer = self._answers.take_answer()
        if ended == "exit" and answer is not None:
            ended = "ready"  # answered, then ended by a background process
        if ended == "ready" and contained.out_of_memory:
            ended = "memory"
        exit_code: int | None = -signal.SIGKILL
        if ended == "ready" and answer is not None:
            exit_code, out_of_memory = answer
            ended = "memory" if out_of_memory else ended
        if ended != "ready" or answer is None:
            contained.kill()
            if ended == "exit":
                exit_code = contained.exit_code()
                ended = "memory" if contained.out_of_memory else ended
        contained.stdout.drain()
        contained.stderr.drain()
        self._seconds += time.monotonic() - start
        result = classify(
            ended,
            exit_code,
            contained.stdout,
            contained.stderr,
            self._seconds,
            cpu_seconds(self._limits),
        )
        if ended != "ready" or answer is None:
            self._end(f"the interpreter was ended ({result.status})")
        return dataclasses.replace(result, seconds=time.monotonic() - start)

    def check(self) -> None:
        """End an idle session if its background processes exceed the limits."""
        if self._lock.acquire(blocking=False):
            try:
                if self._contained is not None and self._contained.tree.outgrown():
                    self._end("what ran in the background outgrew the session's limits")
            finally:
                self._lock.release()

    def close(self) -> None:
        """See :meth:`SandboxSession.close`; a running piece is stopped."""
        contained = self._contained
        if contained is not None:
            contained.interrupt()
            with self._lock:
                self._end("the session was closed")

    def _end(self, why: str) -> None:
        contained, self._contained = self._contained, None
        if contained is None:
            return
        self._why_over = why
        self._finalizer()


def _let_go(contained: Contained | None, answers: Capture, code_w: int, owner: int) -> None:
    if contained is not None and os.getpid() == owner:
        contained.close()
    elif contained is not None:  # a fork of the trainer drops its copy without ending the process
        contained.close_pipes()
    answers.close()
    os.close(code_w)


class _Keeper:
    """A thread that lives as long as the process.

    The kernel ends a sandbox when the thread that started it ends. So this thread starts sandboxes
    that must outlive a pool's worker thread. Between starts, the thread checks the idle sessions.
    """

    def __init__(self) -> None:
        self.sessions: weakref.WeakSet[PipeSession] = weakref.WeakSet()
        self._jobs: queue.SimpleQueue[tuple[Callable[[], object], Future]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="sandbox-sessions", daemon=True).start()

    def call(self, function: Callable[[], _T]) -> _T:
        """Call a function on the thread and wait for it."""
        future: Future = Future()
        self._jobs.put((function, future))
        return future.result()

    def _work(self) -> None:
        while True:
            try:
                function, future = self._jobs.get(timeout=_IDLE_S if self.sessions else None)
            except queue.Empty:
                for session in list(self.sessions):
                    session.check()
                continue
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            del function, future


@functools.cache
def _keeper() -> _Keeper:
    return _Keeper()


# A forked process has none of its parent's threads.
os.register_at_fork(after_in_child=_keeper.cache_clear)
