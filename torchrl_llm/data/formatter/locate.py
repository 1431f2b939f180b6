"""Where the contents of messages stand in a rendered conversation.

The contents are rendered a second time, each between two private-use marks. Where that text without
its marks is the text, the marks say exactly which characters came from which message. What stands
between the contents is remembered for conversations of the same structure, which then need no
second rendering: if the remembered gaps and the contents make up the text, the places are known.
Templates that look at a content in a way that marks disturb fall back to a search.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torchrl_llm.data.formatter.fields import texts_of
from torchrl_llm.data.formatter.shield import ESCAPE, Shield

_MARK, _END_MARK, _MAX_MARKED = 0xF0000, 0x100000, 0xFFFD
_PRIVATE_USE = re.compile("[\U000f0000-\U0010fffd]")
_MARKS = re.compile("[\U000f0000-\U0010fffd]|" + ESCAPE + ".", re.DOTALL)
_THINK = re.compile("(</?think>)")
_MAX_SKELETONS = 256

Mark = Callable[[str, int], str]


class Span(NamedTuple):
    """A half-open character range that holds a field of message ``index``."""

    start: int
    end: int
    index: int


class _Skeleton(NamedTuple):
    """``gaps[k]`` stands before field ``fields[k]`` (message, number of its text); one gap ends."""

    gaps: tuple[str, ...]
    fields: tuple[tuple[int, int], ...]


class Locator:
    """Find contents in the texts of one template.

    Args:
        shield: turns the codes of marked texts back.
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
            text: their text.
            render: renders them once more with each content passed through a mark; ``None`` if the
                template refuses.
            key: whatever else the text depends on (tools, generation prompt).
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
        # A mark in an empty content is worth a try: it may switch an `if content` of the template,
        # and then the next round leaves it out.
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
    # Templates cut contents at these tags: each part has marks of its own, so that none is halved.
    parts = _THINK.split(text) if "think>" in text else [text]
    return "".join(
        part if not part or part.isspace() or _THINK.fullmatch(part) else _marked(part, index)
        for part in parts
    )


def _marked(text: str, index: int) -> str:
    core = text.strip()
    lead, trail = _blanks(text, core)
    # Inside the white space: a template that strips must still find it at the ends.
    return f"{lead}{chr(_MARK + index)}{core}{chr(_END_MARK + index)}{trail}"


def _blanks(text: str, core: str) -> tuple[str, str]:
    """White space in front of the core of a text, and behind it."""
    if not core:
        return "", text
    lead = len(text) - len(text.lstrip())
    return text[:lead], text[lead + len(core) :]


def _unmarked(marked: str, shield: Shield) -> tuple[str, list[Span]] | None:
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
    """Spans of the parts of one content as one span, where the whole content was rendered."""
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
    """Spans with the white space that their contents had at the ends, where it was rendered."""
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
    """Spans if the gaps and the contents make up the text; None otherwise."""
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
    """Which of the white space around a gap the template may have kept."""
    if not trail and not lead:
        return [("", "")]
    return [(trail, lead), ("", ""), (trail, ""), ("", lead)]


def _searched(texts: list[list[str]], text: str) -> list[Span]:
    """Contents found by looking for them from left to right; those not found are left out."""
    spans, cursor = [], 0
    for index, fields in enumerate(texts):
        for value in fields:
            core = value.strip()
            at = text.find(core, cursor) if core else -1
            if at >= 0:
                spans.append(Span(at, at + len(core), index))
                cursor = at + len(core)
    return spans
