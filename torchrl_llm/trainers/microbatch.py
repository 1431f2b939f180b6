"""Micro-batches under a budget of tokens.

A batch of rows is cut into pieces that fit into memory; each piece is one forward and backward.
Where a piece is padded, rows of like length go together, so that little of it is padding, and the
padding counts. Where it is not (:mod:`torchrl_llm.modules.backends.layouts`), only tokens count,
and the rows of a group go together, for a scorer runs their prompt once.

The loss of every piece is normalised by the whole batch (``loss.normalizer``), so the gradients of
the pieces add up to the gradient of the batch, whatever the cut.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain

from tensordict import LazyStackedTensorDict
from tensordict.utils import NestedKey

from torchrl_llm.data.ragged import lazy_rows, read_rows


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
    _check(budget)
    pieces: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if pieces and (len(pieces[-1]) + 1) * longest <= budget:
            pieces[-1].append(row)
        else:
            pieces.append([row])
            longest = lengths[row]
    return pieces


def plan_packed_batches(
    lengths: Sequence[int], budget: int | None, groups: Sequence[Hashable] | None = None
) -> list[list[int]]:
    """Cut rows into pieces of at most ``budget`` tokens, with the rows of a group together.

    Args:
        lengths: tokens in each row.
        budget: tokens a piece may hold; ``None`` puts all rows into one piece. A single row that is
            longer goes alone.
        groups: what each row belongs to; by default each row is a group of its own. A group is cut
            only where it meets the budget.

    Returns:
        Row indices of each piece, the group with the longest row first, and its rows from the
        longest on; each row appears exactly once.

    Raises:
        ValueError: the budget is not positive.

    Example:
        >>> plan_packed_batches([4, 9, 3, 8], 15, groups=[0, 1, 1, 0])
        [[1, 2], [3, 0]]
    """
    if budget is None:
        return [list(range(len(lengths)))] if lengths else []
    _check(budget)
    families: dict[Hashable, list[int]] = {}
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        families.setdefault(row if groups is None else groups[row], []).append(row)
    pieces: list[list[int]] = []
    held = 0
    for row in chain.from_iterable(families.values()):
        held += lengths[row]
        if not pieces or held > budget:
            pieces.append([])
            held = lengths[row]
        pieces[-1].append(row)
    return pieces


def _check(budget: int) -> None:
    if budget < 1:
        raise ValueError(f"the token budget of a micro-batch must be at least 1, got {budget}")


def micro_batches(
    rows: LazyStackedTensorDict,
    *,
    budget: int | None = None,
    layout: str | None = "padded",
    key: NestedKey = ("tokens", "full"),
    group_key: NestedKey = "group_id",
) -> list[LazyStackedTensorDict]:
    """Cut a batch of rows into micro-batches under a budget of tokens.

    Args:
        rows: 1-d lazy stack of rows.
        budget: tokens a micro-batch may hold; ``None`` for no cut.
        layout: that of the scorer (``policy.layout``). ``"padded"``, or ``None`` for a scorer that
            has no choice: padding counts too.
        key: where a row's token ids are.
        group_key: what its group is, where the rows have it; read for the other layouts.

    Returns:
        The pieces, each a lazy stack over the same rows (nothing is copied).

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.data.ragged import lazy_rows
        >>> rows = lazy_rows([TensorDict({"ids": torch.zeros(n)}) for n in (2, 9, 3, 8)])
        >>> [len(piece) for piece in micro_batches(rows, budget=18, key="ids")]
        [2, 2]
        >>> [len(piece) for piece in micro_batches(rows, budget=20, layout="packed", key="ids")]
        [3, 1]
    """
    if budget is None:
        return [rows] if len(rows) else []
    members = rows.unbind(0)
    lengths = [ids.shape[0] for ids in read_rows(rows, key)]
    if layout in (None, "padded"):
        pieces = plan_micro_batches(lengths, budget)
    else:
        groups = read_rows(rows, group_key, None)
        ids = None if groups is None else [int(group) for group in groups]
        pieces = plan_packed_batches(lengths, budget, ids)
    return [lazy_rows([members[row] for row in piece]) for piece in pieces]
