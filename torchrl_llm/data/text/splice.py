"""Decides whether new messages continue the old ids, and from which position, or fork.

Three renderings are compared as text: ``P``, the old prompt; ``A``, the old messages; ``F``, old
and new messages. The new part is ``F`` from the token that closes the sampled turn, if the text
before it equals the sampled text (or the template's own form of it). Otherwise the template has
rewritten history, and the cause is returned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.messages import reasoning_of, thoughts_of
from torchrl_llm.data.text.call_syntax import behind_blanks
from torchrl_llm.data.text.codec import Codec, covers
from torchrl_llm.data.text.probe import Closer, Probe
from torchrl_llm.data.text.renderer import Rendered

_WORDS = re.compile(r"\S+")


class Ending(NamedTuple):
    """Parts of sampled ids: the body and the end of the turn.

    Attributes:
        body: ids before the end-of-turn tokens.
        tail: the end-of-turn tokens and all that was sampled after them.
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
    ids: Sequence[int], finish_reason: FinishReason | None, probe: Probe, codec: Codec
) -> Ending:
    """Split a response into its body and its end.

    Only the ids decide: text that spells an end-of-turn token does not end the turn.
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
    stopped = finish_reason is not None and finish_reason.whole
    if ids and (ids[-1] in codec.eos_ids or (stopped and ids[-1] in codec.special_ids)):
        return Ending(ids[:-1], ids[-1:], None)
    return Ending(ids, [], None)


def _held(ids: Sequence[int], closer: Sequence[int]) -> int:
    """Length of the longest prefix of ``closer`` that ends ``ids``."""
    sizes = range(min(len(ids), len(closer)), 0, -1)
    return next((n for n in sizes if list(ids[-n:]) == list(closer[:n])), 0)


def window_start(messages: Sequence[Mapping[str, Any]], turn: int, *, short: bool) -> list[int]:
    """Indices of the old messages that decide how the template continues the turn at ``turn``.

    A leading system message, and everything from the last user message before the turn on:
    templates do not depend on earlier messages. In a long tool loop that continues (``short``),
    only the user message and the last messages matter.
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
    # Templates recognize results inside a user message, and do not treat it as the user's.
    return "<tool_response>" in str(message.get("content"))


class Said(NamedTuple):
    """Inputs of the comparison: three renderings of a window, and the sampled turn.

    Attributes:
        prompt: ``P``, the old messages without the sampled turn, with the generation prompt.
        alone: renders ``A``, the old messages, on demand.
        full: ``F``, old and new messages, with the generation prompt.
        body: decoded response without its end-of-turn tokens.
        closer: the closer of the response, if any.
        turn: message of the sampled turn.
        probe: findings about the template.
    """

    prompt: Rendered
    alone: Callable[[], Rendered]
    full: Rendered
    body: str
    closer: Closer | None
    turn: Mapping[str, Any]
    probe: Probe


def find_cut(said: Said) -> Cut | None:
    """The position in ``F`` from which the old ids are continued.

    ``None`` if the template rewrites history.
    """
    return _by_sampled_text(said) or _by_own_form(said)


def _by_sampled_text(said: Said) -> Cut | None:
    full, prompt = said.full.text, said.prompt.text
    end = _match(full, prompt, said.body)
    if end is None:
        return None
    if not said.probe.closers:
        # No special token ends a turn: require that the template's own form ends there as well,
        # because an empty turn would match anything.
        form = said.alone().text
        own = _match(form, prompt, said.body)
        return Cut(end, None) if own is not None and not form[own:].strip() else None
    end = behind_blanks(full, end)
    found = closer_at(said.full, end, said.probe)
    if found is None and _next_turn_at(said, end):
        return Cut(end, None)
    if found is None or (said.closer is not None and said.closer != found):
        return None
    return Cut(end, found)


def _next_turn_at(said: Said, at: int) -> bool:
    """Whether the model's next turn begins here, and so closes a truncated turn (GLM)."""
    header = said.probe.header.strip()
    if said.closer is not None or not header or not said.probe.headers_close:
        return False
    literal = covers(said.full.literals, at, at + len(header))
    return said.full.text.startswith(header, at) and not literal


def _by_own_form(said: Said) -> Cut | None:
    length, form, full = len(said.prompt.text.rstrip()), said.alone(), said.full.text
    if not form.text.startswith(said.prompt.text[:length]):
        return None
    last = _find_closer(form, length, len(form.text), said.probe, last=True)
    ending = last[1] if last else None
    own = form.text[: last[0]] if last else form.text.rstrip()
    if not full.startswith(own) or not contains(own[length:], reasoning_of(said.turn) or ""):
        return None
    start = len(own)
    if ending is None and said.probe.closers:
        start = behind_blanks(full, start)
    found = closer_at(said.full, start, said.probe)
    if said.probe.closers and found is None:
        next_turn = ending is None and _next_turn_at(said, start)
        return Cut(start, None) if next_turn else None
    if any(wanted is not None and found != wanted for wanted in (ending, said.closer)):
        return None
    return Cut(start, found)


def closer_at(rendered: Rendered, at: int, probe: Probe) -> Closer | None:
    """The longest closer at a character position that is not literal text."""
    for closer in _longest_first(probe):
        if rendered.text.startswith(closer.text, at) and not _literal(rendered, at, closer):
            return closer
    return None


def first_closer(
    rendered: Rendered, start: int, end: int, probe: Probe
) -> tuple[int, Closer] | None:
    """The first closer in a range of characters, and its position."""
    return _find_closer(rendered, start, end, probe)


def _find_closer(
    rendered: Rendered, start: int, end: int, probe: Probe, *, last: bool = False
) -> tuple[int, Closer] | None:
    find = rendered.text.rfind if last else rendered.text.find
    best: tuple[int, Closer] | None = None
    for closer in _longest_first(probe):
        at = find(closer.text, start, end)
        while at >= 0 and _literal(rendered, at, closer):
            at = find(closer.text, start, at) if last else find(closer.text, at + 1, end)
        if at >= 0 and (best is None or (at > best[0] if last else at < best[0])):
            best = at, closer
    return best


def _longest_first(probe: Probe) -> list[Closer]:
    return sorted(probe.closers, key=lambda closer: -len(closer.text))


def _literal(rendered: Rendered, at: int, closer: Closer) -> bool:
    return covers(rendered.literals, at, at + len(closer.text))


def fork_cause(said: Said, window: Sequence[Mapping[str, Any]]) -> str:
    """Find out what the template rewrote, after :func:`find_cut` found no cut.

    Args:
        said: inputs of the comparison.
        window: the old messages that were rendered.

    Returns:
        ``think_dropped``, ``prompt_changed``, ``closer_changed`` or ``history_changed``.
    """
    prompt, full = said.prompt.text.rstrip(), said.full.text
    for message in window:
        for thought in thoughts_of(message):
            held = message is said.turn or contains(said.prompt.text, thought)
            if held and not contains(full, thought):
                return "think_dropped"
    if not full.startswith(prompt):
        return "prompt_changed"
    if said.closer is not None and find_cut(said._replace(closer=None)):
        return "closer_changed"
    ended = first_closer(said.full, len(prompt), len(full), said.probe)
    now = full[len(prompt) : ended[0] if ended is not None else None]
    # An empty thought block was sampled but not rendered again.
    marks = {"</think>", *(said.probe.reasoning[1:] if said.probe.reasoning else ())}
    lost = any(mark in said.body and mark not in now for mark in marks)
    return "think_dropped" if lost else "history_changed"


def contains(text: str, part: str) -> bool:
    """Whether a text contains a part, ignoring white space; every text contains an empty part."""
    part = part.strip()
    return not part or part in text or _squeezed(part) in _squeezed(text)


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _match(text: str, start: str, body: str) -> int | None:
    """Position in ``text`` after ``start + body``, ignoring white space; None without a match."""
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
