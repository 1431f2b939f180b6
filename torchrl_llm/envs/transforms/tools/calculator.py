"""A calculator: the four operations on whole numbers, exactly, and nothing else."""

from __future__ import annotations

import re

from torchrl_llm.envs.reward.countdown import evaluate_expression
from torchrl_llm.envs.transforms.tools.call import ToolCall, ToolOutput
from torchrl_llm.envs.transforms.tools.tool import Tool

__all__ = ["Calculator"]


class Calculator(Tool):
    """Computes an expression of whole numbers, ``+ - * /`` and parentheses.

    Nothing is evaluated as Python, and time is linear in the length of the expression. A result
    that is no whole number is given to 12 digits.

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
        """The value of ``call.args["expression"]``."""
        expression = call.args["expression"]
        numbers = [int(digits) for digits in re.findall("[0-9]{1,1000}", expression)]
        value = evaluate_expression(expression, numbers)
        if value is None:
            allowed = self.parameters["properties"]["expression"]["description"]
            return ToolOutput(f"cannot be computed; allowed are: {allowed}", error="ValueError")
        return str(value) if value.denominator == 1 else f"{float(value):.12g}"
