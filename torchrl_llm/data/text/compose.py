"""Provenance of each character, and so of each token, of a rendered conversation.

The assistant mask covers the characters that a model would have to generate.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from torchrl_llm.data.enums import Source
from torchrl_llm.data.text.codec import Codec, Encoding, Piece
from torchrl_llm.data.text.probe import Probe
from torchrl_llm.data.text.renderer import Rendered, Renderer
from torchrl_llm.data.text.splice import first_closer
from torchrl_llm.errors import TemplateError, TokenizerError

Messages = Sequence[Mapping[str, Any]]
_ASSISTANT = 8  # added to the source code of a character inside a model's turn


@dataclass(frozen=True)
class Composed:
    """A rendered conversation with a label for each character: source code + 8 x assistant."""

    rendered: Rendered
    chars: np.ndarray

    def piece(self, start: int = 0) -> Piece:
        """The text from ``start`` on, to be encoded as a continuation of the text before it."""
        text, literals = self.rendered.text, self.rendered.literals
        if not start:
            return Piece(text, literals)
        return Piece(text[start:], [(a - start, b - start) for a, b in literals if a >= start])

    def with_tokens(self, markers: Collection[str]) -> Composed:
        """A copy in which these strings are special tokens inside a model's turn.

        Args:
            markers: strings of special tokens.
        """
        text = self.rendered.text
        literals = [
            (start, end)
            for start, end in self.rendered.literals
            if self.chars[start] < _ASSISTANT or text[start:end] not in markers
        ]
        return replace(self, rendered=replace(self.rendered, literals=literals))

    def sources(self, encoding: Encoding, start: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Source code (int8) and assistant flag (bool) of each token of ``piece(start)``."""
        labels = label_tokens(encoding, self.rendered.text[start:], self.chars[start:])
        return labels % _ASSISTANT, labels >= _ASSISTANT


class Composer:
    """Render conversations and label the author of each character.

    Args:
        renderer: of the template, with the form that the probe found.
        codec: the tokenizer.
        probe: findings about the template.
        tools: tools of conversations without their own.
    """

    def __init__(
        self, renderer: Renderer, codec: Codec, probe: Probe, tools: Sequence[Any] | None
    ) -> None:
        self.renderer = renderer
        self.codec = codec
        self.probe = probe
        self.tools = list(tools) if tools else None

    def compose(
        self, messages: Messages, *, add_generation_prompt: bool, tools: Sequence[Any] | None = None
    ) -> Composed:
        """Compose a whole conversation.

        An unfinished assistant message at the end (``is_complete`` is false) is left open if a
        generation prompt is requested: the model continues it.

        Raises:
            TemplateError: the template rejects a message, or would drop it.
        """
        self.check(messages)
        prefilled = None
        last = messages[-1] if messages else {}
        if (
            add_generation_prompt
            and last.get("role") == "assistant"
            and last.get("is_complete") is False
        ):
            prefilled, add_generation_prompt = len(messages) - 1, False
        rendered = self.renderer.render(
            messages,
            tools=self.tools if tools is None else tools,
            add_generation_prompt=add_generation_prompt,
            spans=True,
            generation=True,
        )
        if prefilled is not None:
            rendered = _open_ended(rendered, prefilled)
        return self.label(rendered, messages, prefilled=prefilled)

    def label(
        self, rendered: Rendered, messages: Messages, *, prefilled: int | None = None
    ) -> Composed:
        """Label the characters of a rendering."""
        regions = assistant_regions(rendered, messages, self.probe)
        chars = char_sources(rendered, messages, regions, prefilled=prefilled)
        for start, end, _ in regions:
            chars[start:end] += _ASSISTANT
        return Composed(rendered, chars)

    def check(self, messages: Messages, first: int = 0) -> None:
        """Raise if the template would silently drop a message.

        Args:
            messages: the messages to look at.
            first: number of messages before them.

        Raises:
            TemplateError: naming the message.
        """
        for index, message in enumerate(messages, first):
            role, lost = message.get("role"), None
            if message.get("tool_calls") and self.probe.call is None:
                lost = "has tool calls"
            elif role == "tool" and not self.probe.results:
                lost = "is a tool result"
            elif role == "system" and index == 0 and not self.probe.system:
                lost = "is a system message"
            elif message.get("tool_calls") and self.probe.loses_calls and message.get("content"):
                lost = "has text next to its tool calls"
            if lost is not None:
                raise TemplateError(f"message {index} {lost}, and the chat template drops it")

    def verify(self, composed: Composed, start: int, encoding: Encoding) -> None:
        """Check that the special tokens of the ids are exactly those of the text.

        Raises:
            TokenizerError: a content was encoded into a special token, or a special token was not.
        """
        shield, literal = self.codec.shield, {a for a, _ in composed.rendered.literals}
        expected = [
            marker
            for at, _, marker in shield.markers_in(composed.rendered.text, start)
            if at not in literal
        ]
        names = (self.codec.added_by_id.get(i) for i in encoding.ids.tolist())
        got = [name for name in names if name in shield.markers]
        if got != expected:
            raise TokenizerError(f"special tokens of the text {expected} were encoded as {got}")


def assistant_regions(
    rendered: Rendered, messages: Sequence[Mapping[str, Any]], probe: Probe
) -> list[tuple[int, int, int]]:
    """The characters that a model would have to generate for each assistant message.

    Returns:
        Half-open character ranges ``(start, end, closed)``: from the end of the header to the end
        of the closer; ``closed`` is the start of the closer (``end`` if there is none).
    """
    if rendered.generation is not None:
        return [_with_closer(rendered, start, end, probe) for start, end in rendered.generation]
    text, regions = rendered.text, []
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for start, end, index in rendered.spans:
        first[index] = min(start, first.get(index, start))
        last[index] = max(end, last.get(index, end))
    starts = sorted(set(first.values()))
    floor = 0
    for index in sorted(first, key=first.__getitem__):
        begin, stop = first[index], last[index]
        if messages[index].get("role") != "assistant":
            floor = max(floor, stop)
            continue
        header = text.rfind(probe.header, floor, begin) if probe.header else -1
        start = header + len(probe.header) if header >= 0 else begin
        following = next((s for s in starts if s >= stop and s > begin), len(text))
        closer = first_closer(rendered, stop, following, probe)
        if closer is not None:
            closed, end = closer[0], closer[0] + len(closer[1].text)
        else:
            # The header of the next turn closes this one and does not exist yet, or nothing closes
            # it.
            end = closed = len(text.rstrip()) if following == len(text) else stop
            end = closed = max(stop, end)
        regions.append((start, end, closed))
        floor = end
    return regions


def _with_closer(rendered: Rendered, start: int, end: int, probe: Probe) -> tuple[int, int, int]:
    """A ``{% generation %}`` block, including the closer that ends it or directly follows it."""
    inside = first_closer(rendered, start, end, probe)
    if inside is not None and inside[0] + len(inside[1].text) >= len(rendered.text[:end].rstrip()):
        return start, end, inside[0]
    behind = first_closer(rendered, end, len(rendered.text), probe)
    if behind is not None and not rendered.text[end : behind[0]].strip():
        return start, behind[0] + len(behind[1].text), behind[0]
    return start, end, end


def char_sources(
    rendered: Rendered,
    messages: Sequence[Mapping[str, Any]],
    regions: Sequence[tuple[int, int, int]],
    *,
    prefilled: int | None = None,
) -> np.ndarray:
    """Source code of each character: int8 ``[len(text)]``.

    Args:
        rendered: the text with its spans.
        messages: the rendered messages.
        regions: from :func:`assistant_regions`.
        prefilled: index of the message whose content was put into the model's turn, if any.
    """
    out = np.zeros(len(rendered.text), dtype=np.int8)
    for start, _, closed in regions:
        out[start:closed] = Source.PROMPT
    for start, end, index in rendered.spans:
        role = messages[index].get("role")
        if index == prefilled:
            out[start:end] = Source.FORCED
        else:
            out[start:end] = Source.TOOL if role in ("tool", "ipython") else Source.PROMPT
    return out


def label_tokens(encoding: Encoding, text: str, chars: np.ndarray) -> np.ndarray:
    """Label of each token: the label of its first character that is not white space.

    Args:
        encoding: ids with character ranges in ``text``.
        text: the encoded text.
        chars: a label for each character.
    """
    if not len(encoding.ids) or not len(chars):
        return np.zeros(len(encoding.ids), dtype=chars.dtype)
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    blank = (codes == 32) | ((codes >= 9) & (codes <= 13))
    # Position of the next character that is not blank, for each position.
    solid = np.where(blank, len(codes), np.arange(len(codes)))
    solid = np.minimum.accumulate(solid[::-1])[::-1]
    starts = np.minimum(encoding.starts, len(codes) - 1)
    first = solid[starts]
    return chars[np.where(first < encoding.ends, first, starts)]


def _open_ended(rendered: Rendered, index: int) -> Rendered:
    """The text up to the end of the last message's content."""
    end = max((s.end for s in rendered.spans if s.index == index), default=None)
    if end is None:
        raise TemplateError("the chat template drops the unfinished last message")
    literals = [x for x in rendered.literals if x[1] <= end]
    return Rendered(rendered.text[:end], literals, [s for s in rendered.spans if s.end <= end])
