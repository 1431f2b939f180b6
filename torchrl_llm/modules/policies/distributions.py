"""Distributions over the tokens of a batch, for inspection; losses never build one.

Shape legend: ``B`` rows, ``T`` tokens, ``V`` vocabulary.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, constraints


class TokenDistribution(Categorical):
    """What each token was drawn from: index ``t`` is p(x_t | x_<t), not the model's next token.

    Args:
        logits: float ``[B, T, V]``.
        mask: bool ``[B, T]``; log-probs and entropies elsewhere are 0.0.

    Example:
        >>> dist = TokenDistribution(torch.zeros(1, 2, 4), torch.tensor([[False, True]]))
        >>> dist.log_prob(torch.tensor([[3, 3]]))
        tensor([[ 0.0000, -1.3863]])
    """

    def __init__(self, logits: Tensor, mask: Tensor) -> None:
        super().__init__(logits=logits, validate_args=False)
        self.mask = mask

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probs, float ``[B, T]`` in nats, of int64 ``[B, T]``, 0.0 outside the mask."""
        return torch.where(self.mask, super().log_prob(value), 0.0)

    def entropy(self) -> Tensor:
        """Entropies, float ``[B, T]`` in nats, 0.0 outside the mask."""
        return torch.where(self.mask, super().entropy(), 0.0)


class LogProbDistribution(Distribution):
    """Given log-probs of given tokens, where a distribution is expected.

    Args:
        log_probs: float ``[B, T]`` in nats.
        mask: bool ``[B, T]``; log-probs elsewhere are 0.0. All by default.

    Example:
        >>> LogProbDistribution(torch.tensor([[0.0, -1.5]])).log_prob()
        tensor([[ 0.0000, -1.5000]])
    """

    arg_constraints: ClassVar[dict] = {}
    support = constraints.nonnegative_integer

    def __init__(self, log_probs: Tensor, mask: Tensor | None = None) -> None:
        super().__init__(batch_shape=log_probs.shape, validate_args=False)
        self.mask = torch.ones_like(log_probs, dtype=torch.bool) if mask is None else mask
        self.log_probs = log_probs

    def log_prob(self, value: Tensor | None = None) -> Tensor:
        """The log-probs, 0.0 outside the mask.

        Args:
            value: the tokens that they belong to, int64 ``[B, T]``; only its shape is checked.

        Raises:
            ValueError: for tokens of another shape.
        """
        if value is not None and value.shape != self.log_probs.shape:
            raise ValueError(
                f"these log-probs belong to tokens of shape {tuple(self.log_probs.shape)}, got "
                f"{tuple(value.shape)}"
            )
        return torch.where(self.mask, self.log_probs, 0.0)
