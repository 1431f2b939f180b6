"""Conversations to token ids, and longer conversations to the same ids with more behind them.

A sampled token is never encoded again. When messages are appended to a conversation whose ids are
known, :meth:`ChatFormatter.extend` encodes what the chat template writes from the token that closes
the sampled turn on, and appends it. The cost depends on the new messages, not on the history. Where
the template rewrites history, the conversation forks, and says why.

Next: :mod:`~torchrl_llm.data.formatter.splice` decides, :mod:`~torchrl_llm.data.formatter.probe`
finds out what a template does, :mod:`~torchrl_llm.data.formatter.respond` reads responses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from torchrl_llm.data.column import Chat
from torchrl_llm.data.enums import FinishReason, Source
from torchrl_llm.data.formatter import splice
from torchrl_llm.data.formatter.codec import Codec, Encoding, Piece
from torchrl_llm.data.formatter.label import assistant_regions, char_sources, label_tokens
from torchrl_llm.data.formatter.probe import Closer, probe_template
from torchrl_llm.data.formatter.render import Form, Rendered, Renderer
from torchrl_llm.data.formatter.respond import ResponseParser
from torchrl_llm.data.record import TokenRecord
from torchrl_llm.data.templates import resolve_template
from torchrl_llm.errors import ConfigError, TemplateError

__all__ = ["ChatFormatter", "Encoded", "Extension", "ForkCause", "OnRewrite"]

OnRewrite = Literal["fork", "keep", "error"]
ForkCause = Literal["think_dropped", "prompt_changed", "closer_changed", "history_changed"]

Messages = Chat | Sequence[Mapping[str, Any]]


class Encoded(NamedTuple):
    """A conversation as ids.

    Attributes:
        token_ids: int64 ``[T]``.
        source: int8 ``[T]``, codes of :class:`~torchrl_llm.data.enums.Source`.
        assistant: bool ``[T]``, what a model would have to generate: the text, reasoning and calls
            of assistant messages and the token that ends the turn.
    """

    token_ids: Tensor
    source: Tensor
    assistant: Tensor


class Extension(NamedTuple):
    """Old ids and what new messages add to them.

    Attributes:
        token_ids: int64 ``[T]``, the whole conversation.
        num_kept: length of the prefix that is the old ids, token for token (0 when forked).
        source: int8 ``[T - num_kept]``, provenance of the new part.
        forked: the template rewrote history, and all ids are new.
        cause: what it rewrote; also set under ``on_rewrite="keep"``, where nothing forks.
    """

    token_ids: Tensor
    num_kept: int
    source: Tensor
    forked: bool
    cause: ForkCause | None


class _Plan(NamedTuple):
    """What is to be encoded: ``rendered.text[start:]``, of which the first ``skip`` ids are held."""

    rendered: Rendered
    chars: np.ndarray
    start: int
    held: list[int]
    kept: int
    cause: ForkCause | None


class ChatFormatter:
    """Encode conversations with a tokenizer and a chat template, each token once.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        chat_template: a Jinja template; the tokenizer's own, or that of its family, by default.
        chat_template_name: name of a registered template.
        on_rewrite: what to do where the template rewrites history: ``"fork"`` starts a new row from
            the new rendering (what a served model would see), ``"keep"`` appends all the same,
            ``"error"`` raises.
        tools: tools of every conversation (JSON schemas or documented functions).
        template_kwargs: further variables of the template, such as ``enable_thinking``.
        debug: check each result (old ids are a prefix, the new text is the rendered one).

    Raises:
        TokenizerError: the tokenizer is not a fast one.
        TemplateError: there is no usable template, or tools are given and it drops calls or results.

    Example:
        >>> from torchrl_llm.data.formatter import ChatFormatter, FinishReason
        >>> formatter = ChatFormatter(tokenizer)                             # doctest: +SKIP
        >>> chat = [{"role": "user", "content": "Hi"}]
        >>> prompt = formatter.encode(chat).token_ids                        # doctest: +SKIP
        >>> ids = torch.cat([prompt, sampled])                               # doctest: +SKIP
        >>> turn = formatter.parse_response(prompt, sampled, FinishReason.STOP)  # doctest: +SKIP
        >>> more = formatter.extend(                                         # doctest: +SKIP
        ...     ids, [*chat, turn], FinishReason.STOP, [{"role": "user", "content": "And?"}],
        ...     response_start=len(prompt))
        >>> bool((more.token_ids[:len(ids)] == ids).all())                   # doctest: +SKIP
        True
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        chat_template_name: str | None = None,
        on_rewrite: OnRewrite = "fork",
        tools: Sequence[Any] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        debug: bool = False,
    ) -> None:
        if on_rewrite not in get_args(OnRewrite):
            raise ConfigError(
                f"on_rewrite must be one of {get_args(OnRewrite)}, got {on_rewrite!r}"
            )
        spec = resolve_template(tokenizer, chat_template, chat_template_name)
        self.tokenizer = tokenizer
        self.on_rewrite = on_rewrite
        self.tools = list(tools) if tools else None
        self.debug = debug
        self._codec = Codec(tokenizer)
        variables = {**tokenizer.special_tokens_map, **(template_kwargs or {})}
        renderer = Renderer(spec.template, self._codec.shield, variables, Form())
        self.probe = probe_template(renderer, self._codec)
        self._renderer = renderer.with_form(self.probe.form)
        self._check_markers(spec.template, own=chat_template is not None)
        if self.tools is not None:
            self._check_tools()
        self._parser = ResponseParser(self._codec, self.probe, self.tools)

    @property
    def chat_template(self) -> str:
        """The Jinja template in use."""
        return self._renderer.template

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a response when they are sampled: the turn's last token, and any eos."""
        ids = {c.ids[-1] for c in self.probe.terminal} | self._codec.eos_ids
        return tuple(sorted(ids))

    def _check_markers(self, template: str, *, own: bool) -> None:
        # A family's or ChatML template was put in for a tokenizer that has none: its end-of-turn
        # token must exist, or the model could never end a turn.
        if own or getattr(self.tokenizer, "chat_template", None) or self.probe.closers:
            return
        raise TemplateError(
            "the tokenizer has no chat template, and the built-in one ends turns with tokens that "
            "this tokenizer does not have; pass chat_template=..., or add the tokens to tokenizer "
            "and model"
        )

    def _check_tools(self) -> None:
        lost = "tool calls" if self.probe.call is None else "tool results"
        if self.probe.call is None or not self.probe.results:
            raise TemplateError(
                f"tools are given, but the chat template drops {lost}; use a template that writes "
                "them, or take the tools away"
            )

    # -- whole conversations ----------------------------------------------------------------------

    def render(
        self,
        chat: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
    ) -> str:
        """The conversation as text, special tokens included.

        Args:
            chat: the messages. If the last one is an unfinished assistant message
                (``is_complete`` is false) and a generation prompt is asked for, the text ends with
                its content, to be continued.
            add_generation_prompt: end with the header of the model's turn.
            tools: tools of this conversation instead of the formatter's.
        """
        return self._whole(_messages(chat), add_generation_prompt, tools)[0].text

    def encode(
        self,
        chat: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
    ) -> Encoded:
        """Encode one conversation; see :meth:`encode_batch`."""
        return self.encode_batch([chat], add_generation_prompt=add_generation_prompt, tools=tools)[
            0
        ]

    def encode_batch(
        self,
        chats: Sequence[Messages],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
    ) -> list[Encoded]:
        """Encode conversations with one call of the tokenizer.

        Args:
            chats: conversations; records that they carry are not read.
            add_generation_prompt: end each with the header of the model's turn.
            tools: tools of these conversations instead of the formatter's.

        Returns:
            Ids, provenance and assistant mask of each.

        Raises:
            TemplateError: the template refuses a message or would drop it.
        """
        wholes = [self._whole(_messages(chat), add_generation_prompt, tools) for chat in chats]
        encodings = self._codec.encode_batch([Piece(r.text, r.literals) for r, _ in wholes])
        out = []
        for (rendered, chars), encoding in zip(wholes, encodings, strict=True):
            # The two labels share one pass over the tokens: source + 8 x assistant.
            labels = label_tokens(encoding, rendered.text, chars)
            out.append(
                Encoded(
                    torch.from_numpy(encoding.ids.copy()),
                    torch.from_numpy(labels % 8),
                    torch.from_numpy(labels >= 8),
                )
            )
            if self.debug:
                self._check_specials(rendered, 0, encoding)
        return out

    def _whole(
        self, messages: Sequence[Mapping[str, Any]], prompt: bool, tools: Sequence[Any] | None
    ) -> tuple[Rendered, np.ndarray]:
        self._check_expressible(messages)
        prefilled = None
        if prompt and messages and messages[-1].get("role") == "assistant":
            if messages[-1].get("is_complete") is False:
                prefilled, prompt = len(messages) - 1, False
        rendered = self._renderer.render(
            messages,
            tools=self.tools if tools is None else tools,
            add_generation_prompt=prompt,
            spans=True,
            generation=True,
        )
        if prefilled is not None:
            rendered = _open_ended(rendered, prefilled)
        regions = assistant_regions(rendered, messages, self.probe)
        chars = char_sources(rendered, messages, regions, prefilled=prefilled)
        for start, end, _ in regions:
            chars[start:end] += 8
        return rendered, chars

    def _check_expressible(self, messages: Sequence[Mapping[str, Any]]) -> None:
        for index, message in enumerate(messages):
            if message.get("tool_calls") and self.probe.call is None:
                raise TemplateError(
                    f"message {index} has tool calls, and the chat template drops them"
                )
            role = message.get("role")
            if role == "tool" and self.probe.call is not None and not self.probe.results:
                raise TemplateError(
                    f"message {index} is a tool result, and the chat template drops it"
                )
            if role == "system" and index == 0 and not self.probe.system:
                raise TemplateError("message 0 is a system message, and the chat template drops it")

    # -- longer conversations ---------------------------------------------------------------------

    def extend(
        self,
        token_ids: Tensor,
        old_messages: Messages,
        finish_reason: FinishReason | None,
        new_messages: Messages,
        *,
        response_start: int,
        tools: Sequence[Any] | None = None,
    ) -> Extension:
        """Continue a conversation whose ids are known.

        Args:
            token_ids: int64 ``[T]``, prompt and sampled response.
            old_messages: the messages that these ids stand for; the last one is the sampled turn.
            finish_reason: how the response ended.
            new_messages: the messages behind it (all results of a step at once). Without any, a
                finished turn is followed by a new header, and an unfinished one is left as it is,
                to be continued.
            response_start: index of the response's first token.
            tools: tools of this conversation instead of the formatter's.

        Returns:
            The ids up to the next generation prompt.

        Raises:
            TemplateError: the template refuses the messages, or rewrites history while
                ``on_rewrite="error"``.
        """
        old, new = _messages(old_messages), _messages(new_messages)
        if not old or old[-1].get("role") != "assistant":
            roles = [m.get("role") for m in old]
            raise TemplateError(f"the last old message must be the sampled turn, got roles {roles}")
        if not new and finish_reason in (FinishReason.LENGTH, FinishReason.ABORT):
            empty = torch.zeros(0, dtype=torch.int8)
            return Extension(token_ids, token_ids.shape[0], empty, False, None)
        plan = self._plan(token_ids, old, finish_reason, new, response_start, tools)
        return self._carry_out(token_ids, plan)

    def continue_record(
        self, record: TokenRecord | None, chat: Messages, *, tools: Sequence[Any] | None = None
    ) -> TokenRecord:
        """The record of the next prompt of a conversation.

        Args:
            record: tokens of the first ``record.num_messages`` messages, or ``None``.
            chat: the whole conversation.
            tools: tools of this conversation instead of the formatter's.

        Returns:
            The same record if it is already a prompt for all messages (or an unfinished response to
            be continued), the longer record, or a new one with its ``fork_cause``.
        """
        messages = _messages(chat)
        if record is None or not bool((record.source == Source.SAMPLED).any()):
            if record is not None and record.num_messages == len(messages):
                return record
            return self._fresh(messages, tools, None)
        covered, finish = record.num_messages, record.finish_reason
        if covered > len(messages):
            return self._fresh(messages, tools, "history_changed")
        if covered == len(messages) and finish in (None, FinishReason.LENGTH, FinishReason.ABORT):
            return record
        if finish is None:
            # A prompt that was not answered gets more messages: go on from the last response.
            record, covered = _last_response(record, messages)
        extension = self.extend(
            record.token_ids,
            messages[:covered],
            record.finish_reason,
            messages[covered:],
            response_start=record.response_start or 0,
            tools=tools,
        )
        if extension.forked:
            return TokenRecord.from_prompt(
                extension.token_ids, extension.source, len(messages), fork_cause=extension.cause
            )
        added = extension.token_ids[extension.num_kept :]
        return record.extend(added, extension.source, len(messages))

    def _fresh(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        cause: ForkCause | None,
    ) -> TokenRecord:
        encoded = self.encode(messages, tools=tools)
        return TokenRecord.from_prompt(
            encoded.token_ids, encoded.source, len(messages), fork_cause=cause
        )

    def _plan(
        self,
        token_ids: Tensor,
        old: Sequence[Mapping[str, Any]],
        finish_reason: FinishReason | None,
        new: Sequence[Mapping[str, Any]],
        response_start: int,
        tools: Sequence[Any] | None,
    ) -> _Plan:
        """Decide what is to be encoded, on a window of the conversation."""
        self._check_expressible(new)
        probe, codec = self.probe, self._codec
        response = token_ids[response_start:].tolist()
        ending = splice.read_ending(
            response, finish_reason, probe, eos_ids=codec.eos_ids, special_ids=codec.special_ids
        )
        body, closer = codec.decode(ending.body), ending.closer
        short = bool(new) and all(m.get("role") == "tool" for m in new)
        window = [old[i] for i in splice.window_start(old, len(old) - 1, short=short)]
        tools = self.tools if tools is None else tools
        try:
            prompt, alone, full = self._three(window, new, tools)
        except TemplateError:  # the template wants to see more than the window
            window = list(old)
            prompt, alone, full = self._three(window, new, tools)
        turn = old[-1]
        cut = splice.find_cut(prompt, alone, full, body=body, closer=closer, turn=turn, probe=probe)
        held, cause = ending.tail if closer or cut else [], None
        if cut is not None and ending.overrun and not self._agrees(full, cut, ending.tail):
            cut = None
        if cut is None:
            thoughts = [
                t
                for m in window
                for t in splice.thoughts_of(m)
                if m is turn or splice.contains(prompt.text, t)
            ]
            cause = splice.fork_cause(
                prompt,
                alone,
                full,
                body=body,
                closer=closer,
                turn=turn,
                thoughts=thoughts,
                probe=probe,
            )
            if self.on_rewrite == "error":
                raise TemplateError(
                    f"the chat template rewrites history ({cause}); use a template that keeps it, "
                    'or on_rewrite="fork"'
                )
            if self.on_rewrite == "fork":
                rendered, chars = self._whole([*old, *new], True, tools)
                return _Plan(rendered, chars % 8, 0, [], 0, cause)
            full, cut, window = self._keep(turn, new, tools, ended=closer is not None)
            held = [] if closer is not None else ending.tail
        messages = [*window, *new]
        regions = assistant_regions(full, messages, probe)
        chars = char_sources(full, messages, regions)
        kept = token_ids.shape[0]
        start = cut.start
        if cut.closer is None:
            # No token ends the turn; white space that was sampled is not written again.
            blank = len(body) - len(body.rstrip())
            while blank and full.text[start : start + 1].isspace():
                start, blank = start + 1, blank - 1
            held = []
        return _Plan(full, chars, start, held, kept, cause)

    def _three(
        self,
        window: Sequence[Mapping[str, Any]],
        new: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
    ) -> tuple[Rendered, Rendered, Rendered]:
        render = self._renderer.render
        prompt = render(window[:-1], tools=tools, add_generation_prompt=True)
        alone = render(window, tools=tools)
        full = render([*window, *new], tools=tools, add_generation_prompt=True, spans=True)
        return prompt, alone, full

    def _agrees(self, full: Rendered, cut: splice.Cut, tail: list[int]) -> bool:
        """Whether ids sampled behind the closer are what the template writes there as well."""
        ids = self._codec.encode(_piece(full, cut.start)).ids.tolist()
        return ids[: len(tail)] == tail

    def _keep(
        self,
        turn: Mapping[str, Any],
        new: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        *,
        ended: bool,
    ) -> tuple[Rendered, splice.Cut, list[Mapping[str, Any]]]:
        """The new part as it stands behind a dummy conversation."""
        dummy: dict[str, Any] = {"role": "assistant", "content": "Yes."}
        if turn.get("tool_calls"):
            dummy = {**dummy, "content": "", "tool_calls": turn["tool_calls"]}
        window: list[Mapping[str, Any]] = [{"role": "user", "content": "Go on."}, dummy]
        full = self._renderer.render(
            [*window, *new], tools=tools, add_generation_prompt=True, spans=True
        )
        after = max((s.end for s in full.spans if s.index == 1), default=0)
        before = min(
            (s.start for s in full.spans if s.index > 1 and s.start >= after),
            default=len(full.text),
        )
        found = splice.first_closer(full, after, before, self.probe)
        if found is None:
            return full, splice.Cut(after, None), window
        at, closer = found
        cut = splice.Cut(at + len(closer.text), None) if ended else splice.Cut(at, closer)
        return full, cut, window

    def _carry_out(self, token_ids: Tensor, plan: _Plan) -> Extension:
        rendered, start = plan.rendered, plan.start
        encoding = self._codec.encode(_piece(rendered, start))
        labels = label_tokens(encoding, rendered.text[start:], plan.chars[start:])
        # What the old ids already hold: all of the tail, or the part of a closer that they end with.
        ids = encoding.ids.tolist()
        skip = next((n for n in range(len(plan.held), 0, -1) if ids[:n] == plan.held[-n:]), 0)
        added = torch.from_numpy(encoding.ids[skip:].copy())
        source = torch.from_numpy(labels[skip:])
        if self.debug:
            self._check_specials(rendered, start, encoding)
        forked = plan.kept == 0
        whole = added if forked else torch.cat([token_ids, added])
        return Extension(whole, plan.kept, source, forked, plan.cause)

    def _check_specials(self, rendered: Rendered, start: int, encoding: Encoding) -> None:
        """Each special token of the ids stands in the text, outside literal places."""
        literal = {a for a, _ in rendered.literals}
        markers = self._codec.shield.markers_in(rendered.text, start)
        expected = [m for a, _, m in markers if a not in literal]
        special = self._codec.special_ids
        got = [self._codec.added_by_id.get(i) for i in encoding.ids.tolist() if i in special]
        if [m for m in got if m in self._codec.shield.markers] != expected:
            raise TemplateError(f"special tokens of the text {expected} were encoded as {got}")

    # -- responses --------------------------------------------------------------------------------

    def parse_response(
        self,
        prompt_ids: Tensor | Sequence[int],
        response_ids: Tensor | Sequence[int],
        finish_reason: FinishReason,
    ) -> dict[str, Any]:
        """Read a sampled response into a message.

        Args:
            prompt_ids: int64 ``[P]``; its end tells whether a thought is open.
            response_ids: int64 ``[R]``.
            finish_reason: how the response ended.

        Returns:
            A message dict; see :class:`~torchrl_llm.data.formatter.respond.ResponseParser`.
        """
        return self._parser.parse(_ids(prompt_ids), _ids(response_ids), finish_reason)

    def decode(self, token_ids: Tensor | Sequence[int]) -> str:
        """Exact text of ids, special tokens included."""
        return self._codec.decode(_ids(token_ids))

    @property
    def closers(self) -> tuple[Closer, ...]:
        """The token runs with which this template ends turns."""
        return self.probe.closers


def _messages(chat: Messages) -> Sequence[Mapping[str, Any]]:
    return chat.messages if isinstance(chat, Chat) else list(chat)


def _ids(ids: Tensor | Sequence[int]) -> list[int]:
    return ids.tolist() if isinstance(ids, Tensor) else list(ids)


def _piece(rendered: Rendered, start: int) -> Piece:
    literals = [(a - start, b - start) for a, b in rendered.literals if a >= start]
    return Piece(rendered.text[start:], literals)


def _open_ended(rendered: Rendered, index: int) -> Rendered:
    """The text up to the end of the last message's content."""
    end = max((s.end for s in rendered.spans if s.index == index), default=None)
    if end is None:
        raise TemplateError("the chat template drops the unfinished last message")
    literals = [x for x in rendered.literals if x[1] <= end]
    return Rendered(rendered.text[:end], literals, [s for s in rendered.spans if s.end <= end])


def _last_response(
    record: TokenRecord, messages: Sequence[Mapping[str, Any]]
) -> tuple[TokenRecord, int]:
    """The record cut behind its last sampled token, and how many messages it then covers."""
    end = int((record.source == Source.SAMPLED).nonzero()[-1]) + 1
    covered = max(
        i for i, m in enumerate(messages[: record.num_messages]) if m.get("role") == "assistant"
    )
    cut = TokenRecord(
        token_ids=record.token_ids[:end],
        source=record.source[:end],
        turn=record.turn[:end],
        policy_version=record.policy_version[:end],
        log_probs=record.log_probs[:end],
        num_messages=covered + 1,
        finish_reason=FinishReason.STOP,
        response_start=record.response_start,
        fork_cause=record.fork_cause,
    )
    return cut, covered + 1
