"""The reward of Countdown: does an expression over the given numbers make the target?

The expression is read by the few lines here, over whole numbers and exact fractions; nothing that a
model wrote is ever evaluated as Python.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from torchrl_llm.envs.reward.answer_block import AnswerBlockParser
from torchrl_llm.errors import RewardError

__all__ = ["CountdownProblem", "CountdownRewardParser", "evaluate_expression"]

_TOKEN = re.compile(r"\s*(?:(?P<number>[0-9]+)|(?P<mark>[-+*/()]))")
_SPELLINGS = str.maketrans(
    {
        "×": "*",
        "·": "*",
        "∗": "*",
        "⋅": "*",
        "x": "*",
        "÷": "/",
        "−": "-",
        "–": "-",
        "$": " ",
        "`": " ",
    }
)
_LATEX = {"\\times": "*", "\\cdot": "*", "\\div": "/", "\\left": "", "\\right": ""}
_LATEX |= dict.fromkeys(("\\(", "\\)", "\\[", "\\]"), "")
_WRAPPER = re.compile(r"\A(?:\\boxed\s*\{(.*)\}|\*\*(.*)\*\*)\Z", re.DOTALL)
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_MAX_LENGTH = 1000
_PRIORITY = {"+": 1, "-": 1, "*": 2, "/": 2, "negative": 3}
_ANSWER = re.compile(r"target=(?P<target>-?[0-9]+), numbers=(?P<numbers>[0-9]+(?:,[0-9]+)*)")


class CountdownProblem(NamedTuple):
    """A target and the numbers to make it of.

    Attributes:
        target: what the expression must be equal to.
        numbers: each may be used once; one that occurs twice, twice.
    """

    target: int
    numbers: tuple[int, ...]


def evaluate_expression(expression: str, numbers: Sequence[int]) -> Fraction | None:
    r"""The exact value of an expression that keeps the rules.

    Allowed are the given numbers, each as often as it is given, ``+ - * /``, parentheses, and a
    minus sign where a term begins. Other spellings of the signs (``×``, ``x``, ``\times``, ``÷``,
    ``\frac{}{}``), dollar signs, backticks, two stars or a ``\boxed{}`` around it, and ``= 24``
    behind it are looked through.

    Args:
        expression: what the model wrote; time is linear in its length, and one of more than 1,000
            characters is refused.
        numbers: the numbers that may be used.

    Returns:
        ``None`` for anything else: other numbers, powers, decimals, a division by zero.

    Example:
        >>> evaluate_expression("(25 + 3) * 4 / 8", [3, 4, 8, 25])
        Fraction(14, 1)
        >>> evaluate_expression("2 ** 3", [2, 3]), evaluate_expression("2 + 2", [2, 3])
        (None, None)
    """
    if len(expression) > _MAX_LENGTH:
        return None
    for spelling, sign in _LATEX.items():
        expression = expression.replace(spelling, sign)
    wrapped = _WRAPPER.match(expression.strip(" \n\t$."))
    expression = next(filter(None, wrapped.groups()), "") if wrapped else expression
    while (written_out := _FRACTION.sub(r"((\1)/(\2))", expression)) != expression:
        expression = written_out
    expression, equals, result = expression.translate(_SPELLINGS).strip().partition("=")
    tokens = _tokens(expression)
    used = Counter(token for token in tokens or () if isinstance(token, int))
    # Before anything is computed: what is left is as small as the given numbers are.
    if not used or used - Counter(numbers):
        return None
    value = _value(tokens)
    if equals and str(value) != result.strip().removesuffix("."):
        return None
    return value


def _tokens(expression: str) -> list[int | str] | None:
    expression = expression.rstrip()
    tokens: list[int | str] = []
    end = 0
    while end < len(expression):
        match = _TOKEN.match(expression, end)
        if match is None:
            return None
        tokens.append(int(match["number"]) if match["number"] else match["mark"])
        end = match.end()
    return tokens


def _value(tokens: Sequence[int | str]) -> Fraction | None:
    """Precedence by two stacks, so that no depth of parentheses is too deep."""
    values: list[Fraction] = []
    signs: list[str] = []
    begins, opened = True, True  # a value is expected; so is a term, which may have a minus sign
    try:
        for token in tokens:
            if isinstance(token, int) or token == "(":
                if not begins:
                    return None
                if token == "(":
                    signs.append(token)
                else:
                    values.append(Fraction(token))
                begins, opened = token == "(", token == "("
            elif begins:
                if token != "-" or not opened:
                    return None
                signs.append("negative")
                opened = False
            elif token == ")":
                _reduce(values, signs, 0)
                if not signs or signs.pop() != "(":
                    return None
            else:
                _reduce(values, signs, _PRIORITY[token])
                signs.append(token)
                begins, opened = True, False
        if begins:
            return None
        _reduce(values, signs, 0)
    except ZeroDivisionError:
        return None
    return values[0] if not signs else None


def _reduce(values: list[Fraction], signs: list[str], priority: int) -> None:
    """Carry out the signs that bind at least as strongly, up to an open parenthesis."""
    while signs and signs[-1] != "(" and _PRIORITY[signs[-1]] >= priority:
        sign, right = signs.pop(), values.pop()
        if sign == "negative":
            values.append(-right)
            continue
        left = values.pop()
        if sign == "+":
            values.append(left + right)
        elif sign == "-":
            values.append(left - right)
        else:
            values.append(left * right if sign == "*" else left / right)


class CountdownRewardParser(AnswerBlockParser):
    """1.0 for an expression that makes the target, 0.1 for another answer block, 0.0 for none.

    The answer of a row is a string such as ``"target=24, numbers=2,3,4"``. The arguments are those
    of :class:`~torchrl_llm.envs.reward.AnswerBlockParser`.

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
