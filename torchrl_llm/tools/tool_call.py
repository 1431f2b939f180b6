"""Records of a tool call and of its result, which all parts of the tools share.

Parsers make a :class:`ToolCall` from what the model wrote, a tool
(:mod:`torchrl_llm.tools.tool`) answers it with a :class:`ToolOutput`, and the
executor makes the :class:`ToolResult` of both, which is stored next to the conversation. A
call that fails is such a record too, never an exception.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchrl_llm.data.failures import Failure
from torchrl_llm.data.text.call_syntax import BrokenCall as BrokenCall


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model wrote.

    Args:
        tool: name of the tool.
        args: its arguments by name.
        tag: the model's own label for the call, handed back with its result.
        id: id that the template gives the call, for templates that name it in the result.
        session: which conversation calls (its ``traj_id``), for tools that keep something between
            the calls of one conversation; set by the transform.
        state: the row that calls, a locked tensordict, where the transform hands it over.

    Example:
        >>> ToolCall("add", {"a": 1, "b": 2}).args["b"]
        2
    """

    tool: str
    args: Mapping[str, Any] = field(default_factory=dict)
    tag: str | None = None
    id: str | None = None
    session: int | None = None
    state: Any = field(default=None, repr=False, compare=False)


class ToolOutput(NamedTuple):
    """What a tool returns when a string does not say enough.

    Attributes:
        content: what the model is to read.
        error: name of what went wrong (``"TimeoutError"``), empty where all went well.
        exit_code: exit status where a process ran, negative for the signal that killed it.
        truncated: whether content was cut.
        failure: what the tool raised, or that it gave no answer; ``None`` where it answered, be it
            with an error that is the model's to mend.
    """

    content: str
    error: str = ""
    exit_code: int | None = None
    truncated: bool = False
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A call that was carried out, or could not be.

    Args:
        call: the call; of a malformed one, its ``tool`` is empty.
        content: what the model reads.
        error: name of what went wrong, empty where all went well: ``"MalformedCall"``,
            ``"UnknownTool"``, ``"InvalidArguments"``, ``"ToolTimeout"``, ``"TooManyCalls"``,
            ``"CutResponse"`` (the response was cut), ``"NotRun"`` (behind a call of the same turn
            that failed or did not end), or the name of the exception that the tool raised.
        seconds: wall-clock time of the call.
        exit_code: see :class:`ToolOutput`.
        truncated: whether ``content`` was cut to the limit.
        failure: see :class:`ToolOutput`.
    """

    call: ToolCall
    content: str
    error: str = ""
    seconds: float = 0.0
    exit_code: int | None = None
    truncated: bool = False
    failure: Failure | None = None

    @property
    def ok(self) -> bool:
        """Whether the call went well."""
        return not self.error

    def record(self) -> dict[str, Any]:
        """The facts of the call as plain data, without what the model reads anyway.

        ``"failure"`` is there where the tool itself failed.
        """
        facts = {
            "tool": self.call.tool,
            "id": self.call.id,
            "tag": self.call.tag,
            "error": self.error,
            "seconds": self.seconds,
            "exit_code": self.exit_code,
            "truncated": self.truncated,
            "num_characters": len(self.content),
        }
        return facts if self.failure is None else {**facts, "failure": self.failure._asdict()}
