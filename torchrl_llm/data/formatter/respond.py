"""A sampled response to a message: read from its ids, not from its text.

The ids say what the text cannot: whether ``<think>`` is the token or seven characters, whether the
turn was closed, whether a role's header was sampled. Nothing is stripped except what the template
itself writes around reasoning and calls, and the exact text is kept beside the message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.formatter.call_patterns import ParsedCalls, syntax_of
from torchrl_llm.data.formatter.codec import Codec, whole_characters
from torchrl_llm.data.formatter.probe import Probe
from torchrl_llm.data.formatter.shield import Shield
from torchrl_llm.data.formatter.splice import read_ending
from torchrl_llm.data.formatter.thoughts import split_thoughts


class ResponseParser:
    """Parse responses for one tokenizer and one template.

    Args:
        codec: the tokenizer.
        probe: findings about the template.
        tools: the tools that a call may name; their schemas type arguments that are written
            without quotes.
    """

    def __init__(self, codec: Codec, probe: Probe, tools: Sequence[Any] | None = None) -> None:
        self._codec = codec
        self._probe = probe
        self._syntax = syntax_of(probe.call)
        # Every added token, so that none can be spelled out in ordinary characters.
        self._shield = Shield(codec.added)
        self._schemas = dict(_schema(tool) for tool in tools or ())
        self._reasoning = probe.reasoning
        self._lead = probe.lead.strip()
        structure = " ".join([probe.lead, probe.call or "", *(probe.reasoning or ())])
        inner = {i for m, i in codec.added.items() if m in structure}
        self._roles = probe.openers - inner

    def parse(
        self, prompt: Sequence[int], response: Sequence[int], finish_reason: FinishReason
    ) -> dict[str, Any]:
        """Read a response.

        Args:
            prompt: ids in front of it.
            response: the sampled ids.
            finish_reason: how the response ended.

        Returns:
            A message with ``role``, ``content``, ``is_complete``, ``raw`` (the exact text without
            the tokens that ended the turn; with them if more was sampled behind), and where there
            is any: ``reasoning_content`` (if the template reads a reasoning field; empty if a block
            without a thought was sampled), ``tool_calls``, ``tool_call_errors`` (the broken calls
            stay in ``content``), and ``flags``: ``"overrun"`` (ids behind the end of the turn),
            ``"injection"`` (a role's header inside the turn), ``"unclosed_reasoning"``.
        """
        codec, flags = self._codec, []
        ending = read_ending(
            response,
            finish_reason,
            self._probe,
            eos_ids=codec.eos_ids,
            special_ids=codec.special_ids,
        )
        if ending.overrun:
            flags.append("overrun")
        if self._roles.intersection(ending.body):
            flags.append("injection")
        text = self._text(ending.body)
        reasoning, text, closed = self._split_reasoning(text, prompt)
        if not closed:
            flags.append("unclosed_reasoning")
        parsed = self._parsed(text)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self._plain(parsed.content),
            "is_complete": finish_reason in (FinishReason.STOP, FinishReason.TOOL_CALLS),
            "raw": codec.decode(response if ending.overrun else ending.body),
        }
        if reasoning is not None:
            message["reasoning_content"] = self._plain(reasoning)
        if parsed.calls:
            message["tool_calls"] = [
                {
                    # Nine characters, as Mistral asks, and unique in the conversation.
                    "id": call.id or f"{len(prompt) % 10**6:06d}{k:03d}",
                    "type": "function",
                    "function": {
                        "name": self._plain(call.name),
                        "arguments": self._plain_tree(call.arguments),
                    },
                }
                for k, call in enumerate(parsed.calls)
            ]
        if parsed.errors:
            message["tool_call_errors"] = [self._plain(error) for error in parsed.errors]
        if flags:
            message["flags"] = flags
        return message

    def _parsed(self, text: str) -> ParsedCalls:
        """The calls in a text; what it thinks of calling in ``<think>`` marks is none of them."""
        content, calls, errors = [], [], []
        for piece, is_thought in split_thoughts(text):
            parsed = ParsedCalls(piece, [], [])
            if self._syntax is not None and not is_thought:
                parsed = self._syntax.parse(piece, self._schemas)
            content.append(parsed.content)
            calls += parsed.calls
            errors += parsed.errors
        return ParsedCalls("".join(content), calls, errors)

    def _text(self, ids: Sequence[int]) -> str:
        """Text in which only added tokens spell added tokens; what merely looks so is covered."""
        codec, cover = self._codec, self._shield.cover
        out: list[str] = []
        run: list[int] = []
        before: int | None = None

        def flush() -> None:
            if run:
                text = codec.decode(run) if before is None else codec.decode_behind(before, run)
                out.append(cover(text))
                run.clear()

        for token in ids:
            marker = codec.added_by_id.get(token)
            if marker is None:
                run.append(token)
                continue
            flush()
            out.append(cover(marker) if token in self._roles else marker)
            before = token
        flush()
        return "".join(out)

    def _split_reasoning(self, text: str, prompt: Sequence[int]) -> tuple[str | None, str, bool]:
        """Reasoning (``None`` without a block for it), the rest, whether the block was closed."""
        header = self._probe.header.strip()
        if self._reasoning is not None:
            opening, closing = self._reasoning
            start = text.lstrip()
            opened = bool(opening) and start.startswith(opening)
            if opened or self._inside(prompt) or (not opening and closing in text):
                start = start[len(opening) :] if opened else text
                thought, mark, rest = start.partition(closing)
                if not mark:  # another message may follow the thought than an answer (gpt-oss)
                    first = next((m for _, _, m in self._shield.markers_in(closing)), closing)
                    thought, mark, rest = start.partition(first)
                    rest = rest.removeprefix(header)
                if not mark:
                    return _unwrapped(thought, 1), "", False
                return _unwrapped(thought, 1).removesuffix("\n"), _unwrapped(rest, 2), True
        if self._lead and text.lstrip().startswith(self._lead):
            text = _unwrapped(text.lstrip()[len(self._lead) :], 2)
        return None, text, True

    def _inside(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt ends inside a thought that it opened."""
        opening, closing = self._reasoning or ("", "")
        if not opening:
            return False
        codec = self._codec
        if opening in codec.added:
            ends = {*self._probe.openers, *codec.eos_ids, *(c.ids[-1] for c in self._probe.closers)}
            ends.discard(codec.added[opening])
            for token in reversed(prompt):
                if token == codec.added[opening]:
                    return True
                if token == codec.added.get(closing) or token in ends:
                    return False
            return False
        return codec.decode(prompt[-48:]).rstrip().endswith(opening)

    def _plain(self, text: str) -> str:
        # A call in JSON may spell halves of characters, which no tokenizer and no file takes.
        return whole_characters(self._shield.uncover(text)[0])

    def _plain_tree(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._plain(value)
        if isinstance(value, Mapping):
            return {self._plain(k): self._plain_tree(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self._plain_tree(item) for item in value]
        return value


def _unwrapped(text: str, newlines: int) -> str:
    """The text without the line ends that a template writes in front of it."""
    lead = len(text) - len(text.lstrip("\n"))
    return text[min(lead, newlines) :]


def _schema(tool: Any) -> tuple[str, Mapping[str, Any]]:
    schema = tool if isinstance(tool, Mapping) else get_json_schema(tool)
    function = schema.get("function", schema)
    return function["name"], function.get("parameters") or {}
