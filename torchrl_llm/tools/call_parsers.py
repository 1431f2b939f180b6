"""Parsers of tool calls: the interface, a parser of structured calls, and one per syntax.

A parser reads one message and returns its calls in order. A malformed call becomes a
:class:`BrokenCall`, and the model gets an error message for it. A parser does not know which tools
exist and does not run them.

If the policy's chat template has a form for calls, the formatter has already parsed the calls, and
:class:`MessageCallParser` returns them. This is more reliable than parsing text. The other parsers
are for templates without a form for calls.

Next: :mod:`torchrl_llm.data.text.call_syntax` reads each syntax,
:mod:`torchrl_llm.tools.code_blocks` has the parser of Python blocks.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torchrl_llm.data.messages import calls_of, spoken_text
from torchrl_llm.data.text.call_syntax import (
    NAME,
    SYNTAXES,
    VALUE,
    BrokenCall,
    Call,
    CallSyntax,
    Pattern,
    Schemas,
    call_of,
)
from torchrl_llm.data.text.learnt_calls import syntax_of
from torchrl_llm.errors import ConfigError
from torchrl_llm.tools.tool_call import ToolCall

Calls = list[ToolCall | BrokenCall]


class ToolParser(ABC):
    """Reads the calls of one message."""

    @abstractmethod
    def parse(self, message: Mapping[str, Any], schemas: Schemas) -> Calls:
        """Return the calls of a message.

        Args:
            message: message of the model, as a dict.
            schemas: JSON schema of the arguments of each tool, by name, for formats that write
                values without their types.
        """


class MessageCallParser(ToolParser):
    """Returns the calls that the formatter has parsed with the chat template.

    The calls are in the message's ``tool_calls``; calls that the formatter could not read are in
    ``tool_call_errors``. For this parser, a message without these keys has no calls. If the
    policy's template has no form for calls, use a different parser.

    Example:
        >>> function = {"name": "add", "arguments": '{"a": 1}'}
        >>> message = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
        >>> MessageCallParser().parse(message, {})
        [ToolCall(tool='add', args={'a': 1}, tag=None, id=None, session=None)]
    """

    def parse(self, message: Mapping[str, Any], schemas: Schemas) -> Calls:
        """Return ``tool_calls`` and ``tool_call_errors`` as calls."""
        calls: Calls = []
        for value in calls_of(message):
            try:
                calls.append(ToolCall(*call_of(value)))
            except ValueError as error:
                calls.append(BrokenCall(str(error)))
        return calls + [BrokenCall(str(e)) for e in message.get("tool_call_errors") or ()]


class TextCalls(NamedTuple):
    """A text without its calls, and the calls.

    Attributes:
        text: the text without its calls.
        calls: the calls, in order.
    """

    text: str
    calls: Calls


class TextParser(ToolParser):
    """Parses calls in the text; a subclass defines ``read``.

    Called with a text (or a dict with ``"text"``), a parser returns the format of TorchRL's
    parsers: ``{"text": ..., "calls": [...], "meta": {"count": ...}}``.
    """

    @abstractmethod
    def read(self, text: str, schemas: Schemas) -> TextCalls:
        """Extract the calls from a text.

        Args:
            text: text of the model after its reasoning.
            schemas: see :meth:`ToolParser.parse`.
        """

    def parse(self, message: Mapping[str, Any], schemas: Schemas) -> Calls:
        """Return the calls in the text after the reasoning, see ``spoken_text``."""
        return self.read(spoken_text(message), schemas).calls

    def __call__(self, response: str | Mapping[str, Any]) -> dict[str, Any]:
        """Parse a text without a conversation; malformed calls are listed in ``meta``."""
        text = response if isinstance(response, str) else str(response.get("text", ""))
        found = self.read(text, {})
        calls = [call for call in found.calls if isinstance(call, ToolCall)]
        problems = [call.problem for call in found.calls if isinstance(call, BrokenCall)]
        meta = {"count": len(calls), **({"errors": problems} if problems else {})}
        return {"text": found.text, "calls": calls, "meta": meta}


class SyntaxParser(TextParser):
    """Parses calls in the syntax of an example; malformed calls come last.

    Args:
        example: a call of the tool ``NAME`` with ``{"key": "VALUE"}``. It must contain exactly
            these words; the text around the words is the syntax. Or a
            :class:`~torchrl_llm.data.text.call_syntax.CallSyntax`.

    Raises:
        ConfigError: when no known syntax matches the example.

    Example:
        >>> parser = SyntaxParser('[CALL]{"name": "NAME", "arguments": {"key": "VALUE"}}[/CALL]')
        >>> text = 'So: [CALL]{"name": "add", "arguments": {"a": 1}}[/CALL]'
        >>> parser.parse({"role": "assistant", "content": text}, {})
        [ToolCall(tool='add', args={'a': 1}, tag=None, id=None, session=None)]
    """

    def __init__(self, example: str | CallSyntax) -> None:
        self.example = example if isinstance(example, str) else ""
        syntax = example
        if isinstance(example, str):
            syntax = syntax_of(example.replace("NAME", NAME).replace("VALUE", VALUE))
        if syntax is None:
            raise ConfigError(
                f"no syntax of calls can be read from {example!r}: write a call of the tool NAME "
                'with the arguments {"key": "VALUE"}, as JSON between two marks for instance'
            )
        self.syntax = syntax

    def read(self, text: str, schemas: Schemas) -> TextCalls:
        """Return the calls in this syntax."""
        parsed = self.syntax.parse(text, schemas)
        calls: Calls = [
            ToolCall(*call)
            if isinstance(call, Call)
            else call._replace(expected=call.expected or self.example)
            for call in parsed.found
        ]
        return TextCalls(parsed.content, calls)


class HermesParser(SyntaxParser):
    """Parses ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3.

    Example:
        >>> text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
        >>> [call.tool for call in HermesParser().parse({"content": text}, {})]
        ['add']
    """

    def __init__(self) -> None:
        super().__init__('<tool_call>{"name": "NAME", "arguments": {"key": "VALUE"}}</tool_call>')


class LlamaParser(SyntaxParser):
    """Parses ``{"name": ..., "parameters": {...}}`` as the whole turn: Llama 3.

    Example:
        >>> text = '{"name": "add", "parameters": {"a": 1}}'
        >>> [call.tool for call in LlamaParser().parse({"content": text}, {})]
        ['add']
    """

    def __init__(self) -> None:
        super().__init__('{"name": "NAME", "parameters": {"key": "VALUE"}}')


class XMLBlockParser(SyntaxParser):
    """``<tool name="search" tag="A">{"query": "..."}</tool>``; the tag may be left out.

    If the contents of a block are not JSON, the call has the argument ``{"raw": contents}`` if the
    tool has an argument ``raw`` or the tools are unknown; otherwise the call is malformed.

    Example:
        >>> parser = XMLBlockParser()
        >>> found = parser('Look: <tool name="search" tag="A">{"query": "td"}</tool> soon.')
        >>> found["text"], found["calls"]
        ('Look:  soon.', [ToolCall(tool='search', args={'query': 'td'}, tag='A', id=None, \
session=None)])
    """

    def __init__(self) -> None:
        super().__init__(SYNTAXES["xml_blocks"])


class ToolTagParser(SyntaxParser):
    r"""Parses ``<tool>search\n{"query": "..."}</tool>``: the name is alone on its line.

    Example:
        >>> ToolTagParser()('<tool>add\n{"a": 1}</tool>')["calls"][0].tool
        'add'
    """

    def __init__(self) -> None:
        super().__init__(SYNTAXES["name_lines"])


class MessageOrTagParser(MessageCallParser):
    r"""Returns the calls that the formatter parsed, and calls in TorchRL's text form.

    Calls that the formatter parsed come first (:class:`MessageCallParser`), then the other calls in
    the text: ``<tool>name\n{"argument": value}</tool>``, or a different syntax.

    Args:
        text_parser: parser of the calls in the text; :class:`ToolTagParser` by default.

    Example:
        >>> message = {"role": "assistant", "content": '<tool>sums.add\n{"a": 1}</tool>'}
        >>> MessageOrTagParser().parse(message, {})[0].tool
        'sums.add'
    """

    def __init__(self, text_parser: TextParser | None = None) -> None:
        self.text_parser = ToolTagParser() if text_parser is None else text_parser

    def parse(self, message: Mapping[str, Any], schemas: Schemas) -> Calls:
        """Return the calls of both parsers; a call (also malformed) found by both counts once."""
        own = super().parse(message, schemas)
        written = self.text_parser.parse(message, schemas)
        if not own or not written:
            return own or written
        # The text of a message still contains the calls that the formatter parsed.
        known = [(call.tool, call.args) for call in own if isinstance(call, ToolCall)]
        unread = len(known) < len(own)
        return own + [
            call
            for call in written
            if ((call.tool, call.args) not in known if isinstance(call, ToolCall) else not unread)
        ]


class PatternParser(SyntaxParser):
    r"""Parses calls with a regular expression; its two groups are name and JSON arguments.

    The run time depends on the pattern. With ``.*?`` the search runs from every start of a match to
    the end of the text; this is slow if a model repeats the start.

    Args:
        pattern: the pattern; ``.`` matches line ends.

    Raises:
        ConfigError: when the pattern does not have two groups.

    Example:
        >>> parser = PatternParser(r"CALL\[(\w+)\]\(([^()]*+)\)")
        >>> parser('CALL[add]({"a": 1})')["calls"][0].args
        {'a': 1}
    """

    def __init__(self, pattern: str) -> None:
        super().__init__(Pattern(pattern))


class JSONCallParser(SyntaxParser):
    """``{"message": "...", "tools": [{"tool": "search", "args": {...}, "tag": "A"}]}``.

    The whole turn must be this object, with or without code fences. A turn that is not JSON has no
    calls.

    Example:
        >>> found = JSONCallParser()('{"message": "Wait", "tools": [{"tool": "now"}]}')
        >>> found["text"], found["calls"][0].tool
        ('Wait', 'now')
    """

    def __init__(self) -> None:
        super().__init__(SYNTAXES["json_turn"])

    def __call__(self, response: str | Mapping[str, Any]) -> dict[str, Any]:
        """Parse a text or a decoded object."""
        return super().__call__(
            response if isinstance(response, str) else json.dumps(dict(response))
        )


class _FunctionParser(ToolParser):
    """A function from a text to a mapping with ``"calls"``."""

    def __init__(self, function: Callable[[str], Mapping[str, Any]]) -> None:
        self.function = function

    def parse(self, message: Mapping[str, Any], schemas: Schemas) -> Calls:
        """Call the function."""
        return [
            call
            if isinstance(call, (ToolCall, BrokenCall))
            else ToolCall(call.tool, call.args, getattr(call, "tag", None))
            for call in self.function(spoken_text(message))["calls"]
        ]


def as_parser(parser: ToolParser | Callable[[str], Mapping[str, Any]]) -> ToolParser:
    """Convert a parser or a function to a parser.

    Raises:
        ConfigError: when the argument is neither.
    """
    if isinstance(parser, ToolParser):
        return parser
    if not callable(parser):
        raise ConfigError(
            f"parser must be a ToolParser or a function of a text, got {type(parser).__name__}"
        )
    return _FunctionParser(parser)
