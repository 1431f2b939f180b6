"""What the rewards of GSM8K, MATH and Countdown share: an ``<answer>`` block that is right or not.

Next: :mod:`torchrl_llm.rewards.countdown` is an example.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from tensordict.utils import NestedKey

from torchrl_llm.rewards.reward_parser import RewardParser, RewardScore, extract_tags


class AnswerBlockParser(RewardParser):
    """1.0 for a right ``<answer>`` block, 0.1 for another block, 0.0 for none.

    Subclasses write :meth:`read_truth` and :meth:`is_right`.

    Args:
        tokenizer: see :class:`~torchrl_llm.rewards.RewardParser`.
        in_keys: see there.
        out_keys: see there.
        eos_token: see there.
        set_done_if_answer: see there.
        input_mode: see there.
        format_reward: reward of an answer block with a wrong answer.
        correct_reward: reward of the right answer.
        num_threads: see there.

    Example:
        >>> class Spelling(AnswerBlockParser):
        ...     def read_truth(self, answer):
        ...         return answer.lower()
        ...     def is_right(self, block, truth):
        ...         return block.lower() == truth
        >>> Spelling().score("It is <answer>Paris</answer>.", "paris").reward
        1.0
    """

    def __init__(
        self,
        tokenizer: Any = None,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        eos_token: str | None = None,
        set_done_if_answer: bool = True,
        input_mode: str | None = None,
        format_reward: float = 0.1,
        correct_reward: float = 1.0,
        *,
        num_threads: int = 0,
    ) -> None:
        super().__init__(
            tokenizer,
            in_keys,
            out_keys,
            eos_token,
            set_done_if_answer,
            input_mode,
            num_threads=num_threads,
        )
        self.format_reward = format_reward
        self.correct_reward = correct_reward

    @staticmethod
    def extract_tags(response: str) -> tuple[str | None, str | None]:
        """Reasoning and answer of a response, ``None`` where there is none."""
        return extract_tags(response)

    def read_response(self, response: str) -> tuple[str | None, str | None]:
        """Reasoning and answer of a response; :meth:`extract_tags` if not overridden."""
        return self.extract_tags(response)

    @abstractmethod
    def read_truth(self, answer: Any) -> Any:
        """The row's answer in the form that :meth:`is_right` compares.

        Args:
            answer: the row's answer.

        Raises:
            RewardError: it is none; the row's reward is then invalid, whatever the response.
        """

    @abstractmethod
    def is_right(self, block: str, truth: Any) -> bool:
        """Whether the contents of an answer block are right.

        Args:
            block: the contents, stripped.
            truth: what :meth:`read_truth` made of the row's answer.
        """

    def score(self, response: str, answer: Any) -> RewardScore:
        """See :class:`AnswerBlockParser`.

        Raises:
            RewardError: the row's own answer cannot be read.
        """
        truth = self.read_truth(answer)
        think, block = self.read_response(response)
        right = block is not None and self.is_right(block, truth)
        reward = self.correct_reward if right else 0.0 if block is None else self.format_reward
        return RewardScore(reward, right, block is not None, think is not None)
