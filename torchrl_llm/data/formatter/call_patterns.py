"""Tool calls in the text of a response: the syntax is learnt from how the template writes one.

Four shapes cover the common families: a JSON object (or list) between two marks, a name followed by
a JSON object of arguments, nested tags with one tag an argument, and Python call expressions.
"""

from __future__ import annotations

import ast
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

from torchrl_llm.data.formatter.probe import NAME, VALUE
from torchrl_llm.data.json_at import json_at

# The bound keeps the time linear where a name may hold the mark in front of it.
_NAME_PATTERN = r"([\w.\-/]{1,200}?)"
_SPACE = re.compile(r"\s*")
# More of them tell nobody anything, and each may be looked for to the end of the text.
_MOST_ERRORS = 64
_MOST_LEVELS = 100
_NESTS = (dict, list, tuple, set)
# No turn means as many calls, and a text of empty objects would hold half a million.
_MOST_VALUES = 4096
# Python's own parser takes a second and a hundred times the memory for a megabyte.
_MOST_PYTHON = 1 << 17


class Call(NamedTuple):
    """One tool call; ``id`` if the model wrote one."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


class ParsedCalls(NamedTuple):
    """What a text holds.

    Attributes:
        content: the text without its calls; broken calls stay in it.
        calls: the calls, in order.
        errors: what is wrong with each broken call.
    """

    content: str
    calls: list[Call]
    errors: list[str]


class CallSyntax(ABC):
    """How one template writes tool calls."""

    @abstractmethod
    def parse(self, text: str, schemas: Mapping[str, Mapping[str, Any]]) -> ParsedCalls:
        """Take the calls out of a text.

        Args:
            text: a response without reasoning and end-of-turn token.
            schemas: JSON schema of the parameters of each known tool, for untyped arguments.
        """


class _Marked(CallSyntax):
    """Calls that each begin with ``opening``; a subclass reads one and says where it ends."""

    opening: str

    def parse(self, text: str, schemas: Mapping[str, Mapping[str, Any]]) -> ParsedCalls:
        kept: list[str] = []
        calls: list[Call] = []
        errors: list[str] = []
        cursor = 0
        while len(errors) < _MOST_ERRORS and (at := text.find(self.opening, cursor)) >= 0:
            try:
                read, end = self.read(text, at, schemas)
            except ValueError as error:
                errors.append(str(error))
                following = text.find(self.opening, at + len(self.opening))
                end = following if following >= 0 else len(text)
                kept.append(text[cursor:end])
            else:
                # White space in front of a call is the template's.
                piece = text[cursor:at]
                kept.append(piece.rstrip("\n") if piece.strip() else "")
                calls += read
            cursor = end
        rest = text[cursor:]
        kept.append(rest if rest.strip() or not calls else "")
        return ParsedCalls("".join(kept), calls, errors)

    @abstractmethod
    def read(
        self, text: str, at: int, schemas: Mapping[str, Mapping[str, Any]]
    ) -> tuple[list[Call], int]:
        """Read the calls that begin at ``at``; where they end. ValueError if they are broken."""


class _TaggedJson(_Marked):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` and its likes."""

    def __init__(self, opening: str, closing: str) -> None:
        self.opening, self.closing = opening, closing

    def read(self, text: str, at: int, schemas: Any) -> tuple[list[Call], int]:
        value, end = _json_at(text, at + len(self.opening))
        calls = [_as_call(v) for v in (value if isinstance(value, list) else [value])]
        if not calls:
            raise ValueError("an empty list of tool calls")
        return calls, _behind(text, end, self.closing)


class _BareJson(CallSyntax):
    """The whole turn is one JSON object (Llama 3), or several behind one another."""

    # What Llama writes in front of calls where it also knows built-in tools.
    _opening = "<|python_tag|>"

    def parse(self, text: str, schemas: Mapping[str, Mapping[str, Any]]) -> ParsedCalls:
        stripped = text.strip()
        marked = stripped.startswith(self._opening)
        stripped = stripped.removeprefix(self._opening).lstrip()
        if not stripped.startswith(("{", "[")):
            return ParsedCalls(text, [], [])
        try:
            found = _json_values(stripped)
            if not any(_is_call(value) for value in found):
                return ParsedCalls(text, [], [])  # an answer that happens to be JSON
            return ParsedCalls("", [_as_call(value) for value in found], [])
        except ValueError as error:
            looks_like = marked or re.match(
                r"[\[{\s]*\"(name|type\"\s*:\s*\"function|function)\"", stripped
            )
            return ParsedCalls(text, [], [str(error)] if looks_like else [])


class _NamedJson(_Marked):
    """A name between two marks, and the JSON of its arguments (DeepSeek, newer Mistral)."""

    def __init__(self, opening: str, before: str, middle: str, after: str) -> None:
        self.opening = opening
        self._head = re.compile(
            re.escape(before) + _NAME_PATTERN + _flexible(middle) + r"(?=[{\[])"
        )
        self._tail = _marks(after)

    def read(self, text: str, at: int, schemas: Any) -> tuple[list[Call], int]:
        calls, cursor = [], at
        while head := self._head.search(text, cursor):
            gap = text[cursor : head.start()]
            # What begins with a mark of its own is read by itself: it may be broken.
            begins = text.find(self.opening, cursor, head.end()) >= 0
            if calls and (begins or _MARKS.sub("", gap).strip() not in ("", "function")):
                break
            arguments, cursor = _json_at(text, head.end())
            calls.append(Call(head.group(1), _arguments(arguments)))
            for mark in self._tail:
                cursor = _skip(text, cursor, mark)
        if not calls:
            raise ValueError(f"no tool name and JSON arguments behind {self.opening!r}")
        return calls, cursor


class _Tags(_Marked):
    """One tag an argument: ``<function=N><parameter=K>V`` or ``<arg_key>K</arg_key>``."""

    def __init__(self, opening: str, closing: str, *, keyed: bool) -> None:
        self.opening, self.closing = opening, closing
        follows = re.escape(closing)
        if keyed:
            self._name = re.compile(r"\s*([^\s<]+)")
            self._begin = re.compile(
                # No possessive group, which Python up to 3.11.4 reads wrongly.
                r"\s*<arg_key>([^<]*(?:<(?!/arg_key>)[^<]*)*)</arg_key>\s*<arg_value>"
            )
            self._end = re.compile(rf"</arg_value>(?=\s*(?:<arg_key>|{follows}))")
            self._newline, self._last = "", ""
        else:
            self._name = re.compile(r"\s*<function=([^>]+)>")
            self._begin = re.compile(r"\s*<parameter=([^>]+)>\n?")
            self._end = re.compile(rf"</parameter>(?=\s*(?:<parameter=|</function>|{follows}))")
            self._newline, self._last = "\n", "</function>"

    def read(
        self, text: str, at: int, schemas: Mapping[str, Mapping[str, Any]]
    ) -> tuple[list[Call], int]:
        name = self._name.match(text, at + len(self.opening))
        if name is None:
            raise ValueError("a tool call without a function name")
        known = (schemas.get(name.group(1)) or {}).get("properties", {})
        arguments, cursor = {}, name.end()
        while begun := self._begin.match(text, cursor):
            key = begun.group(1).strip()
            # What ends a value must be followed by more of the call: it may be a part of the value.
            ended = self._end.search(text, begun.end())
            if ended is None:
                raise ValueError(f"the argument {key!r:.80} of a tool call has no end")
            value = text[begun.end() : ended.start()].removesuffix(self._newline)
            arguments[key] = _typed(value, known.get(key))
            cursor = ended.end()
        cursor = _skip(text, cursor, self._last)
        return [Call(name.group(1), arguments)], _behind(text, cursor, self.closing)


class _Pythonic(_Marked):
    """``[name(key=value)]`` between two marks (LFM2)."""

    def __init__(self, opening: str, closing: str) -> None:
        self.opening, self.closing = opening, closing

    def read(self, text: str, at: int, schemas: Any) -> tuple[list[Call], int]:
        start = at + len(self.opening)
        end = text.find(self.closing, start)
        if end < 0:
            raise ValueError(f"a tool call without {self.closing!r}")
        if end > _MOST_PYTHON:
            raise ValueError(f"a tool call that ends behind {_MOST_PYTHON} characters")
        try:
            tree = ast.parse(text[start:end].strip(), mode="eval").body
            nodes = tree.elts if isinstance(tree, ast.List) else [tree]
            calls = []
            for node in nodes:
                if not isinstance(node, ast.Call) or node.args:
                    raise ValueError("expected calls with named arguments")
                arguments = {str(k.arg): _shallow(ast.literal_eval(k.value)) for k in node.keywords}
                calls.append(Call(ast.unparse(node.func), arguments))
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise ValueError(f"not a Python call: {error}") from error
        return calls, end + len(self.closing)


def syntax_of(call: str | None) -> CallSyntax | None:
    """The syntax of a template, from its text for one call of ``NAME`` with ``{"key": VALUE}``."""
    if call is None or NAME not in call:
        return None
    if "<function=" in call or "<arg_key>" in call:
        opening, closing = _first_mark(call), _last_mark(call)
        return _Tags(opening, closing, keyed="<arg_key>" in call)
    at = call.index(NAME)
    if re.search(NAME + r"\(key=", call):
        listed = call.rfind("[", 0, at) >= 0 and call[:at].rstrip().endswith("[")
        begin = call[:at].rstrip().removesuffix("[") if listed else call[:at]
        end = call[call.index(VALUE) :].lstrip(VALUE + "\"')")
        return _Pythonic(begin.strip(), (end.removeprefix("]") if listed else end).strip())
    for match in re.finditer(r"[\[{]", call[:at]):
        try:
            value, end = _json_at(call, match.start())
        except ValueError:
            continue
        if NAME in json.dumps(value):
            opening, closing = call[: match.start()].strip(), call[end:].strip()
            return _TaggedJson(opening, closing) if opening else _BareJson()
    brace = call.find("{", at)
    if brace < 0:
        return None
    before = call[:at]
    near = re.search(r"(<[^<>]*>|\[[A-Z_]+\]|[^\s<>\]]+)$", before)
    if near is None:
        return None
    try:
        _, end = _json_at(call, brace)
    except ValueError:
        return None
    opening = _first_mark(before) or before.strip()
    return _NamedJson(opening, near.group(), call[at + len(NAME) : brace], call[end:])


_MARKS = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]|```\w*")


def _marks(text: str) -> list[str]:
    return _MARKS.findall(text)


def _first_mark(text: str) -> str:
    return next(iter(_marks(text)), "")


def _last_mark(text: str) -> str:
    return next(iter(reversed(_marks(text))), "")


def _flexible(text: str) -> str:
    """A pattern for a text in which the amount of white space may differ."""
    return r"\s*".join(re.escape(word) for word in ["", *text.split(), ""])


def _json_at(text: str, at: int) -> tuple[Any, int]:
    try:
        value, end = json_at(text, _SPACE.match(text, at).end())  # type: ignore[union-attr]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the arguments of a tool call are not JSON: {error}") from error
    return _shallow(value), end


def _json_values(text: str) -> list[Any]:
    """The items of a list, or values with nothing but commas and semicolons between them."""
    values: list[Any] = []
    at = found = 0
    while at < len(text):
        value, end = _json_at(text, at)
        values += value if isinstance(value, list) else [value]
        found += 1
        if max(found, len(values)) > _MOST_VALUES:
            raise ValueError(f"more than {_MOST_VALUES} tool calls in one turn")
        at = re.compile(r"[\s;,]*").match(text, end).end()  # type: ignore[union-attr]
    return values


def _is_call(value: Any) -> bool:
    """Whether a JSON value is meant as a call, and not as an answer with a name in it."""
    if not isinstance(value, Mapping):
        return False
    if isinstance(value.get("function"), Mapping):
        return True
    arguments = "arguments" in value or "parameters" in value
    return "name" in value and (arguments or set(value) <= {"name", "type", "id"})


def _shallow(value: Any) -> Any:
    """The value, or a ValueError where those who copy and write it would recurse too deeply."""
    level = [value] if type(value) in _NESTS else []
    for _ in range(_MOST_LEVELS):
        inner = chain.from_iterable(o.values() if type(o) is dict else o for o in level)
        level = [value for value in inner if type(value) in _NESTS]
        if not level:
            return value
    raise ValueError(f"the arguments of a tool call are nested deeper than {_MOST_LEVELS}")


def _skip(text: str, at: int, mark: str) -> int:
    start = _SPACE.match(text, at).end()  # type: ignore[union-attr]
    return start + len(mark) if text.startswith(mark, start) else at


def _behind(text: str, at: int, closing: str) -> int:
    if not closing:
        return at
    end = _skip(text, at, closing)
    if end == at:
        raise ValueError(f"a tool call without {closing!r}")
    return end


def _as_call(value: Any) -> Call:
    identity = value.get("id") if isinstance(value, Mapping) else None
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = value["function"]
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise ValueError("a tool call must be an object with a name")
    arguments = _arguments(value.get("arguments", value.get("parameters", {})))
    return Call(value["name"], arguments, identity if isinstance(identity, str) else None)


def _arguments(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value, strict=False)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the arguments of a tool call are not JSON: {error}") from error
    if value is None:
        return {}
    _shallow(value)
    if not isinstance(value, Mapping):
        raise ValueError("the arguments of a tool call must be an object")
    return dict(value)


def _typed(text: str, schema: Mapping[str, Any] | None) -> Any:
    """An argument that was written without quotes: a string unless the schema says otherwise."""
    if schema is None or schema.get("type", "string") == "string":
        return text
    try:
        return _shallow(json.loads(text))
    except (ValueError, RecursionError):
        return text
