"""Renderer of one chat template: messages to shielded text, with the position of each content.

To locate the contents, they are rendered a second time, each between two private-use marks. If this
text without its marks equals the text, the marks show which characters came from which message. The
gaps between the contents are stored for conversations of the same structure, which then need no
second rendering: if the stored gaps and the contents add up to the text, the positions are known.
If marks change the behaviour of a template, the contents are searched for instead.

Next: :mod:`~torchrl_llm.data.text.probe` finds out which form of messages a template needs.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import get_json_schema, render_jinja_template

from torchrl_llm.data.messages import REASONING_KEYS, calls_of, reasoning_of, texts_of
from torchrl_llm.data.text.codec import ESCAPE, Shield
from torchrl_llm.data.watchdog import with_limit
from torchrl_llm.errors import ConfigError, TemplateError

LONGEST_S = 60.0
"""Limit in seconds for rendering one conversation, which usually takes a millisecond."""

_PRIVATE_KEYS = frozenset({"is_complete", "raw", "flags", "tool_call_errors"})
# The state of {% generation %} is stored in the compiled template, which all threads share.
_GENERATION_LOCK = threading.Lock()

_MARK, _END_MARK, _MAX_MARKED = 0xF0000, 0x100000, 0xFFFD
_PRIVATE_USE = re.compile("[\U000f0000-\U0010fffd]")
_MARKS = re.compile("[\U000f0000-\U0010fffd]|" + ESCAPE + ".", re.DOTALL)
_THINK = re.compile("(</?think>)")
_MAX_SKELETONS = 256

Mark = Callable[[str, int], str]


def has_generation(template: str) -> bool:
    """Whether a template marks the assistant's words with ``{% generation %}``."""
    return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", template) is not None


@dataclass(frozen=True, kw_only=True)
class Form:
    """The form of messages that a template needs.

    Args:
        parts: contents may be ``[{"type": "text", "text": ...}]``.
        text: contents may be strings.
        arguments_as_text: a call's arguments must be a JSON string, not a mapping.
        reasoning_field: the message key for reasoning; ``None`` if the template reads none.
        call_ids: calls and results need ids (of nine characters, for Mistral).
        named_ids: the template writes only the id of a call, which is ``functions.NAME:0`` (Kimi).
        empty_tools: without tools the template needs an empty list.
    """

    parts: bool = False
    text: bool = True
    arguments_as_text: bool = False
    reasoning_field: str | None = None
    call_ids: bool = False
    named_ids: bool = False
    empty_tools: bool = False


class Span(NamedTuple):
    """The half-open character range of a field of message ``index``."""

    start: int
    end: int
    index: int


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation.

    Args:
        text: the text, including special-token strings of contents.
        literals: character ranges that spell a special token but are plain text.
        spans: positions of the contents, in order of the text.
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
        variables: values for the template besides the messages (``bos_token``, options).
        form: the form of messages that the template needs.
    """

    def __init__(
        self, template: str, shield: Shield, variables: Mapping[str, Any], form: Form
    ) -> None:
        self.template = template
        self.shield = shield
        self.variables = dict(variables)
        self.form = form
        self._locator = Locator(shield)
        self.has_generation = has_generation(template)

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
            TemplateError: the template rejects the messages.
            ConfigError: the template does not end.
        """
        tools = self._tools(tools)
        if self.form.named_ids:
            messages = with_named_ids(messages)
        prepared = [self._prepare(m, i) for i, m in enumerate(messages)]
        asked = generation and self.has_generation
        covered, blocks = self._jinja(prepared, tools, add_generation_prompt, asked)
        text, literals = self.shield.uncover(covered)
        if blocks is not None and literals:
            lengths = [
                len(self.shield.uncover(covered[:at])[0]) for block in blocks for at in block
            ]
            blocks = list(zip(lengths[::2], lengths[1::2], strict=True))
        found: list[Span] = []
        if spans:

            def marked(mark: Mark) -> str | None:
                again = [self._prepare(m, i, mark) for i, m in enumerate(messages)]
                try:
                    return self._jinja(again, tools, add_generation_prompt)[0]
                except TemplateError:
                    return None

            key = (add_generation_prompt, bool(tools))
            found = self._locator.locate(messages, text, marked, key)
        return Rendered(text, literals, found, blocks)

    # -- one call of the template -----------------------------------------------------------------

    def _jinja(
        self, prepared: list[dict], tools: list[dict] | None, prompt: bool, blocks: bool = False
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """The text, and the positions of the ``{% generation %}`` blocks if requested."""
        try:
            with _GENERATION_LOCK if blocks else nullcontext():
                texts, found = with_limit(
                    partial(
                        render_jinja_template,
                        conversations=[prepared],
                        tools=tools,
                        chat_template=self.template,
                        add_generation_prompt=prompt,
                        return_assistant_tokens_mask=blocks,
                        **self.variables,
                    ),
                    LONGEST_S,
                )
        except TimeoutError:
            raise ConfigError(
                f"the chat template had not ended after {LONGEST_S:g} s for {len(prepared)} "
                "messages: it is unsuitable or malicious; choose a different one with "
                "model.chat_template_name, or repair the tokenizer's"
            ) from None
        except Exception as error:  # a template may raise anything
            if blocks:  # without blocks, it raises with the cause
                return self._jinja(prepared, tools, prompt)[0], []
            roles = [m.get("role") for m in prepared]
            raise TemplateError(
                f"the chat template rejects messages with roles {_shortened(roles)}: {error}"
            ) from error
        return texts[0], found[0] if blocks else None

    def _tools(self, tools: Sequence[Any] | None) -> list[dict] | None:
        if not tools:
            return [] if self.form.empty_tools else None
        schemas = [t if isinstance(t, Mapping) else get_json_schema(t) for t in tools]
        return [self.shield.cover_tree(schema) for schema in schemas]

    # -- messages in the template's form ----------------------------------------------------------

    def _prepare(
        self, message: Mapping[str, Any], index: int, mark: Mark | None = None
    ) -> dict[str, Any]:
        """A copy of one message in the template's form, shielded, and marked if requested."""
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
        reasoning = reasoning_of(message)
        if reasoning is not None and form.reasoning_field is not None:
            out[form.reasoning_field] = text(reasoning)
        if calls := calls_of(message):
            out["tool_calls"] = [self._call(c, index, k, text) for k, c in enumerate(calls)]
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
                f"message {index} has a tool call that is not a mapping: {call!r:.200}"
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


def with_named_ids(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages with ids of calls that contain their names, and results that refer to these.

    An id that already contains the name is not changed.
    """
    out: list[Mapping[str, Any]] = []
    known: dict[Any, str] = {}
    for message in messages:
        if calls := calls_of(message):
            named = []
            for k, call in enumerate(calls):
                name = str((call.get("function") or call).get("name", ""))
                given = call.get("id")
                told = isinstance(given, str) and name in given
                known[given] = given if told else f"functions.{name}:{k}"
                named.append({**call, "id": known[given]})
            message = {**message, "tool_calls": named}
        elif message.get("tool_call_id") is not None and message["tool_call_id"] in known:
            message = {**message, "tool_call_id": known[message["tool_call_id"]]}
        out.append(message)
    return out


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _shortened(roles: list[Any]) -> str:
    return str(roles) if len(roles) < 12 else f"{roles[:4]} ... {roles[-4:]}"


# -- positions of the contents --------------------------------------------------------------------


class _Skeleton(NamedTuple):
    """``gaps[k]`` precedes ``fields[k]`` (message, number of its text); a last gap follows."""

    gaps: tuple[str, ...]
    fields: tuple[tuple[int, int], ...]


class Locator:
    """Locate contents in the texts of one template.

    Args:
        shield: replaces the codes of marked texts.
    """

    def __init__(self, shield: Shield) -> None:
        self._shield = shield
        self._skeletons: dict[Any, _Skeleton] = {}

    def locate(
        self,
        messages: Sequence[Mapping[str, Any]],
        text: str,
        render: Callable[[Mark], str | None],
        key: Any,
    ) -> list[Span]:
        """Locate the contents.

        Args:
            messages: the rendered messages.
            text: the rendered text.
            render: renders them again with each content passed through a function; returns ``None``
                if the template rejects them.
            key: other inputs of the text (tools, generation prompt).
        """
        texts = [texts_of(message) for message in messages]
        shape = tuple(
            (m.get("role"), *(bool(t and not t.isspace()) for t in fields))
            for m, fields in zip(messages, texts, strict=True)
        )
        known = self._skeletons.get((shape, key))
        if known is not None and (found := _fitted(known, texts, text)) is not None:
            return found
        if len(messages) > _MAX_MARKED or any(_PRIVATE_USE.search(t) for f in texts for t in f):
            return _searched(texts, text)
        # Marks are also tried in empty contents: they may change an `if content` of the template,
        # and then the next round omits them.
        blank = any(not all(filled) or not filled for _, *filled in shape)
        for mark in (_mark_all, _mark_filled) if blank else (_mark_filled,):
            marked = render(mark)
            found = _unmarked(marked, self._shield) if marked is not None else None
            if found is not None and found[0] == text:
                spans = _joined(found[1], texts, text)
                if known is None:
                    self._remember((shape, key), spans, texts, text)
                return _widened(spans, texts, text)
        return _searched(texts, text)

    def _remember(self, key: Any, spans: list[Span], texts: list[list[str]], text: str) -> None:
        skeleton = _skeleton(spans, texts, text)
        if skeleton is not None:
            if len(self._skeletons) >= _MAX_SKELETONS:
                self._skeletons.clear()
            self._skeletons[key] = skeleton


def _mark_all(text: str, index: int) -> str:
    return _marked(text, index) if not text or text.isspace() else _mark_filled(text, index)


def _mark_filled(text: str, index: int) -> str:
    # Templates cut contents at these tags: each part gets its own marks, so that no pair is split.
    parts = _THINK.split(text) if "think>" in text else [text]
    return "".join(
        part if not part or part.isspace() or _THINK.fullmatch(part) else _marked(part, index)
        for part in parts
    )


def _marked(text: str, index: int) -> str:
    core = text.strip()
    lead, trail = _blanks(text, core)
    # Inside the white space: a template that strips must find white space at the ends.
    return f"{lead}{chr(_MARK + index)}{core}{chr(_END_MARK + index)}{trail}"


def _blanks(text: str, core: str) -> tuple[str, str]:
    """White space before and after the core of a text."""
    if not core:
        return "", text
    lead = len(text) - len(text.lstrip())
    return text[:lead], text[lead + len(core) :]


def _unmarked(marked: str, shield: Shield) -> tuple[str, list[Span]] | None:
    """Text without marks and the marked spans; None if a mark lacks its counterpart."""
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
        if len(code) == 2:
            continue
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


def _joined(spans: list[Span], texts: list[list[str]], text: str) -> list[Span]:
    """Joins the spans of the parts of a content if the whole content was rendered."""
    out: list[Span] = []
    for span in spans:
        if out and out[-1].index == span.index:
            whole = text[out[-1].start : span.end]
            if any(whole in t for t in texts[span.index]):
                out[-1] = out[-1]._replace(end=span.end)
                continue
        out.append(span)
    return out


def _widened(spans: list[Span], texts: list[list[str]], text: str) -> list[Span]:
    """Spans including the white space at the ends of their contents, if it was rendered."""
    out = []
    for start, end, index in spans:
        core = text[start:end]
        whole = next((t for t in texts[index] if core and t.strip() == core), core)
        lead = len(_blanks(whole, core)[0])
        if len(whole) > len(core) and text.startswith(whole, max(start - lead, 0)):
            start, end = start - lead, start - lead + len(whole)
        out.append(Span(start, end, index))
    return out


def _skeleton(spans: list[Span], texts: list[list[str]], text: str) -> _Skeleton | None:
    """The gaps between fields, without the white space that belongs to the fields."""
    gaps, fields, last, trail = [], [], 0, ""
    for start, end, index in spans:
        core = text[start:end]
        k = next((k for k, t in enumerate(texts[index]) if t.strip() == core), None)
        if k is None or not core:
            return None
        lead, behind = _blanks(texts[index][k], core)
        gaps.append(_bare(text[last:start], trail, lead))
        fields.append((index, k))
        last, trail = end, behind
    gaps.append(_bare(text[last:], trail, ""))
    return _Skeleton(tuple(gaps), tuple(fields))


def _bare(gap: str, trail: str, lead: str) -> str:
    return gap.removeprefix(trail).removesuffix(lead)


def _fitted(skeleton: _Skeleton, texts: list[list[str]], text: str) -> list[Span] | None:
    """Spans if the gaps and the contents add up to the text; None otherwise."""
    spans: list[Span] = []
    at, trail = 0, ""
    for gap, (index, k) in zip(skeleton.gaps, skeleton.fields, strict=False):
        whole = texts[index][k]
        core = whole.strip()
        lead, behind = ("", "") if len(core) == len(whole) else _blanks(whole, core)
        for kept_trail, kept_lead in _variants(trail, lead):
            between = kept_trail + gap + kept_lead
            if text.startswith(between, at) and text.startswith(core, at + len(between)):
                break
        else:
            return None
        if kept_trail:
            spans[-1] = spans[-1]._replace(end=at + len(kept_trail))
        start = at + len(between)
        at, trail = start + len(core), behind
        spans.append(Span(start - len(kept_lead), at, index))
    rest = text[at:]
    if rest == trail + skeleton.gaps[-1]:
        if trail:
            spans[-1] = spans[-1]._replace(end=at + len(trail))
    elif rest != skeleton.gaps[-1]:
        return None
    return spans


def _variants(trail: str, lead: str) -> list[tuple[str, str]]:
    """Combinations of white space around a gap that the template may have kept."""
    if not trail and not lead:
        return [("", "")]
    return [(trail, lead), ("", ""), (trail, ""), ("", lead)]


def _searched(texts: list[list[str]], text: str) -> list[Span]:
    """Spans of contents, searched for from left to right; missing contents are skipped."""
    spans, cursor = [], 0
    for index, fields in enumerate(texts):
        for value in fields:
            core = value.strip()
            at = text.find(core, cursor) if core else -1
            if at >= 0:
                spans.append(Span(at, at + len(core), index))
                cursor = at + len(core)
    return spans
