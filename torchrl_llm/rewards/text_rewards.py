"""Rewards that compare a response with the answer as texts: equal, or contained."""

from __future__ import annotations

from typing import Any

from torchrl_llm._registry import register
from torchrl_llm.rewards.reward_parser import RewardParser


@register("rewards", "exact")
class ExactReward(RewardParser):
    """1.0 for a response that is the answer, but for case and the white space around it; else 0.0.

    Example:
        >>> reward = ExactReward()
        >>> reward.score(" paris ", "Paris"), reward.score("It is Paris.", "Paris")
        (1.0, 0.0)
    """

    needs_answer = True

    def score(self, response: str, answer: Any) -> float:
        """See :class:`ExactReward`."""
        return float(_plain(response) == _plain(answer))


@register("rewards", "contains")
class ContainsReward(RewardParser):
    """1.0 for a response in which the answer stands as words of its own, in any case; else 0.0.

    Example:
        >>> reward = ContainsReward()
        >>> reward.score("It is Paris.", "paris"), reward.score("Parisian", "Paris")
        (1.0, 0.0)
    """

    needs_answer = True

    def score(self, response: str, answer: Any) -> float:
        """See :class:`ContainsReward`; an empty answer is contained in nothing."""
        text, wanted = _plain(response), _plain(answer)
        start = text.find(wanted) if wanted else -1
        while start >= 0:
            end = start + len(wanted)
            around = text[max(0, start - 1) : start] + text[end : end + 1]
            if not any(sign.isalnum() for sign in around):
                return 1.0
            start = text.find(wanted, start + 1)
        return 0.0


def _plain(text: Any) -> str:
    return str(text).strip().casefold()
