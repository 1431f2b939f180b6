"""Rows that are too long for training: rejects, drops or cuts them, and reports them.

The length of a row includes prompt, turns and tools. The row of a turn holds the whole conversation
up to that turn, so a trajectory is checked turn by turn, before its turns are joined. Filters,
advantage estimators and forward passes receive rows that are already cut.

The policy handles prompts that leave no room for an answer (``on_overlong`` of
:class:`~torchrl_llm.modules.policies.LLMWrapperBase`). Next:
:class:`~torchrl_llm.trainers.batch_source.BatchSource` counts the cut tokens.

Shape legend: ``T`` tokens of a row, ``R`` of its response, ``L`` most tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_llm._checked import Ge, checked
from torchrl_llm.data.enums import MaskReason, TruncationReason
from torchrl_llm.data.nodes import Path, leaf, new_node, plain_node, set_copied
from torchrl_llm.data.replay_buffers import trajectory_queues
from torchrl_llm.data.rollouts import invalidate_reward, mask_trained, sampled_tokens
from torchrl_llm.data.scoring import Support
from torchrl_llm.data.token_facts import FACTS
from torchrl_llm.errors import OverlongError

OnOverlong = Literal["error", "drop", "truncate"]
"""Handling of overlong items; each class that offers this choice documents the details."""


class FittedRows(NamedTuple):
    """A batch after :meth:`LengthRule.fit`.

    Attributes:
        marked: the collected rows; tokens that are not trained are marked OVERLONG.
        kept: the rows for training, none longer than the limit.
        dropped: for each kept row, whether it only counts for the size of its group.
        cut_tokens: sampled tokens that ``kept`` no longer has.
        overlong: number of conversations that were too long.
    """

    marked: list[TensorDict]
    kept: list[TensorDict]
    dropped: list[bool]
    cut_tokens: int
    overlong: int

    @classmethod
    def of(cls, rows: Sequence[TensorDict]) -> FittedRows:
        """Return the result for rows of which none is too long."""
        return cls(list(rows), list(rows), [False] * len(rows), 0, 0)


@checked
@dataclass(frozen=True, kw_only=True)
class LengthRule:
    """The maximum length of a training row, and the handling of longer ones.

    Attributes:
        max_seq_len: tokens of a row: prompt, turns and tools.
        on_overlong: ``error`` raises an error. ``drop`` excludes the conversation from training and
            from its group's baseline. ``truncate`` trains its first tokens (:func:`cut_row`), and
            keeps its reward.

    Raises:
        ConfigError: for a length below 2, or an unknown rule.

    Example:
        >>> ids = torch.arange(5)
        >>> row = TensorDict(tokens={"prompt": ids[:2], "response": ids[2:], "full": ids})
        >>> fitted = LengthRule(max_seq_len=4, on_overlong="truncate").fit([row])
        >>> fitted.kept[0]["tokens", "response"].tolist(), fitted.cut_tokens
        ([2, 3], 1)
    """

    max_seq_len: Annotated[int, Ge(2)]
    on_overlong: OnOverlong = "error"

    def fit(self, rows: Sequence[TensorDict]) -> FittedRows:
        """Check the rows of a batch, one per turn; none of them is changed.

        Args:
            rows: rows with ``("tokens", "full")``; rows with the same ``traj_id`` are one
                conversation.

        Raises:
            OverlongError: a row is too long, under ``error``.
        """
        too_long = [_length(row) > self.max_seq_len for row in rows]
        if not any(too_long):
            return FittedRows.of(rows)
        if self.on_overlong == "error":
            raise OverlongError(self._refusal(rows, too_long.index(True)))
        names = [trajectory_queues.trajectory_of(row) or index for index, row in enumerate(rows)]
        overlong = {name for name, long in zip(names, too_long, strict=True) if long}
        fitted = FittedRows([], [], [], 0, len(overlong))
        cut_tokens = 0
        for row, name, long in zip(rows, names, too_long, strict=True):
            out = self.on_overlong == "drop" and name in overlong
            marked = _marked(row, 0 if out else self.max_seq_len) if out or long else row
            kept = cut_row(marked, self.max_seq_len) if long else marked
            fitted.marked.append(marked)
            fitted.kept.append(_without_reward(kept) if out else kept)
            fitted.dropped.append(out)
            cut_tokens += sampled_tokens(row) - sampled_tokens(kept) if long else 0
        return fitted._replace(cut_tokens=cut_tokens)

    def _refusal(self, rows: Sequence[TensorDict], at: int) -> str:
        row, told = rows[at], ""
        for name in ("group_id", "traj_id", "turn"):
            value = leaf(row, (name,))
            told += "" if value is None else f", {name}={trajectory_queues.group_value(value)}"
        prompt = leaf(row, ("tokens", "prompt"))
        asked = "" if prompt is None else f", {prompt.shape[0]} of them before its last answer"
        return (
            f"row {at} of the batch{told} has {_length(row)} tokens{asked}, and train.max_seq_len "
            f"is {self.max_seq_len}: raise it; shorten prompts (env.max_prompt_length), answers "
            "(inference_model.max_tokens) or conversations (env.max_steps); or set "
            "train.on_overlong=truncate (trains the beginning) or drop"
        )


def cut_row(row: TensorDict, max_length: int) -> TensorDict:
    """Return the first tokens of a row, with the facts about these tokens only.

    This cuts every per-token fact (:class:`~torchrl_llm.data.token_facts.TokenFact`), the ids of
    the support, and the columns with the names of token columns (``("next", "ref_log_probs",
    "full")``). Per-token rewards of removed tokens are added to the last remaining token of the
    response, so the return of each trained token does not change. A reward of the whole row does
    not change.

    The row becomes ``truncated``, for the reason ``MAX_SEQ_LEN`` unless it already has a reason.
    ``terminated`` does not change, because the task was over. ``"cut_tokens"``, int64, is the
    number of removed sampled tokens. Text and conversation are not cut.

    Args:
        row: without batch dimension; it is not changed.
        max_length: ``L``, below the length of the row.

    Returns:
        A row that shares the tensors of the given row.

    Example:
        >>> ids = torch.arange(5)
        >>> tokens = {"prompt": ids[:2], "response": ids[2:], "full": ids}
        >>> row = TensorDict(tokens=tokens, next={"reward": torch.tensor([[1.0], [2.0], [3.0]])})
        >>> cut = cut_row(row, 4)
        >>> cut["next", "reward"].flatten().tolist(), cut["cut_tokens"].item()
        ([1.0, 5.0], 1)
    """
    length, size = _length(row), leaf(row, ("tokens", "response")).shape[0]
    start = length - size
    left = max(max_length - start, 0)
    spans = {"full": (length, max_length), "prompt": (start, max_length), "response": (size, left)}
    changed: dict[Path, Any] = {}
    for fact in FACTS.values():
        column = leaf(row, fact.key)
        if column is not None:
            changed[fact.key] = column[:max_length]
    for path, node in _nodes(row):
        for name, (before, after) in spans.items():
            column = node.get(name)
            if isinstance(column, Tensor) and column.shape[:1] == (before,):
                changed[*path, name] = column[:after]
    counts = leaf(row, ("support", "counts"))
    if counts is not None:
        kept = Support(leaf(row, ("support", "token_ids")), counts).span(0, max_length)
        changed |= {("support", name): column for name, column in kept._asdict().items()}
    advantage = leaf(row, ("advantage",))
    if advantage is not None and advantage.shape[0] == length:
        changed["advantage",] = advantage[:max_length]
    last = max(left, 1) - 1
    for path, values in _token_rewards(row, size):
        changed[path] = torch.cat([values[:last], values[last:].sum(0, keepdim=True)])
    cut = _copy(row)
    for path, value in (changed | _flags(row)).items():
        set_copied(cut, path, value)
    before = leaf(row, (trajectory_queues.CUT_TOKENS,))
    number = sampled_tokens(row) - sampled_tokens(cut) + (0 if before is None else int(before))
    set_copied(cut, (trajectory_queues.CUT_TOKENS,), torch.tensor(number))
    return cut


def _copy(row: TensorDict) -> TensorDict:
    """Copy the row with the same nodes; ``set_copied`` replaces the nodes that it changes."""
    return new_node(dict(row._tensordict))


def _length(row: TensorDict) -> int:
    full = leaf(row, ("tokens", "full"))
    return 0 if full is None else full.shape[0]


def _nodes(row: TensorDict) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Return the nodes of a row, including all nodes below ``next``, each with its content."""
    waiting: list[tuple[Path, Any]] = [((), row)]
    for path, node in waiting:
        inner = plain_node(node)
        if type(inner) is TensorDict:
            yield path, inner._tensordict
            if path[:1] in ((), ("next",)):
                waiting += [((*path, name), child) for name, child in inner._tensordict.items()]


def _token_rewards(row: TensorDict, size: int) -> Iterator[tuple[Path, Tensor]]:
    """Return per-token rewards of a response with more than one token."""
    for path, node in _nodes(row):
        for name, values in node.items() if path[:1] == ("next",) and size > 1 else ():
            named = any("reward" in part for part in (*path, name))
            numbers = isinstance(values, Tensor) and values.is_floating_point()
            if named and numbers and values.shape[:1] == (size,):
                yield (*path, name), values


def _flags(row: TensorDict) -> dict[Path, Tensor]:
    done, reason = leaf(row, ("next", "done")), leaf(row, ("next", "truncation_reason"))
    yes = torch.ones(1, dtype=torch.bool) if done is None else torch.ones_like(done)
    if reason is None:
        reason = torch.full(yes.shape, int(TruncationReason.NONE), dtype=torch.int8)
    none = reason == TruncationReason.NONE
    return {
        ("next", "truncated"): yes,
        ("next", "truncation_reason"): reason.masked_fill(none, int(TruncationReason.MAX_SEQ_LEN)),
    }


def _marked(row: TensorDict, start: int) -> TensorDict:
    """Mark sampled tokens from ``start`` on as overlong; masked tokens keep their reason."""
    row = _copy(row)
    mask_trained(row, MaskReason.OVERLONG, start=start)
    return row


def _without_reward(row: TensorDict) -> TensorDict:
    row = _copy(row)
    invalidate_reward(row)
    return row
