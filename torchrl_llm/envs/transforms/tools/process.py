"""Tools in processes of their own: for work that keeps the interpreter busy, or may never end.

It is no sandbox: the processes have the trainer's rights
(:mod:`torchrl_llm.envs.sandbox` is where code of a model runs).
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import queue
import signal
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torchrl_llm.envs.transforms.tools.call import ToolCall, ToolOutput
from torchrl_llm.envs.transforms.tools.tool import FunctionTool, Tool, as_text, failure
from torchrl_llm.errors import ConfigError

__all__ = ["ProcessTool"]

_START_S = 300.0


class ProcessTool(Tool):
    """Runs another tool in a pool of processes.

    Python runs one thread at a time, so calls that compute gain nothing from threads; processes use
    all cores. A call that takes too long is really ended: its process is killed, with what it
    has started, and replaced. One that dies takes no other call with it.

    The tool is sent by pickle: a function must be one that can be imported. As always with
    processes, a script that uses this needs ``if __name__ == "__main__":``.

    Args:
        tool: the tool, or a function as for
            :class:`~torchrl_llm.envs.transforms.tools.tool.FunctionTool`.
        num_processes: how many; one a core by default.
        limit_s: seconds that a call may take, waiting for a free process not counted.

    Raises:
        ConfigError: a tool that keeps a state between calls (they meet different processes) or
            cannot be pickled, or impossible numbers.

    Example:
        >>> import math
        >>> schema = {"name": "gcd", "parameters": {"type": "object"}}
        >>> tool = ProcessTool(FunctionTool(math.gcd, schema=schema), num_processes=2)
        >>> tool.name, tool.num_processes
        ('gcd', 2)
    """

    def __init__(
        self,
        tool: Tool | Callable[..., Any],
        *,
        num_processes: int | None = None,
        limit_s: float = 10.0,
    ) -> None:
        self.tool = tool if isinstance(tool, Tool) else FunctionTool(tool)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        self.num_processes = (
            cores or os.cpu_count() or 1 if num_processes is None else num_processes
        )
        self.limit_s = limit_s
        if self.num_processes < 1 or not limit_s > 0:
            raise ConfigError(
                f"num_processes and limit_s must be positive, got {num_processes} and {limit_s}"
            )
        if self.tool.stateful:
            raise ConfigError(
                f"{self.tool.name!r} keeps something between calls, which would meet different "
                "processes; use it without ProcessTool"
            )
        try:
            self._pickled = pickle.dumps(self.tool)
        except Exception as error:
            raise ConfigError(
                f"{self.tool.name!r} cannot be sent to a process: {error}; use a function of a "
                "module, no lambda and none inside another function"
            ) from error
        self.name, self.description = self.tool.name, self.tool.description
        self.parameters, self.kind = self.tool.parameters, self.tool.kind
        self.timeout = math.inf  # a call always ends here, and its own limit says why
        self._workers: list[_Worker] = []
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()

    @property
    def argument_schema(self) -> Mapping[str, Any]:
        """That of the tool."""
        return self.tool.argument_schema

    def start(self) -> None:
        """Start the processes; they get ready while the first call waits."""
        if self._workers:
            return
        self._workers = [_Worker(self._pickled) for _ in range(self.num_processes)]
        self._idle = queue.SimpleQueue()
        for worker in self._workers:
            worker.start()
            self._idle.put(worker)
        weakref.finalize(self, _kill, self._workers)

    def run(self, call: ToolCall) -> ToolOutput:
        """Have a process answer the call."""
        idle = self._idle
        worker = idle.get()
        try:
            return worker.answer(replace(call, state=None), self.limit_s)
        finally:
            idle.put(worker)

    def close(self) -> None:
        """End the processes."""
        workers, self._workers = self._workers, []
        _kill(workers)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_workers": [], "_idle": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _idle=queue.SimpleQueue())


class _Worker:
    """One process, started again when it has died."""

    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled
        self._process: Any = None
        self._pipe: Any = None
        self._ready = False

    def start(self) -> None:
        context = _context()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, self._pickled), name="tool", daemon=True
        )
        self._process.start()
        theirs.close()
        self._ready = False

    def answer(self, call: ToolCall, limit_s: float) -> ToolOutput:
        try:
            if self._process is None:
                self.start()
            if not self._ready:
                self._wait(_START_S)
                self._ready = True
            self._pipe.send(call)
            return ToolOutput(*self._wait(limit_s))
        except TimeoutError:
            self.kill()
            text = f"No answer within {limit_s:g} s; the call was ended."
            return ToolOutput(text, "ToolTimeout")
        except (EOFError, OSError):
            code = self.kill()
            return ToolOutput(f"The tool's process died (exit code {code}).", "ToolDied", code)

    def _wait(self, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            raise TimeoutError
        return self._pipe.recv()

    def kill(self) -> int | None:
        """End the process and what it has started; its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        # It leads a group of its own (once it runs); what it has started is in it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        self._pipe.close()
        return process.exitcode


def _kill(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.kill()


def _context() -> Any:
    methods = multiprocessing.get_all_start_methods()
    if "forkserver" not in methods:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    if multiprocessing.get_start_method(allow_none=True) != "forkserver":
        # Nobody else uses that server: let it import this once, instead of each process.
        context.set_forkserver_preload([__name__])
    return context


def _serve(pipe: Any, pickled: bytes) -> None:
    """The life of a process: a tool, and call after call."""
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tool = pickle.loads(pickled)
    tool.start()
    pipe.send(None)
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            return
        pipe.send(tuple(_output(tool, call)))


def _output(tool: Tool, call: ToolCall) -> ToolOutput:
    try:
        value = tool.run(call)
        if isinstance(value, ToolOutput):
            return value._replace(content=as_text(value.content))
        return ToolOutput(as_text(value))
    except BaseException as error:  # the end of a call, not of the process
        return failure(error)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)
