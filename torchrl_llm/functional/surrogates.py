"""Policy-gradient losses per token, unreduced; smaller is better.

A surrogate says what one token costs. Which tokens count is the mask's business, and how they are
averaged that of :mod:`torchrl_llm.functional.reduce`.

Shape legend: ``N`` tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ppo_clip", "reinforce"]

# exp(20) = 5e8: far beyond any ratio that means something, well below overflow.
_LOG_RATIO_LIMIT = 20.0


def ppo_clip(
    log_ratio: Tensor, advantage: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    r"""The clipped surrogate of PPO, :math:`-\min(r A, \mathrm{clip}(r, 1 - l, 1 + h) A)`.

    arXiv:1707.06347 equation 7, with two bounds as in DAPO (arXiv:2503.14476 equation 10).
    Log-ratios above 20 count as 20, so that no ratio overflows.

    Args:
        log_ratio: ``[N]``, log of current over sampling probability, nats.
        advantage: ``[N]``.
        low: ``l``, in [0, 1).
        high: ``h``, at least 0.

    Returns:
        The loss ``[N]`` and a bool ``[N]`` that is true where the clip cuts the gradient: above the
        upper bound with a positive advantage, below the lower one with a negative advantage.

    Example:
        >>> loss, clipped = ppo_clip(torch.tensor([0.0, 1.0]), torch.tensor([2.0, 2.0]), 0.2, 0.2)
        >>> loss, clipped
        (tensor([-2.0000, -2.4000]), tensor([False,  True]))
    """
    ratio = log_ratio.clamp(max=_LOG_RATIO_LIMIT).exp()
    gain = ratio * advantage
    bounded = ratio.clamp(1.0 - low, 1.0 + high) * advantage
    loss = -torch.minimum(gain, bounded)
    return loss, (bounded < gain).detach()


def reinforce(log_probs: Tensor, advantage: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""The score-function loss :math:`-w A \log \pi`, whose gradient is the policy gradient.

    Args:
        log_probs: ``[N]``, nats, with gradients.
        advantage: ``[N]``, a constant.
        weights: ``[N]`` importance weights, constants; 1 when ``None``.

    Returns:
        ``[N]``. Its value means little; its gradient is what counts.

    Example:
        >>> reinforce(torch.tensor([-1.0, -2.0]), torch.tensor([1.0, -0.5]))
        tensor([ 1., -1.])
    """
    weight = advantage.detach() if weights is None else (advantage * weights).detach()
    return -weight * log_probs
