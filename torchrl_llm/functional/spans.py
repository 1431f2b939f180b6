"""Runs of tokens: between a mask and the half-open spans that it is made of.

Shape legend: ``T`` tokens of one row.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def run_lengths(values_T: Tensor) -> tuple[Tensor, Tensor]:
    """Run-length encoding of a row.

    Args:
        values_T: ``[T]`` of any type that compares.

    Returns:
        The value of each run and the int64 length of each run.

    Example:
        >>> run_lengths(torch.tensor([7, 7, 3, 7]))
        (tensor([7, 3, 7]), tensor([2, 1, 1]))
    """
    values, counts = torch.unique_consecutive(values_T, return_counts=True)
    return values, counts


def mask_to_spans(mask_T: Tensor) -> list[tuple[int, int]]:
    """Half-open spans ``(start, end)`` of the true runs of a mask.

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
    """True inside the given spans.

    Args:
        spans: half-open ``(start, end)``; they may touch or overlap.
        length: ``T``.

    Returns:
        bool ``[T]``.

    Raises:
        ValueError: for a span that is reversed or leaves the row.

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
