r"""The value tracker of SPO: a success rate per prompt that forgets as the policy moves.

Single-stream Policy Optimization, arXiv:2509.13232, section 3: each prompt has a Beta
distribution :math:`(\alpha, \beta)` over its success rate :math:`v = \alpha / (\alpha + \beta)`,
which is the baseline of the next reward. What was seen under an older policy counts less, the more
the policy has moved since.

Shape legend: every argument broadcasts; ``[N]`` prompts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def forgetting_factor(
    kl: Tensor | float, *, half_life: float = 0.1, bounds: tuple[float, float] = (0.875, 0.96)
) -> Tensor:
    r"""How much of the past still counts.

    :math:`\rho = clip(2^{-KL / D_{half}}, \rho_{min}, \rho_{max})`.

    Args:
        kl: nats, divergence of the policy now from the policy at the prompt's last visit.
        half_life: nats after which the past counts half.
        bounds: ``(rho_min, rho_max)``; the paper's, for memories of 8 to 25 samples.

    Returns:
        Shaped like ``kl``.

    Example:
        >>> forgetting_factor(torch.tensor([0.0, 0.01, 1.0]))
        tensor([0.9600, 0.9330, 0.8750])
    """
    return torch.exp2(-torch.as_tensor(kl) / half_life).clamp(*bounds)


def beta_update(
    alpha: Tensor, beta: Tensor, reward: Tensor, rho: Tensor | float, count: Tensor | float = 1.0
) -> tuple[Tensor, Tensor]:
    r""":math:`\alpha \leftarrow \rho \alpha + r` and :math:`\beta \leftarrow \rho \beta + 1 - r`.

    Args:
        alpha: successes so far.
        beta: failures so far.
        reward: in [0, 1]; the sum of the rewards where ``count`` of them came at one visit.
        rho: see :func:`forgetting_factor`.
        count: rewards of this visit.

    Returns:
        The new ``(alpha, beta)``.

    Example:
        >>> one = torch.tensor(1.0)
        >>> beta_update(one, one, one, 0.5)
        (tensor(1.5000), tensor(0.5000))
    """
    return rho * alpha + reward, rho * beta + count - reward


def uncertainty_weight(value: Tensor, *, floor: float = 0.05) -> Tensor:
    r"""How often a prompt should be drawn, :math:`\sqrt{v (1 - v)} + \epsilon`.

    Prompts that always or never succeed teach little; the floor keeps them from being forgotten.

    Args:
        value: success rates in [0, 1].
        floor: the smallest weight.

    Returns:
        Shaped like ``value``, not normalised.

    Example:
        >>> uncertainty_weight(torch.tensor([0.0, 0.5]))
        tensor([0.0500, 0.5500])
    """
    return (value * (1 - value)).sqrt() + floor
