"""Tool calls out of what the model wrote: the interface, and the messages' own calls.

A parser reads one message and returns the calls in the order in which they were written; what was
meant as a call and cannot be read becomes a
:class:`~torchrl_llm.tools.tool_call.BrokenCall`, which the model is told about. A parser
neither knows which tools there are nor runs any.

Next: :mod:`torchrl_llm.tools.call_formats` reads calls that are written in the text.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torchrl_llm.data.formatter.thoughts import split_thoughts
from torchrl_llm.data.input_modes.history_mode import message_text
from torchrl_llm.errors import ConfigError
from torchrl_llm.tools.tool_call import BrokenCall, ToolCall

Schemas = Mapping[str, Mapping[str, Any]]
Calls = list[ToolCall | BrokenCall]


class ToolParser(ABC):
    """Reads the calls of one message."""

    @abstractmethod
    def parse(self, message: Mapping[str, Any], schemas: Schemas) -> Calls:
        """The calls of a message.

        Args:
            message: what the model wrote, as a message dict.
            schemas: JSON schema of the arguments of each tool, by name, for formats that write
                values without their types.
        """


class MessageCallParser(ToolParser):
    """The calls that the chat template's own format holds, as the formatter has read them.

    They are the message's ``tool_calls``; calls that the formatter could not read are its
    ``tool_call_errors``. A message that nobody has read into these keys has no calls for this
    parser: where the policy's template has no form for calls, take one of
    :mod:`torchrl_llm.tools.call_formats`.

    Example:
        >>> function = {"name": "add", "arguments": '{"a": 1}'}
        >>> message = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
        >>> MessageCallParser().parse(message, {})
        [ToolCall(tool='add', args={'a': 1}, tag=None, id=None, session=None)]
    """

    def parse(self, message: Mapping[str, Any], schemas: Schemas) -> Calls:
        """``tool_calls`` and ``tool_call_errors``."""
        calls = [_read(call) for call in message.get("tool_calls") or ()]
        return calls + [BrokenCall(str(e)) for e in message.get("tool_call_errors") or ()]


class TextCalls(NamedTuple):
    """What a text holds.

    Attributes:
        text: the text without its calls.
        calls: the calls, in order.
    """

    text: str
    calls: Calls


class TextParser(ToolParser):
    """Calls that are written in the text; a subclass writes :meth:`read`.

    Called with a text (or a dict with ``"text"``) it gives what TorchRL's parsers do:
    ``{"text": ..., "calls": [...], "meta": {"count": ...}}``.
    """

    @abstractmethod
    def read(self, text: str, schemas: Schemas) -> TextCalls:
        """Take the calls out of a text.

        Args:
            text: what the model wrote behind its reasoning.
            schemas: see :meth:`ToolParser.parse`.
        """

    def parse(self, message: Mapping[str, Any], schemas: Schemas) -> Calls:
        """The calls in the text behind the reasoning, see :func:`spoken_text`."""
        return self.read(spoken_text(message), schemas).calls

    def __call__(self, response: str | Mapping[str, Any]) -> dict[str, Any]:
        """Parse a text outside of any conversation; what cannot be read is under ``meta``."""
        text = response if isinstance(response, str) else str(response.get("text", ""))
        found = self.read(text, {})
        calls = [call for call in found.calls if isinstance(call, ToolCall)]
        problems = [call.problem for call in found.calls if isinstance(call, BrokenCall)]
        meta = {"count": len(calls), **({"errors": problems} if problems else {})}
        return {"text": found.text, "calls": calls, "meta": meta}


class _FunctionParser(ToolParser):
    """A function from a text to a mapping with ``"calls"``."""

    def __init__(self, function: Callable[[str], Mapping[str, Any]]) -> None:
        self.function = function

    def parse(self, message: Mapping[str, Any], schemas: Schemas) -> Calls:
        """What the function finds."""
        return [
            call
            if isinstance(call, (ToolCall, BrokenCall))
            else ToolCall(call.tool, call.args, getattr(call, "tag", None))
            for call in self.function(spoken_text(message))["calls"]
        ]


def as_parser(parser: ToolParser | Callable[[str], Mapping[str, Any]]) -> ToolParser:
    """A parser from a parser or a function.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(parser, ToolParser):
        return parser
    if not callable(parser):
        raise ConfigError(
            f"parser must be a ToolParser or a function of a text, got {type(parser).__name__}"
        )
    return _FunctionParser(parser)


def spoken_text(message: Mapping[str, Any]) -> str:
    """What a message says outside its reasoning: the text in which calls are looked for.

    Reasoning is what was split off as such, and what
    :func:`~torchrl_llm.data.formatter.thoughts.split_thoughts` takes for it.

    Example:
        >>> spoken_text({"role": "assistant", "content": "<think>no</think> yes"})
        ' yes'
    """
    text = message_text(dict(message))
    thought = message.get("reasoning_content")
    if isinstance(thought, str) and "unclosed_reasoning" not in (message.get("flags") or ()):
        text = text.partition(thought)[2] if thought.strip() and thought in text else text
    return "".join(piece for piece, is_thought in split_thoughts(text) if not is_thought)


def _read(call: Any) -> ToolCall | BrokenCall:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return BrokenCall("it has no name")
    args = function.get("arguments")
    if isinstance(args, str):
        try:
            args = json.loads(args) if args.strip() else {}
        except (ValueError, RecursionError) as error:
            return BrokenCall(f"the arguments of {function['name']!r:.80} are not JSON: {error}")
    if args is None:
        args = {}
    if not isinstance(args, Mapping):
        return BrokenCall(f"the arguments of {function['name']!r:.80} must be an object")
    identity = call.get("id")
    return ToolCall(
        function["name"], dict(args), id=identity if isinstance(identity, str) else None
    )
