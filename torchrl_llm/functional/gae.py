r"""Values of tokens: generalised advantage estimation, and the critic's loss.

Every sampled token is a step: the state is everything before it, the action is the token. The
tokens of all trajectories are concatenated, and ``row_N`` holds the trajectory of each. Only
sampled tokens are included, no prompts and no tool results.

Shape legend: ``N`` tokens, ``S`` trajectories.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class GAE(NamedTuple):
    """Advantages, and the returns that a critic should predict.

    Attributes:
        advantage: ``[N]``.
        target: ``[N]``, advantage plus value: the TD(lambda) return.
    """

    advantage: Tensor
    target: Tensor


def gae(
    rewards_N: Tensor,
    values_N: Tensor,
    row_N: Tensor,
    *,
    gamma: float = 1.0,
    lmbda: float = 1.0,
    bootstrap_S: Tensor | None = None,
) -> GAE:
    r"""Compute generalised advantage estimates for the tokens of trajectories.

    arXiv:1506.02438 equation 16: :math:`A_t = \sum_{l \ge 0} (\gamma \lambda)^l \delta_{t+l}` with
    :math:`\delta_t = r_t + \gamma V_{t+1} - V_t` within one trajectory. After the last token of a
    trajectory, :math:`V` is 0 if the trajectory terminated, and the value of its last state if it
    was truncated. With both factors 1, the advantage is the return minus the value. This is the
    default, and usual for language models, because their reward comes at the end.

    The sum is computed by doubling (1, 2, 4, ... steps at once), without a loop over tokens.

    Args:
        rewards_N: ``[N]``, the reward that follows each token.
        values_N: ``[N]``, the value of the state before each token.
        row_N: int64 ``[N]``, the trajectory of each token; the tokens of a trajectory are in order
            and next to each other.
        gamma: discount per token.
        lmbda: decay of the sum; 0 is one-step TD, 1 Monte Carlo.
        bootstrap_S: ``[S]``, the value after the last token of each trajectory; 0 when ``None``.

    Returns:
        Advantages and value targets in the dtype of ``values_N``, without gradient.

    Raises:
        ValueError: for shapes that differ.

    Example:
        >>> rewards, values = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.5, 0.25, 1.0])
        >>> gae(rewards, values, torch.tensor([0, 0, 1])).advantage
        tensor([0.5000, 0.7500, 1.0000])
    """
    if not rewards_N.shape == values_N.shape == row_N.shape or row_N.ndim != 1:
        raise ValueError(
            f"rewards, values and row must be [N] alike, got {tuple(rewards_N.shape)}, "
            f"{tuple(values_N.shape)} and {tuple(row_N.shape)}"
        )
    values = values_N.detach()
    after = torch.zeros_like(values)
    if bootstrap_S is not None:
        after = bootstrap_S.detach().to(values.dtype)[row_N]
    inner = torch.where(row_N[1:] == row_N[:-1], values[1:], after[:-1])
    following = torch.cat([inner, after[-1:]])
    advantage = rewards_N.detach().to(values.dtype) + gamma * following - values
    shift = 1
    while shift < row_N.shape[0]:
        later = torch.where(row_N[shift:] == row_N[:-shift], advantage[shift:], 0.0)
        decayed = torch.nn.functional.pad(later, (0, shift)) * (gamma * lmbda) ** shift
        advantage = advantage + decayed
        shift *= 2
    return GAE(advantage, advantage + values)


def value_loss(
    values: Tensor, targets: Tensor, old_values: Tensor | None = None, clip: float | None = None
) -> tuple[Tensor, Tensor]:
    r"""Compute the critic's squared error, :math:`(V - R)^2 / 2`.

    With ``clip``, the result is the larger of this error and the error of the clipped value. The
    clipped value is :math:`V`, moved by at most ``clip`` from its old value. OpenAI's code of PPO
    does this (not in arXiv:1707.06347; see arXiv:2005.12729 section 3).

    Args:
        values: ``[N]``, with gradients.
        targets: ``[N]``, constants.
        old_values: ``[N]``, constants, the values from which the advantages were computed.
        clip: how far a value may move from its old value.

    Returns:
        The loss ``[N]`` and a bool ``[N]``, true where the clip cuts the gradient.

    Raises:
        ValueError: when one of ``old_values`` and ``clip`` is given without the other.

    Example:
        >>> value_loss(torch.tensor([1.0]), torch.tensor([3.0]))[0]
        tensor([2.])
    """
    if (old_values is None) != (clip is None):
        raise ValueError("clip and old_values belong together")
    targets = targets.detach()
    loss = (values - targets).square() / 2
    if clip is None:
        return loss, torch.zeros_like(loss, dtype=torch.bool)
    old = old_values.detach()
    moved = values - old
    held = (old + moved.clamp(-clip, clip) - targets).square() / 2
    # Within the clip the two differ only by rounding.
    cut = (moved.abs() > clip) & (held > loss)
    return torch.where(cut, held, loss), cut.detach()
