"""The on-policy policy gradient on padded rows: what is left of every loss when the ratio is one.

This is the teaching path (``sota-implementations/pico``); the LossModules work on flat tokens and
do more. On fresh rows :class:`~torchrl_llm.objectives.GRPOLoss` with
``aggregation="sequence_sum"`` has the same gradient.

Shape legend: ``B`` rollouts, ``T`` tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def policy_gradient_loss(
    log_probs_BT: Tensor,
    advantages_B: Tensor,
    mask_BT: Tensor,
    *,
    normalize_by_tokens: bool = False,
) -> Tensor:
    r"""REINFORCE with a baseline, :math:`-\frac1B \sum_i A_i \sum_t m_{it} \log \pi(y_{it})`.

    The update of GRPO (arXiv:2402.03300, equation 3) on fresh rollouts, where all ratios are one,
    without division by the length as in Dr. GRPO (arXiv:2503.20783, section 3.2).

    Args:
        log_probs_BT: ``[B, T]``, log p(y_t | y_<t) in nats, with gradients; anything outside the
            mask, NaN included.
        advantages_B: ``[B]``, constants.
        mask_BT: bool ``[B, T]``, the tokens that the policy sampled.
        normalize_by_tokens: the mean over a rollout's tokens instead of their sum (the code of
            picoRL; long answers then weigh less a token).

    Returns:
        A scalar. Rollouts without a sampled token add nothing and count in ``B``.

    Raises:
        ValueError: for shapes that do not fit.

    Example:
        >>> log_probs = torch.tensor([[0.0, -1.0, -2.0], [0.0, -3.0, 0.0]])
        >>> mask = torch.tensor([[False, True, True], [False, True, False]])
        >>> advantages = torch.tensor([2.0, 1.0])
        >>> policy_gradient_loss(log_probs, advantages, mask)  # (2 * 3 + 1 * 3) / 2
        tensor(4.5000)
        >>> policy_gradient_loss(log_probs, advantages, mask, normalize_by_tokens=True)
        tensor(3.)
    """
    shape = log_probs_BT.shape
    if mask_BT.shape != shape or advantages_B.shape != shape[:1]:
        raise ValueError(
            f"log-probs and mask must be [B, T] and advantages [B], got {tuple(shape)}, "
            f"{tuple(mask_BT.shape)} and {tuple(advantages_B.shape)}"
        )
    terms_B = torch.where(mask_BT, log_probs_BT, 0.0).sum(1)
    if normalize_by_tokens:
        terms_B = terms_B / mask_BT.sum(1).clamp(min=1)
    return -(advantages_B.detach() * terms_B).mean()
