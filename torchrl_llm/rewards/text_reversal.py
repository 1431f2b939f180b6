"""The reward of text reversal: 1 for the text backwards, less for one that has much of it."""

from __future__ import annotations

from typing import Any

from torchrl_llm.errors import ConfigError, RewardError
from torchrl_llm.rewards.reward_parser import RewardParser, RewardScore
from torchrl_llm.rewards.text_blocks import split_response


def common_subsequence(first: str, second: str) -> int:
    r"""Length of the longest common subsequence.

    One row of the usual table is the bits of one integer, so a letter costs a few operations on
    ``len(first) / 64`` words (H. Hyyrö, 2004, "Bit-parallel LCS-length computation revisited").

    Args:
        first: a text.
        second: another; time grows with the product of the lengths, divided by the word size.

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
    """1.0 for the right text in the one answer block; 0.0 without exactly one.

    Any other answer has ``format_reward + partial_reward * 2 L / (n + m)``, where ``L`` is the
    length of its longest common subsequence with the right text, and ``n`` and ``m`` are the
    lengths of both. An answer of more than twice the right length has ``format_reward`` alone.

    Args:
        format_reward: reward of an answer block.
        partial_reward: what a wrong answer may have beside it.
        kwargs: arguments of :class:`~torchrl_llm.rewards.RewardParser`.

    Raises:
        ConfigError: where a wrong answer could be worth as much as the right one.

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
            RewardError: where the row's own answer is not a text.
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
