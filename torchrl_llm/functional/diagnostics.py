"""Numbers that tell whether the sampler and the trained policy still agree.

Shape legend: ``N`` tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from torchrl_llm.functional.kl import k1, k3

__all__ = ["PolicyMismatch", "effective_sample_size", "policy_mismatch"]


def effective_sample_size(log_ratio_N: Tensor) -> Tensor:
    r"""Effective sample size as a share, :math:`(\sum w)^2 / (N \sum w^2)`.

    Args:
        log_ratio_N: ``[N]`` log importance weights, nats, at least one.

    Returns:
        A scalar in (0, 1] without gradient: 1 when all weights are equal, 1/N when one has it all.

    Example:
        >>> import torch
        >>> effective_sample_size(torch.tensor([0.0, 0.0, -1e9, -1e9]))
        tensor(0.5000)
    """
    values = log_ratio_N.detach().float()
    weights = (values - values.max()).exp()
    return weights.sum().square() / (weights.square().sum() * values.shape[0])


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
    log_ratio = (log_probs_N - sample_log_probs_N).detach().float()
    return PolicyMismatch(
        k1(log_ratio).mean(),
        k3(log_ratio).mean(),
        log_ratio.max().exp(),
        log_ratio.min().exp(),
        effective_sample_size(log_ratio),
    )
