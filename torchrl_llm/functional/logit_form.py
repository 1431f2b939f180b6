"""What a head does to its logits before the softmax: a factor, and a squash between two bounds."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LogitForm(NamedTuple):
    r"""Logits as a model's head forms them: :math:`z = c \tanh(s x / c)`, or :math:`s x` alone.

    Attributes:
        scale: the factor ``s`` on the logits.
        softcap: the cap ``c`` of the scaled logits, or ``None``.

    Example:
        >>> form = LogitForm(softcap=2.0)
        >>> capped = form.squash(torch.tensor([0.0, 100.0]))
        >>> capped, form.slope(capped)
        (tensor([0., 2.]), tensor([1., 0.]))
    """

    scale: float = 1.0
    softcap: float | None = None

    @property
    def squashes(self) -> bool:
        """Whether there is more to it than the factor."""
        return self.softcap is not None

    def squash(self, logits: Tensor) -> Tensor:
        """Scaled logits between the bounds.

        Args:
            logits: scaled, of any shape.
        """
        return torch.tanh(logits / self.softcap) * self.softcap if self.squashes else logits

    def squash_(self, logits: Tensor) -> Tensor:
        """The same in place, without a gradient.

        Args:
            logits: scaled, of any shape.
        """
        return logits.div_(self.softcap).tanh_().mul_(self.softcap) if self.squashes else logits

    def slope(self, squashed: Tensor) -> Tensor:
        """Derivative of the squash.

        Args:
            squashed: what it has returned.
        """
        return 1.0 - (squashed / self.softcap).square_()
