"""An executor that runs the calls of a batch in parallel, with time limits.

An exception of a tool is never raised in the caller, and no call delays the batch longer than its
limit. The executor does not depend on conversations or tensordicts.

Next: :mod:`torchrl_llm.tools.tool_transform` uses it in an environment;
:class:`~torchrl_llm.tools.process_tool.ProcessTool` runs a tool in processes.
"""

from __future__ import annotations

import difflib
import math
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from torchrl._utils import logger

from torchrl_llm._checked import Ge, Gt, checked
from torchrl_llm.data.failures import Failure
from torchrl_llm.errors import ConfigError
from torchrl_llm.sandbox.workers import DaemonThreads
from torchrl_llm.tools.call_arguments import ArgumentError, argument_checker, describe_parameters
from torchrl_llm.tools.tool import Restarted, Tool, as_output, failure
from torchrl_llm.tools.tool_call import BrokenCall, ToolCall, ToolOutput, ToolResult


class ToolExecutor(Restarted):
    """Runs the tool calls of many conversations.

    Calls of different conversations run in parallel, in threads. Within a conversation, calls of
    stateful tools and actions run one after the other. The result of a call that exceeds its limit
    is the error ``"ToolTimeout"``. Python cannot stop its thread, so the thread continues;
    :attr:`num_hanging` counts these threads. If ``max_concurrency`` calls of a tool hang, the tool
    is not called again until one of them ends. To stop calls at the limit, run the tool in
    processes (:class:`~torchrl_llm.tools.process_tool.ProcessTool`).

    Args:
        tools: tools; each needs a name.
        timeout: time limit of a call in seconds, for tools without their own limit.
        max_concurrency: number of parallel calls.
        max_result_chars: largest number of characters of a result; the middle of a longer result is
            left out, with a note.
        stop_on_error: skip the remaining calls of a conversation after a failure; all calls of a
            conversation then run one after the other.

    Raises:
        ConfigError: for two tools with the same name, or an invalid number.

    Example:
        >>> from torchrl_llm.tools.tool import FunctionTool
        >>> def add(a: int, b: int) -> int:
        ...     '''Add two numbers.
        ...
        ...     Args:
        ...         a: one of them.
        ...         b: the other.
        ...     '''
        ...     return a + b
        >>> executor = ToolExecutor([FunctionTool(add)])
        >>> calls = [[ToolCall("add", {"a": 1, "b": "2"})], [ToolCall("ad")]]
        >>> [[(r.content, r.error) for r in row] for row in executor.run(calls)]
        [[('3', '')], [("There is no tool 'ad'. Did you mean 'add'?", 'UnknownTool')]]
        >>> executor.close()
    """

    _own = ("_lock", "_checkers", "_hanging", "_threads", "_started")

    @checked
    def __init__(
        self,
        tools: Iterable[Tool] = (),
        *,
        timeout: Annotated[float, Gt(0)] = 10.0,
        max_concurrency: Annotated[int, Ge(1)] = 64,
        max_result_chars: Annotated[int, Ge(64)] = 16_384,
        stop_on_error: bool = False,
    ) -> None:
        self.timeout = timeout
        self.max_concurrency = max_concurrency
        self.max_result_chars = max_result_chars
        self.stop_on_error = stop_on_error
        self.tools: dict[str, Tool] = {}
        self._begin()
        self.add(tools)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._checkers: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {}
        self._hanging: Counter[str] = Counter()
        self._threads: DaemonThreads | None = None
        self._started: set[str] = set()

    def add(self, tools: Iterable[Tool]) -> None:
        """Add tools.

        Raises:
            ConfigError: when a name is already used, or empty.
        """
        for tool in tools:
            if not isinstance(tool.name, str) or not tool.name:
                raise ConfigError(f"a tool needs a name, {tool!r} has {tool.name!r}")
            if tool.name in self.tools:
                raise ConfigError(f"two tools are named {tool.name!r}; rename one of them")
            self.tools[tool.name] = tool

    @property
    def num_hanging(self) -> int:
        """Number of calls that timed out and have not ended yet."""
        return sum(self._hanging.values())

    # -- life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the tools that have not been started; :meth:`run` also starts them."""
        with self._lock:
            if self._threads is None:
                self._threads = DaemonThreads(self.max_concurrency)
                weakref.finalize(self, self._threads.close)
            for name, tool in self.tools.items():
                if name not in self._started:
                    tool.start()
                    self._checker(tool)  # the time limit of the call does not include the start
                    self._started.add(name)

    def end_session(self, session: int) -> None:
        """Tell the tools that a conversation has ended.

        Args:
            session: ``traj_id`` of the conversation.
        """
        for tool in self.tools.values():
            if tool.name in self._started:
                _quietly(tool, tool.end_session, session)

    def close(self) -> None:
        """Close tools and threads; may be called twice, and the object can be used again."""
        with self._lock:
            threads, self._threads = self._threads, None
            started, self._started = self._started, set()
        for name in started:
            _quietly(self.tools[name], self.tools[name].close)
        if threads is not None:
            threads.close()

    # -- calls ------------------------------------------------------------------------------------

    def run(self, batch: Sequence[Sequence[ToolCall | BrokenCall]]) -> list[list[ToolResult]]:
        """Run all calls.

        Args:
            batch: the calls of each conversation, in the order in which they were written.

        Returns:
            A result for each call, in the same order.
        """
        if not any(batch):
            return [[] for _ in batch]
        self.start()
        run = _Run(batch, self)
        try:
            for chain in run.chains:
                self._threads.submit(chain.work)
            run.wait()
        finally:
            run.give_up()
        return run.results

    def answer(self, call: ToolCall) -> ToolResult:
        """Run one call in this thread, without a time limit."""
        begun = time.perf_counter()
        try:
            output = self._output(call)
        except BaseException as error:  # a tool may raise any exception, even SystemExit
            output = failure(error)
        content, cut = shorten(output.content, self.max_result_chars)
        failed = output.failure and output.failure._replace(source=f"tool {call.tool!r}")
        return ToolResult(
            call,
            content,
            error=output.error,
            seconds=time.perf_counter() - begun,
            exit_code=output.exit_code,
            truncated=cut or output.truncated,
            failure=failed,
        )

    def _output(self, call: ToolCall) -> ToolOutput:
        tool = self.tools.get(call.tool)
        if tool is None:
            return ToolOutput(self._unknown(call.tool), "UnknownTool")
        try:
            args = self._checker(tool)(call.args)
        except ArgumentError as error:
            wanted = describe_parameters(tool.parameters)
            text = f"Invalid arguments for {tool.name}: {error}. Expected {wanted}."
            return ToolOutput(text, "InvalidArguments")
        return as_output(tool.run(replace(call, args=args)))

    def _checker(self, tool: Tool) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        checker = self._checkers.get(tool.name)
        if checker is None:
            checker = self._checkers[tool.name] = argument_checker(tool.argument_schema)
        return checker

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name[:80], self.tools, 1)
        near = near or [tool for tool in self.tools if len(name) > 2 and name in tool]
        shown = repr(name if len(name) <= 80 else name[:77] + "...")
        there = f"Did you mean {near[0]!r}?" if near else f"There are {sorted(self.tools)}."
        return f"There is no tool {shown}. {there}"

    # -- limits -----------------------------------------------------------------------------------

    def limit_of(self, call: ToolCall) -> float:
        """Return the time limit of a call in seconds."""
        tool = self.tools.get(call.tool)
        return self.timeout if tool is None or tool.timeout is None else tool.timeout

    def in_order(self, call: ToolCall) -> bool:
        """Whether a call waits for earlier calls of the same conversation."""
        tool = self.tools.get(call.tool)
        stateful = tool is not None and (tool.stateful or tool.kind == "action")
        return stateful or self.stop_on_error

    def _blocked(self, call: ToolCall) -> ToolResult | None:
        if self._hanging[call.tool] < self.max_concurrency:
            return None
        text = f"{call.tool} does not answer: {self._hanging[call.tool]} of its calls still hang."
        failed = Failure.told("ToolTimeout", text, source=f"tool {call.tool!r}")
        return ToolResult(call, text, error="ToolTimeout", failure=failed)

    def _given_up(self, call: ToolCall) -> None:
        with self._lock:
            self._hanging[call.tool] += 1
            threads = self._threads
        if threads is not None:
            threads.replace()


class _Chain:
    """Calls of one conversation that run one after the other in one thread."""

    def __init__(self, run: _Run, places: list[tuple[int, int]]) -> None:
        self.run, self.places = run, places
        self.at = 0
        self.deadline: float | None = None
        self.over = False

    def call(self) -> ToolCall:
        row, column = self.places[self.at]
        return self.run.batch[row][column]

    def work(self) -> bool:
        """Run the calls, and return whether the thread was abandoned meanwhile."""
        executor, changed = self.run.executor, self.run.changed
        while True:
            with changed:
                if self.over or self.at == len(self.places):
                    return False
                call = self.call()
                blocked = executor._blocked(call)
                self.deadline = time.monotonic() + executor.limit_of(call)
                changed.notify()
            result = blocked or executor.answer(call)
            with changed:
                if self.over:
                    with executor._lock:
                        executor._hanging[call.tool] -= 1
                    return True
                self.deadline = None
                self.put(result)
                if executor.stop_on_error and not result.ok:
                    self.skip("Not run, because a call before it failed.")
                changed.notify()

    def put(self, result: ToolResult) -> None:
        row, column = self.places[self.at]
        self.run.results[row][column] = result
        self.at += 1
        self.over = self.at == len(self.places)

    def give_up(self, error: str, text: str) -> None:
        """Answer the running call and the calls after it; the thread continues."""
        call = self.call()
        seconds = self.run.executor.limit_of(call)
        if self.deadline is not None:
            self.run.executor._given_up(call)
        failed = Failure.told(error, text, source=f"tool {call.tool!r}")
        self.put(ToolResult(call, text, error=error, seconds=seconds, failure=failed))
        self.skip("Not run, because a call before it did not end.")

    def skip(self, text: str) -> None:
        """Answer the remaining calls."""
        while not self.over:
            self.put(ToolResult(self.call(), text, error="NotRun"))


class _Run:
    """The calls of one batch while they run."""

    def __init__(self, batch: Sequence[Sequence[ToolCall | BrokenCall]], executor: Any) -> None:
        self.batch, self.executor = batch, executor
        self.changed = threading.Condition()
        self.results: list[list[Any]] = [[None] * len(calls) for calls in batch]
        self.chains: list[_Chain] = []
        for row, calls in enumerate(batch):
            ordered: list[tuple[int, int]] = []
            broken = False
            for column, call in enumerate(calls):
                if isinstance(call, BrokenCall):
                    self.results[row][column] = _broken(call, executor)
                    broken = executor.stop_on_error
                elif broken:
                    text = "Not run, because a call before it failed."
                    self.results[row][column] = ToolResult(call, text, error="NotRun")
                elif executor.in_order(call):
                    ordered.append((row, column))
                else:
                    self.chains.append(_Chain(self, [(row, column)]))
            if ordered:
                self.chains.append(_Chain(self, ordered))

    def wait(self) -> None:
        """Wait until every call is answered or timed out."""
        running = list(self.chains)
        with self.changed:
            while running:
                now = time.monotonic()
                for chain in running:
                    if chain.deadline is not None and chain.deadline <= now:
                        limit = self.executor.limit_of(chain.call())
                        text = f"No answer within {limit:g} s; the call was given up."
                        chain.give_up("ToolTimeout", text)
                running = [chain for chain in running if not chain.over]
                deadlines = [c.deadline for c in running if c.deadline is not None]
                if running:
                    left = min(deadlines, default=math.inf) - now
                    self.changed.wait(min(left, threading.TIMEOUT_MAX))

    def give_up(self) -> None:
        """Abandon unfinished calls when the caller was interrupted."""
        with self.changed:
            for chain in self.chains:
                if not chain.over:
                    chain.give_up("Interrupted", "Interrupted.")
            self.chains.clear()  # they reference the run and would keep the executor alive


def shorten(text: str, longest: int) -> tuple[str, bool]:
    r"""Shorten a text to at most ``longest`` characters by leaving out its middle.

    Characters that cannot be encoded (lone surrogates) are replaced.

    Args:
        text: any text.
        longest: largest number of characters, at least 64.

    Returns:
        The text, and whether it was cut.

    Example:
        >>> text, cut = shorten("x" * 1000, 64)
        >>> cut, len(text), text[:30]
        (True, 63, 'xxxxxxxxxxxxxxxxxxx\n[... 972 c')
    """
    cut = len(text) > longest
    if cut:
        # The length of the mark depends on its number; assume the largest.
        room = longest - len(f"\n[... {len(text)} characters left out ...]\n")
        head = (room + 1) * 2 // 3
        tail = room - head
        left = len(text) - room
        mark = f"\n[... {left} characters left out ...]\n"
        text = text[:head] + mark + (text[-tail:] if tail else "")
    return text.encode("utf-8", "replace").decode("utf-8"), cut


def _broken(call: BrokenCall, executor: ToolExecutor) -> ToolResult:
    text = f"This tool call cannot be read: {call.problem}."
    if call.expected:
        text += f" Expected {call.expected}"
    if executor.tools:
        text += f" Tools: {', '.join(sorted(executor.tools))}."
    text, _ = shorten(text, executor.max_result_chars)
    return ToolResult(ToolCall(""), text, error="MalformedCall")


def _quietly(tool: Tool, method: Callable[..., None], *args: Any) -> None:
    try:
        method(*args)
    except Exception as error:  # one tool's failure to close must not affect the others
        logger.warning(
            "%s of the tool %r failed: %s", method.__name__, tool.name, failure(error).content
        )
