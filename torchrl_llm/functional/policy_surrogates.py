"""Policy-gradient losses per token, unreduced; smaller is better.

A surrogate computes the loss of each token. The mask selects the tokens, and
:mod:`torchrl_llm.functional.reduce` averages them. All functions work on flat tokens without
padding, keep the dtype of their inputs, and compile as one graph. They limit the size of a step in
different ways:

- the ratio of each token, by a hard clip or a soft gate: :func:`ppo_clip`, :func:`sapo`;
- one ratio per sequence: :func:`gspo`, :func:`gspo_token`, :func:`gmpo`;
- a constant weight on the score function: :func:`reinforce`, :func:`cispo`, :func:`topr`. No token
  loses its gradient to a clip: the weight is a bounded constant, and only the log-prob has a
  gradient.

At ratio one all functions have the same gradient as :func:`reinforce`. :func:`policy_gradient_loss`
is this common case on padded rows; ``sota-implementations/pico`` uses it for teaching.

A sequence's ratio, and the gradient that its tokens share, are sums over all of its tokens. They
are computed in float64, one number per token, and the loss has the dtype of its inputs. The
gradients of rows of 100,000 tokens then differ from a computation in float64 by at most one part in
a million. Each token gets the value of its sequence. So ``aggregate(..., "sequence_mean")`` is the
papers' mean over sequences.

Shape legend: ``N`` tokens, ``S`` sequences; in padded rows ``B`` rollouts, ``T`` tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrl_llm.functional import ratios

MAX_LOG_RATIO = 20.0
"""Largest log-ratio: exp(20) = 5e8 is above meaningful ratios and far below overflow."""


def ppo_clip(
    log_ratio: Tensor, advantage: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    r"""Compute PPO's clipped surrogate, :math:`-\min(r A, \mathrm{clip}(r, 1 - l, 1 + h) A)`.

    arXiv:1707.06347 equation 7, with two bounds as in DAPO (arXiv:2503.14476 equation 10).
    Log-ratios above 20 count as 20, so that no ratio overflows.

    Args:
        log_ratio: ``[N]``, log of current over sampling probability, nats.
        advantage: ``[N]``.
        low: ``l``, in [0, 1).
        high: ``h``, at least 0.

    Returns:
        The loss ``[N]`` and a bool ``[N]`` that is true where the clip cuts the gradient: above the
        upper bound with a positive advantage, below the lower bound with a negative advantage.

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
    the advantage is positive and ``tau_neg`` otherwise. The gradient is the gradient of :math:`-r
    A` times the factor :math:`4 p (1 - p)` with :math:`p = \sigma(\tau (r - 1))`. The factor is 1
    at ratio one and falls on both sides, faster for a larger :math:`\tau`. (The *value* of the gate
    has no maximum at ratio one; its value there is :math:`2 / \tau`.)

    Args:
        log_ratio: ``[N]``, log of current over sampling probability, nats.
        advantage: ``[N]``.
        tau_pos: temperature of tokens with a positive advantage, above 0.
        tau_neg: temperature of the other tokens, above 0.

    Returns:
        The loss ``[N]``. Nothing is clipped.

    Example:
        >>> sapo(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0]))
        tensor([-2.0000, -3.3916])
    """
    tau = torch.full_like(log_ratio, tau_neg).masked_fill(advantage > 0, tau_pos)
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    return -4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * advantage


def gspo(
    log_ratio_N: Tensor,
    advantage_N: Tensor,
    row_N: Tensor,
    num_rows: int,
    low: float = 3e-4,
    high: float = 4e-4,
    level: ratios.Level = "geometric",
) -> tuple[Tensor, Tensor]:
    r"""Group sequence policy optimisation, :math:`-\min(s A, \mathrm{clip}(s, 1 - l, 1 + h) A)`.

    arXiv:2507.18071 equation 5, with the length-normalised ratio of equation 7,
    :math:`s = \exp(\frac{1}{n} \sum_t \log r_t)`. Every token has the same share in the gradient
    of its sequence. The advantages of a sequence may differ between its tokens (for example an
    outcome plus a distillation term). Then each token has :math:`\min(s A_t, \mathrm{clip}(s)
    A_t)`, and the gradient of the sequence is the gradient of their mean. ``gspo_token`` gives
    each token its own gradient.

    Args:
        log_ratio_N: ``[N]``, log of current over sampling probability, nats.
        advantage_N: ``[N]``.
        row_N: int64 ``[N]``, the sequence of each token.
        num_rows: ``S``.
        low: ``l``, in [0, 1).
        high: ``h``, at least 0.
        level: ``"geometric"``, the paper's ratio; ``"sequence"``, the product of the token ratios,
            which is the ratio of whole sequences and is not normalised by their length.

    Returns:
        The loss ``[N]`` and a bool ``[N]`` that is true where the clip cuts the gradient.

    Example:
        >>> log_ratio, row = torch.tensor([0.3, -0.1, 0.0]), torch.tensor([0, 0, 1])
        >>> gspo(log_ratio, torch.ones(3), row, 2, 0.2, 0.2)
        (tensor([-1.1052, -1.1052, -1.0000]), tensor([False, False, False]))
    """
    log_ratio = ratios.level_log_ratio(log_ratio_N.double(), row_N, num_rows, level)
    loss, clipped = ppo_clip(log_ratio, advantage_N, low, high)
    return loss.to(torch.promote_types(log_ratio_N.dtype, advantage_N.dtype)), clipped


def gspo_token(
    log_ratio_N: Tensor,
    advantage_N: Tensor,
    row_N: Tensor,
    num_rows: int,
    low: float = 3e-4,
    high: float = 4e-4,
    level: ratios.Level = "geometric",
) -> tuple[Tensor, Tensor]:
    r"""GSPO's token variant: the sequence's ratio in value, the token's own gradient.

    arXiv:2507.18071 equations 13 and 14,
    :math:`s_t = \mathrm{sg}[s] \, \pi_t / \mathrm{sg}[\pi_t]`. With one advantage per sequence,
    value, clip and gradient equal those of ``gspo``. With an advantage per token, each token
    uses its own advantage.

    Args:
        log_ratio_N: ``[N]``, log of current over sampling probability, nats.
        advantage_N: ``[N]``.
        row_N: int64 ``[N]``, the sequence of each token.
        num_rows: ``S``.
        low: ``l``, in [0, 1).
        high: ``h``, at least 0.
        level: ``"geometric"``, the paper's ratio; ``"sequence"``, the product of the token ratios,
            which is the ratio of whole sequences and is not normalised by their length.

    Returns:
        The loss ``[N]`` and a bool ``[N]`` that is true where the clip cuts the gradient.

    Example:
        >>> log_ratio, row = torch.tensor([0.3, -0.1], requires_grad=True), torch.tensor([0, 0])
        >>> loss, _ = gspo_token(log_ratio, torch.tensor([1.0, 0.0]), row, 1, 0.2, 0.2)
        >>> torch.autograd.grad(loss.sum(), log_ratio)
        (tensor([-1.1052, -0.0000]),)
    """
    log_ratio = ratios.level_log_ratio(log_ratio_N.detach().double(), row_N, num_rows, level)
    log_ratio = log_ratio + (log_ratio_N - log_ratio_N.detach())
    loss, clipped = ppo_clip(log_ratio, advantage_N, low, high)
    return loss.to(torch.promote_types(log_ratio_N.dtype, advantage_N.dtype)), clipped


def gmpo(
    log_ratio_N: Tensor,
    advantage_N: Tensor,
    row_N: Tensor,
    num_rows: int,
    low: float = 0.4,
    high: float = 0.4,
) -> tuple[Tensor, Tensor]:
    r"""Geometric-mean policy optimisation: a geometric mean over the clipped tokens of a row.

    arXiv:2507.20673, the objective with token-level clipping in section 3,

    .. math:: -\mathrm{sgn}(A) \Bigl(\prod_t \bigl| \min(r_t A,
        \mathrm{clip}(r_t, e^{-l}, e^{h}) A) \bigr|\Bigr)^{1/n}.

    With one advantage per sequence this is :math:`-A \exp(\frac{1}{n} \sum_t c_t)`, where
    :math:`c_t = \min(\log r_t, h)` for a positive advantage and :math:`\max(\log r_t, -l)` for a
    negative advantage: each bound acts on one sign. A clipped token adds nothing to the gradient;
    the other tokens share the gradient of the sequence.

    The bounds are in log space (the paper's range is :math:`e^{-0.4}` to :math:`e^{0.4}`). Ludic's
    code uses ``high`` for both signs; this is ``low=high`` in this function. TRL's code follows the
    paper. The paper has one advantage per sequence. If the tokens of a sequence have different
    advantages, each token is clipped by the sign of its own advantage, and weighted by its own
    advantage.

    Args:
        log_ratio_N: ``[N]``, log of current over sampling probability, nats.
        advantage_N: ``[N]``.
        row_N: int64 ``[N]``, the sequence of each token.
        num_rows: ``S``.
        low: ``l``, nats, at least 0.
        high: ``h``, nats, at least 0.

    Returns:
        The loss ``[N]`` and a bool ``[N]`` that is true where a bound cuts the token's gradient.

    Example:
        >>> log_ratio, row = torch.tensor([1.0, -0.2, -1.0]), torch.tensor([0, 0, 1])
        >>> gmpo(log_ratio, torch.tensor([1.0, 1.0, -1.0]), row, 2)
        (tensor([-1.1052, -1.1052,  0.6703]), tensor([ True, False,  True]))
    """
    capped = torch.where(advantage_N > 0, log_ratio_N.clamp(max=high), log_ratio_N)
    bounded = torch.where(advantage_N < 0, capped.clamp(min=-low), capped)
    clipped = (bounded != log_ratio_N).detach()
    mean = ratios.geometric_log_ratio(bounded.double(), row_N, num_rows).clamp(max=MAX_LOG_RATIO)
    loss = -mean.exp()[row_N] * advantage_N
    return loss.to(torch.promote_types(log_ratio_N.dtype, advantage_N.dtype)), clipped


def reinforce(log_probs: Tensor, advantage: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""The score-function loss :math:`-w A \log \pi`, whose gradient is the policy gradient.

    Args:
        log_probs: ``[N]``, nats, with gradients.
        advantage: ``[N]``, a constant.
        weights: ``[N]`` importance weights, constants; 1 when ``None``.
            :func:`~torchrl_llm.functional.truncated_weights` computes weights of tokens,
            :func:`sequence_weights` weights of sequences.

    Returns:
        ``[N]``. Only its gradient is meaningful, not its value.

    Example:
        >>> reinforce(torch.tensor([-1.0, -2.0]), torch.tensor([1.0, -0.5]))
        tensor([ 1., -1.])
    """
    weight = advantage.detach() if weights is None else (advantage * weights).detach()
    return -weight * log_probs


def sequence_weights(
    log_ratio_N: Tensor, row_N: Tensor, num_rows: int, maximum: float = math.inf
) -> Tensor:
    r"""Compute the weight of each token's sequence, :math:`\min(\prod_t r_t, c)`, a constant.

    The product is the weight of a trajectory in REINFORCE with importance sampling. It is unbiased
    but grows exponentially with the length; ``maximum`` bounds it. Products above exp(20) count as
    exp(20).

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
    # The exponent stays float64: for a sum near 20, float32 would leave the ratio only six digits.
    log_weights = ratios.sequence_log_ratio(log_ratio_N.detach().double(), row_N, num_rows)
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
    token keeps its gradient, unlike in PPO. The paper uses only the upper bound (``low=None``) and
    does not publish its value. Ludic uses ``high=0.2``, and 0.28 in its ScaleRL preset. TRL's
    ``epsilon_high`` is the bound itself: TRL's 5.0 equals ``high=4.0`` of this function.

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
    whole sequence, clipped to bounds that depend on the sign of its advantage. By default, good
    sequences have weight 1 as in supervised learning. Bad sequences have a weight in [0, 1] that
    falls as they become unlikely, so no KL term is needed. The paper's sum over the log-probs of a
    trajectory and mean over trajectories is ``aggregate(..., "sequence_sum")``.

    Args:
        log_probs_N: ``[N]``, nats, with gradients.
        log_ratio_N: ``[N]``, log of current over sampling probability, nats.
        advantage_N: ``[N]``, a constant: the reward, or the reward minus a baseline.
        row_N: int64 ``[N]``, the sequence of each token.
        num_rows: ``S``.
        positive: bounds ``(a, b)`` where the advantage is at least 0.
        negative: bounds ``(a, b)`` where the advantage is negative.

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


def policy_gradient_loss(
    log_probs_BT: Tensor,
    advantages_B: Tensor,
    mask_BT: Tensor,
    *,
    normalize_by_tokens: bool = False,
) -> Tensor:
    r"""REINFORCE with a baseline, :math:`-\frac1B \sum_i A_i \sum_t m_{it} \log \pi(y_{it})`.

    This is the update of GRPO (arXiv:2402.03300, equation 3) on fresh rollouts, where all ratios
    are one. Like Dr. GRPO (arXiv:2503.20783, section 3.2), it does not divide by the length.

    Args:
        log_probs_BT: ``[B, T]``, log p(y_t | y_<t) in nats, with gradients; values outside the mask
            are ignored, even NaN.
        advantages_B: ``[B]``, constants.
        mask_BT: bool ``[B, T]``, the tokens that the policy sampled.
        normalize_by_tokens: average over a rollout's tokens instead of summing, as picoRL's code
            does; tokens of long answers then have less weight.

    Returns:
        A scalar. Rollouts without sampled tokens add nothing to the sum but count in ``B``.

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
