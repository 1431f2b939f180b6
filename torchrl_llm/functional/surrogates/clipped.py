"""Surrogates that bound the ratio of each token by itself: a hard clip and a soft gate.

Shape legend: ``N`` tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Larger log-ratios count as this one: exp(20) = 5e8 is far beyond any ratio that means something
and well below overflow."""


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
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    gain = ratio * advantage
    bounded = ratio.clamp(1.0 - low, 1.0 + high) * advantage
    loss = -torch.minimum(gain, bounded)
    return loss, (bounded < gain).detach()


def sapo(
    log_ratio: Tensor, advantage: Tensor, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> Tensor:
    r"""Soft adaptive policy optimisation, :math:`-\frac{4}{\tau} \sigma(\tau (r - 1)) A`.

    arXiv:2511.20347, the objective and its gate in section 3. :math:`\tau` is ``tau_pos`` where
    the advantage is positive and ``tau_neg`` elsewhere. The gradient is that of :math:`-r A` times
    :math:`4 p (1 - p)` with :math:`p = \sigma(\tau (r - 1))`: one at ratio one, fading on both
    sides, faster for a larger :math:`\tau`. (The gate's *value* does not peak at ratio one; there
    it is :math:`2 / \tau`.)

    Args:
        log_ratio: ``[N]``, log of current over sampling probability, nats.
        advantage: ``[N]``.
        tau_pos: temperature of tokens with a positive advantage, above 0.
        tau_neg: temperature of the others.

    Returns:
        The loss ``[N]``. Nothing is clipped.

    Example:
        >>> sapo(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0]))
        tensor([-2.0000, -3.3916])
    """
    tau = torch.full_like(log_ratio, tau_neg).masked_fill(advantage > 0, tau_pos)
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    return -4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * advantage
