r"""Correction of a loss for a sampler that is not the policy being trained.

Three policies take part: the sampler :math:`\mu`, whose log-probs come with the rows; the proximal
policy :math:`\pi_\mathrm{prox}`, the trainer's own before the update; and the current one. With a
correction the loss's ratio is current over *proximal*, and each token's loss is multiplied by a
bounded weight :math:`w = \pi_\mathrm{prox} / \mu`, a constant for autograd. Without one the ratio
is current over sampled.

The weights are those of :mod:`torchrl_llm.functional.ratios`.
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
    r"""Importance weights of the sampler's mismatch.

    Tokens of weight 0 still count in the denominators of the averages, which have to be known
    before the forward; so do they in IcePop's paper and in TRL, while slime leaves them out.
    Divergences are not weighted.

    Defaults of the bounds: ``"tis"`` and ``"mis"`` (0, 2), as verl and ms-swift have it;
    ``"icepop"`` (0.5, 5), its paper's. TRL's default is ``type="mis", level="sequence",
    bounds=(0, 3)``.

    Attributes:
        type: ``"none"``: no weight, only the ratio's denominator changes. ``"tis"``, truncated
            importance sampling: ``w`` clamped to the bounds. ``"mis"``, masked importance
            sampling: ``w`` where it is inside the bounds, 0 elsewhere. ``"icepop"``: the same per
            token with two bounds, arXiv:2510.18855.
        level: whose ratio ``w`` is: ``"token"``, its own; ``"sequence"``, the product over its
            row; ``"geometric"``, the geometric mean over its row.
        bounds: ``(low, high)`` of ``w``.
        sequence_bounds: rows whose geometric mean ratio is outside have weight 0, whatever the
            type; a length-invariant mask of sequences.
        proximal: ``"stored"``: the log-probs under ``("prox_log_probs", "full")``; ``"current"``:
            the current policy's own, detached. The latter is right for the first update on a
            batch, where the two are the same.

    Raises:
        ConfigError: for settings that are unknown, impossible or without effect.

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
        """Weight of each token.

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
