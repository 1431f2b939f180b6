"""What a loss asks of a model: the log-probs of given tokens, and nothing else.

Losses live above this file and models beside it, so that no loss ever names a wrapper class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

__all__ = ["TokenScorer", "TokenScores"]


class TokenScores(NamedTuple):
    """Scores of the selected tokens of a batch, flat and in row-major order.

    Attributes:
        log_probs: float32 ``[N]`` in nats, log p(x_t | x_<t) at the row's temperature.
        entropy: float32 ``[N]`` in nats, entropy of the distribution that x_t was drawn from;
            ``None`` when it was not asked for.
    """

    log_probs: Tensor
    entropy: Tensor | None = None


class TokenScorer(ABC):
    """Anything that can score given token ids, with gradients where it trains."""

    @abstractmethod
    def token_scores(
        self,
        sequences: Sequence[Tensor],
        select: Sequence[Tensor],
        *,
        temperature: float | Tensor = 1.0,
        entropy: bool = False,
    ) -> TokenScores:
        """Score selected positions of ragged sequences.

        Args:
            sequences: ``B`` int64 tensors of shape ``[T_b]``.
            select: ``B`` bool tensors of shape ``[T_b]``: the positions to score. Position 0 has no
                prefix and must not be selected.
            temperature: one value, or float32 ``[B]``, a value a row.
            entropy: also return the entropy at each selected position.

        Returns:
            The scores of the ``N`` selected positions, row after row.
        """
