"""The reward of letter counting: one number right or wrong, or the share of several.

:func:`score_counts` is the whole of it; the class puts it into an environment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from torchrl_llm.errors import RewardError
from torchrl_llm.rewards.reward_parser import RewardParser, RewardScore
from torchrl_llm.rewards.text_blocks import split_response

# int() would also take a sign, underscores and the digits of other scripts.
_NUMBER = re.compile(r"[0-9]{1,9}")


def score_counts(response: str, counts: Mapping[str, int]) -> float:
    """0 without exactly one readable answer block; else 0.1, and up to 0.9 more for what is right.

    A readable answer is a number where one letter is asked for, and an object of numbers, a letter
    each, where several are. Other letters than those that were asked for are worth nothing more.

    Args:
        response: what the model wrote.
        counts: the letters that were asked for, and how often each occurs.

    Example:
        >>> score_counts("<answer>3</answer>", {"r": 3}), score_counts("3", {"r": 3})
        (1.0, 0.0)
        >>> score_counts('<answer>{"r": 3, "s": 2}</answer>', {"r": 3, "s": 1})
        0.55
    """
    blocks = split_response(response).answer
    given = _read(blocks[0], counts) if len(blocks) == 1 else None
    if given is None:
        return 0.0
    if given.keys() != counts.keys():
        return 0.1
    right = sum(given[letter] == count for letter, count in counts.items())
    return 0.1 + 0.9 * right / len(counts)


def _read(block: str, counts: Mapping[str, int]) -> dict[str, int] | None:
    if len(counts) == 1:
        number = _NUMBER.fullmatch(block)
        return dict.fromkeys(counts, int(block)) if number else None
    try:
        given = json.loads(block)
    except (ValueError, RecursionError):
        return None
    # bool is an int in Python; in an answer it is not.
    if not isinstance(given, dict) or any(type(n) is not int or n < 0 for n in given.values()):
        return None
    return given


class LetterCountingRewardParser(RewardParser):
    """The reward of :func:`score_counts`; success is a reward of 1.

    The row's answer is a JSON object of the letters and their counts.

    Example:
        >>> LetterCountingRewardParser().score("<answer>2</answer>", '{"r": 3}').reward
        0.1
    """

    def score(self, response: str, answer: Any) -> RewardScore:
        """See :func:`score_counts`.

        Raises:
            RewardError: where the row's own answer is no such object.
        """
        try:
            counts = json.loads(answer)
            right = bool(counts) and all(type(n) is int for n in counts.values())
        except (TypeError, ValueError, AttributeError):
            right = False
        if not right:
            raise RewardError(f"the answer of the row must be a JSON object, got {answer!r}")
        parts = split_response(response)
        reward = score_counts(response, counts)
        return RewardScore(reward, reward == 1.0, bool(parts.answer), bool(parts.think))
