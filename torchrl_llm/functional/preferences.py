r"""Losses that compare answers: in pairs of chosen and rejected, or one by one with a label.

The losses compare one number per answer, in nats: its log-prob, its log-ratio to a reference, its
mean log-prob per token, or its log-odds. :math:`d` is the number of the chosen answer minus the
number of the rejected answer.

Shape legend: ``P`` pairs, ``B`` answers.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

PairForm = Literal["sigmoid", "hinge", "ipo", "robust"]


def pair_loss(
    difference_P: Tensor,
    form: PairForm = "sigmoid",
    *,
    beta: float,
    label_smoothing: float = 0.0,
    target_margin: float = 0.0,
) -> Tensor:
    r"""Compute the loss of pairs, with :math:`z = \beta d - \gamma`.

    ==============  =============================================================================
    form            loss
    ==============  =============================================================================
    ``"sigmoid"``   :math:`-(1 - \epsilon) \log \sigma(z) - \epsilon \log \sigma(-z)`
                    (arXiv:2305.18290)
    ``"hinge"``     :math:`\max(0, 1 - z)` (arXiv:2305.10425)
    ``"ipo"``       :math:`(d - \frac{1}{2 \beta})^2` (arXiv:2310.12036, equation 17)
    ``"robust"``    :math:`(-(1 - \epsilon) \log \sigma(z) + \epsilon \log \sigma(-z)) /
                    (1 - 2 \epsilon)`, without bias where a share of the labels is wrong
                    (arXiv:2403.00409)
    ==============  =============================================================================

    Args:
        difference_P: ``[P]``, nats.
        form: a form in the table.
        beta: slope; larger values keep the policy closer to the reference.
        label_smoothing: :math:`\epsilon`, the share of labels that are wrong; read by ``"sigmoid"``
            and ``"robust"``.
        target_margin: :math:`\gamma`, target difference of a pair (arXiv:2405.14734).

    Returns:
        ``[P]``.

    Raises:
        ValueError: for an unknown form.

    Example:
        >>> pair_loss(torch.zeros(1), beta=0.1).exp()
        tensor([2.])
        >>> pair_loss(torch.tensor([5.0]), "ipo", beta=0.1)
        tensor([0.])
    """
    if form not in get_args(PairForm):
        raise ValueError(f"form must be one of {', '.join(get_args(PairForm))}, got {form!r}")
    if form == "ipo":
        return (difference_P - 1 / (2 * beta)) ** 2
    margin = beta * difference_P - target_margin
    if form == "hinge":
        return torch.relu(1 - margin)
    right, wrong = -logsigmoid(margin), -logsigmoid(-margin)
    if form == "robust":
        return ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)
    return (1 - label_smoothing) * right + label_smoothing * wrong


def log_odds(log_probs_B: Tensor) -> Tensor:
    r"""Return log-odds :math:`\log \frac{p}{1 - p}` of log-probs (arXiv:2403.07691, equation 4).

    Args:
        log_probs_B: ``[B]``, at most 0, nats; ORPO uses the mean per token.

    Returns:
        ``[B]``; also exact near 0, where ``log1p(-exp(x))`` loses all digits.

    Example:
        >>> log_odds(torch.tensor([0.5]).log())
        tensor([0.])
    """
    # A probability of 1 has infinite odds and no gradient.
    x = log_probs_B.clamp(max=-torch.finfo(log_probs_B.dtype).tiny)
    near = x > -math.log(2)
    small = torch.log(-torch.expm1(torch.where(near, x, torch.full_like(x, -1.0))))
    large = torch.log1p(-torch.exp(torch.where(near, torch.full_like(x, -1.0), x)))
    return x - torch.where(near, small, large)


def kto_loss(log_ratios_B: Tensor, is_good_B: Tensor, kl: Tensor, *, beta: float) -> Tensor:
    r"""Compute the unweighted loss of labelled answers (arXiv:2402.01306, equation 8).

    The loss of a good answer is :math:`1 - \sigma(\beta (r - k))`, the loss of a bad answer is
    :math:`1 - \sigma(\beta (k - r))`. :math:`k` is the divergence from the reference, at least 0,
    without gradient.

    Args:
        log_ratios_B: ``[B]``, log-prob of each answer minus its log-prob under the reference, nats.
        is_good_B: bool ``[B]``, the label.
        kl: a number, or ``[B]``: nats per answer.
        beta: slope.

    Returns:
        ``[B]``.

    Example:
        >>> kto_loss(torch.zeros(2), torch.tensor([True, False]), torch.tensor(0.0), beta=0.1)
        tensor([0.5000, 0.5000])
    """
    margin = log_ratios_B - kl.detach().clamp(min=0)
    return torch.sigmoid(torch.where(is_good_B, -beta, beta) * margin)


def bradley_terry(
    chosen_P: Tensor, rejected_P: Tensor, *, margins_P: Tensor | float = 0.0, centering: float = 0.0
) -> Tensor:
    r"""Compute the loss of pairs of scores, :math:`-\log \sigma(c - r - m) + \lambda (c + r)^2`.

    Args:
        chosen_P: ``[P]``, score of the chosen answers.
        rejected_P: ``[P]``, score of the rejected answers.
        margins_P: ``[P]``, how much better each chosen answer is (arXiv:2307.09288, section 3.2.2).
        centering: :math:`\lambda`, keeps the scores around 0 (arXiv:2312.09244).

    Returns:
        ``[P]``.

    Example:
        >>> bradley_terry(torch.ones(1), torch.ones(1)).exp()
        tensor([2.])
    """
    loss = -logsigmoid(chosen_P - rejected_P - margins_P)
    return loss + centering * (chosen_P + rejected_P) ** 2 if centering else loss


def calibration_error(margins_P: Tensor, *, num_bins: int = 10) -> Tensor:
    r"""Compute the expected calibration error of pairs of scores (arXiv:1706.04599, equation 3).

    :math:`\sigma(m)` is the probability that the chosen answer is better, so the confidence of a
    pair is :math:`\sigma(|m|)`, between 0.5 and 1. A pair is correct if :math:`m > 0`; at 0 it
    counts as half correct. Pairs are sorted into bins of equal width by their confidence; the error
    is the mean over pairs of :math:`|\mathrm{accuracy} - \mathrm{confidence}|` of their bin.

    Args:
        margins_P: ``[P]``, score of the chosen minus score of the rejected answer; at least one
            pair.
        num_bins: number of bins between 0.5 and 1.

    Returns:
        A float64 scalar.

    Example:
        >>> odds = torch.tensor([3.0, 3.0, 3.0, 1 / 3], dtype=torch.float64)
        >>> calibration_error(odds.log()).item()
        0.0
    """
    margins = margins_P.detach().double().cpu()
    confidence, right = torch.sigmoid(margins.abs()), (margins.sign() + 1) / 2
    bins = ((confidence - 0.5) * 2 * num_bins).long().clamp(max=num_bins - 1)
    gaps = torch.zeros(num_bins, dtype=torch.float64).index_add(0, bins, right - confidence)
    return gaps.abs().sum() / len(margins)
