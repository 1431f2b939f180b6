"""Formatter that encodes conversations into token ids and extends them with new messages.

A sampled token is never encoded again. When messages are appended to a conversation with known ids,
:meth:`ChatFormatter.extend` encodes only the text from the token that closes the sampled turn, and
appends the ids. The cost depends on the new messages, not on the history. If the template rewrites
history, the conversation forks, and the result has the cause.

Next: :mod:`~torchrl_llm.data.text.splice` decides, :mod:`~torchrl_llm.data.text.probe`
finds out what a template does, :mod:`~torchrl_llm.data.text.respond` reads responses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchrl._utils import logger

from torchrl_llm._checked import checked
from torchrl_llm._log import tell_once
from torchrl_llm.data.chat import Chat
from torchrl_llm.data.enums import FinishReason, Source
from torchrl_llm.data.record import TokenRecord, extend_records
from torchrl_llm.data.text import continuation
from torchrl_llm.data.text.call_syntax import NAME, VALUE
from torchrl_llm.data.text.codec import Codec
from torchrl_llm.data.text.compose import Composed, Composer
from torchrl_llm.data.text.probe import THOUGHT, TOOL, USER, Closer, calling, probe_template
from torchrl_llm.data.text.renderer import Form, Renderer
from torchrl_llm.data.text.respond import ResponseParser
from torchrl_llm.data.text.templates import resolve_template
from torchrl_llm.errors import TemplateError

Messages = Chat | Sequence[Mapping[str, Any]]
_NAMED_TOKENS = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
# Tokenizers whose missing markers have been reported.
_TOLD: set[str] = set()


class Encoded(NamedTuple):
    """A conversation as ids.

    Attributes:
        token_ids: int64 ``[T]``.
        source: int8 ``[T]``, codes of :class:`~torchrl_llm.data.enums.Source`.
        assistant: bool ``[T]``, the tokens that a model would have to generate: text, reasoning and
            calls of assistant messages, and the token that ends the turn.
    """

    token_ids: Tensor
    source: Tensor
    assistant: Tensor

    def prompt_record(
        self, chat: Messages, *, fork_cause: str | None = None, earlier_turns: int = 0
    ) -> TokenRecord:
        """Record of these ids as a prompt.

        A prompt that ends inside an unfinished message of the model is recorded as a truncated
        response, although none of it was sampled: the answer continues that message.

        Args:
            chat: the conversation that was encoded.
            fork_cause: why an earlier record of the conversation was dropped.
            earlier_turns: number of the model's turns in that record.
        """
        messages = _messages(chat)
        record = TokenRecord.from_prompt(
            self.token_ids,
            self.source,
            len(messages),
            fork_cause=fork_cause,
            earlier_turns=earlier_turns,
        )
        last = messages[-1] if messages else {}
        if last.get("role") != "assistant" or last.get("is_complete") is not False:
            return record
        outside = (~self.assistant).nonzero()
        start = int(outside[-1]) + 1 if outside.numel() else 0
        return replace(record, finish_reason=FinishReason.LENGTH, response_start=start)


class ChatFormatter:
    """Encode conversations with a tokenizer and a chat template, each token once.

    Args:
        tokenizer: a fast Hugging Face tokenizer. If it declares a ``response_template`` and its own
            chat template is in use, ``transformers`` parses each response with it; set it to
            ``None`` to parse responses in the form that the chat template writes.
        chat_template: a Jinja template; the tokenizer's own, or that of its family, by default.
        chat_template_name: name of a registered template.
        on_rewrite: what to do if the template rewrites history: ``"fork"`` starts a new row from
            the new rendering (which a served model would see), ``"keep"`` appends anyway,
            ``"error"`` raises.
        tools: tools of every conversation (JSON schemas or documented functions).
        template_kwargs: further variables of the template, such as ``enable_thinking``.
        debug: check each result (old ids are a prefix, the new text equals the rendered text).

    Raises:
        TokenizerError: the tokenizer is not a fast one.
        TemplateError: there is no usable template, or the template drops the given tools or writes
            calls that cannot be read back, or ``transformers`` cannot read the tokenizer's
            ``response_template``.

    Example:
        >>> from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> symbols = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
        >>> backend = Tokenizer(models.BPE({s: i for i, s in enumerate(symbols)}, []))
        >>> backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        >>> backend.decoder = decoders.ByteLevel()
        >>> formatter = ChatFormatter(
        ...     PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>"),
        ...     chat_template="{% for m in messages %}{{ m.role + ':' + m.content + '<end>' }}"
        ...     "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}",
        ... )
        >>> user = {"role": "user", "content": "Hi <end>"}
        >>> prompt = formatter.encode([user]).token_ids
        >>> formatter.decode(prompt), int((prompt == 0).sum())  # the user's <end> ends nothing
        ('user:Hi <end><end>assistant:', 1)
        >>> sampled = torch.tensor([*formatter.encode([]).token_ids[:2], 0])
        >>> turn = formatter.parse_response(prompt, sampled, FinishReason.STOP)
        >>> turn["content"], turn["is_complete"]
        ('as', True)
        >>> more = formatter.extend(
        ...     torch.cat([prompt, sampled]), [user, turn], FinishReason.STOP,
        ...     [{"role": "user", "content": "Go on"}], response_start=len(prompt),
        ... )
        >>> more.num_kept == len(prompt) + 3, more.forked
        (True, False)
        >>> formatter.decode(more.token_ids[more.num_kept :])
        'user:Go on<end>assistant:'
    """

    @checked
    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        chat_template_name: str | None = None,
        on_rewrite: continuation.OnRewrite = "fork",
        tools: Sequence[Any] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        debug: bool = False,
    ) -> None:
        spec = resolve_template(tokenizer, chat_template, chat_template_name)
        self.tokenizer = tokenizer
        self.on_rewrite = on_rewrite
        self.tools = list(tools) if tools else None
        self.debug = debug
        self._codec = Codec(tokenizer)
        if unread := [name for name in template_kwargs or () if name not in spec.template]:
            tell_once(f"the chat template does not read {', '.join(unread)} (template_kwargs)")
        variables = {**tokenizer.special_tokens_map, **(template_kwargs or {})}
        renderer = Renderer(spec.template, self._codec.shield, variables, Form())
        self.probe = probe_template(renderer, self._codec)
        self._renderer = renderer.with_form(self.probe.form)
        self._tell_plain_markers(own=chat_template is not None)
        self._composer = Composer(self._renderer, self._codec, self.probe, self.tools)
        self._continuation = continuation.Continuation(self._composer, on_rewrite, debug=debug)
        self._appending = continuation.Continuation(self._composer, "keep", debug=debug)
        own = spec.name == "tokenizer"
        declared = getattr(tokenizer, "response_template", None) if own else None
        self._parser = ResponseParser(self._codec, self.probe, self.tools, declared)
        self._check_thoughts()
        if self.tools is not None:
            self._check_tools()

    @property
    def chat_template(self) -> str:
        """The Jinja template in use."""
        return self._renderer.template

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a response when sampled (the turn's last token, and any eos)."""
        ids = {c.ids[-1] for c in self.probe.terminal} | self._codec.eos_ids
        return tuple(sorted(ids))

    def _tell_plain_markers(self, *, own: bool) -> None:
        # The tokenizer has no template, so a family's or ChatML is used, and lacks its markers.
        if own or getattr(self.tokenizer, "chat_template", None) or self.probe.closers:
            return
        name = getattr(self.tokenizer, "name_or_path", "")
        if name not in _TOLD:
            _TOLD.add(name)
            logger.warning(
                f"the tokenizer {name!r} lacks the special tokens of the built-in chat template: "
                "its markers are encoded as plain text, and only the end-of-text token ends a "
                "response; pass chat_template, or add the tokens to tokenizer and model"
            )

    def _check_thoughts(self) -> None:
        opened, shut = self.probe.reasoning or ("", "")
        ends = [c.text for c in self.probe.terminal if shut.startswith(c.text)]
        if ends and not self._parser.declared:
            raise TemplateError(
                f"the chat template ends a thought ({opened!r}) with {ends[0]!r}, which ends the "
                "turn as well: responses would end with their thought; expected a mark of its "
                "own for the end of a thought; use another template"
            )

    def _check_tools(self) -> None:
        lost = "tool calls" if self.probe.call is None else "tool results"
        if self.probe.call is None:  # raises if the template rejects calls rather than drops them
            chat = [{"role": "user", "content": USER}, calling([(NAME, VALUE)])]
            self._renderer.render(chat, tools=[TOOL])
        if self.probe.call is None or not self.probe.results:
            raise TemplateError(
                f"tools are given, but the chat template drops {lost}; use a template that writes "
                "them, or remove the tools"
            )
        if not self._parser.reads_calls:
            raise TemplateError(
                "tools are given, but a call in this chat template's form cannot be read back; "
                "expected JSON, tags, braces or Python calls between marks, got "
                f"{self.probe.call!r:.300}; declare tokenizer.response_template, or remove the "
                "tools and parse the text with a ToolParser"
            )
        if not self._parser.declared:
            self._check_calls()

    def _check_calls(self) -> None:
        """Read the calls that the template writes: bare, with two arguments, after a thought."""
        prompt = [{"role": "user", "content": USER}]
        turns = [calling([(NAME, VALUE)]) for _ in range(2 + (self.probe.reasoning is not None))]
        turns[1]["tool_calls"][0]["function"]["arguments"]["other"] = VALUE
        turns[2:] = [{**turn, "reasoning_content": THOUGHT} for turn in turns[2:]]
        for turn in turns:
            wanted = [(NAME, sorted(turn["tool_calls"][0]["function"]["arguments"]))]
            try:
                before = self._renderer.render(prompt, tools=[TOOL], add_generation_prompt=True)
                whole = self._renderer.render([*prompt, turn], tools=[TOOL])
            except TemplateError:
                continue
            if not whole.text.startswith(before.text):
                continue
            text = whole.text[len(before.text) :]
            ids = self._codec.ids(text)
            read = self.parse_response(self._codec.ids(before.text), ids, FinishReason.STOP)
            calls = [c["function"] for c in read.get("tool_calls", ())]
            found = [(c["name"], sorted(c["arguments"])) for c in calls]
            if found != wanted:
                raise TemplateError(
                    "tools are given, but the call that this chat template writes cannot be read "
                    f"back; expected a call {wanted}, got {found} of {text!r:.300}; declare "
                    "tokenizer.response_template, or take the tools away and parse the text with a "
                    "ToolParser"
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
                (``is_complete`` is false) and a generation prompt is requested, the text ends with
                its content, to be continued.
            add_generation_prompt: end with the header of the model's turn.
            tools: tools of this conversation instead of the formatter's.
        """
        composed = self._composer.compose(
            _messages(chat), add_generation_prompt=add_generation_prompt, tools=tools
        )
        return composed.rendered.text

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
            chats: conversations; their records are ignored.
            add_generation_prompt: end each with the header of the model's turn.
            tools: tools of these conversations instead of the formatter's.

        Returns:
            Ids, provenance and assistant mask of each.

        Raises:
            TemplateError: the template rejects a message or would drop it.
        """
        composed = [
            self._composer.compose(
                _messages(chat), add_generation_prompt=add_generation_prompt, tools=tools
            )
            for chat in chats
        ]
        return self._encoded(composed)

    def encode_demonstration(
        self, chat: Messages, *, tools: Sequence[Any] | None = None
    ) -> Encoded:
        """Encode a conversation for supervised training.

        As :meth:`encode` without a generation prompt, except for special tokens that were added for
        the model's answers, that is, those that neither the template nor the tokenizer uses (as end
        of text or padding). In the model's own turns they are encoded as special tokens, in other
        messages as plain characters.

        Args:
            chat: the messages.
            tools: tools of this conversation instead of the formatter's.

        Raises:
            TemplateError: as of :meth:`encode_batch`.
        """
        composed = self._composer.compose(_messages(chat), add_generation_prompt=False, tools=tools)
        return self._encoded([composed.with_tokens(self._spoken)])[0]

    @cached_property
    def _spoken(self) -> frozenset[str]:
        """Special tokens that only an answer can hold."""
        shield, template = self._codec.shield, self.chat_template
        roles = [
            {"role": role, "content": role} for role in ("system", "user", "assistant", "tool")
        ]
        written = {each for each in shield.markers if each in template}
        for chat in (roles, roles[:3], roles[1:3], roles[1:]):
            with suppress(TemplateError):
                text = self._renderer.render([*chat, roles[1]], add_generation_prompt=True).text
                written |= {marker for _, _, marker in shield.markers_in(text)}
        written |= {each.text for each in self.probe.terminal}
        written |= {getattr(self.tokenizer, name) for name in _NAMED_TOKENS}
        return frozenset(shield.markers) - written

    def _encoded(self, composed: Sequence[Composed]) -> list[Encoded]:
        encodings = self._codec.encode_batch([c.piece() for c in composed])
        out = []
        for whole, encoding in zip(composed, encodings, strict=True):
            source, assistant = whole.sources(encoding)
            if self.debug:
                self._composer.verify(whole, 0, encoding)
            ids = torch.from_numpy(encoding.ids)
            out.append(Encoded(ids, torch.from_numpy(source), torch.from_numpy(assistant)))
        return out

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
    ) -> continuation.Extension:
        """Continue a conversation with known ids.

        Args:
            token_ids: int64 ``[T]``, prompt and sampled response.
            old_messages: the messages of these ids; the last one is the sampled turn.
            finish_reason: how the response ended.
            new_messages: the messages after it (all results of a step at once). If empty, a
                finished turn is followed by a new header, and an unfinished turn is left open, to
                be continued.
            response_start: index of the response's first token.
            tools: tools of this conversation instead of the formatter's.

        Returns:
            The ids up to the next generation prompt.

        Raises:
            TemplateError: the template rejects the messages, or rewrites history while
                ``on_rewrite="error"``.
        """
        old, new = _sampled_last(_messages(old_messages)), _messages(new_messages)
        if not (new or finish_reason is None or finish_reason.whole):
            empty = torch.zeros(0, dtype=torch.int8)
            return continuation.Extension(token_ids, token_ids.shape[0], empty, False, None)
        return self._continuation.extend(
            continuation.Request(token_ids, old, finish_reason, new, response_start, tools)
        )

    def extend_turn(
        self,
        token_ids: Tensor,
        turn: Mapping[str, Any],
        finish_reason: FinishReason | None,
        new_messages: Messages,
        *,
        response_start: int,
        tools: Sequence[Any] | None = None,
    ) -> continuation.Extension:
        """Continue a conversation of which only the ids and the last turn are known.

        For rows that are sent as ids: as :meth:`extend`, except that history is never rewritten,
        whatever ``on_rewrite`` is, because there are no messages to render it from.

        Args:
            token_ids: int64 ``[T]``, prompt and sampled response.
            turn: the message of the response, see :meth:`parse_response`.
            finish_reason: how the response ended.
            new_messages: the messages after it, at least one.
            response_start: index of the response's first token.
            tools: tools of this conversation instead of the formatter's.

        Returns:
            The ids up to the next generation prompt, never forked.

        Raises:
            TemplateError: the template rejects the messages, or its text depends on the number of
                earlier turns.
        """
        if self.probe.counts:
            raise TemplateError(continuation.COUNTED)
        old = [{"role": "user", "content": "Go on."}, turn]
        new = _messages(new_messages)
        return self._appending.extend(
            continuation.Request(token_ids, old, finish_reason, new, response_start, tools)
        )

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
            be continued), else the longer record, or a new one with its ``fork_cause``.
        """
        return self.continue_records([record], [chat], tools=tools)[0]

    def continue_records(
        self,
        records: Sequence[TokenRecord | None],
        chats: Sequence[Messages],
        *,
        tools: Sequence[Any] | None = None,
    ) -> list[TokenRecord]:
        """The records of the next prompts of many conversations, see :meth:`continue_record`.

        Args:
            records: tokens of the first messages of each, or ``None``.
            chats: the whole conversations.
            tools: tools of these conversations instead of the formatter's.
        """
        read = list(map(_messages, chats))
        out = [self._known(*pair, tools) for pair in zip(records, read, strict=True)]
        rows = [row for row, record in enumerate(out) if record is None]
        begun, requests = [], []
        for row in rows:
            record, messages = records[row], read[row]
            if record.finish_reason is None:
                # An unanswered prompt gets more messages: continue from the last response.
                record = _last_response(record, messages)
            covered = record.num_messages
            begun.append(record)
            requests.append(
                continuation.Request(
                    record.token_ids,
                    _sampled_last(messages[:covered]),
                    record.finish_reason,
                    messages[covered:],
                    record.response_start or 0,
                    tools,
                )
            )
        added = self._continuation.additions(requests)
        for row, record in zip(rows, _extended(begun, added, requests), strict=True):
            out[row] = record
        return out

    def _known(
        self,
        record: TokenRecord | None,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
    ) -> TokenRecord | None:
        """The record of the next prompt if nothing must be appended to a response."""
        if record is None:
            return self._fresh(messages, tools, None, 0)
        covered, finish = record.num_messages, record.finish_reason
        if covered > len(messages):
            return self._fresh(messages, tools, "history_changed", record.num_turns)
        if covered == len(messages) and (finish is None or not finish.whole):
            return record
        if finish is None and not bool((record.source == Source.SAMPLED).any()):
            return self._fresh(messages, tools, record.fork_cause, record.num_turns)
        return None

    def _fresh(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        cause: str | None,
        turns: int,
    ) -> TokenRecord:
        return self.encode(messages, tools=tools).prompt_record(
            messages, fork_cause=cause, earlier_turns=turns
        )

    # -- responses --------------------------------------------------------------------------------

    def parse_response(
        self,
        prompt_ids: Tensor | Sequence[int],
        response_ids: Tensor | Sequence[int],
        finish_reason: FinishReason,
    ) -> dict[str, Any]:
        """Read a sampled response into a message.

        Args:
            prompt_ids: int64 ``[P]``; its end shows whether a thought is open.
            response_ids: int64 ``[R]``.
            finish_reason: how the response ended.

        Returns:
            A message dict; see ``ResponseParser``.
        """
        return self._parser.parse(_ids(prompt_ids), _ids(response_ids), finish_reason)

    def decode(self, token_ids: Tensor | Sequence[int]) -> str:
        """Exact text of ids, special tokens included."""
        return self._codec.decode(_ids(token_ids))

    @property
    def closers(self) -> tuple[Closer, ...]:
        """The token sequences that end turns in this template."""
        return self.probe.closers


def _messages(chat: Messages) -> Sequence[Mapping[str, Any]]:
    return chat.messages if isinstance(chat, Chat) else list(chat)


def _ids(ids: Tensor | Sequence[int]) -> list[int]:
    return ids.tolist() if isinstance(ids, Tensor) else list(ids)


def _sampled_last(old: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The messages, after a check that the model wrote the last one."""
    if not old or old[-1].get("role") != "assistant":
        roles = [m.get("role") for m in old]
        raise TemplateError(f"the last old message must be the sampled turn, got roles {roles}")
    return old


def _extended(
    records: Sequence[TokenRecord],
    added: Sequence[continuation.Addition],
    requests: Sequence[continuation.Request],
) -> list[TokenRecord]:
    """The extended records, or new records where the template forks."""
    numbers = [len(request.old) + len(request.new) for request in requests]
    rows = list(zip(records, added, numbers, strict=True))
    kept = [(record, more, n) for record, more, n in rows if not more.forked]
    longer = iter(
        extend_records(
            [record for record, _, _ in kept],
            [more.token_ids for _, more, _ in kept],
            [more.source for _, more, _ in kept],
            [n for _, _, n in kept],
        )
    )
    return [
        TokenRecord.from_prompt(
            more.token_ids, more.source, n, fork_cause=more.cause, earlier_turns=record.num_turns
        )
        if more.forked
        else next(longer)
        for record, more, n in rows
    ]


def _last_response(record: TokenRecord, messages: Sequence[Mapping[str, Any]]) -> TokenRecord:
    """The record cut after its last sampled token."""
    end = int((record.source == Source.SAMPLED).nonzero()[-1]) + 1
    covered = max(
        i for i, m in enumerate(messages[: record.num_messages]) if m.get("role") == "assistant"
    )
    return record.cut(0, end, num_messages=covered + 1, finish_reason=FinishReason.STOP)


def assistant_mask(
    formatter: ChatFormatter, messages: Sequence[Mapping[str, Any]], *, include_header: bool = False
) -> tuple[Tensor, Tensor]:
    r"""Token ids of a conversation, and a mask of the assistant's turns.

    A turn consists of the tokens that a policy would have sampled: its content and its end-of-turn
    token. It excludes the header before it and the line break that a template writes after it.

    Args:
        formatter: has the tokenizer and the template.
        messages: the conversation.
        include_header: mark everything that each assistant message adds to the ids of the messages
            before it, header and line break too, as picoRL's ``tokenize_with_assistant_mask`` does.

    Returns:
        int64 ``[T]`` ids and a bool ``[T]`` mask.

    Raises:
        TemplateError: ``include_header`` with a template that writes a message differently when
            others follow (for instance strips old reasoning), so that a message has no span.

    Example:
        >>> from transformers import AutoTokenizer
        >>> from torchrl_llm.assets import embedded_model_path
        >>> formatter = ChatFormatter(AutoTokenizer.from_pretrained(embedded_model_path()))
        >>> chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
        >>> ids, mask = assistant_mask(formatter, chat)
        >>> formatter.decode(ids[mask])
        'Yo<|im_end|>'
        >>> ids, mask = assistant_mask(formatter, chat, include_header=True)
        >>> formatter.decode(ids[mask])
        '<|im_start|>assistant\nYo<|im_end|>\n'
    """
    whole = formatter.encode(messages, add_generation_prompt=False)
    if not include_header:
        return whole.token_ids, whole.assistant
    mask = torch.zeros_like(whole.assistant)
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        start, end = (
            _prefix_length(formatter, messages[:count], whole.token_ids)
            for count in (index, index + 1)
        )
        mask[start:end] = True
    return whole.token_ids, mask


def _prefix_length(
    formatter: ChatFormatter, messages: Sequence[Mapping[str, Any]], whole: Tensor
) -> int:
    if not messages:
        return 0
    ids = formatter.encode(messages, add_generation_prompt=False).token_ids
    if not torch.equal(ids, whole[: ids.shape[0]]):
        raise TemplateError(
            f"the ids of the first {len(messages)} messages are not how the conversation begins: "
            "this chat template writes them differently when more follow; use "
            "include_header=False, which needs no prefixes"
        )
    return ids.shape[0]
