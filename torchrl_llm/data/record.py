"""The record of a conversation's tokens: ids, and for each id where it came from.

A :class:`TokenRecord` belongs to one conversation and is immutable. It rides inside the
:class:`~torchrl_llm.data.column.Chat` whose first ``num_messages`` messages it encodes, so whatever
carries the chat carries the record. Batches of records become the ``tokens``, ``log_probs``,
``masks`` and ``trace`` columns (:mod:`torchrl_llm.data.containers`).

Shape legend: ``T`` tokens of the conversation so far, ``R`` tokens of one response.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchrl_llm.data.enums import FinishReason, Source
from torchrl_llm.data.scoring import Support

__all__ = ["TokenRecord"]


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

    def __reduce__(self) -> tuple:
        # As arrays: a tensor pickles the whole storage that it is a view of, and takes ten times
        # as long.
        columns = {name: getattr(self, name).numpy() for name in _COLUMNS}
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
        length = token_ids.shape[0]
        return cls(
            token_ids=token_ids,
            source=source.to(torch.int8),
            turn=torch.full((length,), -1, dtype=torch.int16),
            policy_version=torch.full((length,), -1, dtype=torch.int32),
            log_probs=torch.zeros(length),
            num_messages=num_messages,
            fork_cause=fork_cause,
            earlier_turns=earlier_turns,
        )

    @classmethod
    def forked(cls, cause: str, *, earlier_turns: int = 0) -> TokenRecord:
        """Record of no tokens, for a conversation whose messages were rewritten.

        It covers no message: whoever continues it encodes the whole conversation anew, and the new
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
        unset = torch.full((token_ids.shape[0],), -1)
        return replace(
            self,
            token_ids=torch.cat([self.token_ids, token_ids]),
            source=torch.cat([self.source, source.to(torch.int8)]),
            turn=torch.cat([self.turn, unset.to(torch.int16)]),
            policy_version=torch.cat([self.policy_version, unset.to(torch.int32)]),
            log_probs=torch.cat([self.log_probs, torch.zeros(unset.shape)]),
            support=self.support and Support.join([self.support, Support.whole(len(unset))]),
            num_messages=num_messages,
            finish_reason=None,
        )

    def respond(
        self,
        token_ids: Tensor,
        log_probs: Tensor,
        policy_version: int,
        finish_reason: FinishReason,
        support: Support | None = None,
    ) -> TokenRecord:
        """Append a sampled response, which adds one message.

        Args:
            token_ids: int64 ``[R]``.
            log_probs: float32 ``[R]`` in nats.
            policy_version: version of the weights that sampled it.
            finish_reason: how the response ended.
            support: the ids that truncated sampling kept for each token, where recorded.
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
        )

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
        columns = {name: getattr(self, name)[start:stop] for name in _COLUMNS}
        support = self.support and self.support.span(start, stop)
        return replace(self, **columns, support=support, **changes)


_COLUMNS = ("token_ids", "source", "turn", "policy_version", "log_probs")


def rebuild_record(columns: dict[str, Any], rest: dict[str, Any]) -> TokenRecord:
    """A record from its pickle."""
    if rest["support"] is not None:
        rest["support"] = Support(*(torch.from_numpy(x) for x in rest["support"]))
    return TokenRecord(**{name: torch.from_numpy(x) for name, x in columns.items()}, **rest)
