"""Numbers that tell whether the sampler and the trained policy still agree.

Shape legend: ``N`` tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_llm.functional.kl import k1, k3

# exp(2 * 20) = 2e17: squares of weights stay far from overflow.
_LOG_RATIO_LIMIT = 20.0


def ess_moments(log_ratio_N: Tensor) -> Tensor:
    """What the effective sample size of importance weights is made of; additive over batches.

    Log-ratios beyond +-20 count as 20, so that the sums of different batches have one scale and
    none overflows.

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
    count = weights.new_tensor(weights.shape[0])
    return torch.stack([count, weights.sum(), weights.square().sum()])


def ess_from_moments(moments: Tensor) -> Tensor:
    r"""Effective sample size as a share, :math:`(\sum w)^2 / (N \sum w^2)`.

    Args:
        moments: ``[..., 3]``, sums of what :func:`ess_moments` gave for the parts of a batch.

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
    r"""Effective sample size as a share, :math:`(\sum w)^2 / (N \sum w^2)`.

    Args:
        log_ratio_N: ``[N]`` log importance weights, nats.

    Returns:
        A scalar in (0, 1] without gradient: 1 when all weights are equal, 1/N when one has it all;
        0 without weights.

    Example:
        >>> import torch
        >>> effective_sample_size(torch.tensor([0.0, 0.0, -1e9, -1e9]))
        tensor(0.5000)
    """
    return ess_from_moments(ess_moments(log_ratio_N))


class PolicyMismatch(NamedTuple):
    """How far the trained policy is from the one that sampled; scalars without gradient.

    Attributes:
        k1: mean of sampled minus current log-prob, nats.
        k3: the same divergence by the estimate that is never negative, nats.
        max_ratio: largest current / sampling probability.
        min_ratio: smallest.
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
        sample_log_probs_N: ``[N]`` as sampled, nats.

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
