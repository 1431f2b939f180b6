"""Parsers of tool calls: the syntaxes in which models write them.

A :class:`CallSyntax` extracts the calls from a text. A malformed call becomes a
:class:`BrokenCall`, which is reported to the model. ``SYNTAXES`` holds the named syntaxes. The
syntax of a chat template is learnt from the text that the template writes for one call, see
``torchrl_llm.data.text.learnt_calls``. To add a syntax, write a subclass here and enter it into
``SYNTAXES``.

Next: ``torchrl_llm.data.text.respond`` reads sampled responses with it,
:mod:`torchrl_llm.tools.call_parsers` has a parser for each name.
"""

from __future__ import annotations

import ast
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

from torchrl_llm.errors import ConfigError

Schemas = Mapping[str, Mapping[str, Any]]
# Placeholders in an example: the tool's name, the value of its argument ``key``, and a text next to
# the call.
NAME, VALUE, ANSWER = "kqxname", "kqxvalue", "kqxanswer"
CALL_ID = "callkqx00"  # nine characters: some templates check the length

_SPACE = re.compile(r"\s*")
# More errors do not help the model, and each costs a search to the end of the text.
_MOST_ERRORS = 64
_MOST_LEVELS = 100
_NESTS = (dict, list, tuple, set)
# For a megabyte, Python's own parser needs a second and a hundred times the memory.
MOST_PYTHON = 1 << 17
# No real turn has this many calls; a text of empty objects could hold half a million.
_MOST_VALUES = 4096
_DECODERS = {strict: json.JSONDecoder(strict=strict) for strict in (True, False)}
_WINDOW = 256
# No literal or escape is longer: the end of a window may cause an error this close to it.
_MARGIN = 16


class Call(NamedTuple):
    """One tool call; ``id`` and ``tag`` if the model wrote them."""

    name: str
    arguments: dict[str, Any]
    tag: str | None = None
    id: str | None = None


class BrokenCall(NamedTuple):
    """A malformed call.

    Attributes:
        problem: description of the error.
        expected: form of a correct call, for the message to the model.
    """

    problem: str
    expected: str = ""


class ParsedCalls(NamedTuple):
    """The calls and the content of a text.

    Attributes:
        content: the text without its calls.
        found: the calls in order; broken ones are among them or after them.
    """

    content: str
    found: list[Call | BrokenCall]

    @property
    def calls(self) -> list[Call]:
        """The well-formed calls."""
        return [call for call in self.found if isinstance(call, Call)]

    @property
    def errors(self) -> list[str]:
        """The problem of each broken call."""
        return [call.problem for call in self.found if isinstance(call, BrokenCall)]


class CallSyntax(ABC):
    """One way to write tool calls."""

    @abstractmethod
    def parse(self, text: str, schemas: Schemas) -> ParsedCalls:
        """Extract the calls from a text.

        Args:
            text: a response without reasoning and end-of-turn token.
            schemas: JSON schema of the parameters of each known tool, for untyped arguments.
        """


# -- calls after marks, and bare calls -------------------------------------------------------------


class Marked(CallSyntax):
    """Calls that each begin with ``opening``; broken calls stay in the content.

    A subclass reads one call and returns its end.
    """

    opening: str

    def parse(self, text: str, schemas: Schemas) -> ParsedCalls:
        """The calls after each ``opening``."""
        kept: list[str] = []
        calls: list[Call] = []
        broken: list[BrokenCall] = []
        cursor = 0
        while len(broken) < _MOST_ERRORS and (at := text.find(self.opening, cursor)) >= 0:
            try:
                read, end = self.read(text, at, schemas)
            except ValueError as error:
                broken.append(BrokenCall(str(error)))
                following = text.find(self.opening, at + len(self.opening))
                end = following if following >= 0 else len(text)
                kept.append(text[cursor:end])
            else:
                # The template writes the white space before a call.
                piece = text[cursor:at]
                kept.append(piece.rstrip("\n") if piece.strip() else "")
                calls += read
            cursor = end
        rest = text[cursor:]
        kept.append(rest if rest.strip() or not calls else "")
        return ParsedCalls("".join(kept), [*calls, *broken])

    @abstractmethod
    def read(self, text: str, at: int, schemas: Schemas) -> tuple[list[Call], int]:
        """The calls that begin at ``at``, and their end. ValueError if they are broken."""


class TaggedJson(Marked):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` and similar forms."""

    def __init__(self, opening: str, closing: str) -> None:
        self.opening, self.closing = opening, closing
        # With two marks on each side, the inner marks enclose each object.
        opened, closed = opening.split(), closing.split()
        inner = [closed[0], opened[-1]] if min(len(opened), len(closed)) > 1 else []
        self._between = re.compile(r"\s*".join(["", *map(re.escape, inner), r"(?=\{)"]))

    def read(self, text: str, at: int, schemas: Schemas) -> tuple[list[Call], int]:
        """The object, the list of objects, or objects in a row (MiniMax), between the marks."""
        value, end = json_behind(text, at + len(self.opening))
        values = value if isinstance(value, list) else [value]
        while self.closing and (between := self._between.match(text, end)):
            value, end = json_behind(text, between.end())
            values.append(value)
            if len(values) > _MOST_VALUES:
                raise ValueError(f"more than {_MOST_VALUES} tool calls in one turn")
        if not values:
            raise ValueError("an empty list of tool calls")
        return [self.call_of(v) for v in values], behind_mark(text, end, self.closing)

    def call_of(self, value: Any) -> Call:
        """The call for a JSON value; ValueError if it is not a call."""
        return call_of(value)

    def value_at(self, text: str, at: int, *, strict: bool = False) -> tuple[Any, int]:
        """The JSON value between the marks that begin at a position, and their end.

        Raises:
            ValueError: it is broken, or not between the marks.
        """
        value, end = json_behind(text, at + len(self.opening), strict=strict)
        return value, behind_mark(text, end, self.closing)


class BareJson(CallSyntax):
    """The whole turn is one JSON object (Llama 3), or several of them in a row."""

    # Llama's mark when it also has built-in tools, and the mark that Phi-4-mini begins with.
    _opening = re.compile(r"<\|python_tag\|>\s*|functools(?=\[)")

    def parse(self, text: str, schemas: Schemas) -> ParsedCalls:
        """The calls, if the turn contains nothing else."""
        stripped = text.strip()
        marked = self._opening.match(stripped)
        stripped = stripped[marked.end() :] if marked else stripped
        if not stripped.startswith(("{", "[")):
            return ParsedCalls(text, [])
        try:
            found = _json_values(stripped)
            if not any(_is_call(value) for value in found):
                return ParsedCalls(text, [])  # an answer that happens to be JSON
            return ParsedCalls("", [call_of(value) for value in found])
        except ValueError as error:
            looks_like = marked or re.match(
                r"[\[{\s]*\"(name|type\"\s*:\s*\"function|function)\"", stripped
            )
            return ParsedCalls(text, [BrokenCall(str(error))] if looks_like else [])


# -- named syntaxes -----------------------------------------------------------------------------


class _Blocks(CallSyntax):
    """Calls between tags: the opening names the tool, and JSON arguments follow."""

    expected: str
    closing = "</tool>"

    @abstractmethod
    def opened(self, text: str, at: int) -> tuple[int, int, str, str | None] | None:
        """The next opening at or after ``at``: its start and end, the tool and the tag."""

    def parse(self, text: str, schemas: Schemas) -> ParsedCalls:
        kept, found, at = [], [], 0
        while (opened := self.opened(text, at)) is not None:
            start, inside, tool, tag = opened
            kept.append(text[at:start])
            call, at = self._block(text, inside, tool, tag, schemas)
            found.append(call)
        kept.append(text[at:])
        return ParsedCalls("".join(kept).strip(), found)

    def _block(
        self, text: str, inside: int, tool: str, tag: str | None, schemas: Schemas
    ) -> tuple[Call | BrokenCall, int]:
        """The call whose arguments begin at ``inside``, and the end of its block."""
        if text.endswith("/>", 0, inside):
            return Call(tool, {}, tag), inside
        try:
            # Reads the JSON first: a string in it may spell the closing tag.
            args, end = json_at(text, behind_blanks(text, inside))
        except (ValueError, RecursionError) as error:
            problem = f"its arguments are not JSON: {error}"
        else:
            end = behind_blanks(text, end)
            problem = f"{self.closing} must follow the arguments"
            if end == len(text) or text.startswith(self.closing, end):
                behind = min(end + len(self.closing), len(text))
                if isinstance(args, dict):
                    return Call(tool, args, tag), behind
                problem = f"the arguments of {tool!r:.80} must be an object"
                return BrokenCall(problem, self.expected), behind
        closed = text.find(self.closing, inside)
        body = text[inside : closed if closed >= 0 else len(text)].strip()
        behind = closed + len(self.closing) if closed >= 0 else len(text)
        if not body:
            return Call(tool, {}, tag), behind
        if closed >= 0 and self.takes_raw(tool, schemas):
            return Call(tool, {"raw": body}, tag), behind
        return BrokenCall(f"{tool!r:.80}: {problem}", self.expected), behind

    def takes_raw(self, tool: str, schemas: Schemas) -> bool:
        """Whether contents that are not JSON become the tool's argument ``raw``."""
        return False


class _XMLBlocks(_Blocks):
    """``<tool name="search" tag="A">{"query": "..."}</tool>``."""

    expected = '<tool name="NAME">{"argument": value}</tool>'
    _opening = re.compile(r"<tool((?:\s+\w{1,20}\s*=\s*(?:\"[^\"<>]*\"|'[^'<>]*'))+)\s*/?>")
    _attribute = re.compile(r"(\w+)\s*=\s*(?:\"([^\"]*)\"|'([^']*)')")

    def opened(self, text: str, at: int) -> tuple[int, int, str, str | None] | None:
        while (found := self._opening.search(text, at)) is not None:
            given = {m[1]: m[2] or m[3] or "" for m in self._attribute.finditer(found[1])}
            if given.get("name"):
                return *found.span(), given["name"], given.get("tag") or None
            at = found.end()
        return None

    def takes_raw(self, tool: str, schemas: Schemas) -> bool:
        known = schemas.get(tool)
        return not schemas or (known is not None and "raw" in (known.get("properties") or {}))


class _NameLines(_Blocks):
    """``<tool>``, a line with the name, JSON arguments and ``</tool>``."""

    expected = '<tool>NAME\n{"argument": value}</tool>'
    _opening = re.compile(r"<tool>[ \t]*+(?:\n[ \t]*+)?([^\s<>{]{1,200})[ \t]*+\n?")

    def opened(self, text: str, at: int) -> tuple[int, int, str, str | None] | None:
        found = self._opening.search(text, at)
        return None if found is None else (*found.span(), found[1], None)


class Pattern(CallSyntax):
    """Calls by a regular expression with two groups, name and JSON arguments.

    Args:
        pattern: the expression; ``.`` also matches line ends.

    Raises:
        ConfigError: not a valid pattern with two groups.
    """

    def __init__(self, pattern: str) -> None:
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError(f"{pattern!r} is not a regular expression: {error}") from error
        if self._pattern.groups != 2:
            raise ConfigError(
                f"the pattern must have two groups, name and arguments; {pattern!r} has "
                f"{self._pattern.groups}"
            )

    def parse(self, text: str, schemas: Schemas) -> ParsedCalls:
        """The matches, in order."""
        found = [
            self._call(m[1].strip(), (m[2] or "").strip()) for m in self._pattern.finditer(text)
        ]
        return ParsedCalls(self._pattern.sub("", text).strip(), found)

    @staticmethod
    def _call(name: str, body: str) -> Call | BrokenCall:
        try:
            args = json.loads(body, strict=False) if body else {}
            problem = "its arguments must be an object"
        except (ValueError, RecursionError) as error:
            args, problem = None, f"its arguments are not JSON: {error}"
        if isinstance(args, dict):
            return Call(name, args)
        return BrokenCall(problem, f"{{...}} with the arguments of {name!r:.80} as JSON")


class _JSONTurn(CallSyntax):
    """``{"message": "...", "tools": [{"tool": "search", "args": {...}, "tag": "A"}]}``."""

    expected = '{"message": "...", "tools": [{"tool": "NAME", "args": {"argument": value}}]}'
    _fenced = re.compile(r"\s*```(?:json)?[ \t]*\r?\n(.*)```\s*", re.DOTALL | re.IGNORECASE)

    def parse(self, text: str, schemas: Schemas) -> ParsedCalls:
        fenced = self._fenced.fullmatch(text)
        body = (fenced[1] if fenced else text).strip()
        if not body.startswith("{"):
            return ParsedCalls(text, [])
        try:
            value = json.loads(body, strict=False)
        except (ValueError, RecursionError) as error:
            broken = [BrokenCall(f"the turn is not JSON: {error}", self.expected)]
            return ParsedCalls(text, broken if '"tools"' in body else [])
        listed, said = value.get("tools") or [], str(value.get("message") or "")
        if not isinstance(listed, list):
            return ParsedCalls(said, [BrokenCall('"tools" must be a list', self.expected)])
        return ParsedCalls(said, [self._call(item) for item in listed])

    def _call(self, item: Any) -> Call | BrokenCall:
        name = item.get("tool") if isinstance(item, dict) else None
        if not isinstance(name, str) or not name:
            return BrokenCall('an entry of "tools" has no "tool"', self.expected)
        args, tag = item.get("args"), item.get("tag")
        if args is not None and not isinstance(args, dict):
            return BrokenCall(f'the "args" of {name!r:.80} must be an object', self.expected)
        return Call(name, args or {}, None if tag is None else str(tag))


SYNTAXES: dict[str, CallSyntax] = {
    "hermes": TaggedJson("<tool_call>", "</tool_call>"),
    "llama": BareJson(),
    "xml_blocks": _XMLBlocks(),
    "name_lines": _NameLines(),
    "json_turn": _JSONTurn(),
}
"""The named syntaxes."""


# -- helpers --------------------------------------------------------------------------------------


def json_behind(text: str, at: int, *, strict: bool = False) -> tuple[Any, int]:
    """As :func:`json_at`, after white space; ValueError if there is no JSON."""
    try:
        return json_at(text, behind_blanks(text, at), strict=strict)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the arguments of a tool call are not JSON: {error}") from error


def behind_blanks(text: str, at: int) -> int:
    """Index of the first character from ``at`` on that is not white space."""
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]


def _json_values(text: str) -> list[Any]:
    """The items of a list, or values separated only by commas and semicolons."""
    values: list[Any] = []
    at = found = 0
    while at < len(text):
        value, end = json_behind(text, at)
        values += value if isinstance(value, list) else [value]
        found += 1
        if max(found, len(values)) > _MOST_VALUES:
            raise ValueError(f"more than {_MOST_VALUES} tool calls in one turn")
        at = re.compile(r"[\s;,]*").match(text, end).end()  # type: ignore[union-attr]
    return values


def _is_call(value: Any) -> bool:
    """Whether a JSON value is a call, and not an answer that contains a name."""
    if not isinstance(value, Mapping):
        return False
    if isinstance(value.get("function"), Mapping):
        return True
    arguments = "arguments" in value or "parameters" in value
    return "name" in value and (arguments or set(value) <= {"name", "type", "id"})


def shallow(value: Any) -> Any:
    """The value; ValueError if copying or writing it would recurse too deeply."""
    level = [value] if type(value) in _NESTS else []
    for _ in range(_MOST_LEVELS):
        inner = chain.from_iterable(o.values() if type(o) is dict else o for o in level)
        level = [value for value in inner if type(value) in _NESTS]
        if not level:
            return value
    raise ValueError(f"the arguments of a tool call are nested deeper than {_MOST_LEVELS}")


def skip_mark(text: str, at: int, mark: str) -> int:
    """The position after white space and a mark, or ``at`` if there is no mark."""
    start = behind_blanks(text, at)
    return start + len(mark) if text.startswith(mark, start) else at


def behind_mark(text: str, at: int, closing: str) -> int:
    """The position after a closing mark; ValueError if it is missing."""
    if not closing:
        return at
    end = skip_mark(text, at, closing)
    if end == at:
        raise ValueError(f"a tool call without {closing!r}")
    return end


def call_of(value: Any) -> Call:
    """The call for a JSON value: ``{"name": ..., "arguments": {...}}`` or a similar form.

    ``parameters`` is read as ``arguments``, ``tool_name`` as ``name`` and ``tool_call_id`` as
    ``id``; arguments may be JSON within a string, and all keys may be nested under ``function``.

    Raises:
        ValueError: it is not a call.
    """
    identity = value.get("id", value.get("tool_call_id")) if isinstance(value, Mapping) else None
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = value["function"]
    name = value.get("name", value.get("tool_name")) if isinstance(value, Mapping) else None
    if not isinstance(name, str):
        raise ValueError("a tool call must be an object with a name")
    given = value.get("arguments", value.get("parameters", {}))
    arguments = arguments_of(given, f"the arguments of {name!r:.80}")
    return Call(name, arguments, id=identity if isinstance(identity, str) else None)


def arguments_of(value: Any, what: str = "the arguments of a tool call") -> dict[str, Any]:
    """The arguments in a value; ValueError if it is not an object, or nested too deeply."""
    if isinstance(value, str):
        try:
            value = json.loads(value, strict=False) if value.strip() else {}
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{what} are not JSON: {error}") from error
    if value is None:
        return {}
    shallow(value)
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} must be an object")
    return dict(value)


def typed_value(text: str, schema: Mapping[str, Any] | None) -> Any:
    """The value of an unquoted argument: a string unless the schema has a different type."""
    if schema is None or schema.get("type", "string") == "string":
        return text
    try:
        return shallow(json.loads(text))
    except (ValueError, RecursionError):
        pass
    if len(text) > MOST_PYTHON:
        return text
    try:  # templates may write other types as Python does: True, None, {'k': 1}
        value = ast.literal_eval(text.strip())
        return shallow(value) if isinstance(value, (bool, list, dict, type(None))) else text
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text


def json_at(text: str, at: int, *, strict: bool = False) -> tuple[Any, int]:
    r"""The JSON value that begins at a position, and its end.

    Args:
        text: any text.
        at: index of the value's first character; no white space is skipped.
        strict: reject line ends inside strings. JSON requires escapes for them, but they are common
            when models write code.

    Raises:
        ValueError: there is no value; the position in the message is counted from ``at``.
        RecursionError: it is nested too deeply.

    Example:
        >>> json_at('So: {"a": 1}.', 4)
        ({'a': 1}, 12)
    """
    size = _WINDOW
    while True:
        window = text[at : at + size]
        whole = at + size >= len(text)
        try:
            value, end = _DECODERS[strict].raw_decode(window)
        except json.JSONDecodeError as error:
            unended = error.msg.startswith("Unterminated") or error.pos > size - _MARGIN
            if whole or not unended:
                raise
        else:
            # A number at the end of the window may continue after it.
            if whole or end <= size - _MARGIN:
                return value, at + end
        size *= 8
