r"""From a loss per token to one number, so that micro-batches add up.

Only tokens that count are ever passed in, flat: ``values_N`` with the row of each in ``row_N``.
Padding and prompts are not there, so they cannot dilute a mean.

Each mode is a weight per token, :math:`\sum_n w_n x_n`:

=================  ===========================  ================================================
mode               weight                       meaning
=================  ===========================  ================================================
``token_mean``     1 / tokens                   every token counts the same (DAPO)
``sequence_mean``  1 / (sequences * len(row))   every sequence counts the same (GRPO)
``sequence_sum``   1 / sequences                sum over a sequence, mean over sequences
``constant``       1 / (sequences * length)     as before, over a fixed length (Dr. GRPO)
=================  ===========================  ================================================

The counts are those of a :class:`Normalizer`. With the counts of the *whole* batch, the results of
its micro-batches, split in any way between rows, add up to the result of the whole batch. A
sequence counts when at least one of its tokens does.

Shape legend: ``N`` tokens, ``S`` rows.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

__all__ = ["MODES", "Mode", "Normalizer", "aggregate", "token_weights"]

Mode = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]
MODES: tuple[str, ...] = get_args(Mode)
"""The names of the modes."""


class Normalizer(NamedTuple):
    """What a batch is divided by.

    Attributes:
        num_tokens: tokens that count.
        num_sequences: rows with at least one token that counts.

    Example:
        >>> Normalizer(10, 2).plus(Normalizer(5, 1))
        Normalizer(num_tokens=15, num_sequences=3)
    """

    num_tokens: int
    num_sequences: int

    def plus(self, other: Normalizer) -> Normalizer:
        """Counts of two disjoint sets of rows together."""
        return Normalizer(
            self.num_tokens + other.num_tokens, self.num_sequences + other.num_sequences
        )

    @classmethod
    def of(cls, lengths: list[int]) -> Normalizer:
        """Counts of a batch whose rows have these many tokens that count."""
        return cls(sum(lengths), sum(length > 0 for length in lengths))


def token_weights(
    lengths_N: Tensor | None,
    mode: Mode,
    normalizer: Normalizer,
    *,
    constant_length: int | None = None,
) -> float | Tensor:
    """Weight of each token under a mode, a number where all are the same.

    Args:
        lengths_N: ``[N]``, for each token how many tokens of its row count; read by
            ``sequence_mean`` only.
        mode: one of :data:`MODES`.
        normalizer: counts of the whole batch.
        constant_length: the length that ``constant`` divides by.

    Raises:
        ValueError: for an unknown mode, a normalizer without tokens, or ``constant`` without
            length.

    Example:
        >>> token_weights(None, "token_mean", Normalizer(4, 2))
        0.25
    """
    if normalizer.num_tokens <= 0 or normalizer.num_sequences <= 0:
        raise ValueError(f"nothing to average over: {normalizer}")
    if mode == "token_mean":
        return 1.0 / normalizer.num_tokens
    if mode == "sequence_mean":
        if lengths_N is None:
            raise ValueError("sequence_mean needs the length of each token's row")
        return 1.0 / (lengths_N * normalizer.num_sequences)
    if mode == "sequence_sum":
        return 1.0 / normalizer.num_sequences
    if mode == "constant":
        if constant_length is None or constant_length <= 0:
            raise ValueError(f"constant needs a positive constant_length, got {constant_length}")
        return 1.0 / (normalizer.num_sequences * constant_length)
    raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")


def aggregate(
    values_N: Tensor,
    row_N: Tensor,
    num_rows: int,
    mode: Mode,
    *,
    normalizer: Normalizer | None = None,
    constant_length: int | None = None,
) -> Tensor:
    """Reduce flat values to one number.

    Args:
        values_N: ``[N]``, the values of the tokens that count.
        row_N: int64 ``[N]``, the row of each, in ``[0, num_rows)``.
        num_rows: ``S``.
        mode: one of :data:`MODES`.
        normalizer: counts of the whole batch when these rows are a part of it; their own by
            default.
        constant_length: the length that ``constant`` divides by.

    Returns:
        A scalar.

    Raises:
        ValueError: when no token counts, or as :func:`token_weights`.

    Example:
        >>> values, rows = torch.tensor([1.0, 2.0, 3.0, 10.0]), torch.tensor([0, 0, 0, 1])
        >>> aggregate(values, rows, 2, "token_mean"), aggregate(values, rows, 2, "sequence_mean")
        (tensor(4.), tensor(6.))
    """
    lengths = None
    if normalizer is None or mode == "sequence_mean":
        lengths = torch.bincount(row_N, minlength=num_rows)
    if normalizer is None:
        normalizer = Normalizer.of(lengths.tolist())
    lengths_N = lengths[row_N] if mode == "sequence_mean" else None
    weights = token_weights(lengths_N, mode, normalizer, constant_length=constant_length)
    return (values_N * weights).sum()
