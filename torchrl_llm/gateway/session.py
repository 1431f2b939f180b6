"""One rollout of a program: its calls and the conversations that they form.

A :class:`GatewaySession` is a :class:`~torchrl_llm.gateway.calls.Port`. It turns each call into a
:class:`Pending` prompt, whose ids continue the previously sampled ids, and submits it to an
:class:`Engine`. In training, a session is one row of an environment
(:mod:`torchrl_llm.gateway.program_env`); in a server, it calls a policy directly
(:mod:`torchrl_llm.gateway.policy_engine`).
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrl_llm.data.chat import Chat
from torchrl_llm.data.enums import FinishReason, Source
from torchrl_llm.data.record import TokenRecord
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.errors import ConfigError, DataError, TemplateError, TokenizerError
from torchrl_llm.gateway.calls import Answer, Call, Port, RefusedCallError
from torchrl_llm.gateway.conversation_tree import ConversationTree, Place
from torchrl_llm.modules.backends.backend_port import SamplingParams
from torchrl_llm.modules.policies.row_readers import TextCodec


class EngineLimits(NamedTuple):
    """Limits of the calls of a gateway.

    Attributes:
        longest_prompt: tokens of a prompt; ``None`` without a limit.
        max_new_tokens: most tokens of an answer; a larger request is reduced to it.
        vocab_size: ids must be below it.
        keeps_support: whether the kept ids of top-k, top-p and min-p are recorded, which training
            on such answers needs.
        trains: whether answers are used for training.
    """

    longest_prompt: int | None
    max_new_tokens: int
    vocab_size: int
    keeps_support: bool = False
    trains: bool = False


@dataclass(eq=False)
class Pending:
    """A prompt that waits for its answer.

    Args:
        session: session of the call.
        chat: the conversation, with the record of the prompt.
        sampling: sampling fields of the call.
        loop: event loop that waits for the answer.
        is_text: whether the program sent a plain prompt instead of messages.

    Attributes:
        answered: the record of prompt and answer.
    """

    session: GatewaySession
    chat: Chat
    sampling: Mapping[str, Any]
    loop: asyncio.AbstractEventLoop
    is_text: bool = False
    answered: asyncio.Future[TokenRecord] = field(init=False)

    def __post_init__(self) -> None:
        self.answered = self.loop.create_future()

    @property
    def is_given_up(self) -> bool:
        """Whether the caller no longer waits for it."""
        return self.answered.cancelled()

    def resolve(self, outcome: TokenRecord | Exception) -> None:
        """Deliver the answer to the caller; thread-safe.

        Args:
            outcome: the record of prompt and answer, or the error.
        """
        if not self.is_given_up:  # its loop may be closed by now
            self.loop.call_soon_threadsafe(self._resolve, outcome)

    def _resolve(self, outcome: TokenRecord | Exception) -> None:
        if self.answered.done():
            return
        if isinstance(outcome, Exception):
            self.answered.set_exception(outcome)
        else:
            self.answered.set_result(outcome)


class Engine(ABC):
    """Answers prompts of many sessions.

    Attributes:
        limits: limits of calls.
    """

    limits: EngineLimits

    @abstractmethod
    def submit(self, pending: Pending) -> None:
        """Accept a prompt, which is resolved later.

        Raises:
            RefusedCallError: the engine accepts no more prompts.
        """

    def withdraw(self, pending: Pending) -> None:
        """Drop a prompt whose client disconnected; does nothing by default."""


class Formatters:
    """The formatters of a policy, one per set of tools in calls.

    Args:
        tokenizer: tokenizer of the policy.
        show_tools: whether prompts describe the tools of calls. If not, the model must already know
            them; its calls are parsed in both cases.
        kept: number of cached sets of tools.
        **template: arguments of :class:`~torchrl_llm.data.text.ChatFormatter`.

    Attributes:
        tokenizer: as given.
        codec: codec of plain texts.
    """

    def __init__(
        self, tokenizer: Any, *, show_tools: bool = True, kept: int = 64, **template: Any
    ) -> None:
        self.tokenizer, self._template, self._kept = tokenizer, template, kept
        self._show_tools = show_tools
        self.codec = TextCodec(tokenizer)
        self._made: dict[str, ChatFormatter] = {}

    def shown(self, tools: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The tools that prompts describe: all or none.

        Args:
            tools: tools of a call.
        """
        return tools if self._show_tools else ()

    def get(self, tools: Sequence[Mapping[str, Any]] = ()) -> ChatFormatter:
        """The formatter for some tools.

        Args:
            tools: tools in the prompt.

        Raises:
            TemplateError: the chat template cannot express them.
        """
        name = json.dumps(list(tools), sort_keys=True)
        found = self._made.pop(name, None)
        if found is None:
            found = ChatFormatter(self.tokenizer, tools=list(tools) or None, **self._template)
        self._made[name] = found
        if len(self._made) > self._kept:
            self._made.pop(next(iter(self._made)))
        return found


class GatewaySession(Port):
    """The calls of one rollout.

    Args:
        engine: answers prompts.
        formatters: encode conversations.
        max_answers: number of stored answers that can be continued; ``None`` for all.
        max_calls: most answered calls; ``None`` for no limit.

    Attributes:
        num_calls: number of answers requested so far.
    """

    def __init__(
        self,
        engine: Engine,
        formatters: Formatters,
        *,
        max_answers: int | None = None,
        max_calls: int | None = None,
    ) -> None:
        self._engine, self._formatters = engine, formatters
        self._tree = ConversationTree(max_answers)
        self._raw: list[Chat] = []
        self._max_answers, self._max_calls = max_answers, max_calls
        self.num_calls = 0
        self._closed = ""

    def close(self, why: str) -> None:
        """Reject further calls.

        Args:
            why: message for later calls.
        """
        self._closed = why

    # -- calls ------------------------------------------------------------------------------------

    async def answer(self, call: Call) -> list[Answer]:
        """See :meth:`torchrl_llm.gateway.calls.Port.answer`."""
        self._check(call)
        formatter = self._formatter(call)
        self.num_calls += call.num_samples
        if call.num_samples == 1:
            return [await self._answer(call, formatter)]
        jobs = [
            asyncio.ensure_future(self._answer(call, formatter)) for _ in range(call.num_samples)
        ]
        try:
            return list(await asyncio.gather(*jobs))
        finally:
            for job in jobs:  # if one is rejected, the call ends at once
                job.cancel()

    def count_tokens(self, call: Call) -> int:
        """See :meth:`torchrl_llm.gateway.calls.Port.count_tokens`."""
        formatter = self._formatter(call)
        with _as_refusal():
            return len(formatter.encode(call.messages).token_ids)

    def token_texts(self, token_ids: Tensor) -> list[str]:
        """See :meth:`torchrl_llm.gateway.calls.Port.token_texts`."""
        formatter = self._formatters.get()
        return [formatter.decode([token]) for token in token_ids.tolist()]

    def _check(self, call: Call) -> None:
        limits, sampling = self._engine.limits, call.sampling
        if self._closed:
            raise RefusedCallError(self._closed, kind="key")
        try:
            kept = {"max_new_tokens": 1, "record_support": limits.keeps_support}
            SamplingParams(**{**kept, **sampling})
        except ConfigError as error:
            raise RefusedCallError(str(error)) from error
        if self._max_calls is not None and self.num_calls + call.num_samples > self._max_calls:
            raise RefusedCallError(
                f"this session may make {self._max_calls} calls, and has made {self.num_calls}; "
                "agent.max_calls changes that"
            )
        cuts = [
            name
            for name, neutral in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0))
            if sampling.get(name, neutral) != neutral
        ]
        if limits.trains and cuts and not limits.keeps_support and sampling.get("temperature") != 0:
            raise RefusedCallError(
                f"{cuts[0]} cuts what can be sampled, which a loss can follow only where the run "
                f"records it: leave it out, or set inference_model.{cuts[0]} for the whole run",
                field=cuts[0],
            )
        if limits.trains and sampling.get("repetition_penalty", 1.0) != 1.0:
            raise RefusedCallError(
                "repetition_penalty changes the probabilities that are trained; leave it out",
                field="repetition_penalty",
            )

    def _formatter(self, call: Call) -> ChatFormatter:
        with _as_refusal("tools" if call.tools else "messages"):
            return self._formatters.get(self._formatters.shown(call.tools))

    async def _answer(self, call: Call, formatter: ChatFormatter) -> Answer:
        with _as_refusal():
            place, prompt = self._prompt(call, formatter)
        limits, length = self._engine.limits, prompt.record.token_ids.shape[0]
        if limits.longest_prompt is not None and length > limits.longest_prompt:
            raise RefusedCallError(
                f"the prompt is too long: {length} tokens > {limits.longest_prompt} maximum",
                kind="context",
                field="messages" if call.prompt is None else "prompt",
            )
        sampling = dict(call.sampling)
        if "max_new_tokens" in sampling:
            sampling["max_new_tokens"] = min(sampling["max_new_tokens"], limits.max_new_tokens)
        pending = Pending(self, prompt, sampling, asyncio.get_running_loop(), place is None)
        self._engine.submit(pending)
        try:
            record = await pending.answered
        except asyncio.CancelledError:
            self._engine.withdraw(pending)
            raise
        return self._answered(call, place, prompt, record, formatter)

    # -- prompts ----------------------------------------------------------------------------------

    def _prompt(self, call: Call, formatter: ChatFormatter) -> tuple[Place | None, Chat]:
        """The position of a call, and its conversation with the record of its prompt."""
        if call.prompt is not None:
            return None, self._raw_prompt(call.prompt)
        if not call.messages:
            raise DataError("messages must hold at least one message")
        place = self._tree.find(call.messages, self._formatters.shown(call.tools))
        chat, record = place.chat, place.chat.record
        if record is None:
            encoded = formatter.encode(chat)
            record = encoded.prompt_record(chat, fork_cause=place.cause, earlier_turns=place.turns)
        else:
            begun = len(chat) > record.num_messages and chat[-1].get("is_complete") is False
            record = formatter.continue_record(record, chat[:-1] if begun else chat)
            record = replace(record, fork_cause=record.fork_cause or place.cause)
            if not bool((record.source == Source.SAMPLED).any()):
                # The template has rewritten everything; parts that the client omitted stay omitted.
                chat, forked = Chat(call.messages), record
                record = formatter.encode(chat).prompt_record(
                    chat, fork_cause=forked.fork_cause, earlier_turns=forked.earlier_turns
                )
            elif begun:
                record = _with_begun(record, chat, formatter)
        return place, chat.with_record(record)

    def _raw_prompt(self, prompt: str | tuple[int, ...]) -> Chat:
        """A plain prompt as one message with the ids of the prompt."""
        codec = self._formatters.codec
        if isinstance(prompt, str):
            text, ids = prompt, None
            before = [chat for chat in self._raw if text.startswith(chat[0]["content"])]
        else:
            size = self._engine.limits.vocab_size
            if any(not 0 <= token < size for token in prompt):
                raise TokenizerError(f"prompt must hold token ids from 0 to {size - 1}")
            ids = torch.tensor(prompt, dtype=torch.int64)
            [text] = codec.decode([ids])
            before = [chat for chat in self._raw if _begins(ids, chat.record.token_ids)]
        longest = max(before, key=lambda chat: len(chat.record.token_ids), default=None)
        if longest is None:
            more = codec.encode([text])[0] if ids is None else ids
            source = torch.full_like(more, int(Source.PROMPT))
            record = TokenRecord.from_prompt(more, source, 1)
        else:
            known, record = longest[0]["content"], longest.record
            if ids is None:
                more = codec.encode_continuation(text[len(known) :])
            else:
                more = ids[len(record.token_ids) :]
            record = record.extend(more, torch.full_like(more, int(Source.PROMPT)), 1)
        if not len(record.token_ids):
            raise DataError("prompt is empty; a model needs at least one token to go on")
        return Chat([{"role": "user", "content": text}], record)

    # -- answers ----------------------------------------------------------------------------------

    def _answered(
        self,
        call: Call,
        place: Place | None,
        prompt: Chat,
        record: TokenRecord,
        formatter: ChatFormatter,
    ) -> Answer:
        """The answer for the client; the conversation is stored."""
        ids, reason, start = record.token_ids, record.finish_reason, len(prompt.record.token_ids)
        begin = record.response_start
        message = formatter.parse_response(ids[:begin], ids[begin:], reason)
        if message.get("tool_calls") and not call.tools:
            del message["tool_calls"]
            message["content"] = message["raw"]
        if begin == start:
            content = message["content"] if place is not None else message["raw"]
        else:  # this answer continues the last message of the prompt
            content = formatter.parse_response(ids[:start], ids[start:], reason)["raw"]
        shown = _before_stop(content, call.sampling.get("stop", ()))
        sent = {name: message[name] for name in _SHOWN if name in message} | {"content": shown}
        if place is None:
            [text] = self._formatters.codec.decode([ids])
            self._raw.append(Chat([{"role": "user", "content": text}], record))
            del self._raw[: -self._max_answers if self._max_answers else 0]
        else:
            before, merged = prompt, []
            if begin < start:
                before, begun = prompt[:-1], prompt[-1]
                merged = [{**begun, "content": begun["content"] + shown}]
            self._tree.add(place, (before + [message]).with_record(record), sent, merged)
        return Answer(sent, reason, ids[:start], ids[start:], record.log_probs[start:])


def _with_begun(record: TokenRecord, chat: Chat, formatter: ChatFormatter) -> TokenRecord:
    """The record of a prompt with the partial answer of its client."""
    before, whole = (formatter.encode(each) for each in (chat[:-1], chat))
    if not _begins(whole.token_ids, before.token_ids):  # the text does not follow the same header
        turns = record.num_turns
        return whole.prompt_record(chat, fork_cause="prompt_changed", earlier_turns=turns)
    more = slice(len(before.token_ids), None)
    start = len(record.token_ids)
    record = record.extend(whole.token_ids[more], whole.source[more], len(chat))
    return replace(record, finish_reason=FinishReason.LENGTH, response_start=start)


_SHOWN = ("role", "content", "reasoning_content", "tool_calls")


def _begins(ids: Tensor, known: Tensor) -> bool:
    return len(known) <= len(ids) and torch.equal(ids[: len(known)], known)


def _before_stop(text: str, stop: Sequence[str]) -> str:
    """The text without its stop string."""
    places = [place for each in stop if (place := text.find(each)) >= 0]
    return text[: min(places)] if places else text


@contextmanager
def _as_refusal(field: str = "messages") -> Iterator[None]:
    """Errors in the conversation of a call are reported to its client."""
    try:
        yield
    except (DataError, TemplateError, TokenizerError, UnicodeEncodeError) as error:
        raise RefusedCallError(str(error), field=field) from error
