"""Calls that are written in the text of a turn, in the formats that models are trained on.

Take one of these where the policy's chat template has no form for tool calls (or none for this
one); where it has, the formatter reads them better than any text can be read, see
:class:`~torchrl_llm.tools.call_parsers.MessageCallParser`.

Next: :mod:`torchrl_llm.data.formatter.call_patterns` reads the syntaxes of chat templates.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torchrl_llm.data.formatter.call_patterns import CallSyntax, syntax_of
from torchrl_llm.data.formatter.probe import NAME, VALUE
from torchrl_llm.data.json_at import json_at
from torchrl_llm.errors import ConfigError
from torchrl_llm.tools.call_parsers import Calls, Schemas, TextCalls, TextParser
from torchrl_llm.tools.tool_call import BrokenCall, ToolCall

_FENCED = re.DOTALL | re.IGNORECASE
_BLANKS = re.compile(r"\s*")


class SyntaxParser(TextParser):
    """Calls in the syntax of an example.

    Args:
        example: how a call of the tool ``NAME`` with ``{"key": "VALUE"}`` is written, with these
            very words; what surrounds them is the syntax.

    Raises:
        ConfigError: nothing of the kinds that are known can be made of the example.

    Example:
        >>> parser = SyntaxParser('[CALL]{"name": "NAME", "arguments": {"key": "VALUE"}}[/CALL]')
        >>> text = 'So: [CALL]{"name": "add", "arguments": {"a": 1}}[/CALL]'
        >>> parser.parse({"role": "assistant", "content": text}, {})
        [ToolCall(tool='add', args={'a': 1}, tag=None, id=None, session=None)]
    """

    def __init__(self, example: str) -> None:
        probe = example.replace("NAME", NAME).replace("VALUE", VALUE)
        syntax = syntax_of(probe)
        if syntax is None:
            raise ConfigError(
                f"no syntax of calls can be read from {example!r}: write a call of the tool NAME "
                'with the arguments {"key": "VALUE"}, as JSON between two marks for instance'
            )
        self.example = example
        self._syntax: CallSyntax = syntax

    def read(self, text: str, schemas: Schemas) -> TextCalls:
        """The calls; broken ones come last."""
        parsed = self._syntax.parse(text, schemas)
        calls: Calls = [ToolCall(call.name, call.arguments, id=call.id) for call in parsed.calls]
        broken = [BrokenCall(error, self.example) for error in parsed.errors]
        return TextCalls(parsed.content, calls + broken)


class HermesParser(SyntaxParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3.

    Example:
        >>> text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
        >>> [call.tool for call in HermesParser().parse({"content": text}, {})]
        ['add']
    """

    def __init__(self) -> None:
        super().__init__('<tool_call>{"name": "NAME", "arguments": {"key": "VALUE"}}</tool_call>')


class LlamaParser(SyntaxParser):
    """``{"name": ..., "parameters": {...}}`` and nothing else in the turn: Llama 3.

    Example:
        >>> text = '{"name": "add", "parameters": {"a": 1}}'
        >>> [call.tool for call in LlamaParser().parse({"content": text}, {})]
        ['add']
    """

    def __init__(self) -> None:
        super().__init__('{"name": "NAME", "parameters": {"key": "VALUE"}}')


class _Blocks(TextParser):
    """Calls between tags: what opens one names the tool, and JSON arguments follow."""

    expected: str
    closing: str

    @abstractmethod
    def _opened(self, text: str, at: int) -> tuple[int, int, str, str | None] | None:
        """The next opening from ``at`` on: its start and end, the tool and the tag."""

    def read(self, text: str, schemas: Schemas) -> TextCalls:
        kept, calls, at = [], [], 0
        while (opened := self._opened(text, at)) is not None:
            start, inside, tool, tag = opened
            kept.append(text[at:start])
            call, at = self._block(text, inside, tool, tag, schemas)
            calls.append(call)
        kept.append(text[at:])
        return TextCalls("".join(kept).strip(), calls)

    def _block(
        self, text: str, inside: int, tool: str, tag: str | None, schemas: Schemas
    ) -> tuple[ToolCall | BrokenCall, int]:
        """The call whose arguments begin at ``inside``, and where its block ends."""
        try:
            # By its JSON first: a string in it may spell the closing tag.
            args, end = json_at(text, _behind_blanks(text, inside))
        except (ValueError, RecursionError) as error:
            problem = f"its arguments are not JSON: {error}"
        else:
            end = _behind_blanks(text, end)
            problem = f"{self.closing} must follow the arguments"
            if end == len(text) or text.startswith(self.closing, end):
                behind = min(end + len(self.closing), len(text))
                if isinstance(args, dict):
                    return ToolCall(tool, args, tag), behind
                problem = f"the arguments of {tool!r:.80} must be an object"
                return BrokenCall(problem, self.expected), behind
        closed = text.find(self.closing, inside)
        body = text[inside : closed if closed >= 0 else len(text)].strip()
        behind = closed + len(self.closing) if closed >= 0 else len(text)
        if not body:
            return ToolCall(tool, {}, tag), behind
        if closed >= 0 and self._takes_raw(tool, schemas):
            return ToolCall(tool, {"raw": body}, tag), behind
        return BrokenCall(f"{tool!r:.80}: {problem}", self.expected), behind

    def _takes_raw(self, tool: str, schemas: Schemas) -> bool:
        return False


class XMLBlockParser(_Blocks):
    """``<tool name="search" tag="A">{"query": "..."}</tool>``; the tag may be left out.

    A block whose contents are no JSON is a call with ``{"raw": contents}`` where the tool has an
    argument of that name, or nothing is known of the tools, and else a broken one.

    Example:
        >>> parser = XMLBlockParser()
        >>> found = parser('Look: <tool name="search" tag="A">{"query": "td"}</tool> soon.')
        >>> found["text"], found["calls"]
        ('Look:  soon.', [ToolCall(tool='search', args={'query': 'td'}, tag='A', id=None, \
session=None)])
    """

    expected = '<tool name="NAME">{"argument": value}</tool>'
    closing = "</tool>"
    _opening = re.compile(r"<tool((?:\s+\w{1,20}\s*=\s*(?:\"[^\"<>]*\"|'[^'<>]*'))+)\s*/?>")
    _attribute = re.compile(r"(\w+)\s*=\s*(?:\"([^\"]*)\"|'([^']*)')")

    def _opened(self, text: str, at: int) -> tuple[int, int, str, str | None] | None:
        while (found := self._opening.search(text, at)) is not None:
            given = {m[1]: m[2] or m[3] or "" for m in self._attribute.finditer(found[1])}
            if given.get("name"):
                return found.start(), found.end(), given["name"], given.get("tag") or None
            at = found.end()
        return None

    def _block(
        self, text: str, inside: int, tool: str, tag: str | None, schemas: Schemas
    ) -> tuple[ToolCall | BrokenCall, int]:
        if text.endswith("/>", 0, inside):
            return ToolCall(tool, {}, tag), inside
        return super()._block(text, inside, tool, tag, schemas)

    def _takes_raw(self, tool: str, schemas: Schemas) -> bool:
        known = schemas.get(tool)
        return not schemas or (known is not None and "raw" in (known.get("properties") or {}))


class ToolTagParser(_Blocks):
    r"""``<tool>search\n{"query": "..."}</tool>``: the name in a line of its own.

    Example:
        >>> ToolTagParser()('<tool>add\n{"a": 1}</tool>')["calls"][0].tool
        'add'
    """

    expected = '<tool>NAME\n{"argument": value}</tool>'
    closing = "</tool>"
    _opening = re.compile(r"<tool>[ \t]*+(?:\n[ \t]*+)?([^\s<>{]{1,200})[ \t]*+\n?")

    def _opened(self, text: str, at: int) -> tuple[int, int, str, str | None] | None:
        found = self._opening.search(text, at)
        return None if found is None else (found.start(), found.end(), found[1], None)


class PatternParser(TextParser):
    r"""Calls by a regular expression of your own with two groups, name and JSON arguments.

    It takes the time that the pattern takes: one with ``.*?`` looks from every beginning to the end
    of the text, which a model that repeats the beginning makes slow.

    Args:
        pattern: is searched for with ``.`` matching line ends.

    Raises:
        ConfigError: it is no pattern with two groups.

    Example:
        >>> parser = PatternParser(r"CALL\[(\w+)\]\(([^()]*+)\)")
        >>> parser('CALL[add]({"a": 1})')["calls"][0].args
        {'a': 1}
    """

    def __init__(self, pattern: str) -> None:
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError(f"{pattern!r} is no regular expression: {error}") from error
        if self._pattern.groups != 2:
            raise ConfigError(
                f"the pattern must have two groups, name and arguments; {pattern!r} has "
                f"{self._pattern.groups}"
            )

    def read(self, text: str, schemas: Schemas) -> TextCalls:
        """The matches, in order."""
        calls: Calls = []
        for found in self._pattern.finditer(text):
            name, body = found[1].strip(), (found[2] or "").strip()
            expected = f"{{...}} with the arguments of {name!r:.80} as JSON"
            try:
                args = json.loads(body, strict=False) if body else {}
            except (ValueError, RecursionError) as error:
                calls.append(BrokenCall(f"its arguments are not JSON: {error}", expected))
                continue
            right = isinstance(args, dict)
            calls.append(
                ToolCall(name, args)
                if right
                else BrokenCall("its arguments must be an object", expected)
            )
        return TextCalls(self._pattern.sub("", text).strip(), calls)


class JSONCallParser(TextParser):
    """``{"message": "...", "tools": [{"tool": "search", "args": {...}, "tag": "A"}]}``.

    The whole turn is that object, between code fences or not. A turn that is no JSON has no calls.

    Example:
        >>> found = JSONCallParser()('{"message": "Wait", "tools": [{"tool": "now"}]}')
        >>> found["text"], found["calls"][0].tool
        ('Wait', 'now')
    """

    expected = '{"message": "...", "tools": [{"tool": "NAME", "args": {"argument": value}}]}'

    def __call__(self, response: str | Mapping[str, Any]) -> dict[str, Any]:
        """Parse a text, or an object that has been read already."""
        return super().__call__(
            response if isinstance(response, str) else json.dumps(dict(response))
        )

    def read(self, text: str, schemas: Schemas) -> TextCalls:
        """The calls under ``"tools"``; the text is ``"message"``."""
        fenced = re.fullmatch(r"\s*```(?:json)?[ \t]*\r?\n(.*)```\s*", text, _FENCED)
        body = (fenced[1] if fenced else text).strip()
        if not body.startswith("{"):
            return TextCalls(text, [])
        try:
            value = json.loads(body, strict=False)
        except (ValueError, RecursionError) as error:
            broken = [BrokenCall(f"the turn is not JSON: {error}", self.expected)]
            return TextCalls(text, broken if '"tools"' in body else [])
        listed, said = value.get("tools") or [], str(value.get("message") or "")
        if not isinstance(listed, list):
            return TextCalls(said, [BrokenCall('"tools" must be a list', self.expected)])
        return TextCalls(said, [self._call(item) for item in listed])

    def _call(self, item: Any) -> ToolCall | BrokenCall:
        name = item.get("tool") if isinstance(item, dict) else None
        if not isinstance(name, str) or not name:
            return BrokenCall('an entry of "tools" has no "tool"', self.expected)
        args, tag = item.get("args"), item.get("tag")
        if args is not None and not isinstance(args, dict):
            return BrokenCall(f'the "args" of {name!r:.80} must be an object', self.expected)
        return ToolCall(name, args or {}, None if tag is None else str(tag))


def _behind_blanks(text: str, at: int) -> int:
    return _BLANKS.match(text, at).end()  # type: ignore[union-attr]
