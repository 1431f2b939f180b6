"""Credit: from rewards to advantages, as inverse transforms of a replay buffer."""

from __future__ import annotations

from torchrl_llm.objectives.credit.base import CreditAssigner
from torchrl_llm.objectives.credit.group import MCAdvantage

__all__ = ["CreditAssigner", "MCAdvantage"]
