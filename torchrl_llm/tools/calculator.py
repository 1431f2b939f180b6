"""A calculator for exact arithmetic on whole numbers with the four basic operations."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from torchrl_llm._registry import register
from torchrl_llm.tools.tool import Tool
from torchrl_llm.tools.tool_call import ToolCall, ToolOutput

_TOKEN = re.compile(r"\s*(?:(?P<number>[0-9]+)|(?P<mark>[-+*/()]))")
_SPELLINGS = str.maketrans("×·∗⋅x÷−–$`", "*****/--  ")
_LATEX = {"\\times": "*", "\\cdot": "*", "\\div": "/", "\\left": "", "\\right": ""}
_LATEX |= dict.fromkeys(("\\(", "\\)", "\\[", "\\]"), "")
_WRAPPER = re.compile(r"\A(?:\\boxed\s*\{(.*)\}|\*\*(.*)\*\*)\Z", re.DOTALL)
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_MAX_LENGTH = 1000
_COMPUTE = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_PRIORITY = {"+": 1, "-": 1, "*": 2, "/": 2, "negative": 3}


def evaluate_expression(expression: str, numbers: Sequence[int]) -> Fraction | None:
    r"""Return the exact value of a valid expression.

    An expression may contain the given numbers, each as often as it is given, ``+ - * /``,
    parentheses, and a minus sign at the start of a term. Other spellings of the signs are allowed
    (``×``, ``x``, ``\times``, ``÷``, ``\frac{}{}``). The function ignores dollar signs, backticks,
    two stars or a ``\boxed{}`` around the expression, and ``= 24`` after it.

    Args:
        expression: text of the model, at most 1,000 characters; the run time is linear in its
            length.
        numbers: the numbers that may be used.

    Returns:
        The value; ``None`` for an expression with other numbers, powers, decimals or a division by
        zero, or that is not valid for a different reason.

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
    # Checked before the computation, so that all numbers are as small as the given numbers.
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
    """Evaluate with two stacks, so that any depth of parentheses works."""
    values: list[Fraction] = []
    signs: list[str] = []
    begins, opened = True, True  # a new term begins, and may have a minus sign
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
    """Apply the operators that bind at least as strongly, up to an open parenthesis."""
    while signs and signs[-1] != "(" and _PRIORITY[signs[-1]] >= priority:
        sign, right = signs.pop(), values.pop()
        values.append(-right if sign == "negative" else _COMPUTE[sign](values.pop(), right))


@register("tools", "calculator")
class Calculator(Tool):
    """Computes an expression of whole numbers, ``+ - * /`` and parentheses.

    The expression is not evaluated as Python, and the run time is linear in its length. A result
    that is not a whole number has 12 digits.

    Example:
        >>> calculate = lambda text: Calculator().run(ToolCall("calculator", {"expression": text}))
        >>> calculate("347*28"), calculate("(1 - 3) / 8"), calculate("2**9").error
        ('9716', '-0.25', 'ValueError')
    """

    name = "calculator"
    description = "Computes an arithmetic expression exactly."
    parameters = {  # noqa: RUF012
        "type": "object",
        "properties": {
            "expression": {
                "type": "string",
                "description": "Whole numbers, + - * / and parentheses, such as (2+3)*4.",
            }
        },
        "required": ["expression"],
    }

    def run(self, call: ToolCall) -> str | ToolOutput:
        """Return the value of ``call.args["expression"]``."""
        expression = call.args["expression"]
        numbers = [int(digits) for digits in re.findall("[0-9]{1,1000}", expression)]
        value = evaluate_expression(expression, numbers)
        if value is None:
            allowed = self.parameters["properties"]["expression"]["description"]
            return ToolOutput(f"cannot be computed; allowed are: {allowed}", error="ValueError")
        return str(value) if value.denominator == 1 else f"{float(value):.12g}"
