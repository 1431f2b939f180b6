"""Surrogates that weigh the score function with a constant: REINFORCE, CISPO and TOPR.

None of them loses a token's gradient to a clip: the weight is bounded, and autograd sees only the
log-prob.

Shape legend: ``N`` tokens, ``S`` sequences.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrl_llm.functional.ratios import sequence_log_ratio
from torchrl_llm.functional.surrogates.clipped import MAX_LOG_RATIO


def reinforce(log_probs: Tensor, advantage: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""The score-function loss :math:`-w A \log \pi`, whose gradient is the policy gradient.

    Args:
        log_probs: ``[N]``, nats, with gradients.
        advantage: ``[N]``, a constant.
        weights: ``[N]`` importance weights, constants; 1 when ``None``. Of a token:
            :func:`~torchrl_llm.functional.truncated_weights`; of its sequence:
            :func:`sequence_weights`.

    Returns:
        ``[N]``. Its value means little; its gradient is what counts.

    Example:
        >>> reinforce(torch.tensor([-1.0, -2.0]), torch.tensor([1.0, -0.5]))
        tensor([ 1., -1.])
    """
    weight = advantage.detach() if weights is None else (advantage * weights).detach()
    return -weight * log_probs


def sequence_weights(
    log_ratio_N: Tensor, row_N: Tensor, num_rows: int, maximum: float = math.inf
) -> Tensor:
    r"""Importance weight of each token's sequence, :math:`\min(\prod_t r_t, c)`, a constant.

    The product is the weight of a trajectory in REINFORCE with importance sampling. It is unbiased
    and explodes with the length, which is what ``maximum`` is for. Products above exp(20) count as
    that.

    Args:
        log_ratio_N: ``[N]``, log of current over sampling probability, nats.
        row_N: int64 ``[N]``, the sequence of each token.
        num_rows: ``S``.
        maximum: ``c``, the largest weight.

    Returns:
        ``[N]`` without gradient.

    Example:
        >>> log_ratio, row = torch.tensor([0.5, 0.5, -1.0]), torch.tensor([0, 0, 1])
        >>> sequence_weights(log_ratio, row, 2, 2.0)
        tensor([2.0000, 2.0000, 0.3679])
    """
    # The exponent stays float64: of a sum near 20, float32 leaves a ratio six digits.
    log_weights = sequence_log_ratio(log_ratio_N.detach().double(), row_N, num_rows)
    weights = log_weights.clamp(max=MAX_LOG_RATIO).exp().clamp(max=maximum)
    return weights.to(log_ratio_N.dtype)[row_N]


def cispo(
    log_probs: Tensor,
    log_ratio: Tensor,
    advantage: Tensor,
    low: float | None = None,
    high: float = 0.2,
) -> tuple[Tensor, Tensor]:
    r"""Clipped importance-sampling weights, :math:`-\mathrm{sg}[\mathrm{clip}(r)] A \log \pi`.

    arXiv:2506.13585 equations 4 and 5. The weight is clipped to :math:`[1 - l, 1 + h]` and the
    token keeps its gradient, unlike in PPO. The paper uses the upper bound alone
    (``low=None``) and does not publish its value; Ludic's ``high`` is 0.2, its ScaleRL preset's
    0.28. TRL's ``epsilon_high`` is the bound itself: its 5.0 is ``high=4.0`` here.

    Args:
        log_probs: ``[N]``, nats, with gradients.
        log_ratio: ``[N]``, log of current over sampling probability, nats.
        advantage: ``[N]``, a constant.
        low: ``l``, in [0, 1]; no lower bound when ``None``.
        high: ``h``, at least 0.

    Returns:
        The loss ``[N]`` and a bool ``[N]`` that is true where a bound changes the weight.

    Example:
        >>> log_probs = torch.tensor([-1.0, -1.0], requires_grad=True)
        >>> loss, clipped = cispo(log_probs, torch.tensor([0.0, 1.0]), torch.tensor([2.0, 2.0]))
        >>> torch.autograd.grad(loss.sum(), log_probs), clipped
        ((tensor([-2.0000, -2.4000]),), tensor([False,  True]))
    """
    ratio = log_ratio.detach().clamp(max=MAX_LOG_RATIO).exp()
    weights = ratio.clamp(min=None if low is None else 1.0 - low, max=1.0 + high)
    return reinforce(log_probs, advantage, weights), weights != ratio


def topr(
    log_probs_N: Tensor,
    log_ratio_N: Tensor,
    advantage_N: Tensor,
    row_N: Tensor,
    num_rows: int,
    positive: tuple[float, float] = (1.0, 1.0),
    negative: tuple[float, float] = (0.0, 1.0),
) -> tuple[Tensor, Tensor]:
    r"""Tapered off-policy REINFORCE, :math:`-\mathrm{sg}[\rho]_a^b A \log \pi`.

    arXiv:2503.14286, the TOPR gradient of section 3. :math:`\rho = \prod_t r_t` is the ratio of the
    whole sequence, clipped to bounds that depend on the sign of its advantage. By default good
    sequences are learnt from as in supervised learning (weight 1), and bad ones are pushed away
    with a weight in [0, 1] that fades as they become unlikely, so that nothing has to be bounded by
    a divergence. The paper's sum over the log-probs of a trajectory and mean over trajectories is
    ``aggregate(..., "sequence_sum")``.

    Args:
        log_probs_N: ``[N]``, nats, with gradients.
        log_ratio_N: ``[N]``, log of current over sampling probability, nats.
        advantage_N: ``[N]``, a constant: the reward, or what is left of it above a baseline.
        row_N: int64 ``[N]``, the sequence of each token.
        num_rows: ``S``.
        positive: bounds ``(a, b)`` where the advantage is at least 0.
        negative: bounds ``(a, b)`` where it is negative.

    Returns:
        The loss ``[N]`` and a bool ``[N]`` that is true where a bound changes the weight.

    Example:
        >>> log_probs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
        >>> row, advantage = torch.tensor([0, 1, 2]), torch.tensor([1.0, -1.0, -1.0])
        >>> loss, _ = topr(log_probs, torch.tensor([2.0, 2.0, -2.0]), advantage, row, 3)
        >>> torch.autograd.grad(loss.sum(), log_probs)
        (tensor([-1.0000,  1.0000,  0.1353]),)
    """
    ratio = sequence_weights(log_ratio_N, row_N, num_rows)
    weights = torch.where(advantage_N >= 0, ratio.clamp(*positive), ratio.clamp(*negative))
    return reinforce(log_probs_N, advantage_N, weights), weights != ratio
