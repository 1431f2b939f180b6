"""Importance ratios in log space: per token, per sequence, and their truncation.

Everything works on flat tokens: ``values_N`` with the row index of each token in ``row_N``. Sums
over a sequence are accumulated in float64, whatever the dtype of the values: float32 loses 0.1 % of
a sum of 100,000 equal numbers.

Shape legend: ``N`` tokens, ``S`` sequences.
"""

from __future__ import annotations

from torch import Tensor

from torchrl_llm.functional.padding import row_counts


def sequence_log_ratio(log_ratio_N: Tensor, row_N: Tensor, num_rows: int) -> Tensor:
    """Log-ratio of whole sequences, the sum over their tokens.

    Args:
        log_ratio_N: ``[N]``, nats.
        row_N: int64 ``[N]``, the sequence of each token.
        num_rows: ``S``.

    Returns:
        ``[S]`` in the dtype given, summed in float64; 0.0 for a sequence without tokens.

    Example:
        >>> import torch
        >>> sequence_log_ratio(torch.tensor([0.1, 0.2, 0.5]), torch.tensor([0, 0, 1]), 2)
        tensor([0.3000, 0.5000])
    """
    return _sums(log_ratio_N, row_N, num_rows).to(log_ratio_N.dtype)


def geometric_log_ratio(log_ratio_N: Tensor, row_N: Tensor, num_rows: int) -> Tensor:
    """Length-normalised log-ratio of sequences, the mean over their tokens.

    Its exponential is the geometric mean of the token ratios (GSPO, arXiv:2507.18071 equation 7).

    Args:
        log_ratio_N: ``[N]``, nats.
        row_N: int64 ``[N]``, the sequence of each token.
        num_rows: ``S``.

    Returns:
        ``[S]`` in the dtype given, summed in float64; 0.0 for a sequence without tokens.

    Example:
        >>> import torch
        >>> geometric_log_ratio(torch.tensor([0.1, 0.2, 0.5]), torch.tensor([0, 0, 1]), 2)
        tensor([0.1500, 0.5000])
    """
    lengths = row_counts(row_N, num_rows).clamp(min=1)
    return (_sums(log_ratio_N, row_N, num_rows) / lengths).to(log_ratio_N.dtype)


def _sums(values_N: Tensor, row_N: Tensor, num_rows: int) -> Tensor:
    """Sums over sequences, float64 ``[S]``."""
    wide_N = values_N.double()
    return wide_N.new_zeros(num_rows).index_add(0, row_N, wide_N)


def truncated_weights(log_ratio: Tensor, maximum: float, minimum: float = 0.0) -> Tensor:
    """Importance weights cut at ``maximum``, constants for autograd.

    Args:
        log_ratio: nats, any shape.
        maximum: largest weight.
        minimum: smallest weight.

    Returns:
        ``exp(log_ratio)`` clamped to the bounds, without gradient, same shape.

    Example:
        >>> import torch
        >>> truncated_weights(torch.tensor([0.0, 3.0]), 2.0)
        tensor([1., 2.])
    """
    return log_ratio.detach().exp().clamp(minimum, maximum)


def masked_weights(log_ratio: Tensor, minimum: float, maximum: float) -> Tensor:
    """Importance weights that are zero outside ``[minimum, maximum]``, constants for autograd.

    Args:
        log_ratio: nats, any shape.
        minimum: smallest weight kept.
        maximum: largest weight kept.

    Returns:
        ``exp(log_ratio)`` where inside the bounds and 0 elsewhere, without gradient, same shape.

    Example:
        >>> import torch
        >>> masked_weights(torch.tensor([0.0, 3.0, -3.0]), 0.5, 2.0)
        tensor([1., 0., 0.])
    """
    weights = log_ratio.detach().exp()
    return weights.where((weights >= minimum) & (weights <= maximum), 0.0)
