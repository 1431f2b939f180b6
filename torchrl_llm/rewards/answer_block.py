"""Splits responses, and defines the base class of rewards for an ``<answer>`` block.

:func:`~torchrl_llm.rewards.reward_parser.extract_tags` returns the last block of each kind;
:func:`split_response` is for rewards that count the blocks. The rewards of GSM8K, MATH and
Countdown are subclasses of :class:`AnswerBlockParser`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from tensordict.utils import NestedKey

from torchrl_llm.rewards.reward_parser import RewardParser, extract_tags
from torchrl_llm.rewards.reward_scorer import RewardScore


class ResponseParts(NamedTuple):
    """Parts of a response, without white space around them.

    Attributes:
        think: contents of the blocks of reasoning.
        answer: contents of the answer blocks after the last block of reasoning.
        behind: everything after the last block of reasoning.
    """

    think: list[str]
    answer: list[str]
    behind: str


def extract_blocks(text: str, tag: str) -> list[str]:
    """Return the contents of all complete ``<tag>...</tag>`` blocks, stripped.

    Args:
        text: any text; the run time is linear in its length (unlike with a lazy regular
            expression).
        tag: name of the tag.

    Example:
        >>> extract_blocks("<a>1</a> <a>2 <a> 3 </a> 4</a>", "a")
        ['1', '3']
    """
    pieces = text.split(f"</{tag}>")[:-1]
    found = (piece.rpartition(f"<{tag}>") for piece in pieces)
    return [content.strip() for _, opened, content in found if opened]


def split_response(response: str) -> ResponseParts:
    """Split a response into its parts.

    Args:
        response: text of the model. It may begin inside the reasoning, if the prompt contains the
            opening tag.

    Example:
        >>> split_response("2+2</think>So: <answer>4</answer>")
        ResponseParts(think=['2+2'], answer=['4'], behind='So: <answer>4</answer>')
    """
    before, closed, behind = response.rpartition("</think>")
    think = extract_blocks(before + closed, "think")
    if closed and not think:
        think = [before.strip()]
    return ResponseParts(think, extract_blocks(behind, "answer"), behind.strip())


class AnswerBlockParser(RewardParser):
    """1.0 for a correct ``<answer>`` block, 0.1 for a wrong one, 0.0 for none or an empty one.

    ``reward_right`` is the same number as the reward, as in TorchRL. Subclasses define
    :meth:`read_truth` and :meth:`is_right`.

    Args:
        tokenizer: see :class:`~torchrl_llm.rewards.RewardParser`.
        in_keys: see :class:`~torchrl_llm.rewards.RewardParser`.
        out_keys: see :class:`~torchrl_llm.rewards.RewardParser`.
        eos_token: see :class:`~torchrl_llm.rewards.RewardParser`.
        set_done_if_answer: see :class:`~torchrl_llm.rewards.RewardParser`.
        input_mode: see :class:`~torchrl_llm.rewards.RewardParser`.
        format_reward: reward of an answer block with a wrong answer.
        correct_reward: reward of the correct answer.
        num_threads: see :class:`~torchrl_llm.rewards.RewardParser`.

    Example:
        >>> class Spelling(AnswerBlockParser):
        ...     def read_truth(self, answer):
        ...         return answer.lower()
        ...     def is_right(self, block, truth):
        ...         return block.lower() == truth
        >>> Spelling().score("It is <answer>Paris</answer>.", "paris").reward
        1.0
    """

    needs_answer = True

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
    def extract_tags(text: str) -> tuple[str, str]:
        """Return the reasoning and the answer of a response; empty if there is none."""
        think, answer = extract_tags(text)
        return think or "", answer or ""

    def read_response(self, response: str) -> tuple[str | None, str | None]:
        """Split a response into reasoning and answer; by default at the tags."""
        return extract_tags(response)

    @abstractmethod
    def read_truth(self, answer: Any) -> Any:
        """Convert the row's answer to the form that :meth:`is_right` compares.

        Args:
            answer: the row's answer.

        Raises:
            RewardError: when the row's answer is not valid; then the reward is invalid for every
                response.
        """

    @abstractmethod
    def is_right(self, block: str, truth: Any) -> bool:
        """Whether the contents of an answer block are correct.

        Args:
            block: the contents, stripped.
            truth: result of :meth:`read_truth` for the row's answer.
        """

    def score(self, response: str, answer: Any) -> RewardScore:
        """See :class:`AnswerBlockParser`.

        Raises:
            RewardError: when the row's answer cannot be read.
        """
        truth = self.read_truth(answer)
        think, block = self.read_response(response)
        right = bool(block) and self.is_right(block, truth)
        reward = self.correct_reward if right else self.format_reward if block else 0.0
        return RewardScore(reward, right, bool(block), bool(think))

    def _right(self, score: RewardScore) -> float:
        return score.reward
