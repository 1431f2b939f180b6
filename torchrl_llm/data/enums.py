"""The small integer codes that are stored with tokens and rows.

The codes are ``IntEnum`` members, so that a tensor of codes can be compared with them directly:
``trace.source == Source.SAMPLED``.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

__all__ = ["FinishReason", "MaskReason", "Source", "TruncationReason"]


class _Code(IntEnum):
    """An ``IntEnum`` that is pickled by its value, also in Python 3.11.0 to 3.11.3.

    These versions pickle ``getattr(class, name)`` by default, which the readers of checkpoints and
    of packed rows reject.
    """

    def __reduce_ex__(self, protocol: object) -> tuple[type[IntEnum], tuple[int]]:
        return type(self), (self.value,)


class Source(_Code):
    """Where a token came from (stored as int8)."""

    TEMPLATE = 0
    """Written by the chat template (headers, inserted end-of-turn tokens, generation prompt)."""
    PROMPT = 1
    """Content of a message that was not sampled (system, user, demonstration)."""
    TOOL = 2
    """Content of a tool result."""
    SAMPLED = 3
    """Sampled by the policy in some turn; the only tokens with a log-prob."""
    FORCED = 4
    """Written into the model's turn without sampling (a prefill)."""


class MaskReason(_Code):
    """Why a token is not part of the loss (stored as int8); 0 means that it is part of it."""

    TRAINED = 0
    NOT_SAMPLED = 1
    TRUNCATED = 2
    STALE = 3
    FILTERED = 4
    INVALID = 5
    OFF_SUPPORT = 6
    OVERLONG = 7


class FinishReason(_Code):
    """How a response ended (stored as int8)."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    TOOL_CALLS = 3

    @property
    def whole(self) -> bool:
        """Whether the model itself ended the response."""
        return self in (FinishReason.STOP, FinishReason.TOOL_CALLS)

    @property
    def cut(self) -> bool:
        """Whether the response reached its token limit before the model ended it."""
        return self is FinishReason.LENGTH

    @classmethod
    def cut_rows(cls, codes: Tensor) -> Tensor:
        """Return which responses were cut.

        Args:
            codes: integer codes of any shape.

        Returns:
            bool, of the same shape.
        """
        return torch.stack([codes == each for each in cls if each.cut]).any(0)


class TruncationReason(_Code):
    """Why an environment cut an episode (stored as int8)."""

    NONE = -1
    MAX_STEPS = 0
    ENV = 1
    MAX_SEQ_LEN = 2
