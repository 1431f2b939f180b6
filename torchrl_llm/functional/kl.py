r"""Estimates of a KL divergence from one sampled token.

The direction is always the same: with ``log_ratio`` :math:`= \log q(x) - \log p(x)` and :math:`x
\sim p`, the mean of each estimate is an estimate of :math:`\mathrm{KL}(p \| q)`. So for the
divergence of the current policy from a reference, ``log_ratio = ref_log_probs - log_probs``, on
tokens of the current policy.

The names are John Schulman's (http://joschu.net/blog/kl-approx.html). As *losses*, where ``p`` is
trained on its own samples, they differ more than as estimates. The mean gradient of ``k1`` is zero
for every ``q``. The mean gradient of ``k2`` is the gradient of :math:`\mathrm{KL}(p \| q)`. The
mean gradient of ``k3`` (GRPO's estimate, arXiv:2402.03300 equation 4) is the gradient of the other
direction, :math:`\mathrm{KL}(q \| p)`. ``weighted_k3`` has the gradient of :math:`\mathrm{KL}(p \|
q)`, and also corrects for samples of an older policy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

_MAX_LOG_WEIGHT = 20.0

KLEstimator = Literal["k1", "k2", "k3"]
LossKLEstimator = Literal["k1", "k2", "k3", "weighted_k3"]


def k1(log_ratio: Tensor) -> Tensor:
    """Return ``-log_ratio``: unbiased, positive or negative, high variance.

    Args:
        log_ratio: log q(x) - log p(x), nats, any shape, x drawn from p.

    Returns:
        Nats, same shape.

    Example:
        >>> import torch
        >>> k1(torch.tensor([0.5, -1.0]))
        tensor([-0.5000,  1.0000])
    """
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Return ``log_ratio ** 2 / 2``: biased, never negative, low variance.

    Args:
        log_ratio: log q(x) - log p(x), nats, any shape, x drawn from p.

    Returns:
        Nats, same shape.

    Example:
        >>> import torch
        >>> k2(torch.tensor([0.5, -1.0]))
        tensor([0.1250, 0.5000])
    """
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """Return ``exp(log_ratio) - 1 - log_ratio``: unbiased, never negative, low variance.

    Args:
        log_ratio: log q(x) - log p(x), nats, any shape, x drawn from p.

    Returns:
        Nats, same shape.

    Example:
        >>> import torch
        >>> k3(torch.tensor([0.0, 1.0]))
        tensor([0.0000, 0.7183])
    """
    return log_ratio.expm1() - log_ratio


def weighted_k3(log_ratio: Tensor, log_weight: Tensor) -> Tensor:
    r"""Return ``k3`` times the ratio of current to sampling probability, both with gradients.

    arXiv:2512.02556 (DeepSeek-V3.2), the unbiased KL estimate; TRL's default. Samples may come from
    any policy that covers ``p``: the mean is :math:`\mathrm{KL}(p \| q)`, and the mean gradient is
    the gradient of :math:`\mathrm{KL}(p \| q)`. At ratio one the gradient equals the gradient of
    ``k2``. Log-weights above 20 count as 20. If ``p`` gives a token almost no probability, the
    weight underflows and ``k3`` overflows; the result is still their exact product.

    Args:
        log_ratio: log q(x) - log p(x), nats, any shape, x drawn from the sampler.
        log_weight: log p(x) - log of the sampler's probability, same shape.

    Returns:
        Nats, same shape.

    Example:
        >>> import torch
        >>> weighted_k3(torch.tensor([1.0]), torch.tensor([0.0]))
        tensor([0.7183])
    """
    log_weight = log_weight.clamp(max=_MAX_LOG_WEIGHT)
    weight = log_weight.exp()
    # Near zero k3 must keep its digits; far above it the exponents must meet before exp.
    near = weight * k3(log_ratio.clamp(max=1.0))
    exponent = (log_weight + log_ratio).clamp(max=2 * _MAX_LOG_WEIGHT)
    far = exponent.exp() - weight * (1.0 + log_ratio)
    return torch.where(log_ratio > 1.0, far, near)


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""The estimates of :data:`KLEstimator` by name; add a new one to both."""
