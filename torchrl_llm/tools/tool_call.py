"""Records of a tool call and its result, shared by all modules of tools.

Parsers create a :class:`ToolCall` from the model's text, a tool (:mod:`torchrl_llm.tools.tool`)
returns a :class:`ToolOutput`, and the executor combines both into a :class:`ToolResult`, which is
stored with the conversation. A failed call is also recorded as a result; it never raises an
exception.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchrl_llm.data.failures import Failure
from torchrl_llm.data.text.call_syntax import BrokenCall as BrokenCall


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of the model.

    Args:
        tool: name of the tool.
        args: arguments by name.
        tag: the model's label for the call; the result repeats the label.
        id: id of the call, for templates that refer to it in the result.
        session: ``traj_id`` of the conversation, for tools that keep state within a conversation;
            set by the transform.
        state: the calling row, a locked tensordict, if the transform passes it.

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
    """The return value of a tool, if a string is not enough.

    Attributes:
        content: text for the model.
        error: name of the error (``"TimeoutError"``), empty on success.
        exit_code: exit status if a process ran; negative for the signal that killed it.
        truncated: whether ``content`` was cut.
        failure: an exception, if the tool raised or did not answer; ``None`` if the tool answered,
            even with an error that the model caused.
    """

    content: str
    error: str = ""
    exit_code: int | None = None
    truncated: bool = False
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A call and its result, even if the call could not be run.

    Args:
        call: the call; the ``tool`` of a malformed call is empty.
        content: text for the model.
        error: name of the error, empty on success: ``"MalformedCall"``, ``"UnknownTool"``,
            ``"InvalidArguments"``, ``"ToolTimeout"``, ``"TooManyCalls"``, ``"CutResponse"`` (the
            response was cut), ``"NotRun"`` (after a call of the same turn that failed or did not
            end), or the type of the tool's exception.
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
        """Whether the call succeeded."""
        return not self.error

    def record(self) -> dict[str, Any]:
        """Return the facts of the call as plain data, without the text for the model.

        ``"failure"`` is present if the tool itself failed.
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
