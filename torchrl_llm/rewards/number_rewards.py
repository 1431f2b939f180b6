"""Rewards for tasks whose answer is a number: sums, GSM8K, Countdown.

:mod:`torchrl_llm.tools.calculator` evaluates Countdown expressions; the text of a model is never
evaluated as Python.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from torchrl_llm._checked import checked
from torchrl_llm._registry import FullSignature, register
from torchrl_llm.errors import RewardError
from torchrl_llm.rewards.answer_block import AnswerBlockParser
from torchrl_llm.rewards.answer_formats import (
    HARNESS_FORMATS,
    AnswerFormat,
    harness_answer,
    harness_spelling,
    marked_answer,
)
from torchrl_llm.rewards.reward_parser import RewardParser
from torchrl_llm.rewards.reward_scorer import RewardScore
from torchrl_llm.tools.calculator import evaluate_expression

# A number may be followed directly by a unit (72km), but digits inside a word are not a number (m2,
# x3). A sign counts if no word or number precedes it: 10 - 5 and 10 -5 contain no -5, but (a) -5
# does.
_NUMBER = re.compile(
    r"(?<![A-Za-z\d.,^])(?P<sign>(?<!\w)(?<!\d\s)(?:(?<!\)\s)[-+]|[-+](?=\S)))?\s?"
    r"(?:[$€£]\s?(?P<inner>-)?)?(?P<body>\.?\d[\d.,]*+)"
    r"(?:e(?P<exponent>[-+]?\d+))?(?P<power>\s?\^\s?[-+(]?\s?\d*)?"
    r"(?:\s?/\s?(?P<below>\d+(?![\d.,]*\d)))?(?:\s(?P<scale>thousand|million|billion)\b)?",
    re.IGNORECASE,
)
_BODY = re.compile(r"(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?")
_PADDED = re.compile(r"0\d")
# Largest length of an answer; Python refuses to convert longer numbers.
_MAX_LENGTH = 1000
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9}
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}")
# Powers and fractions of one character: 10³, 3½.
_SMALL_DIGITS = re.compile("(?P<power>[²³¹⁰⁴-⁹⁻]+)|[¼-¾⅐-⅞]")
_MIXED = re.compile(r"(?<![\w.,/^])(\d+)\s+(\d+)\s?/\s?(\d+)(?![\d./])")
# 3 x 10^4 is 3e4, and 10^4 is 1e4.
_TIMES_TEN = re.compile(
    r"(?:(?<=\d)\s*(?:\\times|\\cdot|[x×·*])\s*10|(?P<alone>(?<![\w.,])10))"
    r"\s?(?:\^|\*\*)\s?[{(]?\s?(?P<exponent>[-+−]?\d+)[})]?"
)
# Thousands separators of LaTeX: 1{,}234 and 1,\!234 and 1\,234.
_LATEX_COMMA = re.compile(r"(?<=\d)(?:\{,\}|,\\!)(?=\d)")
_THIN_SPACE = re.compile(r"(?<=\d)(?:\\,|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
# The power of a unit: cm^2, \text{ft}^{3}.
_UNIT_POWER = re.compile(r"(?<=[A-Za-z])\s*\^\s*\d+")
_LATEX_WRAPPER = re.compile(r"\\(?:boxed|text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}")
_NOISE = str.maketrans({"*": " ", "`": " ", "_": " ", "{": " ", "}": " ", "−": "-", "–": "-"})


def parse_number(text: str) -> Fraction | None:
    r"""Parse the number in a short answer.

    Markdown, LaTeX, currency and percent signs, thousands separators and units are ignored; ``1.5
    million``, ``3 1/2``, ``2e-3`` and ``3 x 10^4`` are numbers. In an equation or a chain of
    equations, the last right-hand side counts. For an answer with two different numbers, or with
    more than 1,000 characters, the result is ``None``.

    Args:
        text: the answer, for example ``"x = 72"`` or ``"**$1,234.50**"``.

    Returns:
        The exact value, or ``None``.

    Example:
        >>> [parse_number(t) for t in ("72 dollars", r"\boxed{72}", "-3", "70 or 72")]
        [Fraction(72, 1), Fraction(72, 1), Fraction(-3, 1), None]
    """
    return None if len(text) > _MAX_LENGTH else _parsed(text)


def last_number(text: str) -> Fraction | None:
    """Return the last number of a text; ``None`` if there is none or it is malformed.

    Args:
        text: a text of any length. It is parsed like in ``parse_number``, except for equations.

    Example:
        >>> last_number("3 boxes of 6 eggs make **$1,018.50** in all.")
        Fraction(2037, 2)
    """
    found = _last_match(text)
    return None if found is None else _value(found)


def _last_match(text: str) -> re.Match[str] | None:
    digit = re.search("[0-9¼-¾⅐-⅞]", text[::-1])
    if digit is None:
        return None
    end = len(text) - digit.start()
    line = text[max(0, end - _MAX_LENGTH) : end + _MAX_LENGTH]
    numbers = list(_NUMBER.finditer(_without_markup(line)))
    return numbers[-1] if numbers else None


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Fraction | None:
    text = _without_markup(text)
    right_hand_side = text.replace("\\approx", "=").replace("≈", "=").rpartition("=")[2]
    values = {_value(match) for match in _NUMBER.finditer(right_hand_side)}
    return values.pop() if len(values) == 1 else None


def _without_markup(text: str) -> str:
    """Remove Markdown and LaTeX around and inside the numbers of a text."""
    text = _LATEX_FRACTION.sub(r" \1/\2", text.replace("\\$", "$").replace("\\%", "%"))
    text = _TIMES_TEN.sub(_in_e_notation, _SMALL_DIGITS.sub(_in_full_size, text))
    text = _THIN_SPACE.sub("", _LATEX_COMMA.sub(",", text))
    while (unwrapped := _LATEX_WRAPPER.sub(r" \1 ", text)) != text:
        text = unwrapped
    text = re.sub(r"\\[()\[\],;! ]", " ", text.translate(_NOISE))
    return _MIXED.sub(_as_fraction, _UNIT_POWER.sub("", text))


def _in_full_size(found: re.Match[str]) -> str:
    text = unicodedata.normalize("NFKC", found[0]).replace("\u2044", "/")
    return ("^" if found["power"] else " ") + text


def _in_e_notation(found: re.Match[str]) -> str:
    return f"{'1' if found['alone'] else ''}e{found['exponent']}"


def _as_fraction(found: re.Match[str]) -> str:
    whole, above, below = (int(number) for number in found.groups())
    return f"{whole * below + above}/{below}" if above < below else found[0]


def _value(match: re.Match[str]) -> Fraction | None:
    """Return the value of one number; ``None`` if it is malformed (``1,2``, ``5/0``, ``2^10``)."""
    body, below = match["body"].rstrip(".,"), match["below"]
    if not _BODY.fullmatch(body):
        return None
    exponent = match["exponent"] or "0"
    if match["power"] or abs(int(exponent)) > 999 or (below is not None and not int(below)):
        return None
    value = Fraction(f"{body.replace(',', '')}e{exponent}") / int(below or 1)
    value *= _SCALES[match["scale"].lower()] if match["scale"] else 1
    return -value if (match["sign"] == "-") != (match["inner"] == "-") else value


def _true_number(answer: Any) -> Fraction:
    """Return the number of a row's answer; ``####`` may precede it."""
    if isinstance(answer, float) and math.isfinite(answer):
        return Fraction(str(answer))  # also 1e+20
    value = parse_number(str(answer).rpartition("####")[2])
    if value is None:
        raise RewardError(f"the answer of the row is not a number: {answer!r}")
    return value


@register("rewards", "gsm8k")
class GSM8KRewardParser(AnswerBlockParser):
    r"""Reward 1.0 for the correct number, 0.1 for a wrong answer, 0.0 without an answer.

    ``answer_format`` selects what counts as the answer. Models trained with torchrl_llm write an
    ``<answer>`` block. Base models, and models whose accuracy is compared with published numbers,
    write no ``<answer>`` block. If a response has several answers, the format selects one answer. A
    response without a number has no answer.

    ======================  =======================================================================
    ``answer_format``       the answer
    ======================  =======================================================================
    ``"tags"``              the last ``<answer>`` block behind the reasoning
    ``"auto"``              the text after the last of ``<answer>``, ``####``, ``\boxed`` and
                            ``The answer is``, or the last number if there is none of these, see
                            :func:`~torchrl_llm.rewards.answer_formats.marked_answer`
    ``"flexible-extract"``  as the filters of these names in lm-evaluation-harness read and compare
    ``"strict-match"``      it, see :func:`~torchrl_llm.rewards.answer_formats.harness_answer`
    ======================  =======================================================================

    Args:
        args: arguments of :class:`~torchrl_llm.rewards.AnswerBlockParser`.
        answer_format: a value of the table.
        kwargs: keyword arguments of :class:`~torchrl_llm.rewards.AnswerBlockParser`.

    Raises:
        ConfigError: for an unknown ``answer_format``.

    Example:
        >>> parser = GSM8KRewardParser()
        >>> parser.score("<think>40 + 32</think><answer>x = \\boxed{72}</answer>", "#### 72").reward
        1.0
        >>> parser.score("<answer>73</answer>", "72").reward, parser.score("72", "72").reward
        (0.1, 0.0)
        >>> GSM8KRewardParser(answer_format="auto").score("The answer is 72.", "72").reward
        1.0
    """

    __signature__ = FullSignature()

    @checked
    def __init__(self, *args: Any, answer_format: AnswerFormat = "tags", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.answer_format = answer_format

    @staticmethod
    def normalize_answer(answer: str) -> Fraction | None:
        """Return the value of an answer, see ``parse_number``; ``####`` may precede it."""
        return parse_number(answer.rpartition("####")[2])

    @classmethod
    def answers_match(cls, answer: str, truth: str) -> bool:
        """Whether two answers have the same number."""
        value = cls.normalize_answer(answer)
        return value is not None and value == cls.normalize_answer(truth)

    def read_response(self, response: str) -> tuple[str | None, str | None]:
        """Return the reasoning of a response, and the answer that ``answer_format`` selects."""
        think, block = super().read_response(response)
        if self.answer_format in HARNESS_FORMATS:
            block = harness_answer(response, self.answer_format)
        elif self.answer_format == "auto":
            text, is_marked = marked_answer(response)
            value = parse_number(text) if is_marked else last_number(text)
            block = None if value is None else str(value)
        return think, block

    def read_truth(self, answer: Any) -> Fraction | str:
        """Return the row's number; with a filter of lm-evaluation-harness, in its spelling.

        Raises:
            RewardError: when the row's answer is not a number.
        """
        truth = _true_number(answer)
        return harness_spelling(str(answer)) if self.answer_format in HARNESS_FORMATS else truth

    def is_right(self, block: str, truth: Fraction | str) -> bool:
        """Whether the block has that number."""
        return (block if isinstance(truth, str) else parse_number(block)) == truth


_ANSWER = re.compile(r"target=(?P<target>-?[0-9]+), numbers=(?P<numbers>[0-9]+(?:,[0-9]+)*)")


class CountdownProblem(NamedTuple):
    """A target, and the numbers for an expression that equals it.

    Attributes:
        target: value of the expression.
        numbers: the numbers; each may be used as often as it occurs in the list.
    """

    target: int
    numbers: tuple[int, ...]


class CountdownRewardParser(AnswerBlockParser):
    """Reward 1.0 for an expression that equals the target, 0.1 for a wrong answer, else 0.0.

    The answer of a row is a string such as ``"target=24, numbers=2,3,4"``. The arguments are the
    same as for :class:`~torchrl_llm.rewards.AnswerBlockParser`.

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
        """Parse the problem in a row's answer; ``None`` if it is malformed."""
        found = _ANSWER.fullmatch(answer.strip())
        if found is None:
            return None
        numbers = tuple(int(number) for number in found["numbers"].split(","))
        return CountdownProblem(int(found["target"]), numbers)

    @staticmethod
    def validate_expression(expression: str, target: int, numbers: Sequence[int]) -> bool:
        """Whether an expression follows the rules and equals the target.

        Args:
            expression: see :func:`evaluate_expression`.
            target: exact value of the expression.
            numbers: numbers that the expression may use.

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
        """Return the row's problem.

        Raises:
            RewardError: when the row's answer is malformed.
        """
        problem = self.normalize_answer(str(answer))
        if problem is None:
            raise RewardError(
                f"the answer of the row must look like 'target=24, numbers=2,3,4', got {answer!r}"
            )
        return problem

    def is_right(self, block: str, truth: CountdownProblem) -> bool:
        """Whether the block contains a correct expression."""
        return self.validate_expression(block, *truth)


@register("rewards", "last_number")
class ArithmeticRewardParser(RewardParser):
    """Reward 1.0 if the last number of the response equals the answer; otherwise 0.0.

    Numbers are parsed by ``last_number``. Explanations are allowed ("37+85 is 122."); leading zeros
    are not allowed.

    Example:
        >>> reward = ArithmeticRewardParser()
        >>> reward.score("37+85 is 122.", "122").reward, reward.score("0122", "122").reward
        (1.0, 0.0)
        >>> reward.score("1,234.0", 1234).reward, reward.score("3.5", 5).reward
        (1.0, 0.0)
    """

    needs_answer = True

    def score(self, response: str, answer: Any) -> RewardScore:
        """Compare the last number of ``response`` with ``answer``.

        Args:
            response: what the model wrote.
            answer: a number or its text.

        Raises:
            RewardError: when the answer is not a number.
        """
        truth, found = _true_number(answer), _last_match(response)
        right = found is not None and _value(found) == truth and not _PADDED.match(found["body"])
        return RewardScore(float(right), success=right, has_answer=found is not None)
