"""Micro-batches under a budget of padded tokens.

A batch of rows is cut into pieces that fit into memory; each piece is one forward and backward.
Rows of like length go together, so that little of a piece is padding. The loss of every piece is
normalised by the whole batch (``loss.normalizer``), so the gradients of the pieces add up to the
gradient of the batch, whatever the cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensordict import LazyStackedTensorDict
from tensordict.utils import NestedKey

from torchrl_llm.data.ragged import lazy_rows, read_rows

__all__ = ["micro_batches", "plan_micro_batches"]


def plan_micro_batches(lengths: Sequence[int], budget: int | None) -> list[list[int]]:
    """Cut rows into pieces of at most ``budget`` padded tokens (rows x longest row).

    Args:
        lengths: tokens in each row.
        budget: padded tokens a piece may hold; ``None`` puts all rows into one piece. A single row
            that is longer goes alone, for a row cannot be cut.

    Returns:
        Row indices of each piece, the piece with the longest rows first, so that a batch that does
        not fit into memory fails at once; each row appears exactly once.

    Raises:
        ValueError: the budget is not positive.

    Example:
        >>> plan_micro_batches([2, 9, 3, 8], 18)
        [[1, 3], [2, 0]]
    """
    if budget is None:
        return [list(range(len(lengths)))] if lengths else []
    if budget < 1:
        raise ValueError(f"the token budget of a micro-batch must be at least 1, got {budget}")
    pieces: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if pieces and (len(pieces[-1]) + 1) * longest <= budget:
            pieces[-1].append(row)
        else:
            pieces.append([row])
            longest = lengths[row]
    return pieces


def micro_batches(
    rows: LazyStackedTensorDict,
    *,
    budget: int | None = None,
    key: NestedKey = ("tokens", "full"),
) -> list[LazyStackedTensorDict]:
    """Cut a batch of rows into micro-batches under a budget of padded tokens.

    Args:
        rows: 1-d lazy stack of rows.
        budget: padded tokens a micro-batch may hold; ``None`` for no cut.
        key: where a row's token ids are.

    Returns:
        The pieces, each a lazy stack over the same rows (nothing is copied).

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.data.ragged import lazy_rows
        >>> rows = lazy_rows([TensorDict({"ids": torch.zeros(n)}) for n in (2, 9, 3, 8)])
        >>> [len(piece) for piece in micro_batches(rows, budget=18, key="ids")]
        [2, 2]
    """
    if budget is None:
        return [rows] if len(rows) else []
    members = rows.unbind(0)
    lengths = [ids.shape[0] for ids in read_rows(rows, key)]
    return [
        lazy_rows([members[row] for row in piece]) for piece in plan_micro_batches(lengths, budget)
    ]
