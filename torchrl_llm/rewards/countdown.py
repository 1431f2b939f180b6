"""The reward of Countdown: does an expression over the given numbers make the target?

The expression is read by :mod:`torchrl_llm.tools.calculator`; nothing that a model wrote is ever
evaluated as Python.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from torchrl_llm.errors import RewardError
from torchrl_llm.rewards.answer_block import AnswerBlockParser
from torchrl_llm.tools.calculator import evaluate_expression

__all__ = ["CountdownProblem", "CountdownRewardParser", "evaluate_expression"]

_ANSWER = re.compile(r"target=(?P<target>-?[0-9]+), numbers=(?P<numbers>[0-9]+(?:,[0-9]+)*)")


class CountdownProblem(NamedTuple):
    """A target and the numbers to make it of.

    Attributes:
        target: what the expression must be equal to.
        numbers: each may be used once; one that occurs twice, twice.
    """

    target: int
    numbers: tuple[int, ...]


class CountdownRewardParser(AnswerBlockParser):
    """1.0 for an expression that makes the target, 0.1 for another answer block, 0.0 for none.

    The answer of a row is a string such as ``"target=24, numbers=2,3,4"``. The arguments are those
    of :class:`~torchrl_llm.rewards.AnswerBlockParser`.

    Example:
        >>> parser = CountdownRewardParser()
        >>> problem = "target=24, numbers=2,3,4,9"
        >>> parser.score("<answer>2 * 3 * 4</answer>", problem).reward
        1.0
        >>> parser.score("<answer>4 * 6</answer>", problem).reward
        0.1
    """

    @staticmethod
    def normalize_answer(answer: str) -> CountdownProblem | None:
        """The problem that a row's answer describes, ``None`` where it does not."""
        found = _ANSWER.fullmatch(answer.strip())
        if found is None:
            return None
        numbers = tuple(int(number) for number in found["numbers"].split(","))
        return CountdownProblem(int(found["target"]), numbers)

    @staticmethod
    def validate_expression(expression: str, target: int, numbers: Sequence[int]) -> bool:
        """Whether an expression keeps the rules and makes the target.

        Args:
            expression: see :func:`evaluate_expression`.
            target: what it must be equal to, exactly.
            numbers: what it may use.

        Example:
            >>> CountdownRewardParser.validate_expression("99 ** 98 ** 97", 1, [97, 98, 99])
            False
        """
        return evaluate_expression(expression, numbers) == target

    @classmethod
    def answers_match(cls, answer: str, truth: str) -> bool:
        """Whether an expression solves the problem of a row's answer."""
        problem = cls.normalize_answer(truth)
        return problem is not None and cls.validate_expression(answer, *problem)

    def read_truth(self, answer: Any) -> CountdownProblem:
        """The row's problem.

        Raises:
            RewardError: the row's answer describes none.
        """
        problem = self.normalize_answer(str(answer))
        if problem is None:
            raise RewardError(
                f"the answer of the row must look like 'target=24, numbers=2,3,4', got {answer!r}"
            )
        return problem

    def is_right(self, block: str, truth: CountdownProblem) -> bool:
        """Whether the block holds such an expression."""
        return self.validate_expression(block, *truth)
