"""Parser of sampled responses: parses a message from its ids, not from its text.

The ids show what the text cannot: whether ``<think>`` is the token or seven characters, whether the
turn was closed, whether a role's header was sampled. Only the text that the template itself writes
around reasoning and calls is stripped, and the message keeps the exact text.

If a tokenizer declares a ``response_template``, ``transformers`` finds the fields. The ids still
determine how the turn ended, and which text is a special token and which only spells one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import get_json_schema

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.messages import REASONING_KEYS, reasoning_of, split_thoughts
from torchrl_llm.data.text.call_syntax import BrokenCall, Call, ParsedCalls, call_of
from torchrl_llm.data.text.codec import Codec, Shield, whole_characters
from torchrl_llm.data.text.learnt_calls import syntax_of
from torchrl_llm.data.text.probe import Probe
from torchrl_llm.data.text.splice import read_ending
from torchrl_llm.errors import TemplateError

# The time grows with the number of regions; no real turn has this many.
_MOST_REGIONS = 256
_LONGEST_HEAD = 64
_ALONE = "the chat template drops a tool call that has text next to it: write the call alone"
_OWN_KEYS = {"role", "content", "tool_calls", *REASONING_KEYS}


class _Fields(NamedTuple):
    """The fields of a response; ``reasoning`` is ``None`` without a block for it."""

    reasoning: str | None
    parsed: ParsedCalls
    others: Mapping[str, Any] = {}


class ResponseParser:
    """Parse responses for one tokenizer and one template.

    Args:
        codec: the tokenizer.
        probe: findings about the template.
        tools: the tools that a call may name; their schemas give the types of unquoted arguments.
        response_template: template with which ``transformers`` finds the fields of a response, see
            ``PreTrainedTokenizerBase.parse_response``. Not used if it extracts reasoning that the
            chat template would not write again.

    Raises:
        TemplateError: this release of ``transformers`` cannot read ``response_template``.
    """

    def __init__(
        self,
        codec: Codec,
        probe: Probe,
        tools: Sequence[Any] | None = None,
        response_template: Mapping[str, Any] | None = None,
    ) -> None:
        self._codec = codec
        self._probe = probe
        self._syntax = syntax_of(probe.call, probe.beside)
        # Every added token, so that ordinary characters cannot spell one.
        self._shield = Shield(codec.added)
        self._tools = list(tools or ())
        self._schemas = dict(_schema(tool) for tool in self._tools)
        self._reasoning = probe.reasoning
        self._lead, self._trail = probe.lead.strip(), probe.trail
        self._heads = [h for h in (_squeezed(probe.header), probe.behind_result) if h]
        structure = " ".join([probe.lead, probe.trail, probe.call or "", *(probe.reasoning or ())])
        inner = {i for m, i in codec.added.items() if m in structure}
        self._roles = probe.openers - inner
        self._ends = {*codec.eos_ids, *(c.ids[-1] for c in probe.closers)}
        self._declared = response_template
        self._delimiters: list[Any] = []
        self._call_opens: Any = None
        if response_template is not None:
            self._load(response_template)

    def _load(self, response_template: Mapping[str, Any]) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        try:
            fields = load_response_template(dict(response_template)).fields
        except (ValueError, TypeError) as error:
            raise TemplateError(
                f"transformers cannot read the tokenizer's response_template: {error}; repair it, "
                "or set tokenizer.response_template = None to parse by the chat template alone"
            ) from error
        if self._probe.form.reasoning_field is None and set(REASONING_KEYS) & set(fields):
            self._declared = None
        patterns = (p for field in fields.values() for p in (field.open_re, field.close_re))
        self._delimiters = [pattern for pattern in patterns if pattern is not None]
        self._call_opens = fields["tool_calls"].open_re if "tool_calls" in fields else None

    @property
    def declared(self) -> bool:
        """Whether ``transformers`` finds the fields with the tokenizer's response_template."""
        return self._declared is not None

    @property
    def reads_calls(self) -> bool:
        """Whether calls can be read, by the chat template's syntax or the response_template."""
        return self._syntax is not None or self._call_opens is not None

    def parse(
        self, prompt: Sequence[int], response: Sequence[int], finish_reason: FinishReason
    ) -> dict[str, Any]:
        """Read a response.

        Args:
            prompt: ids before it.
            response: the sampled ids.
            finish_reason: how the response ended.

        Returns:
            A message with ``role``, ``content``, ``is_complete``, ``raw`` (the exact text without
            the tokens that ended the turn; with them if more was sampled after them), and, if
            present: ``reasoning_content`` (if the template reads a reasoning field; empty if a
            block without a thought was sampled), ``tool_calls``, ``tool_call_errors`` (broken calls
            stay in ``content``), and ``flags``: ``"overrun"`` (ids after the end of the turn),
            ``"injection"`` (a role's header inside the turn), ``"unclosed_reasoning"``.
        """
        codec, flags = self._codec, []
        ending = read_ending(response, finish_reason, self._probe, codec)
        if ending.overrun:
            flags.append("overrun")
        body = self._without_head(ending.body, prompt)
        if self._roles.intersection(body):
            flags.append("injection")
        text = self._text(body, self._roles)
        reasoning, rest, closed = self._split_reasoning(text, prompt)
        if not closed:
            flags.append("unclosed_reasoning")
        if self._trail and rest.rstrip().endswith(self._trail):
            rest = rest.rstrip().removesuffix(self._trail)
        found = _Fields(reasoning, self._parsed(rest))
        if self._declared is not None:
            found = self._declared_fields(text, prompt, found)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self._plain(found.parsed.content),
            "is_complete": finish_reason.whole,
            "raw": codec.decode(response if ending.overrun else ending.body),
            **self._plain_tree(found.others),
        }
        if found.reasoning is not None:
            message["reasoning_content"] = self._plain(found.reasoning)
        if calls := found.parsed.calls:
            message["tool_calls"] = [
                {
                    # Nine characters, as Mistral requires, and unique in the conversation.
                    "id": call.id or f"{len(prompt) % 10**6:06d}{k:03d}",
                    "type": "function",
                    "function": {
                        "name": self._plain(call.name),
                        "arguments": self._plain_tree(call.arguments),
                    },
                }
                for k, call in enumerate(calls)
            ]
        if errors := found.parsed.errors:
            message["tool_call_errors"] = [self._plain(error) for error in errors]
        if flags:
            message["flags"] = flags
        return message

    # -- fields by the tokenizer's response_template ----------------------------------------------

    def _declared_fields(self, text: str, prompt: Sequence[int], own: _Fields) -> _Fields:
        """The fields that ``transformers`` finds, or else ``own``."""
        delimiters = (m for p in self._delimiters for m in p.finditer(text))
        if next(islice(delimiters, _MOST_REGIONS, None), None) is not None:
            return own
        # A template only reads the text from the beginning of the model's turn on.
        end = next((k for k in range(len(prompt) - 1, -1, -1) if prompt[k] in self._ends), 0)
        try:
            parser = self._codec.tokenizer.get_response_parser(
                dict(self._declared), prefix=self._text(prompt[end:], ()), tools=self._tools
            )
            parser.feed(text)
            message, _ = parser.finalize()
        except (ValueError, KeyError, RecursionError) as error:
            silent = not own.parsed.found and self._call_opens is not None
            if not silent or self._call_opens.search(text) is None:
                return own
            broken = BrokenCall(f"a tool call cannot be read: {error}")
            return own._replace(parsed=own.parsed._replace(found=[broken]))
        message = _without_prompt(message, parser.initial_events)
        content = message.get("content", "")
        if not isinstance(content, str):
            return own
        found: list[Call | BrokenCall] = []
        for value in message.get("tool_calls", ()):
            try:
                found.append(call_of(value))
            except ValueError as error:
                found.append(BrokenCall(str(error)))
        others = {key: value for key, value in message.items() if key not in _OWN_KEYS}
        return _Fields(reasoning_of(message), ParsedCalls(content, found), others)

    # -- fields by the chat template's text -------------------------------------------------------

    def _parsed(self, text: str) -> ParsedCalls:
        """The calls in a text, except those within ``<think>`` marks."""
        content, found = [], []
        for piece, is_thought in split_thoughts(text):
            parsed = ParsedCalls(piece, [])
            if self._syntax is not None and not is_thought:
                parsed = self._syntax.parse(piece, self._schemas)
                if self._probe.loses_calls and parsed.calls and parsed.content.strip():
                    parsed = ParsedCalls(piece, [BrokenCall(_ALONE)])
            content.append(parsed.content)
            found += parsed.found
        return ParsedCalls("".join(content), found)

    def _text(self, ids: Sequence[int], hidden: Collection[int]) -> str:
        """Text in which only added tokens spell added tokens; other occurrences are covered.

        The ``hidden`` tokens are covered, too: they are content.
        """
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
            out.append(cover(marker) if token in hidden else marker)
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
                if not mark:  # a message other than an answer may follow the thought (gpt-oss)
                    first = next((m for _, _, m in self._shield.markers_in(closing)), closing)
                    thought, mark, rest = start.partition(first)
                    rest = rest.removeprefix(header).removeprefix(self._lead)
                if not mark:
                    return _unwrapped(thought, 1), "", False
                return _unwrapped(thought, 1).removesuffix("\n"), _unwrapped(rest, 2), True
        if self._lead and text.lstrip().startswith(self._lead):
            text = _unwrapped(text.lstrip()[len(self._lead) :], 2)
        return None, text, True

    def _without_head(self, body: list[int], prompt: Sequence[int]) -> list[int]:
        """The ids without the head of a turn that the template writes and the prompt lacks."""
        for head in self._heads:
            for size in range(1, min(len(body), _LONGEST_HEAD) + 1):
                said = _squeezed(self._codec.decode(body[:size]))
                if said == head:
                    before = _squeezed(self._codec.decode(prompt[-_LONGEST_HEAD:]))
                    return body if before.endswith(head) else body[size:]
                if not head.startswith(said.rstrip("\ufffd")):
                    break
        return body

    def _inside(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt ends inside a thought that it opened."""
        opening, closing = self._reasoning or ("", "")
        if not opening:
            return False
        codec = self._codec
        if opening in codec.added:
            ends = (self._probe.openers | self._ends) - {codec.added[opening]}
            for token in reversed(prompt):
                if token == codec.added[opening]:
                    return True
                if token == codec.added.get(closing) or token in ends:
                    return False
            return False
        return codec.decode(prompt[-48:]).rstrip().endswith(opening)

    def _plain(self, text: str) -> str:
        # A call in JSON may spell lone surrogates, which no tokenizer or file accepts.
        return whole_characters(self._shield.uncover(text)[0])

    def _plain_tree(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._plain(value)
        if isinstance(value, Mapping):
            return {self._plain(k): self._plain_tree(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self._plain_tree(item) for item in value]
        return value


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _unwrapped(text: str, newlines: int) -> str:
    """The text without the line ends that a template writes before it."""
    lead = len(text) - len(text.lstrip("\n"))
    return text[min(lead, newlines) :]


def _schema(tool: Any) -> tuple[str, Mapping[str, Any]]:
    schema = tool if isinstance(tool, Mapping) else get_json_schema(tool)
    function = schema.get("function", schema)
    return function["name"], function.get("parameters") or {}


def _without_prompt(message: dict[str, Any], events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fields without the values that the end of the prompt has already set."""
    opened: dict[str, str] = {}
    closed: dict[str, list[Any]] = {}
    for event in events:
        field = event["field"]
        if event["type"] == "region_close":
            closed.setdefault(field, []).append(event["value"])
            opened.pop(field, None)
        else:
            opened[field] = opened.get(field, "") + event.get("text", "")
    own = {}
    for field, value in message.items():
        before = closed.get(field, [])
        if isinstance(value, list) and before:
            value = value[len(before) :]
        elif before and value == before[-1]:
            continue
        elif isinstance(value, str) and (begun := opened.get(field)):
            value = value[len(begun if value.startswith(begun) else begun.lstrip()) :]
        own[field] = value
    return own
