"""A conversation as text in which each character knows its owner, ready to be encoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchrl_llm.data.formatter.codec import Codec, Encoding, Piece
from torchrl_llm.data.formatter.label import assistant_regions, char_sources, label_tokens
from torchrl_llm.data.formatter.probe import Probe
from torchrl_llm.data.formatter.render import Rendered, Renderer
from torchrl_llm.errors import TemplateError, TokenizerError

Messages = Sequence[Mapping[str, Any]]
_ASSISTANT = 8  # added to the source code of a character inside a model's turn


@dataclass(frozen=True)
class Composed:
    """A rendered conversation with a label for each character: source code + 8 x assistant."""

    rendered: Rendered
    chars: np.ndarray

    def piece(self, start: int = 0) -> Piece:
        """The text from ``start`` on, to be encoded as the continuation of what stands before."""
        text, literals = self.rendered.text, self.rendered.literals
        if not start:
            return Piece(text, literals)
        return Piece(text[start:], [(a - start, b - start) for a, b in literals if a >= start])

    def sources(self, encoding: Encoding, start: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Source code (int8) and assistant flag (bool) of each token of ``piece(start)``."""
        labels = label_tokens(encoding, self.rendered.text[start:], self.chars[start:])
        return labels % _ASSISTANT, labels >= _ASSISTANT


class Composer:
    """Render conversations and say who wrote what.

    Args:
        renderer: the template, with the form that the probe found.
        codec: the tokenizer.
        probe: findings about the template.
        tools: tools of conversations that name none.
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
        generation prompt is asked for: the model is to continue it.

        Raises:
            TemplateError: the template refuses a message, or would drop it.
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
        """Refuse messages that the template would drop without a word.

        Args:
            messages: the messages to look at.
            first: how many messages stand before them.

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
            if lost is not None:
                raise TemplateError(f"message {index} {lost}, and the chat template drops it")

    def verify(self, composed: Composed, start: int, encoding: Encoding) -> None:
        """Check that the special tokens of the ids are those of the text, and no others.

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


def _open_ended(rendered: Rendered, index: int) -> Rendered:
    """The text up to the end of the last message's content."""
    end = max((s.end for s in rendered.spans if s.index == index), default=None)
    if end is None:
        raise TemplateError("the chat template drops the unfinished last message")
    literals = [x for x in rendered.literals if x[1] <= end]
    return Rendered(rendered.text[:end], literals, [s for s in rendered.spans if s.end <= end])
