"""Syntaxes of tool calls, learnt from one example that a chat template wrote.

:func:`syntax_of` takes the text of one call of ``NAME`` with ``{"key": VALUE}`` and derives the
syntax from the text around these words: a JSON object or list between two marks, a name followed by
a JSON object of arguments, nested tags with one tag per argument, an object in braces with marks
for quotes, or Python call expressions. A syntax that cannot parse its own example is rejected.

Next: :mod:`torchrl_llm.data.text.call_syntax` has the interface and the helpers.
"""

from __future__ import annotations

import ast
import json
import re
from contextlib import suppress
from typing import Any

from torchrl_llm.data.text.call_syntax import (
    ANSWER,
    CALL_ID,
    MOST_PYTHON,
    NAME,
    VALUE,
    BareJson,
    BrokenCall,
    Call,
    CallSyntax,
    Marked,
    ParsedCalls,
    Schemas,
    TaggedJson,
    arguments_of,
    behind_mark,
    json_behind,
    shallow,
    skip_mark,
    typed_value,
)

# The bound keeps the time linear if a name may contain the mark before it.
_NAME_PATTERN = r"([\w.\-/]{1,200}?)"
_MARKS = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]|```\w*")
# Ends of a thought: a call is learnt from the text after it.
_THOUGHT_END = re.compile(r"</[\w:]*think[\w:]*>|<\|END_THINKING\|>|\[/THINK\]")
_ID = r"(?P<id>[\w.:\-]{1,200})"


def syntax_of(call: str | None, beside: str | None = None) -> CallSyntax | None:
    """Derive a template's syntax from its text for one call of ``NAME`` with ``{"key": VALUE}``.

    Args:
        call: the text.
        beside: the text for such a call with ``ANSWER`` next to it.

    Returns:
        The syntax; ``None`` if no known syntax parses this text as that call.
    """
    if call is None or NAME not in call or VALUE not in call:
        return None
    *_, begin = (0, *(m.end() for m in _THOUGHT_END.finditer(call, 0, call.index(NAME))))
    call = call[begin:].strip()
    schemas = {NAME: {"properties": {"key": {"type": "string"}}}}
    for learn in (_opened, _braced, _pythonic, _json, _named, _tagged):
        with suppress(ValueError):
            syntax = learn(call)
            if syntax is None:
                continue
            read = syntax.parse(call, schemas)
            own = [(c.name, c.arguments) for c in read.calls] == [(NAME, {"key": VALUE})]
            if own and not read.errors and not read.content.strip():
                return _beside(syntax, call, beside or "")
    return None


class _Beside(CallSyntax):
    """A bare call with text on one side: the tool must be known, or the text must have marks.

    Args:
        bare: reads the call alone.
        leads: the text is before the call.
        opening: mark that the template writes before the text; ``closing``: the mark after it.
    """

    _begins = re.compile(r"[\[{]\s*\"(?:name|type|function|id)\"|\[\s*[A-Za-z_][\w.]{0,200}\(")
    _ends = re.compile(r"\)\s*\]|\}\s*\}")

    def __init__(self, bare: CallSyntax, leads: bool, opening: str, closing: str) -> None:
        self._bare, self._leads, self._opening, self._closing = bare, leads, opening, closing

    def parse(self, text: str, schemas: Schemas) -> ParsedCalls:
        whole = self._bare.parse(text, schemas)
        if whole.found:
            return whole
        # The text may spell calls, too: only the first or the last can be the call.
        found = (self._begins if self._leads else self._ends).finditer(text)
        places = [m.start() if self._leads else m.end() for m in found]
        for at in dict.fromkeys((*places[:1], *places[-1:])):
            said, call = (text[:at], text[at:])[:: 1 if self._leads else -1]
            read = self._bare.parse(call, schemas)
            marked = self._opening and said.lstrip().startswith(self._opening)
            known = marked or all(c.name in schemas for c in read.calls)
            if read.calls and not read.errors and known:
                said = said.strip() if self._opening or self._closing else said
                said = said.removeprefix(self._opening).removesuffix(self._closing)
                return ParsedCalls(said, read.found)
        return whole


def _beside(syntax: CallSyntax, call: str, beside: str) -> CallSyntax:
    around, said, behind = beside.partition(ANSWER)
    if isinstance(syntax, TaggedJson) and said and (around + behind).strip() == call:
        opening = around.strip()
        shut = syntax.opening.removeprefix(opening)
        if opening and shut and behind.startswith(shut):  # the text has marks, even an empty text
            return _Beside(BareJson(), True, opening, shut)
    if not isinstance(syntax, (BareJson, _BarePythonic)):
        return syntax
    if said and call in behind:
        return _Beside(syntax, True, around.strip(), behind[: behind.index(call)].strip())
    if said and call in around:
        begun = around[around.index(call) + len(call) :]
        return _Beside(syntax, False, begun.strip(), behind.strip())
    return _Beside(syntax, True, "", "")


# -- JSON -----------------------------------------------------------------------------------------


class _NameKeyed(TaggedJson):
    """``[{"name": {...}}]`` between two marks: the name is the key of the arguments."""

    def call_of(self, value: Any) -> Call:
        named = isinstance(value, dict) and len(value) == 1
        if not named:
            raise ValueError("a tool call must be an object with the tool's name as its key")
        ((name, arguments),) = value.items()
        return Call(name, arguments_of(arguments))


def _json(call: str) -> CallSyntax | None:
    at = call.index(NAME)
    for match in re.finditer(r"[\[{]", call[:at]):
        try:
            value, end = json_behind(call, match.start())
        except ValueError:
            continue
        if NAME not in json.dumps(value):
            continue
        opening, closing = call[: match.start()].strip(), call[end:].strip()
        if not opening:
            return BareJson()
        first = value[0] if isinstance(value, list) and value else value
        keyed = isinstance(first, dict) and NAME in first
        return (_NameKeyed if keyed else TaggedJson)(opening, closing)
    return None


class _NamedJson(Marked):
    """A name between two marks, and the JSON of its arguments (DeepSeek, newer Mistral)."""

    def __init__(self, opening: str, before: str, middle: str, after: str, inner: str = "") -> None:
        self.opening = opening
        flexible = _flexible(middle)
        with_id = _flexible(CALL_ID).strip("\\s*") in flexible
        if with_id:
            flexible = flexible.replace(re.escape(CALL_ID), _ID)
        # The number of a call; the example has the first number.
        flexible = re.sub(r":\d+(?!\w)", r":\\d{1,9}", flexible)
        self._head = re.compile(re.escape(before) + _NAME_PATTERN + flexible + r"(?=[{\[])")
        self._numbered = re.search(r"^:\d+(?!\w)", middle) is not None
        self._prefix = before if self._numbered and not before.startswith("<") else ""
        self._tail = _MARKS.findall(after)
        # Some templates write the outer mark only before the first call of a conversation.
        inner = inner and _NamedJson(inner, before, middle, after)
        self._inner = inner or None

    def parse(self, text: str, schemas: Schemas) -> ParsedCalls:
        if self._inner is not None and self.opening not in text:
            return self._inner.parse(text, schemas)
        return super().parse(text, schemas)

    def read(self, text: str, at: int, schemas: Schemas) -> tuple[list[Call], int]:
        calls, cursor = [], at
        while head := self._head.search(text, cursor):
            gap = text[cursor : head.start()]
            # A call with its own opening mark is read separately: it may be broken.
            begins = text.find(self.opening, cursor, head.end()) >= 0
            if calls and (begins or _MARKS.sub("", gap).strip() not in ("", "function")):
                break
            arguments, cursor = json_behind(text, head.end())
            calls.append(Call(head.group(1), arguments_of(arguments), id=self._id(head)))
            for mark in self._tail:
                cursor = skip_mark(text, cursor, mark)
        if not calls:
            raise ValueError(f"no tool name and JSON arguments after {self.opening!r}")
        return calls, cursor

    def _id(self, head: re.Match[str]) -> str | None:
        if "id" in head.re.groupindex:
            return head["id"]
        if not self._numbered:
            return None
        # The id is the name with the call's number (Kimi); results refer to it.
        number = re.match(r":\d+", head.string[head.end(1) : head.end()])
        return f"{self._prefix}{head[1]}{number.group()}" if number else None


def _named(call: str) -> CallSyntax | None:
    at = call.index(NAME)
    brace = call.find("{", at)
    near = re.search(r"(<[^<>]*>|<\w+=|\[[A-Z_]+\]|[^\s<>\]]+)$", call[:at])
    if brace < 0 or near is None:
        return None
    _, end = json_behind(call, brace)
    marks = [m for m in _MARKS.findall(call[:at]) if m != near.group()]
    opening = marks[0] if marks else _first_mark(call[:at]) or call[:at].strip()
    inner = marks[1] if len(marks) > 1 else ""
    return _NamedJson(opening, near.group(), call[at + len(NAME) : brace], call[end:], inner)


# -- tags -----------------------------------------------------------------------------------------


class _Tags(Marked):
    """One tag per argument: ``<function=N><parameter=K>V`` or ``<arg_key>K</arg_key>``.

    Args:
        opening: the first mark; if it does not contain the name, ``named`` follows it.
        named: text before the name; ``shut_name``: text after it.
        before: text before a key; ``shut``: text between key and value.
        end: text after a value; ``last``: text after the last value of a call.
        closing: the last mark.
    """

    def __init__(
        self,
        opening: str,
        named: str,
        shut_name: str,
        before: str,
        shut: str,
        end: str,
        last: str,
        closing: str,
    ) -> None:
        self.opening, self.closing, self._last, self._outer = opening, closing, last, named
        name = r"([^<>\"\n]{1,200}?)" if shut_name else r"([^\s<]{1,200})"
        self._name = re.compile(rf"\s*{_flexible(named)}{name}{_attributes(shut_name)}")
        self._before = re.compile(_flexible(before))
        self._newline = "\n" if shut.endswith("\n") else ""
        self._shut = re.compile(rf"\s*{_attributes(shut.strip())}\n?")
        following = "|".join(re.escape(m) for m in (before, last, closing) if m)
        self._end = re.compile(rf"{re.escape(end)}(?=\s*(?:{following or '$'}))")

    def read(self, text: str, at: int, schemas: Schemas) -> tuple[list[Call], int]:
        calls: list[Call] = []
        cursor = at + len(self.opening) if self.opening != self._outer else at
        while (name := self._name.match(text, cursor)) is not None:
            arguments, cursor = self._arguments(text, name, schemas)
            calls.append(Call(name[1], arguments))
            cursor = skip_mark(text, cursor, self._last) if self._last else cursor
            if not self._outer or self.opening == self._outer:
                break
        if not calls:
            raise ValueError("a tool call without a function name")
        return calls, behind_mark(text, cursor, self.closing)

    def _arguments(
        self, text: str, name: re.Match[str], schemas: Schemas
    ) -> tuple[dict[str, Any], int]:
        known = (schemas.get(name[1]) or {}).get("properties", {})
        arguments, cursor = {}, name.end()
        while (found := self._key_at(text, cursor)) is not None:
            key, kind, begin = found
            # More of the call must follow an end mark: otherwise the mark is part of the value.
            ended = self._end.search(text, begin)
            if ended is None:
                raise ValueError(f"the argument {key!r:.80} of a tool call has no end")
            value = text[begin : ended.start()]
            value = value.removesuffix(self._newline) if self._newline else value
            if value.startswith("<![CDATA[") and value.endswith("]]>"):
                value = value[9:-3]
            schema = known.get(key) if kind is None or kind == "string" else {"type": kind}
            arguments[key] = typed_value(value, schema)
            cursor = ended.end()
        return arguments, cursor

    def _key_at(self, text: str, at: int) -> tuple[str, str | None, int] | None:
        """The key that begins at a position, its type if written, and the start of its value."""
        begun = self._before.match(text, at)
        if begun is None:
            return None
        stop = re.compile(r"[<>\"]").search(text, begun.end())
        shut = self._shut.match(text, stop.start()) if stop else None
        if shut is None:
            return None
        told = re.search(r"(string|type)=\"(\w+)\"", shut.group())
        kind = told and (told[2] if told[1] == "type" else {"true": "string"}.get(told[2], "any"))
        return text[begun.end() : stop.start()].strip(), kind, shut.end()


def _tagged(call: str) -> CallSyntax | None:
    at, value = call.index(NAME), call.rindex(VALUE)
    key = call.rfind("key", at, value)
    # The tag around the key may contain the word "key" (`<arg_key>key</arg_key>`).
    inner = re.compile(r"(?<![\w/])key(?!\w)").search(call, at + len(NAME), value)
    if key < 0 or inner is None:
        return None
    key = inner.start()
    head, between = call[:at], call[at + len(NAME) : key]
    shut, tail = call[key + 3 : value], call[value + len(VALUE) :]
    before = between[between.rfind("<") :].lstrip() if "<" in between else ""
    units = _units(tail)
    if not before or not units:
        return None
    partial = re.search(r"<[^<>]*$", head)  # `<function=`, `<invoke name="`
    opening = _first_mark(head)
    named = partial.group() if partial else ""
    if not named and len(_MARKS.findall(head)) > 1:
        named = _MARKS.findall(head)[-1]
    opening = opening or named
    end, *behind = units
    closing = behind[-1] if len(behind) > 1 or not named else ""
    last = behind[0] if named and behind else ""
    if opening == named:
        last, closing = "", last or closing
    return _Tags(
        opening, named, between[: between.rfind("<")].strip(), before, shut, end, last, closing
    )


def _units(text: str) -> list[str]:
    """The closing marks of a text; a mark followed by a word extends to the next mark."""
    return re.findall(r"<[^<>]*>(?:\w+<[^<>]*>)?|\S+", text)


class _Opened(Marked):
    """Tags of special tokens: ``<|open|>call tool="N"<|sep|>..<|close|>call<|sep|>`` (Kimi K3)."""

    # The text next to the calls and the message are also enclosed in such tags.
    opening = "<|close|>response<|sep|><|open|>tools<|sep|>"
    _call = re.compile(r"\s*<\|open\|>call tool=\"([^\"<>]{1,200})\"[^<>]*<\|sep\|>")
    _part = re.compile(
        r"\s*<\|open\|>(?:argument key=\"([^\"<>]{0,200})\"|json) type=\"(\w+)\"<\|sep\|>"
    )
    _end = re.compile(
        r"<\|close\|>(?:argument|json)<\|sep\|>(?=\s*<\|(?:open\|>argument|close\|>call))"
    )

    def read(self, text: str, at: int, schemas: Schemas) -> tuple[list[Call], int]:
        calls, cursor = [], at + len(self.opening)
        while (head := self._call.match(text, cursor)) is not None:
            arguments, cursor = {}, head.end()
            while (part := self._part.match(text, cursor)) is not None:
                ended = self._end.search(text, part.end())
                if ended is None:
                    raise ValueError(f"an argument of the tool call {head[1]!r:.80} has no end")
                value = text[part.end() : ended.start()]
                if part[1] is None:
                    arguments |= arguments_of(value)
                else:
                    arguments[_attribute(part[1])] = typed_value(value, {"type": part[2]})
                cursor = ended.end()
            cursor = behind_mark(text, cursor, "<|close|>call<|sep|>")
            calls.append(Call(_attribute(head[1]), arguments))
        if not calls:
            raise ValueError("an empty list of tool calls")
        cursor = behind_mark(text, cursor, "<|close|>tools<|sep|>")
        return calls, skip_mark(text, skip_mark(text, cursor, "<|close|>message"), "<|sep|>")


def _attribute(text: str) -> str:
    return text.replace("&quot;", '"').replace("&amp;", "&")


def _opened(call: str) -> CallSyntax | None:
    return _Opened() if _Opened.opening in call else None


# -- an object in braces --------------------------------------------------------------------------


class _Braced(Marked):
    """``call:NAME{key:<|"|>VALUE<|"|>}``: keys are bare, and a mark replaces quotes (Gemma)."""

    _name = re.compile(r"([^{}\s]{1,200})(?=\{)")

    def __init__(self, opening: str, quote: str, closing: str) -> None:
        self.opening, self.closing = opening, closing
        mark = re.escape(quote)
        self._part = re.compile(
            rf"\s*(?:{mark}(?P<said>.*?){mark}|(?P<brace>[{{}}\[\],:])|"
            r"(?P<key>[^:{}\[\],]{1,200})(?=:)|(?P<word>[^,{}\[\]<]+))",
            re.DOTALL,
        )

    def read(self, text: str, at: int, schemas: Schemas) -> tuple[list[Call], int]:
        name = self._name.match(text, at + len(self.opening))
        if name is None:
            raise ValueError("a tool call without a function name")
        written, end = self._as_json(text, name.end())
        known = (schemas.get(name[1]) or {}).get("properties", {})
        arguments = {
            key: typed_value(value, known.get(key)) if isinstance(value, str) else value
            for key, value in arguments_of(written).items()
        }
        return [Call(name[1], arguments)], behind_mark(text, end, self.closing)

    def _as_json(self, text: str, at: int) -> tuple[str, int]:
        """The object that begins at a position as JSON, and its end."""
        parts: list[str] = []
        depth = 0
        while depth or not parts:
            part = self._part.match(text, at)
            if part is None:
                raise ValueError("a tool call without '}'")
            at, kind = part.end(), part.lastgroup
            if kind in ("said", "key"):
                parts.append(json.dumps(part[kind]))
                continue
            depth += part[kind] in ("{", "[")
            depth -= part[kind] in ("}", "]")
            if part[kind] in ("}", "]") and parts[-1] == ",":
                parts.pop()
            parts.append(part[kind])
        return "".join(parts), at


def _braced(call: str) -> CallSyntax | None:
    found = re.search(NAME + r"\{key:(<[^<>]*>)" + VALUE + r"\1\}", call)
    if found is None or not call[: found.start()].strip():
        return None
    return _Braced(call[: found.start()].strip(), found[1], call[found.end() :].strip())


# -- Python ---------------------------------------------------------------------------------------


class _Pythonic(Marked):
    """``[name(key=value)]`` between two marks (LFM2)."""

    def __init__(self, opening: str, closing: str) -> None:
        self.opening, self.closing = opening, closing

    def read(self, text: str, at: int, schemas: Schemas) -> tuple[list[Call], int]:
        start = at + len(self.opening)
        end = text.find(self.closing, start)
        if end < 0:
            raise ValueError(f"a tool call without {self.closing!r}")
        if end > MOST_PYTHON:
            raise ValueError(f"a tool call of more than {MOST_PYTHON} characters")
        calls = _python_calls(text[start:end].strip(), schemas)
        return calls, end + len(self.closing)


class _BarePythonic(CallSyntax):
    """The whole turn is ``[name(key=value)]`` (Llama 3.2 and 4)."""

    _begins = re.compile(r"\s*\[?\s*[A-Za-z_][\w.]{0,200}\(\s*(?:[A-Za-z_]\w{0,200}\s*=|\)\s*\])")

    def parse(self, text: str, schemas: Schemas) -> ParsedCalls:
        stripped = text.strip()
        if self._begins.match(stripped) is None or not stripped.endswith(("]", ")")):
            return ParsedCalls(text, [])
        try:
            if len(stripped) > MOST_PYTHON:
                raise ValueError(f"tool calls of more than {MOST_PYTHON} characters")
            return ParsedCalls("", list(_python_calls(stripped, schemas)))
        except ValueError as error:
            return ParsedCalls(text, [BrokenCall(str(error))])


def _python_calls(text: str, schemas: Schemas) -> list[Call]:
    with suppress(SyntaxError, RecursionError, MemoryError, ValueError):
        ast.parse(escaped := text.replace("\n", "\\n"), mode="eval")
        text = escaped  # some templates do not escape line ends in strings
    try:
        tree = ast.parse(text, mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        calls = []
        for node in nodes:
            if not isinstance(node, ast.Call) or node.args:
                raise ValueError("expected calls with named arguments")
            name = ast.unparse(node.func)
            known = (schemas.get(name) or {}).get("properties", {})
            arguments = {}
            for keyword in node.keywords:
                key, value = str(keyword.arg), _literal(keyword.value)
                schema = known.get(key) or {}
                if isinstance(value, (int, float)) and schema.get("type") == "string":
                    value = ast.get_source_segment(text, keyword.value)  # it had no quotes
                arguments[key] = typed_value(value, schema) if isinstance(value, str) else value
            calls.append(Call(name, arguments))
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"not a Python call: {error}") from error
    return calls


def _literal(node: ast.expr) -> Any:
    # Some templates print strings without quotes; JSON's constants parse as names, too.
    if isinstance(node, ast.Name):
        return {"true": True, "false": False, "null": None}.get(node.id, node.id)
    return shallow(ast.literal_eval(node))


def _pythonic(call: str) -> CallSyntax | None:
    if not re.search(NAME + r"\(key=", call):
        return None
    at = call.index(NAME)
    listed = call.rfind("[", 0, at) >= 0 and call[:at].rstrip().endswith("[")
    opening = call[:at].rstrip().removesuffix("[") if listed else call[:at]
    end = call[call.index(VALUE) :].lstrip(VALUE + "\"')")
    closing = (end.removeprefix("]") if listed else end).strip()
    if not opening.strip() and not closing:
        return _BarePythonic()
    return _Pythonic(opening.strip(), closing)


# -- helpers --------------------------------------------------------------------------------------


def _first_mark(text: str) -> str:
    return next(iter(_MARKS.findall(text)), "")


def _flexible(text: str) -> str:
    """A pattern for a text with any amount of white space."""
    return r"\s*".join(re.escape(word) for word in ["", *text.split(), ""])


def _attributes(text: str) -> str:
    """As :func:`_flexible`, with any values of attributes."""
    return re.sub(r"=\"[^\"]*\"", lambda _: r'="[^"<>]{0,80}"', _flexible(text))
