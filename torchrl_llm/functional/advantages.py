"""Advantages of a group of samples of one prompt.

Shape legend: ``G`` members of a group; leading dimensions are groups.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

__all__ = ["group_advantages"]


def group_advantages(
    rewards_G: Tensor,
    valid_G: Tensor | None = None,
    *,
    normalize: Literal["sample", "population", "none"] = "sample",
    eps: float = 1e-6,
) -> Tensor:
    r"""Reward against the group's mean, :math:`A_i = (r_i - \bar r) / \max(\sigma, \epsilon)`.

    GRPO, arXiv:2402.03300 section 4.1.2; without the division, Dr. GRPO, arXiv:2503.20783. The
    floor on the deviation follows TorchRL; other libraries add epsilon instead.

    Args:
        rewards_G: ``[..., G]``, floating.
        valid_G: bool ``[..., G]``; members that are not valid enter no statistic and get 0. Their
            rewards may be anything, NaN included. All valid by default.
        normalize: the deviation: ``"sample"`` (divides by G - 1), ``"population"`` (by G), or
            ``"none"`` for no division.
        eps: floor of the deviation.

    Returns:
        float32 ``[..., G]``; all zeros in a group with fewer than two valid members.

    Raises:
        ValueError: for an unknown ``normalize`` or shapes that differ.

    Example:
        >>> group_advantages(torch.tensor([0.0, 1.0, 1.0, 0.0]), normalize="population")
        tensor([-1.,  1.,  1., -1.])
    """
    if normalize not in ("sample", "population", "none"):
        raise ValueError(f"normalize must be sample, population or none, got {normalize!r}")
    rewards = rewards_G.float()
    if valid_G is None:
        valid_G = torch.ones_like(rewards, dtype=torch.bool)
    if valid_G.shape != rewards.shape:
        raise ValueError(
            f"valid must have the shape of rewards, got {tuple(valid_G.shape)} "
            f"and {tuple(rewards.shape)}"
        )
    rewards = rewards.where(valid_G, 0.0)
    count = valid_G.sum(-1, keepdim=True)
    centred = (rewards - rewards.sum(-1, keepdim=True) / count.clamp(min=1)).where(valid_G, 0.0)
    if normalize != "none":
        degrees = (count - int(normalize == "sample")).clamp(min=1)
        centred = centred / (centred.square().sum(-1, keepdim=True) / degrees).sqrt().clamp(min=eps)
    return centred.where(count > 1, 0.0)
