r"""Averages token losses into one number, such that micro-batches add up to the batch.

The functions take only the tokens that count, flat: ``values_N``, and the row of each token in
``row_N``. Padding and prompts are left out, so they cannot dilute a mean.

Each mode is a weight per token, :math:`\sum_n w_n x_n`:

=================  ===========================  ================================================
mode               weight                       meaning
=================  ===========================  ================================================
``token_mean``     1 / tokens                   every token counts the same (DAPO)
``prompt_mean``    1 / (groups * len(group))    every prompt counts the same, and within a prompt
                                                every token
``sequence_mean``  1 / (sequences * len(row))   every sequence counts the same (GRPO)
``sequence_sum``   1 / sequences                sum over a sequence, mean over sequences
``constant``       1 / (sequences * length)     as before, over a fixed length (Dr. GRPO)
=================  ===========================  ================================================

A :class:`Normalizer` holds the counts. With the counts of the *whole* batch, the results of its
micro-batches add up to the result of the whole batch, for any split of the rows.

A sequence counts if at least one of its tokens counts. Ludic and TRL divide by all rows of a batch,
including rows without a counting token; ``count_empty=True`` does the same (also for prompts). Such
a row adds nothing to the sum, so it makes the result smaller.

Shape legend: ``N`` tokens, ``S`` rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from torchrl_llm.functional.padding import row_counts

Mode = Literal["token_mean", "prompt_mean", "sequence_mean", "sequence_sum", "constant"]
MODES: tuple[str, ...] = get_args(Mode)
"""The names of the modes."""


class Normalizer(NamedTuple):
    """The denominators of a batch.

    If rows have weights (see :class:`~torchrl_llm.objectives.SFTLoss`), the counts are sums of
    weights.

    Attributes:
        num_tokens: tokens that count.
        num_sequences: rows with at least one token that counts; all rows with ``count_empty``.
        group_tokens: number of counting tokens per prompt group, by its id; ``None`` unless needed
            for ``prompt_mean``. Groups without such tokens are included as 0 with ``count_empty``.

    Example:
        >>> Normalizer(10, 2, {7: 10}).plus(Normalizer(5, 1, {7: 2, 8: 3}))
        Normalizer(num_tokens=15, num_sequences=3, group_tokens={7: 12, 8: 3})
    """

    num_tokens: int | float
    num_sequences: int | float
    group_tokens: Mapping[int, int] | None = None

    def plus(self, other: Normalizer) -> Normalizer:
        """Add the counts of a disjoint set of rows."""
        if (self.group_tokens is None) != (other.group_tokens is None):
            raise ValueError("one of the two normalizers counts prompt groups, the other does not")
        groups = None
        if self.group_tokens is not None:
            groups = dict(self.group_tokens)
            for group, tokens in other.group_tokens.items():
                groups[group] = groups.get(group, 0) + tokens
        return Normalizer(
            self.num_tokens + other.num_tokens, self.num_sequences + other.num_sequences, groups
        )

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        group_ids: Sequence[int] | None = None,
        *,
        count_empty: bool = False,
    ) -> Normalizer:
        """Count a batch.

        Args:
            lengths: number of counting tokens of each row.
            group_ids: the prompt group of each row, for ``prompt_mean``.
            count_empty: also count rows and groups without counting tokens.

        Example:
            >>> Normalizer.of([3, 0]).num_sequences, Normalizer.of([3, 0], count_empty=True)[1]
            (1, 2)
        """
        groups = None
        if group_ids is not None:
            groups = {}
            for group, length in zip(group_ids, lengths, strict=True):
                if length or count_empty:
                    groups[group] = groups.get(group, 0) + length
        sequences = len(lengths) if count_empty else sum(length > 0 for length in lengths)
        return cls(sum(lengths), sequences, groups)


def token_weights(
    lengths_N: Tensor | None,
    mode: Mode,
    normalizer: Normalizer,
    *,
    constant_length: int | None = None,
) -> float | Tensor:
    """Return the weight of each token under a mode; a single number if all are equal.

    Args:
        lengths_N: ``[N]``, in the dtype of the result: for each token the number of counting tokens
            in its row (``sequence_mean``) or in its prompt group over the whole batch
            (``prompt_mean``). The other modes ignore it.
        mode: one of ``MODES``.
        normalizer: counts of the whole batch.
        constant_length: the length that ``constant`` divides by.

    Raises:
        ValueError: for an unknown mode, a normalizer without tokens, ``constant`` without
            length, or ``prompt_mean`` without groups.

    Example:
        >>> token_weights(None, "token_mean", Normalizer(4, 2))
        0.25
    """
    if normalizer.num_tokens <= 0 or normalizer.num_sequences <= 0:
        raise ValueError(f"nothing to average over: {normalizer}")
    if mode in ("sequence_mean", "prompt_mean") and lengths_N is None:
        raise ValueError(f"{mode} needs the length of each token's row or group")
    groups = None if normalizer.group_tokens is None else len(normalizer.group_tokens)
    if mode == "prompt_mean" and not groups:
        raise ValueError("prompt_mean needs a normalizer that counts prompt groups")
    counts = (normalizer.num_tokens, normalizer.num_sequences, groups)
    return _weights(lengths_N, mode, *counts, constant_length)


def _weights(
    lengths_N: Tensor | None,
    mode: str,
    num_tokens: int,
    num_sequences: int | Tensor,
    num_groups: int | Tensor | None,
    constant_length: int | None,
) -> float | Tensor:
    if mode == "token_mean":
        return 1.0 / num_tokens
    if mode == "prompt_mean":
        return 1.0 / (lengths_N * num_groups)
    if mode == "sequence_mean":
        return 1.0 / (lengths_N * num_sequences)
    if mode == "sequence_sum":
        return 1.0 / num_sequences
    if mode == "constant":
        if constant_length is None or constant_length <= 0:
            raise ValueError(f"constant needs a positive constant_length, got {constant_length}")
        return 1.0 / (num_sequences * constant_length)
    raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")


def aggregate(
    values_N: Tensor,
    row_N: Tensor,
    num_rows: int,
    mode: Mode,
    *,
    normalizer: Normalizer | None = None,
    constant_length: int | None = None,
    group_S: Tensor | None = None,
    count_empty: bool = False,
) -> Tensor:
    """Reduce flat values to one number.

    Args:
        values_N: ``[N]``, the values of the tokens that count.
        row_N: int64 ``[N]``, the row of each token, in ``[0, num_rows)``.
        num_rows: ``S``.
        mode: one of ``MODES``.
        normalizer: counts of the whole batch if these rows are a part of it; by default the counts
            of these rows.
        constant_length: the length that ``constant`` divides by.
        group_S: int64 ``[S]``, the prompt group of each row, for ``prompt_mean``.
        count_empty: count rows without tokens in the denominator; with a normalizer, its own
            setting decides.

    Returns:
        A scalar in the dtype of the values, summed in float64.

    Raises:
        ValueError: when no token counts, when the normalizer lacks groups of these rows, or when
            :func:`token_weights` raises.

    Example:
        >>> import torch
        >>> values, rows = torch.tensor([1.0, 2.0, 3.0, 10.0]), torch.tensor([0, 0, 0, 1])
        >>> aggregate(values, rows, 2, "token_mean"), aggregate(values, rows, 2, "sequence_mean")
        (tensor(4.), tensor(6.))
    """
    if mode == "prompt_mean" and group_S is None:
        raise ValueError("prompt_mean needs the prompt group of each row")
    lengths_S = row_counts(row_N, num_rows).to(values_N.dtype)
    if normalizer is None:
        weights = _own_weights(lengths_S, row_N, mode, constant_length, group_S, count_empty)
    else:
        if mode == "prompt_mean" and normalizer.group_tokens:
            tokens, groups = normalizer.group_tokens, group_S.tolist()
            strange = {g for g, n in zip(groups, lengths_S.tolist(), strict=True) if n} - {*tokens}
            if strange:
                raise ValueError(
                    f"the normalizer does not count the prompt groups {sorted(strange)[:8]}"
                )
            lengths_S = lengths_S.new_tensor([tokens.get(g, 0) for g in groups])
        weights = token_weights(lengths_S[row_N], mode, normalizer, constant_length=constant_length)
    return (values_N * weights).sum(dtype=torch.float64).to(values_N.dtype)


def _own_weights(
    lengths_S: Tensor,
    row_N: Tensor,
    mode: str,
    constant_length: int | None,
    group_S: Tensor | None,
    count_empty: bool,
) -> float | Tensor:
    """Return the tokens' weights in a whole batch; counts stay tensors, for torch.compile."""
    if not row_N.shape[0]:
        raise ValueError("nothing to average over: no token counts")
    there_S = lengths_S.new_ones(lengths_S.shape) if count_empty else (lengths_S > 0)
    there_S = there_S.to(lengths_S.dtype)
    num_groups = None
    if mode == "prompt_mean":
        same_SS = (group_S[:, None] == group_S).to(lengths_S.dtype)
        # Each group counts once: the sum over its rows of 1 / (number of its rows).
        num_groups = (there_S / (same_SS @ there_S).clamp(min=1)).sum()
        lengths_S = same_SS @ lengths_S
    counts = (row_N.shape[0], there_S.sum(), num_groups)
    return _weights(lengths_S[row_N], mode, *counts, constant_length)
