"""Surrogates with one ratio for a whole sequence: GSPO, its token variant, and GMPO.

Each token is given the value of its sequence, so that a mean over the tokens of a sequence is that
value, and ``aggregate(..., "sequence_mean")`` is the papers' mean over sequences.

A sequence's ratio and the gradient that its tokens share are sums over all of its tokens. They are
computed in float64, one number a token, and the loss has the dtype of what is given: gradients of
rows of 100,000 tokens are those of float64 to one part in a million.

Shape legend: ``N`` tokens, ``S`` sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_llm.functional.corrections import Level, level_log_ratio
from torchrl_llm.functional.ratios import geometric_log_ratio
from torchrl_llm.functional.surrogates.clipped import MAX_LOG_RATIO, ppo_clip


def gspo(
    log_ratio_N: Tensor,
    advantage_N: Tensor,
    row_N: Tensor,
    num_rows: int,
    low: float = 3e-4,
    high: float = 4e-4,
    level: Level = "geometric",
) -> tuple[Tensor, Tensor]:
    r"""Group sequence policy optimisation, :math:`-\min(s A, \mathrm{clip}(s, 1 - l, 1 + h) A)`.

    arXiv:2507.18071 equation 5, with the length-normalised ratio of equation 7,
    :math:`s = \exp(\frac{1}{n} \sum_t \log r_t)`. Every token has the same share in the gradient
    of its sequence. Where the advantages of a sequence differ between its tokens (a distillation
    term on top of an outcome, say) each token has :math:`\min(s A_t, \mathrm{clip}(s) A_t)`, and
    the gradient of the sequence is that of their mean; :func:`gspo_token` keeps them apart.

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
    log_ratio = level_log_ratio(log_ratio_N.double(), row_N, num_rows, level)
    loss, clipped = ppo_clip(log_ratio, advantage_N, low, high)
    return loss.to(torch.promote_types(log_ratio_N.dtype, advantage_N.dtype)), clipped


def gspo_token(
    log_ratio_N: Tensor,
    advantage_N: Tensor,
    row_N: Tensor,
    num_rows: int,
    low: float = 3e-4,
    high: float = 4e-4,
    level: Level = "geometric",
) -> tuple[Tensor, Tensor]:
    r"""GSPO's token variant: the sequence's ratio in value, the token's own gradient.

    arXiv:2507.18071 equations 13 and 14,
    :math:`s_t = \mathrm{sg}[s] \, \pi_t / \mathrm{sg}[\pi_t]`. With one advantage a sequence its
    value, clip and gradient are those of :func:`gspo`; with an advantage a token, each token is
    moved by its own.

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
    log_ratio = level_log_ratio(log_ratio_N.detach().double(), row_N, num_rows, level)
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
    r"""Geometric-mean policy optimisation, the clipped objective of a row as a geometric mean.

    arXiv:2507.20673, the objective with token-level clipping in section 3,

    .. math:: -\mathrm{sgn}(A) \Bigl(\prod_t \bigl| \min(r_t A,
        \mathrm{clip}(r_t, e^{-l}, e^{h}) A) \bigr|\Bigr)^{1/n}.

    With one advantage a sequence that is :math:`-A \exp(\frac{1}{n} \sum_t c_t)`, where
    :math:`c_t = \min(\log r_t, h)` for a positive advantage and :math:`\max(\log r_t, -l)` for a
    negative one: both bounds act, each on one sign. A token that is cut adds nothing to the
    gradient; all others share that of the sequence.

    The bounds are in log space (the paper's range is :math:`e^{-0.4}` to :math:`e^{0.4}`). Ludic's
    code has ``high`` for both signs, which is ``low=high`` here; TRL's agrees with the paper. For
    advantages that differ between the tokens of a sequence, which the paper does not have, each
    token is cut by its own sign and weighs its own advantage.

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
    mean = geometric_log_ratio(bounded.double(), row_N, num_rows).clamp(max=MAX_LOG_RATIO)
    loss = -mean.exp()[row_N] * advantage_N
    return loss.to(torch.promote_types(log_ratio_N.dtype, advantage_N.dtype)), clipped
