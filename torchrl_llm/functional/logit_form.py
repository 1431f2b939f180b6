"""The transformation of a head's logits before the softmax: a factor and a soft cap."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LogitForm(NamedTuple):
    r"""How a model's head forms its logits: :math:`z = c \tanh(s x / c)`, or only :math:`s x`.

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
        """Whether there is a cap."""
        return self.softcap is not None

    def squash(self, logits: Tensor) -> Tensor:
        """Apply the cap to scaled logits.

        Args:
            logits: scaled logits, any shape.
        """
        return torch.tanh(logits / self.softcap) * self.softcap if self.squashes else logits

    def squash_(self, logits: Tensor) -> Tensor:
        """Apply the cap in place, without a gradient.

        Args:
            logits: scaled logits, any shape.
        """
        return logits.div_(self.softcap).tanh_().mul_(self.softcap) if self.squashes else logits

    def slope(self, squashed: Tensor) -> Tensor:
        """Return the derivative of the cap.

        Args:
            squashed: output of :meth:`squash`.
        """
        return 1.0 - (squashed / self.softcap).square_()
