"""Between flat values with lengths and padded rectangles. Masks come from lengths, never from ids.

Shape legend: ``B`` rows, ``T`` longest row, ``N`` tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Side = Literal["left", "right"]


def length_mask(
    lengths_B: Tensor | Sequence[int], max_length: int | None = None, *, side: Side = "right"
) -> Tensor:
    """True at the tokens of each row, false at its padding.

    Args:
        lengths_B: ``B`` lengths.
        max_length: ``T``; the longest row by default.
        side: where the padding is.

    Returns:
        bool ``[B, T]``.

    Raises:
        ValueError: when a row is longer than ``max_length``.

    Example:
        >>> length_mask([2, 1], side="left").int()
        tensor([[1, 1],
                [0, 1]], dtype=torch.int32)
    """
    lengths = torch.as_tensor(lengths_B)
    longest = int(lengths.max()) if lengths.numel() else 0
    if max_length is None:
        max_length = longest
    elif longest > max_length:
        raise ValueError(f"a row has {longest} tokens, more than max_length={max_length}")
    mask = torch.arange(max_length, device=lengths.device) < lengths[:, None]
    return mask if side == "right" else mask.flip(1)


def row_index(lengths_B: Tensor | Sequence[int]) -> Tensor:
    """Row of each token of flat values.

    Args:
        lengths_B: ``B`` lengths.

    Returns:
        int64 ``[N]``.

    Example:
        >>> row_index([2, 0, 1])
        tensor([0, 0, 2])
    """
    lengths = torch.as_tensor(lengths_B)
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def row_counts(row_N: Tensor, num_rows: int) -> Tensor:
    """Tokens of each row; the inverse of :func:`row_index`.

    Args:
        row_N: int64 ``[N]``, the row of each token.
        num_rows: ``B``.

    Returns:
        int64 ``[B]``.

    Example:
        >>> row_counts(torch.tensor([0, 0, 2]), 3)
        tensor([2, 0, 1])
    """
    # torch.bincount has an output size that torch.compile cannot know.
    return row_N.new_zeros(num_rows).index_add(0, row_N, torch.ones_like(row_N))


def pad_flat(
    values_N: Tensor,
    lengths_B: Tensor | Sequence[int],
    value: float | int | bool = 0,
    *,
    side: Side = "right",
) -> Tensor:
    """Lay flat values out in a padded rectangle; gradients pass through.

    Args:
        values_N: ``[N, ...]``, row after row.
        lengths_B: ``B`` lengths that sum to ``N``.
        value: what fills the gaps.
        side: where the padding goes.

    Returns:
        ``[B, T, ...]``.

    Example:
        >>> pad_flat(torch.tensor([1, 2, 3]), [2, 1])
        tensor([[1, 2],
                [3, 0]])
    """
    mask = length_mask(lengths_B, side=side).to(values_N.device)
    dense = values_N.new_full((*mask.shape, *values_N.shape[1:]), value)
    return dense.masked_scatter(
        mask.view(*mask.shape, *[1] * (values_N.ndim - 1)).expand_as(dense), values_N
    )


def flatten_padded(dense: Tensor, mask_BT: Tensor) -> Tensor:
    """The valid entries of a padded rectangle, row after row; the inverse of :func:`pad_flat`.

    Args:
        dense: ``[B, T, ...]``.
        mask_BT: bool ``[B, T]``.

    Returns:
        ``[N, ...]``.

    Example:
        >>> flatten_padded(torch.tensor([[1, 2], [3, 0]]), torch.tensor([[1, 1], [1, 0]]).bool())
        tensor([1, 2, 3])
    """
    return dense[mask_BT]
