"""Rewards that compare response and answer as texts: equality or containment."""

from __future__ import annotations

import re
from datetime import datetime, time
from decimal import Decimal
from typing import Any

from torchrl_llm._registry import register
from torchrl_llm.errors import RewardError
from torchrl_llm.rewards.reward_parser import RewardParser


@register("rewards", "exact")
class ExactReward(RewardParser):
    """Reward 1.0 if the response equals the answer, up to case and outer white space; else 0.0.

    Example:
        >>> reward = ExactReward()
        >>> reward.score(" paris ", "Paris"), reward.score("It is Paris.", "Paris")
        (1.0, 0.0)
    """

    needs_answer = True

    def score(self, response: str, answer: Any) -> float:
        """See :class:`ExactReward`; no response equals a missing answer.

        Raises:
            RewardError: when the answer is not a text, a number or a date.
        """
        return float(answer is not None and _plain(response) in _spellings(answer))


@register("rewards", "contains")
class ContainsReward(RewardParser):
    """Reward 1.0 if the response contains the answer as whole words, in any case; else 0.0.

    A number must match as a whole: 5 is not contained in ``3.5``, ``-5`` or ``1,500``.

    Example:
        >>> reward = ContainsReward()
        >>> reward.score("It is Paris.", "paris"), reward.score("Parisian", "Paris")
        (1.0, 0.0)
    """

    needs_answer = True

    def score(self, response: str, answer: Any) -> float:
        """See :class:`ContainsReward`; no response contains an empty or missing answer.

        Raises:
            RewardError: when the answer is not a text, a number or a date.
        """
        text = _plain(response)
        return float(any(_stands_in(text, wanted) for wanted in _spellings(answer)))


def _stands_in(text: str, wanted: str) -> bool:
    start = text.find(wanted) if wanted else -1
    while start >= 0:
        end = start + len(wanted)
        around = text[max(0, start - 1) : start] + text[end : end + 1]
        is_word = not any(sign.isalnum() for sign in around)
        begins = wanted[0].isdigit() and _NUMBER_BEFORE.search(text[max(0, start - 2) : start])
        if is_word and not begins and not _NUMBER_BEHIND.match(wanted[-1] + text[end:]):
            return True
        start = text.find(wanted, start + 1)
    return False


# Text that makes a number a part of a longer number: 3[.5], 1[,500] and [-]5; but not [x-]5 or
# 46[.0].
_NUMBER_BEFORE = re.compile(r"\d,\Z|\.\Z|(?<![\w)])[-−]\Z")
_NUMBER_BEHIND = re.compile(r"\d(?:,\d|\.\d*[1-9])")


def _plain(text: Any) -> str:
    return str(text).strip().casefold()


def _spellings(answer: Any) -> set[str]:
    """Return possible spellings of a table cell: 46.0 as 46, 1.50 as 1.5, midnight as a day."""
    if isinstance(answer, (list, tuple, set, dict, bytes)):
        raise RewardError(
            f"the answer of the row must be a text, a number or a date, got {answer!r:.200}; a "
            "reward of (response, answer) may read others"
        )
    short = answer = "" if answer is None else answer
    if isinstance(answer, float) and answer.is_integer():
        short = int(answer)  # in a column with fractional values, for example 0.5
    elif isinstance(answer, Decimal):
        short = f"{answer.normalize():f}"
    elif isinstance(answer, datetime) and answer.time() == time.min:
        short = answer.date()
    return {_plain(answer), _plain(short)}
