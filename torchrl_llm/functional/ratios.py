r"""Importance ratios in log space, importance weights, and measures of policy mismatch.

A sampler with different kernels, a different precision or older weights draws from :math:`\mu`, not
from the proximal policy :math:`\pi_\mathrm{prox}` (the trainer's policy before the update). Its
tokens get weights :math:`w = \pi_\mathrm{prox} / \mu`, per token or per sequence. The weight is
either truncated (:func:`truncated_weights`) or set to 0 outside bounds (:func:`masked_weights`).
Weights are constants for autograd.

All functions take flat tokens: ``values_N``, and the row index of each token in ``row_N``. Sums
over a sequence are always computed in float64, because float32 loses 0.1 % of a sum of 100,000
equal numbers.

Shape legend: ``N`` tokens, ``S`` sequences.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from torchrl_llm.functional.kl import k1, k3
from torchrl_llm.functional.padding import row_counts


def sequence_log_ratio(log_ratio_N: Tensor, row_N: Tensor, num_rows: int) -> Tensor:
    """Compute the log-ratio of whole sequences, the sum over their tokens.

    Args:
        log_ratio_N: ``[N]``, nats.
        row_N: int64 ``[N]``, the sequence of each token.
        num_rows: ``S``.

    Returns:
        ``[S]`` in the dtype of ``log_ratio_N``, summed in float64; 0.0 for a sequence without
        tokens.

    Example:
        >>> import torch
        >>> sequence_log_ratio(torch.tensor([0.1, 0.2, 0.5]), torch.tensor([0, 0, 1]), 2)
        tensor([0.3000, 0.5000])
    """
    return _sums(log_ratio_N, row_N, num_rows).to(log_ratio_N.dtype)


def geometric_log_ratio(log_ratio_N: Tensor, row_N: Tensor, num_rows: int) -> Tensor:
    """Compute the length-normalised log-ratio of sequences, the mean over their tokens.

    Its exponential is the geometric mean of the token ratios (GSPO, arXiv:2507.18071 equation 7).

    Args:
        log_ratio_N: ``[N]``, nats.
        row_N: int64 ``[N]``, the sequence of each token.
        num_rows: ``S``.

    Returns:
        ``[S]`` in the dtype of ``log_ratio_N``, summed in float64; 0.0 for a sequence without
        tokens.

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
    """Compute importance weights of at most ``maximum``, constants for autograd.

    Args:
        log_ratio: log-ratio of each token or sequence, nats, any shape.
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
    """Compute importance weights that are 0 outside ``[minimum, maximum]``, without gradient.

    Args:
        log_ratio: log-ratio of each token or sequence, nats, any shape.
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


Level = Literal["token", "sequence", "geometric"]
LEVELS: tuple[str, ...] = get_args(Level)
"""The names of the levels."""


def level_log_ratio(log_ratio_N: Tensor, row_N: Tensor, num_rows: int, level: Level) -> Tensor:
    """Return for each token its own log-ratio or the log-ratio of its sequence.

    Args:
        log_ratio_N: ``[N]``, nats.
        row_N: int64 ``[N]``, the sequence of each token.
        num_rows: ``S``.
        level: ``"token"``, the token's own log-ratio; ``"sequence"``, the sum over its sequence;
            ``"geometric"``, the mean over its sequence.

    Returns:
        ``[N]`` in the dtype of ``log_ratio_N``, nats. Sums over a sequence are computed in float64,
        also in the backward pass.

    Raises:
        ValueError: for an unknown level.

    Example:
        >>> import torch
        >>> log_ratio, rows = torch.tensor([0.1, 0.2, 0.5]), torch.tensor([0, 0, 1])
        >>> level_log_ratio(log_ratio, rows, 2, "sequence")
        tensor([0.3000, 0.3000, 0.5000])
    """
    if level == "token":
        return log_ratio_N
    # The backward pass of the indexing is also a sum over the sequence.
    wide_N = log_ratio_N.double()
    if level == "sequence":
        return sequence_log_ratio(wide_N, row_N, num_rows)[row_N].to(log_ratio_N.dtype)
    if level == "geometric":
        return geometric_log_ratio(wide_N, row_N, num_rows)[row_N].to(log_ratio_N.dtype)
    raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {level!r}")


def sequence_mask(
    log_ratio_N: Tensor, row_N: Tensor, num_rows: int, minimum: float, maximum: float
) -> Tensor:
    """Return which tokens belong to sequences whose geometric mean ratio is inside the bounds.

    Args:
        log_ratio_N: ``[N]``, nats.
        row_N: int64 ``[N]``, the sequence of each token.
        num_rows: ``S``.
        minimum: smallest geometric mean ratio of a sequence that is kept.
        maximum: largest geometric mean ratio of a sequence that is kept.

    Returns:
        bool ``[N]``.

    Example:
        >>> import torch
        >>> log_ratio, rows = torch.tensor([0.1, -0.1, 0.9]), torch.tensor([0, 0, 1])
        >>> sequence_mask(log_ratio, rows, 2, 0.5, 2.0)
        tensor([ True,  True, False])
    """
    ratio = level_log_ratio(log_ratio_N, row_N, num_rows, "geometric").detach().exp()
    return (ratio >= minimum) & (ratio <= maximum)


# exp(2 * 20) = 2e17: squares of weights stay far from overflow.
_LOG_RATIO_LIMIT = 20.0


def ess_moments(log_ratio_N: Tensor) -> Tensor:
    """Return moments of importance weights for the effective sample size; they add up over batches.

    Log-ratios are clamped to [-20, 20], so that the sums of different batches have one scale and do
    not overflow.

    Args:
        log_ratio_N: ``[N]`` log importance weights, nats.

    Returns:
        ``[3]`` without gradient: the number of weights, their sum, and the sum of their squares.

    Example:
        >>> import torch
        >>> ess_moments(torch.tensor([0.0, 0.0]))
        tensor([2., 2., 2.])
    """
    weights = log_ratio_N.detach().clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()
    count = weights.new_full((), weights.shape[0])
    return torch.stack([count, weights.sum(), weights.square().sum()])


def ess_from_moments(moments: Tensor) -> Tensor:
    r"""Return the effective sample size as a share, :math:`(\sum w)^2 / (N \sum w^2)`.

    Args:
        moments: ``[..., 3]``, sums of the results of :func:`ess_moments` over the parts of a batch.

    Returns:
        ``[...]``, in (0, 1]; 0 for a batch without tokens.

    Example:
        >>> import torch
        >>> parts = [ess_moments(torch.tensor([0.0])), ess_moments(torch.tensor([0.0, -9e9]))]
        >>> ess_from_moments(sum(parts))
        tensor(0.6667)
    """
    count, total, squares = moments.unbind(-1)
    share = total.square() / (count * squares)
    return share.where(count > 0, 0.0)


def effective_sample_size(log_ratio_N: Tensor) -> Tensor:
    r"""Return the effective sample size as a share, :math:`(\sum w)^2 / (N \sum w^2)`.

    Args:
        log_ratio_N: ``[N]`` log importance weights, nats.

    Returns:
        A scalar in (0, 1] without gradient: 1 when all weights are equal, 1/N when one weight
        dominates; 0 without weights.

    Example:
        >>> import torch
        >>> effective_sample_size(torch.tensor([0.0, 0.0, -1e9, -1e9]))
        tensor(0.5000)
    """
    return ess_from_moments(ess_moments(log_ratio_N))


class PolicyMismatch(NamedTuple):
    """Difference between the trained policy and the sampler; scalars without gradient.

    Attributes:
        k1: mean of sampled minus current log-prob, nats.
        k3: estimate of the same divergence that is never negative, nats.
        max_ratio: largest current / sampling probability.
        min_ratio: smallest current / sampling probability.
        ess: effective sample size as a share.
    """

    k1: Tensor
    k3: Tensor
    max_ratio: Tensor
    min_ratio: Tensor
    ess: Tensor


def policy_mismatch(log_probs_N: Tensor, sample_log_probs_N: Tensor) -> PolicyMismatch:
    """Compare current and sampling log-probs of the same tokens.

    Args:
        log_probs_N: ``[N]`` under the current policy, nats, at least one.
        sample_log_probs_N: ``[N]`` under the sampler, nats.

    Example:
        >>> import torch
        >>> policy_mismatch(torch.zeros(3), torch.zeros(3)).ess
        tensor(1.)
    """
    log_ratio = (log_probs_N - sample_log_probs_N).detach()
    return PolicyMismatch(
        k1(log_ratio).mean(),
        k3(log_ratio).mean(),
        log_ratio.max().exp(),
        log_ratio.min().exp(),
        effective_sample_size(log_ratio),
    )
