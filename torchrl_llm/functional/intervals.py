"""Confidence intervals for evaluations: Wilson's, and the bootstrap over prompts.

Shape legend: ``P`` prompts, ``S`` resamples.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# Number of indices drawn at a time, so that ten thousand prompts do not need a gigabyte.
_DRAWN_AT_ONCE = 1 << 21


class Interval(NamedTuple):
    """Both ends of a confidence interval, float64.

    Attributes:
        low: the lower end.
        high: the upper end.
    """

    low: Tensor
    high: Tensor


def wilson_interval(num_right: Tensor, num_trials: Tensor, *, level: float = 0.95) -> Interval:
    """Compute Wilson's interval of a proportion (Wilson 1927, J. Am. Stat. Assoc. 22, p. 209).

    ``(p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)`` with ``p = c / n``. The
    interval is within 0 and 1, and its width is above 0 even if no trial or every trial is right.

    Args:
        num_right: ``c``, any shape.
        num_trials: ``n`` independent trials, the same shape; with ``n = 0`` the interval is 0 to 1.
        level: share of such intervals that contain the true proportion.

    Returns:
        The interval, of the same shape.

    Raises:
        ValueError: for impossible counts or an impossible level.

    Example:
        >>> low, high = wilson_interval(torch.tensor(0), torch.tensor(10))
        >>> low.item(), round(high.item(), 4)
        (0.0, 0.2775)
    """
    _check_level(level)
    if not bool(((num_right >= 0) & (num_right <= num_trials)).all()):
        raise ValueError(
            f"expected 0 <= num_right <= num_trials, got {num_right.tolist()} of "
            f"{num_trials.tolist()}"
        )
    z = math.sqrt(2) * float(torch.erfinv(torch.tensor(level, dtype=torch.float64)))
    c, n = num_right.double(), num_trials.double()
    wrong = n - c
    # Multiplied by n, so that n = 0 needs no case of its own.
    middle = c + z * z / 2
    half = z * (c * wrong / n.clamp_min(1) + z * z / 4).sqrt()
    scale = n + z * z
    low = torch.where(c == 0, 0.0, (middle - half) / scale)
    return Interval(low, torch.where(wrong == 0, 1.0, (middle + half) / scale))


def bootstrap_interval(
    totals_P: Tensor,
    counts_P: Tensor | None = None,
    *,
    level: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Compute a percentile bootstrap of a mean whose independent units are prompts (Efron 1979).

    Prompts are drawn with replacement, each with all its samples. Samples of one prompt are
    similar, so more samples per prompt must not make the interval narrower. The statistic is
    ``sum(totals) / sum(counts)``. The function uses its own generator, so it neither depends on the
    user's seed nor changes the user's random state.

    Args:
        totals_P: float ``[P]``, the sum of the values of each prompt, or its single value.
        counts_P: ``[P]``, number of values of each prompt; 1 by default. Resamples whose counts are
            all 0 are left out.
        level: share of such intervals that contain the true mean, for many prompts.
        num_resamples: ``S``.
        seed: seed of the generator.

    Returns:
        The interval. NaN if there is only one prompt, or if all prompts have the same value: a
        bootstrap sees no spread then, and an interval of width 0 would be wrong.

    Raises:
        ValueError: for shapes that differ, or an impossible level or number.

    Example:
        >>> low, high = bootstrap_interval(torch.tensor([0.0, 1.0] * 50))
        >>> round(low.item(), 2), round(high.item(), 2)
        (0.4, 0.6)
    """
    _check_level(level)
    counts_P = torch.ones_like(totals_P) if counts_P is None else counts_P
    if totals_P.ndim != 1 or counts_P.shape != totals_P.shape or num_resamples < 1:
        raise ValueError(
            "expected totals and counts [P] and num_resamples of at least 1, got "
            f"{list(totals_P.shape)}, {list(counts_P.shape)} and {num_resamples}"
        )
    pairs_P2 = torch.stack([totals_P, counts_P], -1).double()
    values = (pairs_P2[:, 0] / pairs_P2[:, 1])[counts_P > 0]
    if bool((values == values[:1]).all()):
        none = torch.tensor(math.nan, dtype=torch.float64)
        return Interval(none, none)
    size = len(totals_P)
    generator = torch.Generator().manual_seed(seed)
    sums = []
    for rows in torch.arange(num_resamples).split(max(1, _DRAWN_AT_ONCE // size)):
        drawn = torch.randint(size, (len(rows), size), generator=generator)
        sums.append(pairs_P2[drawn].sum(1))
    totals_S, counts_S = torch.cat(sums).unbind(-1)
    means_S = (totals_S / counts_S)[counts_S > 0]
    tail = (1 - level) / 2
    ends = torch.tensor([tail, 1 - tail], dtype=torch.float64)
    return Interval(*means_S.quantile(ends).unbind())


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level}")
