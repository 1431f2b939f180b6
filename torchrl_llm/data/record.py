"""The record of a conversation's tokens: ids, and for each id where it came from.

A :class:`TokenRecord` belongs to one conversation and is immutable. It rides inside the
:class:`~torchrl_llm.data.chat.Chat` whose first ``num_messages`` messages it encodes, so whatever
carries the chat carries the record. Its columns are the wired facts of
:data:`~torchrl_llm.data.token_facts.FACTS`. Batches of records become the ``tokens``,
``log_probs``, ``masks`` and ``trace`` columns (:mod:`torchrl_llm.data.views`).

Shape legend: ``T`` tokens of the conversation so far, ``R`` tokens of one response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from torchrl_llm.data.enums import FinishReason, Source
from torchrl_llm.data.scoring import Support
from torchrl_llm.data.token_facts import FACTS, RECORD_COLUMNS, find_fact


@dataclass(frozen=True, slots=True, eq=False)
class TokenRecord:
    """Token ids of one conversation with the provenance of each.

    Args:
        token_ids: int64 ``[T]``.
        source: int8 ``[T]``, codes of :class:`~torchrl_llm.data.enums.Source`.
        turn: int16 ``[T]``, the model's turn that sampled the token, counted over the whole
            conversation, -1 where not sampled.
        policy_version: int32 ``[T]``, version of the weights that sampled it, -1 where not sampled.
        log_probs: float32 ``[T]`` in nats, log p(x_t | x_<t) under the sampling distribution; 0.0
            where not sampled.
        num_messages: how many messages of the chat these ids encode.
        finish_reason: how the last response ended; ``None`` while the ids are a prompt.
        response_start: index of the first token of the last response, ``None`` without one.
        fork_cause: why these ids do not extend the ids before them; ``None`` where they do.
        support: the ids that truncated sampling kept for each of the ``T`` tokens (none where not
            sampled); ``None`` where nobody asked for it.
        earlier_turns: turns of the conversation before what these ids hold, where a fork gave them
            up; the next turn has at least this number.
        facts: columns of facts that were registered with
            :func:`~torchrl_llm.data.token_facts.register_fact`, by name; one that is missing has
            its default at every token.

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
        # As arrays: a tensor pickles the whole storage that it is a view of, and takes ten times
        # as long.
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
        """Record of a prompt in which nothing was sampled.

        Args:
            token_ids: int64 ``[T]``.
            source: integer codes ``[T]``.
            num_messages: messages that the ids encode.
            fork_cause: why an earlier record of the same conversation was given up.
            earlier_turns: how many of the model's turns that record had.
        """
        return cls(
            **_unsampled(token_ids, source),
            num_messages=num_messages,
            fork_cause=fork_cause,
            earlier_turns=earlier_turns,
        )

    @classmethod
    def forked(cls, cause: str, *, earlier_turns: int = 0) -> TokenRecord:
        """Record of no tokens, for a conversation whose messages were rewritten.

        It covers no message: whoever continues it encodes the whole conversation again, and the new
        record keeps the cause.

        Args:
            cause: why the earlier ids were given up.
            earlier_turns: how many of the model's turns the conversation had by then.

        Example:
            >>> record = TokenRecord.forked("window", earlier_turns=3)
            >>> record.num_messages, record.token_ids.tolist(), record.fork_cause, record.num_turns
            (0, [], 'window', 3)
        """
        nothing = torch.zeros(0, dtype=torch.int64)
        return cls.from_prompt(nothing, nothing, 0, fork_cause=cause, earlier_turns=earlier_turns)

    @classmethod
    def of(cls, columns: Mapping[str, Tensor], **rest: Any) -> TokenRecord:
        """Record of columns by the names of their facts, registered ones among them.

        Args:
            columns: all built-in columns, ``[T]`` each, and any registered ones.
            rest: the fields that are no columns.
        """
        if len(columns) == len(RECORD_COLUMNS):
            return cls(**columns, **rest)
        facts = {name: column for name, column in columns.items() if name not in RECORD_COLUMNS}
        return cls(*(columns[name] for name in RECORD_COLUMNS), facts=facts, **rest)

    def columns(self) -> dict[str, Tensor]:
        """All columns by the names of their facts."""
        return {name: getattr(self, name) for name in RECORD_COLUMNS} | dict(self.facts)

    @property
    def num_turns(self) -> int:
        """How many turns of the model the conversation has, those among them that were given up."""
        held = int(self.turn.max()) + 1 if self.turn.numel() else 0
        return max(held, self.earlier_turns)

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
        """Append a sampled response, which adds one message.

        Args:
            token_ids: int64 ``[R]``.
            log_probs: float32 ``[R]`` in nats.
            policy_version: version of the weights that sampled it.
            finish_reason: how the response ended.
            support: the ids that truncated sampling kept for each token, where recorded.
            facts: columns ``[R]`` of registered facts by name.

        Raises:
            DataError: a fact is not registered, or of another dtype or length.
        """
        count = token_ids.shape[0]
        return TokenRecord(
            token_ids=torch.cat([self.token_ids, token_ids]),
            source=torch.cat([self.source, self.source.new_full((count,), Source.SAMPLED)]),
            turn=torch.cat([self.turn, self.turn.new_full((count,), self.num_turns)]),
            policy_version=torch.cat(
                [self.policy_version, self.policy_version.new_full((count,), policy_version)]
            ),
            log_probs=torch.cat([self.log_probs, log_probs.to(torch.float32)]),
            num_messages=self.num_messages + 1,
            finish_reason=finish_reason,
            response_start=self.token_ids.shape[0],
            fork_cause=self.fork_cause,
            support=self.support_with(support, count),
            earlier_turns=self.earlier_turns,
            facts=self.facts_with(facts or {}, count),
        )

    def facts_with(self, more: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
        """Registered facts of these tokens and ``count`` that follow, defaults where not given."""
        joined = {}
        for name in {**self.facts, **more}:
            fact = find_fact(name)
            if name in more:
                fact.check(more[name], count)
            before = self.facts.get(name)
            parts = (before, self.token_ids.shape[0]), (more.get(name), count)
            joined[name] = torch.cat([fact.filled(n) if c is None else c for c, n in parts])
        return joined

    def support_with(self, more: Support | None, count: int) -> Support | None:
        """The support of these tokens and ``count`` that follow; ``None`` where neither has one."""
        if self.support is None and more is None:
            return None
        parts = ((self.support, self.token_ids.shape[0]), (more, count))
        return Support.join([Support.whole(size) if s is None else s for s, size in parts])

    def cut(self, start: int, stop: int, **changes: Any) -> TokenRecord:
        """The record of the tokens from ``start`` to before ``stop``.

        Args:
            start: index of the first token kept.
            stop: index behind the last.
            changes: fields that are not columns of tokens.
        """
        columns = {name: getattr(self, name)[start:stop] for name in RECORD_COLUMNS}
        facts = {name: column[start:stop] for name, column in self.facts.items()}
        support = self.support and self.support.span(start, stop)
        return replace(self, **columns, facts=facts, support=support, **changes)


def _unsampled(token_ids: Tensor, source: Tensor) -> dict[str, Tensor]:
    """The built-in columns of tokens that were not sampled."""
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
    """Append tokens that were not sampled to each record, see :meth:`TokenRecord.extend`.

    Args:
        records: ``B`` records.
        token_ids: ``B`` int64 tensors ``[N_b]``, the new ids only.
        sources: ``B`` tensors of integer codes ``[N_b]``.
        num_messages: ``B`` numbers of messages that old and new ids encode together.

    Returns:
        ``B`` records, whose tensors are views of one tensor a field.
    """
    if not records:
        return []
    counts = [ids.shape[0] for ids in token_ids]
    more = _unsampled(torch.cat(list(token_ids)), torch.cat(list(sources)))
    lengths = [record.token_ids.shape[0] + n for record, n in zip(records, counts, strict=True)]
    columns = {
        name: torch.cat(
            [
                part
                for record, new in zip(records, column.split(counts), strict=True)
                for part in (getattr(record, name), new)
            ]
        ).split(lengths)
        for name, column in more.items()
    }
    return [
        replace(
            record,
            **dict(zip(columns, row, strict=True)),
            facts=record.facts_with({}, count),
            support=record.support and Support.join([record.support, Support.whole(count)]),
            num_messages=number,
            finish_reason=None,
        )
        for record, count, number, row in zip(
            records, counts, num_messages, zip(*columns.values(), strict=True), strict=True
        )
    ]


def rebuild_record(columns: dict[str, Any], rest: dict[str, Any]) -> TokenRecord:
    """A record from its pickle."""
    if rest["support"] is not None:
        rest["support"] = Support(*(torch.from_numpy(x) for x in rest["support"]))
    return TokenRecord.of({name: torch.from_numpy(x) for name, x in columns.items()}, **rest)
