"""Sessions: an interpreter in a sandbox that is given one piece of code after another.

No text marks where an answer ends, so nothing that the code holds or prints can be taken for such a
mark. Errors on standard error are no failure by themselves. What background work prints between two
pieces comes with the later one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import queue
import signal
import struct
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from torchrl_llm.sandbox.contained_process import Contained
from torchrl_llm.sandbox.interface import Limits, SandboxResult, SandboxSession, check_seconds
from torchrl_llm.sandbox.process_watch import Capture, Feed, classify, cpu_seconds, pump

INTERPRETER = Path(__file__).with_name("interpreter.py")
"""The program that runs inside."""

_T = TypeVar("_T")
_ANSWER_BYTES = 4096
_IDLE_S = 1.0


class _Answers(Capture):
    """The pipe on which the interpreter answers, one frame for each piece."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, keep=_ANSWER_BYTES)

    def complete(self) -> bool:
        """Whether a whole frame has come, or something that is none."""
        if len(self.kept) < 4:
            return False
        return len(self.kept) - 4 >= min(self._length(), _ANSWER_BYTES - 4)

    def _length(self) -> int:
        return struct.unpack(">I", self.kept[:4])[0]

    def take_answer(self) -> tuple[int, bool] | None:
        """Exit code and whether memory ran out; ``None`` if there is no frame, or none of ours."""
        frame = bytes(self.kept[4:])
        self.reset()
        try:
            values = json.loads(frame)
            return int(values["exit_code"]), bool(values["memory"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return None


class PipeSession(SandboxSession):
    """A session whose interpreter was given a pipe for code and one for its answers.

    Args:
        start: starts the interpreter; it is given the two descriptors that belong inside.
        limits: of the session.
        answers_fd: where the answers come from, if not from the second of these.
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
        # Also where nobody closes it, and where the process ends.
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

    def run(self, code: str, *, wall_s: float | None = None) -> SandboxResult:
        """See :meth:`SandboxSession.run`; one piece at a time, others wait."""
        check_seconds("wall_s", wall_s, optional=True)
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
            ended = "ready"  # it answered, then died of something that it had left running
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
        """End an idle session if what it left running has outgrown its limits."""
        if self._lock.acquire(blocking=False):
            try:
                if self._contained is not None and self._contained.tree.outgrown():
                    self._end("what ran in the background outgrew the session's limits")
            finally:
                self._lock.release()

    def close(self) -> None:
        """See :meth:`SandboxSession.close`; a piece that is running is cut short."""
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
    elif contained is not None:  # a fork of the trainer lets go of its copy, and ends nothing
        contained.close_pipes()
    answers.close()
    os.close(code_w)


class _Keeper:
    """A thread that lives as long as the process.

    The kernel ends a sandbox when the thread that started it ends, so one that is to outlive a
    worker of some pool has to be started here. Between starts it looks after the idle sessions.
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
