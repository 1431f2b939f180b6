"""Rewards for tasks about the letters of a text: counting letters, reversing the text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from torchrl_llm.errors import ConfigError, RewardError
from torchrl_llm.rewards.answer_block import split_response
from torchrl_llm.rewards.reward_parser import RewardParser
from torchrl_llm.rewards.reward_scorer import RewardScore

# Checked because int() would also accept a sign, underscores and digits of other scripts.
_NUMBER = re.compile(r"[0-9]{1,9}")


def score_counts(response: str, counts: Mapping[str, int]) -> float:
    """Return 0 without exactly one valid answer block, else 0.1 plus up to 0.9 for correct counts.

    For one requested letter, a valid answer is a number. For several letters, it is a JSON object
    that maps letters to numbers. Additional letters add nothing.

    Args:
        response: what the model wrote.
        counts: the requested letters and their counts.

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
    # bool is an int in Python, but not a valid answer.
    if not isinstance(given, dict) or any(type(n) is not int or n < 0 for n in given.values()):
        return None
    return given


class LetterCountingRewardParser(RewardParser):
    """The reward of ``score_counts``; success is a reward of 1.

    The row's answer is a JSON object that maps letters to counts.

    Example:
        >>> LetterCountingRewardParser().score("<answer>2</answer>", '{"r": 3}').reward
        0.1
    """

    def score(self, response: str, answer: Any) -> RewardScore:
        """See ``score_counts``.

        Raises:
            RewardError: when the row's answer is not such an object.
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


def common_subsequence(first: str, second: str) -> int:
    r"""Return the length of the longest common subsequence.

    A row of the usual table is stored as the bits of one integer, so each letter needs a few
    operations on ``len(first) / 64`` words (H. Hyyrö, 2004, "Bit-parallel LCS-length computation
    revisited").

    Args:
        first: first text.
        second: second text; the run time is proportional to the product of the lengths, divided by
            64.

    Example:
        >>> common_subsequence("gnirts", "grits")
        4
    """
    places: dict[str, int] = {}
    for i, letter in enumerate(first):
        places[letter] = places.get(letter, 0) | 1 << i
    full = (1 << len(first)) - 1
    row = full
    for letter in second:
        hit = row & places.get(letter, 0)
        row = (row + hit | row - hit) & full
    return (full & ~row).bit_count()


class TextReversalRewardParser(RewardParser):
    """Reward 1.0 for the correct text in the only answer block; 0.0 without exactly one block.

    Any other answer gets ``format_reward + partial_reward * 2 L / (n + m)``, where ``L`` is the
    length of its longest common subsequence with the correct text, and ``n`` and ``m`` are the
    lengths of both. An answer of more than twice the correct length gets only ``format_reward``.

    Args:
        format_reward: reward of an answer block.
        partial_reward: largest additional reward of a wrong answer.
        kwargs: arguments of :class:`~torchrl_llm.rewards.RewardParser`.

    Raises:
        ConfigError: when a wrong answer could get as much as the correct answer.

    Example:
        >>> parser = TextReversalRewardParser()
        >>> parser.score("<answer>olleh</answer>", "olleh").reward
        1.0
        >>> parser.score("<answer>oleh</answer>", "olleh").reward  # 0.1 + 0.4 * 8 / 9
        0.4555555555555556
    """

    def __init__(
        self, *, format_reward: float = 0.1, partial_reward: float = 0.4, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if not 0 <= format_reward <= format_reward + partial_reward < 1:
            raise ConfigError(
                "format_reward and partial_reward must be at least 0 and below 1 together, got "
                f"{format_reward} and {partial_reward}"
            )
        self.format_reward = format_reward
        self.partial_reward = partial_reward

    def score(self, response: str, answer: Any) -> RewardScore:
        """See :class:`TextReversalRewardParser`.

        Raises:
            RewardError: when the row's answer is not a text.
        """
        if not isinstance(answer, str) or not answer.strip():
            raise RewardError(f"the answer of the row must be a text, got {answer!r}")
        truth, parts = answer.strip(), split_response(response)
        think = bool(parts.think)
        if len(parts.answer) != 1:
            return RewardScore(0.0, False, bool(parts.answer), think)
        block = parts.answer[0]
        if block == truth:
            return RewardScore(1.0, True, True, think)
        share = 0.0
        if len(block) <= 2 * len(truth):
            share = 2 * common_subsequence(truth, block) / (len(truth) + len(block))
        return RewardScore(self.format_reward + self.partial_reward * share, False, True, think)
