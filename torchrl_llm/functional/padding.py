"""Conversions between flat values with lengths, padded rectangles, masks and half-open spans.

Masks come from lengths, never from ids.

Shape legend: ``B`` rows, ``T`` longest row (or the one row), ``N`` tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

Side = Literal["left", "right"]


def length_mask(
    lengths_B: Tensor | Sequence[int], max_length: int | None = None, *, side: Side = "right"
) -> Tensor:
    """Return a mask that is true at the tokens of each row and false at the padding.

    Args:
        lengths_B: ``B`` lengths.
        max_length: ``T``; the longest row by default.
        side: side of the padding.

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
    """Return the row of each token of flat values.

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
    """Return the number of tokens of each row; the inverse of :func:`row_index`.

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
    """Copy flat values into a padded rectangle; gradients pass through.

    Args:
        values_N: ``[N, ...]``, row after row.
        lengths_B: ``B`` lengths that sum to ``N``.
        value: padding value.
        side: side of the padding.

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
    """Return the valid entries of a padded rectangle, flat; the inverse of :func:`pad_flat`.

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


def run_lengths(values_T: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the run-length encoding of a row.

    Args:
        values_T: ``[T]`` of any dtype that can be compared.

    Returns:
        The value of each run and the int64 length of each run.

    Example:
        >>> run_lengths(torch.tensor([7, 7, 3, 7]))
        (tensor([7, 3, 7]), tensor([2, 1, 1]))
    """
    values, counts = torch.unique_consecutive(values_T, return_counts=True)
    return values, counts


def mask_to_spans(mask_T: Tensor) -> list[tuple[int, int]]:
    """Return half-open spans ``(start, end)`` of the true runs of a mask.

    Args:
        mask_T: bool ``[T]``.

    Example:
        >>> mask_to_spans(torch.tensor([False, True, True, False, True]))
        [(1, 3), (4, 5)]
    """
    if mask_T.dtype is not torch.bool or mask_T.ndim != 1:
        raise ValueError(f"mask must be bool [T], got {mask_T.dtype} {tuple(mask_T.shape)}")
    values, counts = run_lengths(mask_T)
    ends = counts.cumsum(0).tolist()
    starts = [0, *ends][: len(ends)]
    triples = zip(values.tolist(), starts, ends, strict=True)
    return [(start, end) for value, start, end in triples if value]


def spans_to_mask(spans: Iterable[tuple[int, int]], length: int) -> Tensor:
    """Return a mask that is true inside the given spans.

    Args:
        spans: half-open ``(start, end)``; they may touch or overlap.
        length: ``T``.

    Returns:
        bool ``[T]``.

    Raises:
        ValueError: for a span that is reversed or reaches outside the row.

    Example:
        >>> spans_to_mask([(1, 3), (4, 5)], 5).tolist()
        [False, True, True, False, True]
    """
    mask = torch.zeros(length, dtype=torch.bool)
    for start, end in spans:
        if not 0 <= start <= end <= length:
            raise ValueError(f"span ({start}, {end}) is not inside a row of {length} tokens")
        mask[start:end] = True
    return mask
