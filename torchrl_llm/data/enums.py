"""The small integer codes that travel with tokens and rows.

They are ``IntEnum`` members so that a tensor of codes can be compared with them directly:
``trace.source == Source.SAMPLED``.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = ["FinishReason", "MaskReason", "Source", "TruncationReason"]


class Source(IntEnum):
    """Where a token came from (stored as int8)."""

    TEMPLATE = 0
    """Written by the chat template: headers, inserted end-of-turn tokens, generation prompt."""
    PROMPT = 1
    """Content of a message that was not sampled: system, user, demonstration."""
    TOOL = 2
    """Content of a tool result."""
    SAMPLED = 3
    """Sampled by the policy in some turn; the only tokens with a log-prob."""
    FORCED = 4
    """Put into the model's turn without sampling (a prefill)."""


class MaskReason(IntEnum):
    """Why a token takes no part in the loss (stored as int8); 0 means that it does."""

    TRAINED = 0
    NOT_SAMPLED = 1
    TRUNCATED = 2
    STALE = 3
    FILTERED = 4
    INVALID = 5
    OFF_SUPPORT = 6
    OVERLONG = 7


class FinishReason(IntEnum):
    """How a response ended (stored as int8)."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    TOOL_CALLS = 3


class TruncationReason(IntEnum):
    """Why an environment cut an episode (stored as int8)."""

    NONE = -1
    MAX_STEPS = 0
    ENV = 1
    MAX_SEQ_LEN = 2
