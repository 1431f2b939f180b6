"""Where the new part of a conversation begins: the decision to continue old ids or to fork.

Three renderings are compared as text: ``P``, the old prompt; ``A``, the old messages; ``F``, old
and new messages. The new part is ``F`` from the token that closes the sampled turn, if ``F`` says
up to there what was sampled (or what the template itself makes of it). Otherwise the template has
rewritten history, and the cause is named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.messages import reasoning_of, thoughts_of
from torchrl_llm.data.text.codec import covers
from torchrl_llm.data.text.probe import Closer, Probe
from torchrl_llm.data.text.renderer import Rendered

_WORDS = re.compile(r"\S+")
_SPACE = re.compile(r"\s*")


class Ending(NamedTuple):
    """How sampled ids end.

    Attributes:
        body: ids before the end-of-turn tokens.
        tail: the end-of-turn tokens and whatever was sampled after them.
        closer: the terminal closer that ``tail`` begins with; ``None`` if the turn was cut.
    """

    body: list[int]
    tail: list[int]
    closer: Closer | None

    @property
    def overrun(self) -> list[int]:
        """Ids sampled after the turn had ended."""
        return self.tail[len(self.closer.ids) :] if self.closer is not None else []


class Cut(NamedTuple):
    """The new part is ``F.text[start:]``; it begins with ``closer``, if the template has any."""

    start: int
    closer: Closer | None


def read_ending(
    ids: Sequence[int],
    finish_reason: FinishReason | None,
    probe: Probe,
    *,
    eos_ids: Collection[int],
    special_ids: Collection[int],
) -> Ending:
    """Split a response into what was said and how it ended.

    Decided by ids alone: text that spells an end-of-turn token ends nothing.
    """
    ids = list(ids)
    firsts = {closer.ids[0] for closer in probe.terminal}
    for at, token in enumerate(ids):
        if token not in firsts:
            continue
        for closer in probe.terminal:
            if tuple(ids[at : at + len(closer.ids)]) == closer.ids:
                return Ending(ids[:at], ids[at:], closer)
    held = max((_held(ids, c.ids) for c in probe.closers), default=0)
    if held:
        return Ending(ids[:-held], ids[-held:], None)
    stopped = finish_reason in (FinishReason.STOP, FinishReason.TOOL_CALLS)
    if ids and (ids[-1] in eos_ids or (stopped and ids[-1] in special_ids)):
        return Ending(ids[:-1], ids[-1:], None)
    return Ending(ids, [], None)


def _held(ids: Sequence[int], closer: Sequence[int]) -> int:
    """Length of the longest prefix of ``closer`` that ends ``ids``."""
    sizes = range(min(len(ids), len(closer)), 0, -1)
    return next((n for n in sizes if list(ids[-n:]) == list(closer[:n])), 0)


def window_start(messages: Sequence[Mapping[str, Any]], turn: int, *, short: bool) -> list[int]:
    """Indices of the old messages that decide how the template continues the turn at ``turn``.

    A leading system message, and everything from the last user message before the turn on: no
    template looks further back. Of a long tool loop that goes on (``short``), only the user message
    and the last messages matter.
    """
    start = turn
    while start > 0:
        start -= 1
        if messages[start].get("role") == "user" and not _is_result(messages[start]):
            break
    else:
        return list(range(turn + 1))
    lead = [0] if start > 0 and messages[0].get("role") in ("system", "developer") else []
    loop = list(range(start, turn + 1))
    if short and len(loop) > 12:
        # Cut at a turn of the model, so that no result loses its call.
        first = next((i for i in loop[-8:] if messages[i].get("role") == "assistant"), None)
        if first is not None:
            loop = [start, *range(first, turn + 1)]
    return lead + loop


def _is_result(message: Mapping[str, Any]) -> bool:
    # Templates look for results that were put into a user message, and do not count it as a user's.
    return "<tool_response>" in str(message.get("content"))


def find_cut(
    prompt: Rendered,
    alone: Callable[[], Rendered],
    full: Rendered,
    *,
    body: str,
    closer: Closer | None,
    turn: Mapping[str, Any],
    probe: Probe,
) -> Cut | None:
    """Find the place in ``full`` from which on the old ids are continued.

    Args:
        prompt: ``P``, the old messages without the sampled turn, with the generation prompt.
        alone: renders ``A``, the old messages, where it is needed.
        full: ``F``, old and new messages, with the generation prompt.
        body: decoded response without its end-of-turn tokens.
        closer: the closer that the response has, if any.
        turn: the message of the sampled turn.
        probe: findings about the template.

    Returns:
        The cut, or ``None`` where the template rewrites what was said.
    """
    return _by_sampled_text(prompt, alone, full, body, closer, probe) or _by_own_form(
        prompt, alone, full, closer, turn, probe
    )


def _by_sampled_text(
    prompt: Rendered,
    alone: Callable[[], Rendered],
    full: Rendered,
    body: str,
    closer: Closer | None,
    probe: Probe,
) -> Cut | None:
    end = _match(full.text, prompt.text, body)
    if end is None:
        return None
    if not probe.closers:
        # Nothing special ends a turn: ask that the template's own form ends there as well, or an
        # empty turn would match anything.
        form = alone().text
        own = _match(form, prompt.text, body)
        done = own is not None and not form[own:].strip()
        return Cut(end, None) if done else None
    end = _SPACE.match(full.text, end).end()  # type: ignore[union-attr]
    found = closer_at(full, end, probe)
    if found is None or (closer is not None and closer != found):
        return None
    return Cut(end, found)


def _by_own_form(
    prompt: Rendered,
    alone: Callable[[], Rendered],
    full: Rendered,
    closer: Closer | None,
    turn: Mapping[str, Any],
    probe: Probe,
) -> Cut | None:
    said, form = len(prompt.text.rstrip()), alone()
    if not form.text.startswith(prompt.text[:said]):
        return None
    at, ending = _last_closer(form, said, probe)
    own = form.text[:at] if ending is not None else form.text.rstrip()
    if not full.text.startswith(own) or not contains(own[said:], reasoning_of(turn) or ""):
        return None
    start = len(own)
    if ending is None:
        start = _SPACE.match(full.text, start).end() if probe.closers else start  # type: ignore[union-attr]
    found = closer_at(full, start, probe)
    if probe.closers and found is None:
        return None
    if (ending is not None and found != ending) or (closer is not None and found != closer):
        return None
    return Cut(start, found)


def closer_at(rendered: Rendered, at: int, probe: Probe) -> Closer | None:
    """The closer (the longest) that stands at a character position and is no literal text."""
    for closer in sorted(probe.closers, key=lambda c: -len(c.text)):
        if rendered.text.startswith(closer.text, at) and not covers(
            rendered.literals, at, at + len(closer.text)
        ):
            return closer
    return None


def first_closer(
    rendered: Rendered, start: int, end: int, probe: Probe
) -> tuple[int, Closer] | None:
    """The first closer in a range of characters, and its position."""
    best: tuple[int, Closer] | None = None
    for closer in sorted(probe.closers, key=lambda c: -len(c.text)):
        at = rendered.text.find(closer.text, start, end)
        while at >= 0 and covers(rendered.literals, at, at + len(closer.text)):
            at = rendered.text.find(closer.text, at + 1, end)
        if at >= 0 and (best is None or at < best[0]):
            best = at, closer
    return best


def _last_closer(rendered: Rendered, floor: int, probe: Probe) -> tuple[int, Closer | None]:
    best: tuple[int, Closer | None] = (-1, None)
    for closer in sorted(probe.closers, key=lambda c: -len(c.text)):
        at = rendered.text.rfind(closer.text, floor)
        while at >= 0 and covers(rendered.literals, at, at + len(closer.text)):
            at = rendered.text.rfind(closer.text, floor, at)
        if at > best[0]:
            best = at, closer
    return best


def fork_cause(
    prompt: Rendered,
    alone: Callable[[], Rendered],
    full: Rendered,
    *,
    body: str,
    closer: Closer | None,
    turn: Mapping[str, Any],
    window: Sequence[Mapping[str, Any]],
    probe: Probe,
) -> str:
    """Name what the template rewrote, where :func:`find_cut` found no cut.

    Args:
        prompt: ``P``.
        alone: renders ``A``.
        full: ``F``.
        body: decoded response without its end-of-turn tokens.
        closer: the closer that the response has, if any.
        turn: the message of the sampled turn.
        window: the old messages that were rendered, ``turn`` among them.
        probe: findings about the template.

    Returns:
        ``think_dropped``, ``prompt_changed``, ``closer_changed`` or ``history_changed``.
    """
    for message in window:
        for thought in thoughts_of(message):
            held = message is turn or contains(prompt.text, thought)
            if held and not contains(full.text, thought):
                return "think_dropped"
    said = prompt.text.rstrip()
    if not full.text.startswith(said):
        return "prompt_changed"
    if closer is not None and find_cut(
        prompt, alone, full, body=body, closer=None, turn=turn, probe=probe
    ):
        return "closer_changed"
    ended = first_closer(full, len(said), len(full.text), probe)
    now = full.text[len(said) : ended[0] if ended is not None else None]
    # A block that held no thought, sampled and not rendered again.
    marks = {"</think>", *(probe.reasoning[1:] if probe.reasoning else ())}
    if any(m in body and m not in now for m in marks):
        return "think_dropped"
    return "history_changed"


def contains(text: str, part: str) -> bool:
    """Whether a text holds a part, white space aside; an empty part is in every text."""
    part = part.strip()
    return not part or part in text or _squeezed(part) in _squeezed(text)


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _match(text: str, start: str, body: str) -> int | None:
    """Position in ``text`` behind ``start + body``, white space aside; None without a match."""
    said = start.rstrip()
    if text.startswith(said):
        at, wanted = len(said), _squeezed(body)
    else:
        at, wanted = 0, _squeezed(start + body)
    left = len(wanted)
    if not left:
        return at
    cursor = 0
    for word in _WORDS.finditer(text, at):
        size = min(len(word.group()), left - cursor)
        if not wanted.startswith(word.group()[:size], cursor):
            return None
        cursor += size
        if cursor == left:
            return word.start() + size
    return None
