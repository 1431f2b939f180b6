"""The record of a conversation's tokens: their ids, and the origin of each id.

A :class:`TokenRecord` belongs to one conversation and is immutable. It encodes the first
``num_messages`` messages of a :class:`~torchrl_llm.data.chat.Chat`. The chat stores it, so it is
copied and sent with the chat. Its columns are the wired facts of
:data:`~torchrl_llm.data.token_facts.FACTS`. Batches of records become the ``tokens``,
``log_probs``, ``masks`` and ``trace`` columns (:mod:`torchrl_llm.data.views`).

Shape legend: ``T`` tokens of the conversation so far, ``R`` tokens of one response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrl_llm.data.enums import FinishReason, Source
from torchrl_llm.data.scoring import Support
from torchrl_llm.data.token_facts import FACTS, RECORD_COLUMNS, TokenFact, added_facts, find_fact
from torchrl_llm.errors import DataError

_built_in = attrgetter(*RECORD_COLUMNS)


class Completion(NamedTuple):
    """One sampled response.

    Attributes:
        token_ids: int64 ``[R]`` on the CPU, every sampled token, including the token that ended the
                response.
        log_probs: float32 ``[R]`` in nats, log p(x_t | x_<t) under the sampled distribution (with
            temperature and truncation); for greedy decoding, at temperature 1.
        finish_reason: how it ended; determined by the last id and the length, never by text or
            pads.
        support: the ids that truncation kept for each token, int32 on the CPU; ``None`` if it was
            not requested.
        versions: int32 ``[R]``, version of the weights that sampled each token, if the backend
            counts versions (because its weights may change within a response); ``None`` if the
            weight updater counts versions.
        facts: columns ``[R]`` of further per-token facts on the CPU, by their registered names
            (:func:`~torchrl_llm.data.token_facts.register_fact`), or ``None``.
    """

    token_ids: Tensor
    log_probs: Tensor
    finish_reason: FinishReason
    support: Support | None = None
    versions: Tensor | None = None
    facts: Mapping[str, Tensor] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TokenRecord:
    """Token ids of one conversation, with the provenance of each id.

    Args:
        token_ids: int64 ``[T]``.
        source: int8 ``[T]``, codes of :class:`~torchrl_llm.data.enums.Source`.
        turn: int16 ``[T]``, number of the model's turn that sampled the token, counted over the
            whole conversation; -1 if not sampled.
        policy_version: int32 ``[T]``, version of the weights that sampled the token; -1 if not
            sampled.
        log_probs: float32 ``[T]`` in nats, log p(x_t | x_<t) under the sampling distribution; 0.0
            if not sampled.
        num_messages: number of messages of the chat that these ids encode.
        finish_reason: how the last response ended; ``None`` if the ids are a prompt.
        response_start: index of the first token of the last response; ``None`` if there is no
                response.
        fork_cause: the reason why these ids do not extend the earlier ids; ``None`` if they do.
        support: the ids that truncated sampling kept for each of the ``T`` tokens (none for tokens
            that were not sampled); ``None`` if the support was not requested.
        earlier_turns: number of model turns whose ids a fork dropped; the next turn has at least
            this number.
        facts: columns of facts that were registered with
            :func:`~torchrl_llm.data.token_facts.register_fact`, by name. A missing fact has its
            default at every token.

    Example:
        >>> record = TokenRecord.from_prompt(torch.tensor([5, 6]), torch.tensor([0, 1]), 1)
        >>> record = record.respond(torch.tensor([7]), torch.tensor([-0.5]), 0, FinishReason.STOP)
        >>> record.source.tolist(), record.turn.tolist(), record.num_messages
        ([0, 1, 3], [-1, -1, 0], 2)
    """

    token_ids: Tensor
    source: Tensor
    turn: Tensor
    policy_version: Tensor
    log_probs: Tensor
    num_messages: int
    finish_reason: FinishReason | None = None
    response_start: int | None = None
    fork_cause: str | None = None
    support: Support | None = None
    earlier_turns: int = 0
    facts: Mapping[str, Tensor] = field(default_factory=dict)

    def __reduce__(self) -> tuple:
        # Pickled as arrays: a tensor would pickle the whole storage that it is a view of, and take
        # ten times as long.
        columns = {name: column.numpy() for name, column in self.columns().items()}
        rest = {
            "num_messages": self.num_messages,
            "finish_reason": self.finish_reason,
            "response_start": self.response_start,
            "fork_cause": self.fork_cause,
            "support": self.support and tuple(column.numpy() for column in self.support),
            "earlier_turns": self.earlier_turns,
        }
        return rebuild_record, (columns, rest)

    @classmethod
    def from_prompt(
        cls,
        token_ids: Tensor,
        source: Tensor,
        num_messages: int,
        *,
        fork_cause: str | None = None,
        earlier_turns: int = 0,
    ) -> TokenRecord:
        """Make the record of a prompt without sampled tokens.

        Args:
            token_ids: int64 ``[T]``.
            source: integer codes ``[T]``.
            num_messages: messages that the ids encode.
            fork_cause: the reason why an earlier record of the same conversation was dropped.
            earlier_turns: number of the model's turns in that record.
        """
        return cls(
            **_unsampled(token_ids, source),
            num_messages=num_messages,
            fork_cause=fork_cause,
            earlier_turns=earlier_turns,
        )

    @classmethod
    def forked(cls, cause: str, *, earlier_turns: int = 0) -> TokenRecord:
        """Make a record without tokens, for a conversation whose messages were rewritten.

        The record covers no message. To continue it, the whole conversation is encoded again, and
        the new record keeps the cause.

        Args:
            cause: the reason why the earlier ids were dropped.
            earlier_turns: number of the model's turns that the conversation had before.

        Example:
            >>> record = TokenRecord.forked("window", earlier_turns=3)
            >>> record.num_messages, record.token_ids.tolist(), record.fork_cause, record.num_turns
            (0, [], 'window', 3)
        """
        nothing = torch.zeros(0, dtype=torch.int64)
        return cls.from_prompt(nothing, nothing, 0, fork_cause=cause, earlier_turns=earlier_turns)

    @classmethod
    def of(cls, columns: Mapping[str, Tensor], **rest: Any) -> TokenRecord:
        """Make a record from columns by the names of their facts, built-in and registered.

        Args:
            columns: all built-in columns, ``[T]`` each, and any registered columns.
            rest: the fields that are not columns.
        """
        if len(columns) == len(RECORD_COLUMNS):
            return cls(**columns, **rest)
        facts = {name: column for name, column in columns.items() if name not in RECORD_COLUMNS}
        return cls(*(columns[name] for name in RECORD_COLUMNS), facts=facts, **rest)

    def columns(self) -> dict[str, Tensor]:
        """All columns by the names of their facts."""
        return dict(zip(RECORD_COLUMNS, _built_in(self), strict=True)) | dict(self.facts)

    @property
    def num_turns(self) -> int:
        """Number of model turns of the conversation, including those whose ids were dropped."""
        held = int(self.turn.max()) + 1 if self.turn.numel() else 0
        return max(held, self.earlier_turns)

    @property
    def continues(self) -> bool:
        """Whether an answer to this prompt continues the response at the end of the prompt.

        A cut response at the end is continued. A record with tokens after its response has no
        finish reason.
        """
        reason = self.finish_reason
        return reason is not None and not reason.whole and self.response_start is not None

    def extend(self, token_ids: Tensor, source: Tensor, num_messages: int) -> TokenRecord:
        """Append tokens that were not sampled (closers, new messages, generation prompt).

        Args:
            token_ids: int64 ``[N]``, the new ids only.
            source: integer codes ``[N]``.
            num_messages: messages that old and new ids encode together.
        """
        return extend_records([self], [token_ids], [source], [num_messages])[0]

    def respond(
        self,
        token_ids: Tensor,
        log_probs: Tensor,
        policy_version: int,
        finish_reason: FinishReason,
        support: Support | None = None,
        facts: Mapping[str, Tensor] | None = None,
    ) -> TokenRecord:
        """Append a sampled response; see ``respond_records``.

        Args:
            token_ids: int64 ``[R]``.
            log_probs: float32 ``[R]`` in nats.
            policy_version: version of the weights that sampled it.
            finish_reason: how the response ended.
            support: the ids that truncated sampling kept for each token, if recorded.
            facts: columns ``[R]`` of registered facts by name.

        Raises:
            DataError: a fact is not registered, or has a different dtype or length.
        """
        response = Completion(token_ids, log_probs.float(), finish_reason, support, None, facts)
        return respond_records([self], [response], policy_version)[0]

    def support_with(self, more: Support | None, count: int) -> Support | None:
        """Return the support of these and ``count`` later tokens; ``None`` if neither has one."""
        if self.support is None and more is None:
            return None
        parts = ((self.support, self.token_ids.shape[0]), (more, count))
        return Support.join([Support.whole(size) if s is None else s for s, size in parts])

    def cut(self, start: int, stop: int, **changes: Any) -> TokenRecord:
        """Return the record of the tokens from ``start`` up to, but not including, ``stop``.

        Args:
            start: index of the first token to keep.
            stop: index after the last token to keep.
            changes: fields that are not columns of tokens.
        """
        columns = {name: getattr(self, name)[start:stop] for name in RECORD_COLUMNS}
        facts = {name: column[start:stop] for name, column in self.facts.items()}
        support = self.support and self.support.span(start, stop)
        return replace(self, **columns, facts=facts, support=support, **changes)


def _unsampled(token_ids: Tensor, source: Tensor) -> dict[str, Tensor]:
    """Return the built-in columns of tokens that were not sampled."""
    given = {"token_ids": token_ids, "source": source.to(torch.int8)}
    length = token_ids.shape[0]
    return {
        name: given[name] if name in given else FACTS[name].filled(length)
        for name in RECORD_COLUMNS
    }


def extend_records(
    records: Sequence[TokenRecord],
    token_ids: Sequence[Tensor],
    sources: Sequence[Tensor],
    num_messages: Sequence[int],
) -> list[TokenRecord]:
    """Append tokens that were not sampled to each record; see :meth:`TokenRecord.extend`.

    Args:
        records: ``B`` records.
        token_ids: ``B`` int64 tensors ``[N_b]``, the new ids only.
        sources: ``B`` tensors of integer codes ``[N_b]``.
        num_messages: ``B`` numbers of messages that old and new ids encode together.

    Returns:
        ``B`` records, whose tensors are views of one tensor per field.
    """
    if not records:
        return []
    counts = [ids.shape[0] for ids in token_ids]
    more = _unsampled(torch.cat(list(token_ids)), torch.cat(list(sources)))
    lengths = [record.token_ids.shape[0] + n for record, n in zip(records, counts, strict=True)]
    columns = {
        name: _join([getattr(r, name) for r in records], column.split(counts)).split(lengths)
        for name, column in more.items()
    }
    return [
        replace(
            record,
            **dict(zip(columns, row, strict=True)),
            facts={
                name: torch.cat([values, find_fact(name).filled(count)])
                for name, values in record.facts.items()
            },
            support=record.support_with(None, count),
            num_messages=number,
            finish_reason=None,
        )
        for record, count, number, row in zip(
            records, counts, num_messages, zip(*columns.values(), strict=True), strict=True
        )
    ]


def respond_records(
    prompts: Sequence[TokenRecord], completions: Sequence[Completion], policy_version: int
) -> list[TokenRecord]:
    """Append a completion to each prompt, which adds one message.

    Args:
        prompts: ``B`` records.
        completions: ``B`` sampled responses.
        policy_version: version of the weights that sampled them, if a completion has no versions.

    Returns:
        ``B`` records, whose tensors are views of one tensor per field. They contain all registered
        facts, with defaults if neither prompt nor completion has them.

    Raises:
        DataError: a completion's fact is not registered, or has a different dtype or length.

    Example:
        >>> prompt = TokenRecord.from_prompt(torch.tensor([5]), torch.tensor([1]), 1)
        >>> done = Completion(torch.tensor([7]), torch.tensor([-0.5]), FinishReason.STOP)
        >>> [record] = respond_records([prompt], [done], 3)
        >>> record.policy_version.tolist(), record.turn.tolist(), record.num_messages
        ([-1, 3], [-1, 0], 2)
    """
    sizes = [completion.token_ids.shape[0] for completion in completions]
    longest = max(sizes, default=0)
    turns = [_turn(prompt) for prompt in prompts]
    # One tensor per turn number is enough for all rows, because slices are free.
    by_turn = {t: torch.full((longest,), t, dtype=torch.int16) for t in set(turns)}
    sampled = torch.full((longest,), int(Source.SAMPLED), dtype=torch.int8)
    versions = torch.full((longest,), policy_version, dtype=torch.int32)
    fields = {
        "token_ids": [c.token_ids for c in completions],
        "source": [sampled[:size] for size in sizes],
        "turn": [by_turn[t][:size] for t, size in zip(turns, sizes, strict=True)],
        "policy_version": [
            versions[:size] if c.versions is None else c.versions
            for c, size in zip(completions, sizes, strict=True)
        ],
        "log_probs": [c.log_probs for c in completions],
    }
    lengths = [p.token_ids.shape[0] + size for p, size in zip(prompts, sizes, strict=True)]
    columns = {
        name: _join([getattr(p, name) for p in prompts], fields[name]).split(lengths)
        for name in RECORD_COLUMNS
    }
    for fact in _given_facts(prompts, completions, sizes):
        before = [p.facts.get(fact.name) for p in prompts]
        new = [None if c.facts is None else c.facts.get(fact.name) for c in completions]
        starts = [len(prompt.token_ids) for prompt in prompts]
        columns[fact.name] = _join(_filled(fact, before, starts), _filled(fact, new, sizes)).split(
            lengths
        )
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return [
        TokenRecord.of(
            rows[row],
            num_messages=prompt.num_messages + (not prompt.continues),
            finish_reason=completion.finish_reason,
            response_start=_response_start(prompt),
            fork_cause=prompt.fork_cause,
            support=prompt.support_with(completion.support, sizes[row]),
            earlier_turns=prompt.earlier_turns,
        )
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    ]


def _given_facts(
    prompts: Sequence[TokenRecord], completions: Sequence[Completion], sizes: Sequence[int]
) -> list[TokenFact]:
    """Return the registered facts, after checking the facts of completions and prompts."""
    for completion, size in zip(completions, sizes, strict=True):
        for name, values in (completion.facts or {}).items():
            fact = find_fact(name)
            if not fact.wired or name in RECORD_COLUMNS:
                raise DataError(
                    f"a completion cannot carry {name!r} in its facts: only facts that were "
                    "registered with wired=True travel with it"
                )
            fact.check(values, size)
    for name in {name for prompt in prompts for name in prompt.facts}:
        find_fact(name)
    return added_facts()


def _filled(fact: TokenFact, rows: Sequence[Tensor | None], sizes: Sequence[int]) -> list[Tensor]:
    """Return rows of a fact, with its default for rows without it."""
    pairs = zip(rows, sizes, strict=True)
    return [fact.filled(size) if row is None else row for row, size in pairs]


def _turn(prompt: TokenRecord) -> int:
    # A cut response continues in the same turn; one without sampled tokens begins a new turn.
    begun = prompt.continues and bool((prompt.turn[prompt.response_start :] >= 0).any())
    return prompt.num_turns - begun


def _response_start(prompt: TokenRecord) -> int:
    return prompt.response_start if prompt.continues else prompt.token_ids.shape[0]


def _join(before: Sequence[Tensor], after: Sequence[Tensor]) -> Tensor:
    return torch.cat([part for pair in zip(before, after, strict=True) for part in pair])


def rebuild_record(columns: dict[str, Any], rest: dict[str, Any]) -> TokenRecord:
    """Restore a record from its pickle."""
    if rest["support"] is not None:
        rest["support"] = Support(*(torch.from_numpy(x) for x in rest["support"]))
    return TokenRecord.of({name: torch.from_numpy(x) for name, x in columns.items()}, **rest)
