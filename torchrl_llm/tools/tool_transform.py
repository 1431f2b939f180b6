"""A transform that adds tools to an environment.

:class:`ToolTransform` parses the calls in the model's turn, runs them with an executor and appends
the results to the conversation. Tools, parser and executor are replaceable.

Next: :mod:`~torchrl_llm.tools.tool` has the base class for your own tools,
:mod:`~torchrl_llm.tools.call_parsers` has the forms of calls.

Shape legend: ``B`` rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Composite, Unbounded
from torchrl.envs import Compose, Transform

from torchrl_llm._checked import Ge, checked
from torchrl_llm._registry import find
from torchrl_llm.data.column import Column
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.failures import tell_failures
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.data.specs import ColumnSpec
from torchrl_llm.data.text.codec import whole_characters
from torchrl_llm.errors import ConfigError
from torchrl_llm.tools.call_parsers import MessageCallParser, ToolParser, as_parser
from torchrl_llm.tools.executor import ToolExecutor
from torchrl_llm.tools.tool import FunctionTool, Tool
from torchrl_llm.tools.tool_call import BrokenCall, ToolCall, ToolResult

Calls = list[ToolCall | BrokenCall]
# Names of unknown tools may be as long as a turn.
_MOST_NAME_CHARS = 200
_COUNTS = ("num_calls", "num_failed", "auxiliary_turns")
_CUT_ANSWER = "No tool was called: your answer was cut before its end."


class ToolTransform(Transform):
    """Runs the tool calls of a conversation.

    At each step, the transform runs the calls in the turn of every row, in parallel for different
    rows. It appends one message per call to ``("next", <input mode>, "prompt")``, the next prompt
    of the model. Sampled tokens are never encoded again. Tokens of results have the source
    ``TOOL``, so they are not trained. Rows that are done or not stepped, and rows without a call,
    are left unchanged.

    The transform writes these keys under ``("next", "tools")``, with zeros at reset:

    - ``"calls"``: a column of tuples, the
      :meth:`~torchrl_llm.tools.tool_call.ToolResult.record` of each call of this turn;
    - ``"num_calls"``, ``"num_failed"``: int64 ``[B]``;
    - ``"auxiliary"``: bool ``[B, 1]``, whether this turn was only thinking: it called tools, but no
      tool of kind ``"action"``. Such a turn is not a step of the environment: rewards do not score
      it and :class:`~torchrl_llm.envs.transforms.StepCounter` does not count it;
    - ``"auxiliary_turns"``: int64 ``[B]``, the number of such turns since the last step.

    ``"env_step"`` does not count an auxiliary turn: the turn has the number of the step that it
    prepares.

    A failed call gets an error message as its result. A call fails if the tool raises or times out,
    if its name is unknown, if its arguments are invalid, or if the call is malformed. No failure
    raises an exception. If a tool itself fails, the log shows the first failure of each kind with
    traceback and row. Calls in a truncated response (``("tokens", "finish_reason")`` is ``LENGTH``
    or ``ABORT``) are not run, because the rest of the turn is missing; the result says so, and the
    turn is a step.

    Append it before rewards and step counters. Tools start at the first call and close with the
    environment (``env.close()``). An environment can have several of these transforms. The
    transform that has the tool answers the call, so tool names must be unique.

    Args:
        tools: tools, or functions with type hints and a Google-style docstring.
        parser: parser of calls; by default the form of the chat template, see
            :class:`~torchrl_llm.tools.call_parsers.MessageCallParser`. A function from a text to
            ``{"calls": [...]}`` works as well.
        tool_name: role of the appended messages.
        timeout: time limit of a call in seconds, for tools without their own limit.
        max_concurrency: number of parallel calls.
        max_calls: largest number of calls of one turn that are run; the other calls get one common
            answer.
        max_result_chars: largest number of characters of a result.
        max_auxiliary_turns: largest number of turns between two steps of the environment that only
            call auxiliary tools. After that, calls are rejected and the turn is a step, so that no
            episode runs forever.
        accept_cut: run the calls of a response that was truncated by its length.

    Raises:
        ConfigError: for tools that cannot be described, duplicate names, or invalid numbers. When
            the transform is appended, also for a tool name of a different transform.

    Example:
        >>> from torchrl_llm.envs import ChatEnv
        >>> def add(a: int, b: int) -> int:
        ...     '''Add two numbers.
        ...
        ...     Args:
        ...         a: one of them.
        ...         b: the other.
        ...     '''
        ...     return a + b
        >>> env = ChatEnv(batch_size=(1,)).append_transform(ToolTransform([add]))
        >>> td = env.reset(TensorDict({"query": ["1+2?"]}, batch_size=(1,)))
        >>> call = {"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
        >>> turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        >>> prompt = td["history"].prompt
        >>> td["history"].full = type(prompt).of([prompt.chats[0] + [turn]])
        >>> td = env.step(td)["next"]
        >>> td["history"].prompt[0, -1].content, td["tools", "auxiliary"]
        ('3', tensor([[True]]))
        >>> env.close()
    """

    use_step = True
    """Answers are part of an environment's step."""
    hands_over_state = False
    """Whether calls carry their row as ``ToolCall.state``."""

    @checked
    def __init__(
        self,
        tools: Iterable[Tool | Callable[..., Any]] = (),
        parser: ToolParser | Callable[[str], Mapping[str, Any]] | None = None,
        *,
        tool_name: str = "tool",
        timeout: float = 10.0,
        max_concurrency: int = 64,
        max_calls: Annotated[int, Ge(1)] = 16,
        max_result_chars: int = 16_384,
        max_auxiliary_turns: Annotated[int, Ge(1)] = 16,
        accept_cut: bool = False,
    ) -> None:
        super().__init__()
        self.parser = MessageCallParser() if parser is None else as_parser(parser)
        self.tool_name = tool_name
        self.max_calls = max_calls
        self.max_auxiliary_turns = max_auxiliary_turns
        self.accept_cut = accept_cut
        self.executor = ToolExecutor(
            [as_tool(tool) for tool in tools],
            timeout=timeout,
            max_concurrency=max_concurrency,
            max_result_chars=max_result_chars,
        )
        self._sessions: dict[int, int] = {}

    # -- tools ------------------------------------------------------------------------------------

    @property
    def tools(self) -> dict[str, Tool]:
        """The tools by name."""
        return self.executor.tools

    @property
    def tool_role(self) -> str:
        """Role of the appended messages, ``tool_name``."""
        return self.tool_name

    @property
    def timeout(self) -> float:
        """Time limit of a call in seconds, for tools without their own limit."""
        return self.executor.timeout

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools in the form of chat templates, for the ``tools`` argument of a policy."""
        return [tool.schema for tool in self.tools.values()]

    def start(self) -> None:
        """Start the tools now instead of at the first call."""
        self.executor.start()

    def close(self) -> None:
        """Close the tools; a later call restarts them."""
        self._sessions.clear()
        self.executor.close()
        super().close()

    def set_container(self, container: Any) -> None:
        """Reject an environment that already has a tool of the same name."""
        others = container if _is_stack(container) else ()
        for other in others:
            if isinstance(other, ToolTransform) and other is not self:
                for name in self.tools.keys() & other.tools.keys():
                    raise ConfigError(
                        f"{type(self).__name__} and {type(other).__name__} both have a tool named "
                        f"{name!r}, and a call of it would be answered twice; rename one of them"
                    )
        super().set_container(container)

    # -- one step ---------------------------------------------------------------------------------

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        turns = Turns.of(tensordict, next_tensordict, self._mode().turns(tensordict))
        calls = [
            self._calls(message) if message is not None and active else []
            for message, active in zip(turns.messages, turns.active, strict=True)
        ]
        results = self._answer(calls, turns)
        _tell(results, turns)
        if any(results):
            added = [self.result_messages(row) if row else [] for row in results]
            self._mode().append(tensordict, next_tensordict, added)
        self._write(tensordict, next_tensordict, results, turns)
        return next_tensordict

    def _mode(self) -> Any:
        if self.parent is None:
            raise ConfigError(f"{type(self).__name__} works in an environment only: append it")
        return self.parent.mode

    def _calls(self, message: Any) -> Calls:
        """Return the calls of a turn that this transform must answer."""
        found = self._found(message)
        earlier, later = self._beside()
        if not earlier and not later:
            return found
        # Other transforms may find the same calls and have a tool that this transform lacks. If
        # none has the tool, the first transform that finds the call answers it.
        theirs = [(other, other._found(message)) for other in (*earlier, *later)]
        known = {_sign(c) for other, calls in theirs for c in calls if _sign(c) in other.tools}
        first = {_sign(call) for _, calls in theirs[: len(earlier)] for call in calls}
        return [
            call for call in found if _sign(call) in self.tools or _sign(call) not in known | first
        ]

    def _found(self, message: Any) -> Calls:
        """Return all calls that the parser finds in a turn."""
        schemas = {name: tool.parameters for name, tool in self.tools.items()}
        try:
            return [_whole(call) for call in self.parser.parse(message, schemas)]
        except Exception as error:  # a text of a model must not end the batch
            return [BrokenCall(f"{type(error).__name__}: {error}")]

    def _beside(self) -> tuple[list[ToolTransform], list[ToolTransform]]:
        """Return the other tool transforms of the environment: before and after this transform."""
        stack = getattr(self.container, "transform", None)
        found = [t for t in stack if isinstance(t, ToolTransform)] if _is_stack(stack) else [self]
        place = next(at for at, transform in enumerate(found) if transform is self)
        return found[:place], found[place + 1 :]

    def _answer(self, calls: Sequence[Calls], turns: Turns) -> list[list[ToolResult]]:
        wanted: list[Calls] = []
        refused: list[list[ToolResult]] = []
        for row, found in enumerate(calls):
            session = turns.sessions[row]
            if found and session is not None:
                self._sessions[row] = session
            state = turns.rows(row) if found and self.hands_over_state else None
            ready = [
                replace(call, session=session, state=state) if isinstance(call, ToolCall) else call
                for call in found
            ]
            cut = self._is_cut(turns, row)
            more = turns.thought[row] < self.max_auxiliary_turns and not cut
            allowed = self.max_calls if more else 0
            wanted.append(ready[:allowed])
            refused.append(self._refusal(ready[allowed:], allowed, cut=cut))
        answered = self.executor.run(wanted)
        return [a + b for a, b in zip(answered, refused, strict=True)]

    def _is_cut(self, turns: Turns, row: int) -> bool:
        """Whether the calls of a row are skipped because its response was truncated."""
        reason = turns.finish[row]
        return not (reason.whole or (reason.cut and self.accept_cut))

    def _refusal(self, calls: Calls, allowed: int, *, cut: bool) -> list[ToolResult]:
        """Return one answer to all calls above the limit, or in a truncated response."""
        if not calls:
            return []
        first = calls[0] if isinstance(calls[0], ToolCall) else ToolCall("")
        if cut:
            return [ToolResult(first, _CUT_ANSWER, error="CutResponse")]
        text = f"{len(calls)} further calls were not run: at most {allowed} a turn."
        if not allowed:
            text = (
                f"No tool was called: {self.max_auxiliary_turns} turns with calls are the limit. "
                "Answer without tools now."
            )
        return [ToolResult(first, text, error="TooManyCalls")]

    def result_messages(self, results: Sequence[ToolResult]) -> list[dict[str, Any]]:
        """Return the messages with the results of the calls of a turn.

        Args:
            results: at least one result, in the order of the calls.

        Returns:
            By default a message per call, with role ``tool_name``, and the tool's ``name`` and the
            call's id if present. If the call has a tag, the result begins with it.
        """
        return [self._result_message(result) for result in results]

    def _result_message(self, result: ToolResult) -> dict[str, Any]:
        call = result.call
        content = result.content if call.tag is None else f"[{call.tag}] {result.content}"
        message = {"role": self.tool_name, "content": content}
        if call.tool:
            message["name"] = call.tool[:_MOST_NAME_CHARS]
        if call.id is not None:
            message["tool_call_id"] = call.id
        return message

    # -- columns ----------------------------------------------------------------------------------

    def _write(
        self,
        td: TensorDictBase,
        next_td: TensorDictBase,
        results: Sequence[Sequence[ToolResult]],
        turns: Turns,
    ) -> None:
        before = next_td.get("tools", None)  # written by a different transform in this step
        num_before = [0] * len(results) if before is None else before.get("num_calls").tolist()
        was = [True] * len(results)
        records: list[tuple] = [()] * len(results)
        failed = [0] * len(results)
        if before is not None:
            was = before.get("auxiliary").flatten().tolist()
            records, failed = before.get("calls").tolist(), before.get("num_failed").tolist()
        auxiliary, thought = [], []
        for row, found in enumerate(results):
            refused = turns.thought[row] >= self.max_auxiliary_turns or self._is_cut(turns, row)
            thinks = not refused and not any(self._acts(result.call) for result in found)
            thinks = (bool(found) or num_before[row] > 0) and thinks
            thinks = thinks and (was[row] or not num_before[row])
            auxiliary.append(thinks)
            kept = turns.thought[row] if not turns.active[row] else 0
            thought.append(turns.thought[row] + 1 if thinks else kept)
        counts = {
            "num_calls": [a + len(b) for a, b in zip(num_before, results, strict=True)],
            "num_failed": [
                a + sum(not r.ok for r in b) for a, b in zip(failed, results, strict=True)
            ],
            "auxiliary_turns": thought,
        }
        rows = zip(records, results, strict=True)
        calls = [(*old, *(result.record() for result in new)) for old, new in rows]
        next_td.set("tools", _node(next_td, calls, counts, auxiliary))
        if (before := td.get("env_step", None)) is not None:
            acts = [a and not b for a, b in zip(turns.stepped, auxiliary, strict=True)]
            acts = torch.tensor(acts, dtype=before.dtype, device=before.device)
            next_td.set("env_step", before + acts.reshape(before.shape))

    def _acts(self, call: ToolCall) -> bool:
        tool = self.tools.get(call.tool)
        if tool is not None:
            return tool.kind == "action"
        # An unknown tool counts as an action if all tools are actions.
        return bool(self.tools) and all(tool.kind == "action" for tool in self.tools.values())

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        ids = tensordict_reset.get("traj_id", None)
        begun = [] if ids is None else (ids.flatten() >= 0).nonzero().flatten().tolist()
        for row in begun:
            if (session := self._sessions.pop(row, None)) is not None:
                self.executor.end_session(session)
        tensordict_reset.set("tools", _no_calls(tensordict_reset))
        return tensordict_reset

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the ``"tools"`` node."""
        size, device = observation_spec.shape, observation_spec.device
        counts = {name: Unbounded(shape=size, dtype=torch.int64, device=device) for name in _COUNTS}
        observation_spec["tools"] = Composite(
            counts,
            calls=ColumnSpec((*size, -1), example_data=()),
            auxiliary=Unbounded(shape=(*size, 1), dtype=torch.bool, device=device),
            shape=size,
            device=device,
        )
        return observation_spec


def as_tool(tool: Tool | Callable[..., Any] | str) -> Tool:
    """Convert a tool, a tool class, a function, or the name of one of these to a tool.

    Args:
        tool: the object; a name is a registered name or ``"module:name"``.

    Raises:
        ConfigError: when the object is none of these, or cannot be described.
    """
    tool = find("tools", tool) if isinstance(tool, str) else tool
    if isinstance(tool, Tool):
        return tool
    if inspect.isclass(tool):
        if not issubclass(tool, Tool):
            raise ConfigError(f"{tool.__name__} is no Tool and no function")
        return tool()
    if not callable(tool):
        raise ConfigError(f"a tool must be a Tool or a function, got {type(tool).__name__}")
    return FunctionTool(tool)


class Turns(NamedTuple):
    """The rows of one step.

    Attributes:
        messages: message of the model in each row, or ``None``.
        stepped: rows that are stepped.
        active: rows that are stepped and not done.
        sessions: ``traj_id`` of each row.
        thought: number of auxiliary turns of each row since the last step of the environment.
        finish: how each response ended.
        rows: function that takes an index and returns the row after the policy.
    """

    messages: Sequence[Any]
    stepped: list[bool]
    active: list[bool]
    sessions: list[int | None]
    thought: list[int]
    finish: list[FinishReason]
    rows: Callable[[int], TensorDictBase]

    @classmethod
    def of(cls, td: TensorDictBase, next_td: TensorDictBase, messages: Sequence[Any]) -> Turns:
        """Read the rows of a step.

        Args:
            td: rows after the policy.
            next_td: the next state.
            messages: the model's message of each row.
        """
        size = len(messages)
        stepped = active = [True] * size
        mask, done = td.get("_step", None), next_td.get("done", None)
        if mask is not None:
            stepped = active = mask.reshape(size, -1).any(-1).tolist()
        if done is not None:
            over = done.reshape(size, -1).any(-1).tolist()
            active = [a and not b for a, b in zip(active, over, strict=True)]
        ids, thought = td.get("traj_id", None), td.get(("tools", "auxiliary_turns"), None)
        reasons = read_rows(td, ("tokens", "finish_reason"), None)
        return cls(
            messages,
            stepped,
            active,
            [None] * size if ids is None else ids.flatten().tolist(),
            [0] * size if thought is None else thought.tolist(),
            [FinishReason.STOP] * size
            if reasons is None
            else [FinishReason(int(r)) for r in reasons],
            lambda row: td[row].lock_(),
        )


def _tell(results: Sequence[Sequence[ToolResult]], turns: Turns) -> None:
    """Log the first failure of each kind."""
    failed = [
        (row, result.failure)
        for row, found in enumerate(results)
        for result in found
        if result.failure is not None
    ]
    failures = [failure for _, failure in failed]
    tell_failures(failures, lambda at: turns.rows(failed[at][0]), len(results))


def _sign(call: ToolCall | BrokenCall) -> str:
    """Return a key for comparing the calls that two parsers found: the tool, or the error."""
    return call.tool if isinstance(call, ToolCall) else call.problem


def _whole(call: ToolCall | BrokenCall) -> ToolCall | BrokenCall:
    """Remove lone surrogates from a call; JSON can contain them, other code cannot."""
    if isinstance(call, BrokenCall):
        return call
    try:
        args = _whole_tree(dict(call.args))
    except RecursionError:
        return BrokenCall("its arguments are nested too deeply")
    return replace(call, tool=whole_characters(call.tool), args=args)


def _whole_tree(value: Any) -> Any:
    if isinstance(value, str):
        return whole_characters(value)
    if isinstance(value, Mapping):
        return {_whole_tree(key): _whole_tree(item) for key, item in value.items()}
    return [_whole_tree(item) for item in value] if isinstance(value, list) else value


def _is_stack(stack: Any) -> bool:
    return isinstance(stack, Compose)


def _no_calls(td: TensorDictBase) -> TensorDict:
    size = td.batch_size.numel()
    return _node(td, [()] * size, dict.fromkeys(_COUNTS, [0] * size), [False] * size)


def _node(
    td: TensorDictBase,
    calls: Sequence[tuple],
    counts: Mapping[str, Sequence[int]],
    auxiliary: Sequence[bool],
) -> TensorDict:
    """Return the node that :class:`ToolTransform` writes for the rows of a tensordict."""
    node = TensorDict(batch_size=td.batch_size, device=td.device)
    node.set("calls", Column.of(calls))
    for name, values in counts.items():
        node.set(name, torch.tensor(values, dtype=torch.int64, device=td.device))
    node.set("auxiliary", torch.tensor(auxiliary, device=td.device).unsqueeze(-1))
    return node
