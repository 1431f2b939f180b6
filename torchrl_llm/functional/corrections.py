r"""Weights that correct for a sampler that is not the policy being trained.

A sampler with other kernels, another precision or older weights draws from :math:`\mu` and not from
the proximal policy :math:`\pi_\mathrm{prox}` (the trainer's own, before the update). Its tokens are
reweighted by :math:`w = \pi_\mathrm{prox} / \mu`, of a token or of its sequence, and the weight is
bounded: cut (:func:`~torchrl_llm.functional.truncated_weights`) or dropped
(:func:`~torchrl_llm.functional.masked_weights`). Weights are constants for autograd.

Everything works on flat tokens: ``values_N`` with the row index of each token in ``row_N``.

Shape legend: ``N`` tokens, ``S`` sequences.
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from torchrl_llm.functional.ratios import geometric_log_ratio, sequence_log_ratio

Level = Literal["token", "sequence", "geometric"]
LEVELS: tuple[str, ...] = get_args(Level)
"""The names of the levels."""


def level_log_ratio(log_ratio_N: Tensor, row_N: Tensor, num_rows: int, level: Level) -> Tensor:
    """Log-ratio of each token at a level: its own, or the one of its sequence.

    Args:
        log_ratio_N: ``[N]``, nats.
        row_N: int64 ``[N]``, the sequence of each token.
        num_rows: ``S``.
        level: ``"token"``, as given; ``"sequence"``, the sum over the token's sequence;
            ``"geometric"``, the mean over it.

    Returns:
        ``[N]`` in the dtype given, nats. Sums over a sequence, those of the backward pass included,
        are accumulated in float64.

    Raises:
        ValueError: for an unknown level.

    Example:
        >>> import torch
        >>> log_ratio, rows = torch.tensor([0.1, 0.2, 0.5]), torch.tensor([0, 0, 1])
        >>> level_log_ratio(log_ratio, rows, 2, "sequence")
        tensor([0.3000, 0.3000, 0.5000])
    """
    if level == "token":
        return log_ratio_N
    # The backward pass of the indexing is a sum over the sequence, too.
    wide_N = log_ratio_N.double()
    if level == "sequence":
        return sequence_log_ratio(wide_N, row_N, num_rows)[row_N].to(log_ratio_N.dtype)
    if level == "geometric":
        return geometric_log_ratio(wide_N, row_N, num_rows)[row_N].to(log_ratio_N.dtype)
    raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {level!r}")


def sequence_mask(
    log_ratio_N: Tensor, row_N: Tensor, num_rows: int, minimum: float, maximum: float
) -> Tensor:
    """Tokens of the sequences whose geometric mean ratio is inside the bounds.

    Args:
        log_ratio_N: ``[N]``, nats.
        row_N: int64 ``[N]``, the sequence of each token.
        num_rows: ``S``.
        minimum: smallest geometric mean of the ratios of a sequence that is kept.
        maximum: largest.

    Returns:
        bool ``[N]``.

    Example:
        >>> import torch
        >>> log_ratio, rows = torch.tensor([0.1, -0.1, 0.9]), torch.tensor([0, 0, 1])
        >>> sequence_mask(log_ratio, rows, 2, 0.5, 2.0)
        tensor([ True,  True, False])
    """
    ratio = level_log_ratio(log_ratio_N, row_N, num_rows, "geometric").detach().exp()
    return (ratio >= minimum) & (ratio <= maximum)
