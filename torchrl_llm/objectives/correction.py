r"""Corrects a loss when the sampler differs from the trained policy.

There are three policies: the sampler :math:`\mu`, whose log-probs are stored in the rows; the
proximal policy :math:`\pi_\mathrm{prox}`, which is the trainer's policy before the update; and the
current policy. With a correction, the ratio of the loss is current over *proximal* probability. The
loss of each token is multiplied by a bounded weight :math:`w = \pi_\mathrm{prox} / \mu`, which is a
constant for autograd. Without a correction, the ratio is current over sampled probability.

:mod:`torchrl_llm.functional.ratios` computes the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from torch import Tensor

from torchrl_llm import functional as F
from torchrl_llm._checked import Pair, checked
from torchrl_llm.errors import ConfigError

_BOUNDS = {"tis": (0.0, 2.0), "mis": (0.0, 2.0), "icepop": (0.5, 5.0)}


@checked
@dataclass(frozen=True, kw_only=True)
class Correction:
    r"""Importance weights that correct for the mismatch between sampler and trainer.

    Tokens of weight 0 still count in the denominators of the averages, because these must be known
    before the forward. IcePop's paper and TRL do the same; slime leaves such tokens out.
    Divergences are not weighted.

    Defaults of the bounds: (0, 2) for ``"tis"`` and ``"mis"``, as in verl and ms-swift; (0.5, 5)
    for ``"icepop"``, as in its paper. TRL's default is ``type="mis", level="sequence", bounds=(0,
    3)``.

    Attributes:
        type: ``"none"``: no weight; only the denominator of the ratio changes. ``"tis"``, truncated
            importance sampling: ``w`` clamped to the bounds. ``"mis"``, masked importance sampling:
            ``w`` inside the bounds, 0 outside. ``"icepop"``: like ``"mis"``, per token, with a
            lower and an upper bound (arXiv:2510.18855).
        level: how ``w`` is computed from ratios: ``"token"``, the ratio of the token;
            ``"sequence"``, the product of the ratios of its row; ``"geometric"``, the geometric
            mean of the ratios of its row.
        bounds: ``(low, high)`` of ``w``.
        sequence_bounds: rows whose geometric mean ratio is outside these bounds get weight 0, for
            every type. This mask of sequences does not depend on their length.
        proximal: ``"stored"``: the log-probs under ``("prox_log_probs", "full")``; ``"current"``:
            the log-probs of the current policy, detached. ``"current"`` is correct only for the
            first update on a batch, when both policies are equal.

    Raises:
        ConfigError: for settings that are unknown, invalid or without effect.

    Example:
        >>> import torch
        >>> correction = Correction(type="tis")
        >>> correction.weights(torch.tensor([0.0, 3.0]), torch.tensor([0, 0]), 1)
        tensor([1., 2.])
    """

    type: Literal["none", "tis", "mis", "icepop"] = "none"
    level: Literal["token", "sequence", "geometric"] = "token"
    bounds: Annotated[tuple[float, float], Pair("[0, inf]")] | None = None
    sequence_bounds: Annotated[tuple[float, float], Pair("[0, inf]")] | None = None
    proximal: Literal["stored", "current"] = "stored"

    def __post_init__(self) -> None:
        if self.type in ("none", "icepop") and self.level != "token":
            raise ConfigError(f"level={self.level!r} has no meaning for type={self.type!r}")
        if self.type == "none" and self.bounds is not None:
            raise ConfigError("bounds have no effect with type='none'")
        if self.bounds is None and self.type != "none":
            object.__setattr__(self, "bounds", _BOUNDS[self.type])
        for name in ("bounds", "sequence_bounds"):
            if (pair := getattr(self, name)) is not None:
                object.__setattr__(self, name, tuple(map(float, pair)))

    def weights(self, log_ratio_N: Tensor, row_N: Tensor, num_rows: int) -> Tensor:
        """Return the weight of each token.

        Args:
            log_ratio_N: ``[N]``, proximal minus sampled log-prob, nats.
            row_N: int64 ``[N]``, the row of each token.
            num_rows: number of rows.

        Returns:
            ``[N]``, without gradient.
        """
        log_ratio_N = log_ratio_N.detach()
        weights = log_ratio_N.new_ones(log_ratio_N.shape)
        if self.type != "none":
            of_level = F.level_log_ratio(log_ratio_N, row_N, num_rows, self.level)
            if self.type == "tis":
                weights = F.truncated_weights(of_level, self.bounds[1], self.bounds[0])
            else:
                weights = F.masked_weights(of_level, *self.bounds)
        if self.sequence_bounds is not None:
            kept = F.sequence_mask(log_ratio_N, row_N, num_rows, *self.sequence_bounds)
            weights = weights * kept
        return weights
