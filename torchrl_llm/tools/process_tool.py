"""A tool that runs in worker processes, for work that is CPU-bound or may never end.

It is not a sandbox: the processes have the trainer's rights. Use :mod:`torchrl_llm.sandbox` for
code of a model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any

from torchrl_llm._checked import Ge, Gt, checked
from torchrl_llm.data.failures import Failure
from torchrl_llm.errors import ConfigError
from torchrl_llm.sandbox.workers import (
    RemoteDiedError,
    RemoteRaisedError,
    RemoteTimeoutError,
    WorkerPool,
)
from torchrl_llm.tools.tool import FunctionTool, Tool, as_output, failure, no_answer
from torchrl_llm.tools.tool_call import ToolCall, ToolOutput


class ProcessTool(Tool):
    """Runs another tool in a pool of processes.

    Python runs one thread at a time, so threads do not speed up CPU-bound calls; processes use all
    cores. If a call takes too long, its process and all child processes are killed, and a new
    process starts. A crash does not affect other calls.

    The tool is pickled once, so a function must be importable. A script that defines the function
    itself needs ``if __name__ == "__main__":``, as in all programs with ``multiprocessing``. Each
    process uses one CPU thread.

    Args:
        tool: the tool, or a function as for
            :class:`~torchrl_llm.tools.tool.FunctionTool`.
        num_processes: number of processes; one per core by default.
        limit_s: time limit of a call in seconds, not including the wait for a free process.

    Raises:
        ConfigError: for a tool that keeps state between calls (calls run in different processes) or
            cannot be pickled, or invalid numbers.

    Example:
        >>> import math
        >>> schema = {"name": "gcd", "parameters": {"type": "object"}}
        >>> tool = ProcessTool(FunctionTool(math.gcd, schema=schema), num_processes=2)
        >>> tool.name, tool.num_processes
        ('gcd', 2)
    """

    @checked
    def __init__(
        self,
        tool: Tool | Callable[..., Any],
        *,
        num_processes: Annotated[int, Ge(1)] | None = None,
        limit_s: Annotated[float, Gt(0)] = 10.0,
    ) -> None:
        self.tool = tool if isinstance(tool, Tool) else FunctionTool(tool)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        self.num_processes = (
            cores or os.cpu_count() or 1 if num_processes is None else num_processes
        )
        self.limit_s = limit_s
        if self.tool.stateful:
            raise ConfigError(
                f"{self.tool.name!r} keeps something between calls, which would meet different "
                "processes; use it without ProcessTool"
            )
        self.name, self.description = self.tool.name, self.tool.description
        self.parameters, self.kind = self.tool.parameters, self.tool.kind
        self.timeout = math.inf  # longer than the call's own limit, which reports the cause
        self._pool = WorkerPool(
            _Answers(self.tool), start=self.tool.start, num_workers=self.num_processes
        )

    @property
    def argument_schema(self) -> Mapping[str, Any]:
        """Argument schema of the tool."""
        return self.tool.argument_schema

    def start(self) -> None:
        """Start to import the tool's modules; the first call waits for the imports."""
        self._pool.start()

    def run(self, call: ToolCall) -> ToolOutput:
        """Run the call in a process."""
        try:
            output = self._pool.call(replace(call, state=None), timeout=self.limit_s)
        except RemoteTimeoutError:
            text = f"No answer within {self.limit_s:g} s; the call was ended."
            return no_answer("ToolTimeout", text)
        except RemoteDiedError as error:
            code = error.exit_code
            return no_answer("ToolDied", f"The tool's process died (exit code {code}).", code)
        except RemoteRaisedError as error:  # an error of the transfer, not of the tool
            told = Failure.told(error.kind, str(error), error.frames, "tool")
            return ToolOutput(f"{error.kind}: {error}", error.kind, failure=told)
        failed = output.pop("failure")
        return ToolOutput(**output, failure=failed and Failure(**failed))

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


class _Answers:
    """Runs a call inside a process."""

    def __init__(self, tool: Tool) -> None:
        self._tool = tool

    def __call__(self, call: ToolCall) -> ToolOutput:
        try:
            return as_output(self._tool.run(call))
        except BaseException as error:  # SystemExit ends the call, not the process
            return failure(error)
