"""Measures how well a model predicts the answers of held-out demonstrations.

To evaluate the model's own answers, use :func:`torchrl_llm.evaluation.evaluate`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchrl_llm._run_log import rounded_repr
from torchrl_llm.data.demonstrations import Demonstration
from torchrl_llm.data.row_transform import pieces_under_budget
from torchrl_llm.data.scoring import ScoreExtras, TokenScorer
from torchrl_llm.errors import DataError


@dataclass(frozen=True, kw_only=True)
class HeldOutLoss:
    """How well a model predicts the trained tokens, averaged over all trained tokens.

    Attributes:
        loss: cross-entropy, nats per token.
        token_accuracy: share of tokens that are the model's most likely token.
        num_tokens: number of tokens.
    """

    loss: float
    token_accuracy: float
    num_tokens: int

    @property
    def perplexity(self) -> float:
        """``exp(loss)``; infinite on overflow."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    __repr__ = rounded_repr

    def metrics(self) -> dict[str, float]:
        """Return the numbers, named ``eval/...``."""
        names = ("loss", "perplexity", "token_accuracy")
        return {f"eval/{name}": getattr(self, name) for name in names}


@torch.no_grad()
def held_out_loss(
    scorer: TokenScorer, rows: Sequence[Demonstration], *, token_budget: int | None = None
) -> HeldOutLoss:
    """Compute the loss of demonstrations.

    Args:
        scorer: scorer, for example a policy; it runs without dropout.
        rows: rows; rows without trained tokens do not count.
        token_budget: tokens per forward, including padding; the result does not depend on it.

    Raises:
        DataError: when no token counts.

    Example:
        >>> from torchrl_llm.data.scoring import TokenScores
        >>> class Coin(TokenScorer):
        ...     def token_scores(self, sequences, select, **_):
        ...         count = sum(int(mask.sum()) for mask in select)
        ...         return TokenScores(torch.full((count,), 0.5).log(), greedy=torch.ones(count))
        >>> row = Demonstration(torch.tensor([1, 2]), torch.tensor([False, True]), False)
        >>> round(held_out_loss(Coin(), [row]).perplexity, 6)
        2.0
    """
    rows = sorted((r for r in rows if bool(r.learned.any())), key=lambda r: len(r.token_ids))
    if not rows:
        raise DataError("none of the held-out rows has a token to predict")
    total, right, count = 0.0, 0, 0
    lengths = [len(row.token_ids) for row in rows]
    for piece in pieces_under_budget(range(len(rows)), lengths, token_budget):
        chosen = [rows[index] for index in piece]
        scores = scorer.token_scores(
            [row.token_ids for row in chosen],
            [row.learned for row in chosen],
            extras=ScoreExtras(greedy=True),
        )
        total -= float(scores.log_probs.double().sum())
        right += int(scores.greedy.sum())
        count += scores.log_probs.shape[0]
    return HeldOutLoss(loss=total / count, token_accuracy=right / count, num_tokens=count)
