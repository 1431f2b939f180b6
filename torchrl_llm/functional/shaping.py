r"""Terms that are added to a reward before any credit rule sees it."""

from __future__ import annotations

import torch
from torch import Tensor


def overlong_penalty(lengths: Tensor, max_length: int, cache: int) -> Tensor:
    r"""DAPO's soft punishment of responses that come near the limit, arXiv:2503.14476 equation 13.

    .. math::
        R_\mathrm{length}(y) = \begin{cases}
            0 & |y| \le L_\mathrm{max} - L_\mathrm{cache} \\
            \frac{(L_\mathrm{max} - L_\mathrm{cache}) - |y|}{L_\mathrm{cache}} & \text{between} \\
            -1 & |y| > L_\mathrm{max}
        \end{cases}

    Args:
        lengths: tokens of each response, any shape.
        max_length: :math:`L_\mathrm{max}`, tokens.
        cache: :math:`L_\mathrm{cache}`, tokens before the limit over which the punishment rises.

    Returns:
        Between -1 and 0; float32 unless ``lengths`` is float64.

    Raises:
        ValueError: unless ``0 < cache <= max_length``.

    Example:
        >>> overlong_penalty(torch.tensor([5, 8, 9, 10, 12]), max_length=10, cache=4)
        tensor([ 0.0000, -0.5000, -0.7500, -1.0000, -1.0000])
    """
    if not 0 < cache <= max_length:
        raise ValueError(
            f"cache must be above 0 and at most max_length={max_length} tokens, got {cache}"
        )
    dtype = lengths.dtype if lengths.dtype is torch.float64 else torch.float32
    return ((max_length - cache - lengths.to(dtype)) / cache).clamp(-1.0, 0.0)


def adapted_kl_coefficient(coefficient: float, kl: float, *, target: float, gain: float) -> float:
    r"""A step of the controller that holds a divergence at a target.

    arXiv:1909.08593 section 2.2: :math:`e = \mathrm{clip}((\mathrm{KL} - t) / t, -0.2, 0.2)` and
    :math:`\beta \leftarrow \beta (1 + K_\beta e)`, with :math:`K_\beta = 0.1` there.

    Args:
        coefficient: :math:`\beta`.
        kl: the divergence that was measured, nats.
        target: :math:`t`, the divergence that is wanted, nats.
        gain: :math:`K_\beta`.

    Returns:
        The new :math:`\beta`.

    Example:
        >>> adapted_kl_coefficient(1.0, 12.0, target=6.0, gain=0.1)
        1.02
    """
    error = min(max((kl - target) / target, -0.2), 0.2)
    return coefficient * (1 + gain * error)
