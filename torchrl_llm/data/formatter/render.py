"""Messages to text through a chat template, with the place of every content in that text.

The contents are rendered twice: as they are, and each between two private-use marks. Where the
second text without its marks is the first, the marks say exactly which characters came from which
message. Templates that look at a content in a way that the marks disturb fall back to a search.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jinja2
from transformers.utils.chat_template_utils import get_json_schema, render_jinja_template

from torchrl_llm.data.formatter.shield import ESCAPE, Shield
from torchrl_llm.errors import TemplateError

__all__ = ["REASONING_KEYS", "Form", "Rendered", "Renderer", "Span"]

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_PRIVATE_KEYS = frozenset({"is_complete", "raw", "flags", "tool_call_errors"})
_MARK, _END_MARK, _MAX_MARKED = 0xF0000, 0x100000, 0xFFFD
_PRIVATE_USE = re.compile("[\U000f0000-\U0010fffd]")
_MARKS = re.compile("[\U000f0000-\U0010fffd]|" + ESCAPE + ".", re.DOTALL)
# The tracker behind {% generation %} lives in the compiled template, which all threads share.
_GENERATION_LOCK = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a template wants its messages.

    Args:
        parts: contents as ``[{"type": "text", "text": ...}]`` are understood.
        text: contents as strings are understood.
        arguments_as_text: a call's arguments must be a JSON string, not a mapping.
        reasoning_field: the message key that holds reasoning; ``None`` if the template reads none.
        call_ids: calls and results need ids (of nine characters, for Mistral).
    """

    parts: bool = False
    text: bool = True
    arguments_as_text: bool = False
    reasoning_field: str | None = None
    call_ids: bool = False


class Span(NamedTuple):
    """A half-open character range that holds a field of message ``index``."""

    start: int
    end: int
    index: int


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation.

    Args:
        text: the text, special-token strings of contents included.
        literals: character ranges that spell a special token and are not one.
        spans: where the contents stand, in order of the text.
        generation: character ranges inside ``{% generation %}``; ``None`` if the template has none.
    """

    text: str
    literals: list[tuple[int, int]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    generation: list[tuple[int, int]] | None = None


class Renderer:
    """Render chats with one template.

    Args:
        template: the Jinja template.
        shield: covers special-token strings in contents.
        variables: what the template may use beside the messages (``bos_token``, options).
        form: how the template wants its messages.
    """

    def __init__(
        self, template: str, shield: Shield, variables: Mapping[str, Any], form: Form
    ) -> None:
        self.template = template
        self.shield = shield
        self.variables = dict(variables)
        self.form = form
        self.has_generation = re.search(r"\{\%-?\s*generation\s*-?\%\}", template) is not None

    def with_form(self, form: Form) -> Renderer:
        """The same renderer for another form of messages."""
        return Renderer(self.template, self.shield, self.variables, form)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        spans: bool = False,
        generation: bool = False,
    ) -> Rendered:
        """Render messages.

        Args:
            messages: plain message dicts; none is changed.
            tools: JSON schemas (or documented functions) of the tools.
            add_generation_prompt: end with the header of the model's turn.
            spans: also locate the contents.
            generation: also locate the ``{% generation %}`` blocks, if the template has any.

        Raises:
            TemplateError: the template refuses the messages.
        """
        tools = self._tools(tools)
        prepared = [self._prepare(m, i) for i, m in enumerate(messages)]
        blocks = None
        if generation and self.has_generation:
            covered, blocks = self._generation(prepared, tools, add_generation_prompt)
        else:
            covered = self._jinja(prepared, tools, add_generation_prompt)
        text, literals = self.shield.uncover(covered)
        if blocks is not None and literals:
            lengths = [
                len(self.shield.uncover(covered[:at])[0]) for block in blocks for at in block
            ]
            blocks = list(zip(lengths[::2], lengths[1::2], strict=True))
        found: list[Span] = []
        if spans:
            found = self._locate(messages, tools, add_generation_prompt, text)
        return Rendered(text, literals, found, blocks)

    # -- one call of the template -----------------------------------------------------------------

    def _jinja(self, prepared: list[dict], tools: list[dict] | None, prompt: bool) -> str:
        try:
            rendered, _ = render_jinja_template(
                conversations=[prepared],
                tools=tools,
                chat_template=self.template,
                add_generation_prompt=prompt,
                **self.variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            roles = [m.get("role") for m in prepared]
            raise TemplateError(
                f"the chat template refuses messages with roles {_shortened(roles)}: {error}"
            ) from error
        return rendered[0]

    def _generation(
        self, prepared: list[dict], tools: list[dict] | None, prompt: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        try:
            with _GENERATION_LOCK:
                rendered, blocks = render_jinja_template(
                    conversations=[prepared],
                    tools=tools,
                    chat_template=self.template,
                    add_generation_prompt=prompt,
                    return_assistant_tokens_mask=True,
                    **self.variables,
                )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError):
            return self._jinja(prepared, tools, prompt), []  # says what is wrong
        return rendered[0], blocks[0]

    def _tools(self, tools: Sequence[Any] | None) -> list[dict] | None:
        if not tools:
            return None
        schemas = [t if isinstance(t, Mapping) else get_json_schema(t) for t in tools]
        return [self.shield.cover_tree(schema) for schema in schemas]

    # -- messages as the template wants them ------------------------------------------------------

    def _prepare(
        self, message: Mapping[str, Any], index: int, mark: Callable[[str, int], str] | None = None
    ) -> dict[str, Any]:
        """A copy of one message in the template's form, shielded, and marked if asked."""
        if "role" not in message:
            raise TemplateError(f"message {index} has no role: {dict(message)!r:.200}")
        form, cover = self.form, self.shield.cover

        def text(value: str) -> str:
            return mark(cover(value), index) if mark else cover(value)

        out = {
            key: value
            for key, value in message.items()
            if key not in _PRIVATE_KEYS and key not in REASONING_KEYS and value is not None
        }
        out["content"] = self._content(message, index, text)
        reasoning = _reasoning(message)
        if reasoning is not None and form.reasoning_field is not None:
            out[form.reasoning_field] = text(reasoning)
        if calls := message.get("tool_calls"):
            out["tool_calls"] = [
                self._call(call, index, k, text) for k, call in enumerate(_listed(calls))
            ]
        if form.call_ids and message["role"] in ("tool", "ipython"):
            out.setdefault("tool_call_id", "call00000")
        return out

    def _content(self, message: Mapping[str, Any], index: int, text: Any) -> Any:
        content = message.get("content")
        content = "" if content is None else content
        if isinstance(content, str):
            if self.form.text:
                return text(content)
            return [{"type": "text", "text": text(content)}]
        if not isinstance(content, (list, tuple)):
            raise TemplateError(
                f"message {index} ({message['role']}) has a content of type "
                f"{type(content).__name__}; expected a string or a list of parts"
            )
        parts = [{"type": "text", "text": p} if isinstance(p, str) else dict(p) for p in content]
        if self.form.parts:
            for part in parts:
                if isinstance(part.get("text"), str):
                    part["text"] = text(part["text"])
            return parts
        other = [p.get("type") for p in parts if p.get("type") != "text"]
        if other:
            raise TemplateError(
                f"message {index} ({message['role']}) has parts of type {other}, "
                "and the chat template only takes text"
            )
        return text("".join(p["text"] for p in parts))

    def _call(self, call: Any, index: int, k: int, text: Any) -> dict[str, Any]:
        if not isinstance(call, Mapping):
            raise TemplateError(
                f"message {index} has a tool call that is no mapping: {call!r:.200}"
            )
        function = dict(call.get("function") or call)
        if "name" not in function:
            raise TemplateError(f"message {index} has a tool call without a name: {call!r:.200}")
        arguments = function.get("arguments", {})
        if self.form.arguments_as_text:
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
        elif isinstance(arguments, str):
            arguments = _parsed(arguments)
        out = {
            "type": call.get("type", "function"),
            "function": {
                "name": text(str(function["name"])),
                "arguments": self.shield.cover_tree(arguments),
            },
        }
        identity = call.get("id")
        if identity is None and self.form.call_ids:
            identity = f"call{k:05d}"
        if identity is not None:
            out["id"] = identity
        return out

    # -- where the contents stand -----------------------------------------------------------------

    def _locate(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[dict] | None,
        prompt: bool,
        text: str,
    ) -> list[Span]:
        if len(messages) <= _MAX_MARKED and not any(_private(m) for m in messages):
            # A mark in an empty content is worth a try: it may switch an `if content` of the
            # template, and then the next round leaves it out.
            empty = any(not _has_text(m) for m in messages)
            for marker in (_mark_all, _mark_filled) if empty else (_mark_filled,):
                try:
                    marked = [self._prepare(m, i, marker) for i, m in enumerate(messages)]
                    found = _unmark(self._jinja(marked, tools, prompt), self.shield)
                except TemplateError:
                    continue
                if found is not None and found[0] == text:
                    return _widened(found[1], messages, text)
        return _searched(messages, text)


def _mark_all(text: str, index: int) -> str:
    core = text.strip()
    if not core:
        return chr(_MARK + index) + chr(_END_MARK + index) + text
    lead = text[: len(text) - len(text.lstrip())]
    # Inside the white space: a template that strips must still find it at the ends.
    return (
        f"{lead}{chr(_MARK + index)}{core}{chr(_END_MARK + index)}{text[len(lead) + len(core) :]}"
    )


def _mark_filled(text: str, index: int) -> str:
    return _mark_all(text, index) if text.strip() else text


def _unmark(marked: str, shield: Shield) -> tuple[str, list[Span]] | None:
    """Text without marks and the marked spans; None if a mark has lost its partner."""
    pieces: list[str] = []
    spans: list[Span] = []
    length = last = 0
    opened: tuple[int, int] | None = None
    for match in _MARKS.finditer(marked):
        piece, code = marked[last : match.start()], match.group()
        last = match.end()
        if len(code) == 2:
            piece += shield.uncover(code)[0]
            pieces.append(piece)
            length += len(piece)
            continue
        pieces.append(piece)
        length += len(piece)
        if ord(code) < _END_MARK:
            if opened is not None:
                return None
            opened = (ord(code) - _MARK, length)
        else:
            if opened is None or opened[0] != ord(code) - _END_MARK:
                return None
            spans.append(Span(opened[1], length, opened[0]))
            opened = None
    if opened is not None:
        return None
    pieces.append(marked[last:])
    return "".join(pieces), spans


def _widened(spans: list[Span], messages: Sequence[Mapping[str, Any]], text: str) -> list[Span]:
    """Spans with the white space that their contents had at the ends, where it was rendered."""
    out = []
    for start, end, index in spans:
        core = text[start:end]
        whole = next((t for t in _texts(messages[index]) if t.strip() == core), core)
        lead = len(whole) - len(whole.lstrip()) if core else 0
        if len(whole) > len(core) and text.startswith(whole, max(start - lead, 0)):
            start, end = start - lead, start - lead + len(whole)
        out.append(Span(start, end, index))
    return out


def _searched(messages: Sequence[Mapping[str, Any]], text: str) -> list[Span]:
    """Contents found by looking for them from left to right; those not found are left out."""
    spans, cursor = [], 0
    for index, message in enumerate(messages):
        for value in _texts(message):
            core = value.strip()
            at = text.find(core, cursor) if core else -1
            if at >= 0:
                spans.append(Span(at, at + len(core), index))
                cursor = at + len(core)
    return spans


def _texts(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        parts = [p if isinstance(p, str) else p.get("text") for p in content]
        texts = [p for p in parts if isinstance(p, str)]
    else:
        texts = [content] if isinstance(content, str) else []
    reasoning = _reasoning(message)
    calls = [str((c.get("function") or c).get("name")) for c in _listed(message.get("tool_calls"))]
    return ([reasoning] if reasoning else []) + texts + calls


def _has_text(message: Mapping[str, Any]) -> bool:
    return any(t.strip() for t in _texts(message)) and all(t.strip() for t in _texts(message))


def _private(message: Mapping[str, Any]) -> bool:
    return any(_PRIVATE_USE.search(t) for t in _texts(message))


def _reasoning(message: Mapping[str, Any]) -> str | None:
    return next((message[k] for k in REASONING_KEYS if isinstance(message.get(k), str)), None)


def _listed(calls: Any) -> list[Any]:
    if not calls:
        return []
    return [calls] if isinstance(calls, Mapping) else list(calls)


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _shortened(roles: list[Any]) -> str:
    return str(roles) if len(roles) < 12 else f"{roles[:4]} ... {roles[-4:]}"
