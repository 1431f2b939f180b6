"""Products and differences of larger numbers, with a calculator at hand.

The task of the embedded model in which it has to use a tool: it knows sums of two digits by heart,
but no product of three digits and two. A conversation takes two turns, a call and the answer that
copies the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor
from torchrl.envs import Transform

from torchrl_llm._registry import register
from torchrl_llm.data.row_files import GeneratedRows
from torchrl_llm.envs.datasets.task_env import TaskEnv
from torchrl_llm.errors import ConfigError
from torchrl_llm.rewards.arithmetic import ArithmeticRewardParser
from torchrl_llm.tools.calculator import Calculator
from torchrl_llm.tools.tool_transform import ToolTransform

_FIRST, _SECOND = range(100, 1000), range(10, 100)
_OPERATORS = "*-"
_NUM_HELD_OUT = 512
_SPLIT_SEED = 20_240_608


@cache
def calculator_problems(split: str) -> Tensor:
    """Numbers of the problems of a split, in a fixed shuffled order.

    Args:
        split: ``"train"`` (161,488 problems) or ``"test"`` (the 512 that are held out).

    Returns:
        int64 ``[N]``, each for :func:`calculator_problem`.

    Raises:
        ConfigError: for another split.

    Example:
        >>> len(calculator_problems("train")), len(calculator_problems("test"))
        (161488, 512)
    """
    if split not in ("train", "test"):
        raise ConfigError(f"split must be 'train' or 'test', got {split!r}")
    total = len(_OPERATORS) * len(_FIRST) * len(_SECOND)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(_SPLIT_SEED))
    return order[:_NUM_HELD_OUT] if split == "test" else order[_NUM_HELD_OUT:]


def calculator_problem(number: int) -> Mapping[str, str]:
    """The row of a problem.

    Args:
        number: in ``[0, 162,000)``.

    Returns:
        ``query`` and ``answer``, and the ``expression`` between the two.

    Example:
        >>> calculator_problem(247 * 90 + 18)
        {'query': 'What is 347*28?', 'answer': '9716', 'expression': '347*28'}
    """
    rest, second = divmod(number, len(_SECOND))
    operator, first = divmod(rest, len(_FIRST))
    a, b, sign = _FIRST[first], _SECOND[second], _OPERATORS[operator]
    value = a * b if sign == "*" else a - b
    expression = f"{a}{sign}{b}"
    return {"query": f"What is {expression}?", "answer": str(value), "expression": expression}


@register("tasks", "calculator")
class CalculatorEnv(TaskEnv):
    """Problems such as ``What is 347*28?`` and a tool that computes them.

    The model calls the tool in the way that its chat template writes calls, reads the result as a
    tool message, and answers in a further turn, which is scored by its last number. There are
    161,488 problems to train on and 512 held out (``split="test"``).

    A model that has never seen the tool needs its schema in the prompt; pass it to the policy:
    ``TransformersWrapper(..., tools=[Calculator().schema])``.

    Args:
        kwargs: arguments of :class:`~torchrl_llm.envs.datasets.TaskEnv` and
            :class:`~torchrl_llm.envs.DatasetChatEnv`.

    Example:
        >>> env = CalculatorEnv(num_envs=1, split="test", shuffle=False)
        >>> td = env.reset()
        >>> td["history"].prompt.content, td["answer"][0]
        ([['Use the calculator.', 'What is 938*64?']], '60032')
    """

    COLUMNS = ("query", "answer")
    SYSTEM_PROMPT = "Use the calculator."
    MAX_AUXILIARY_TURNS = 2

    @classmethod
    def default_dataset(cls, split: str | None) -> GeneratedRows:
        """The problems of a split, ``train`` if not given."""
        numbers = calculator_problems("train" if split is None else split)
        return GeneratedRows(lambda index: calculator_problem(int(numbers[index])), len(numbers))

    def make_tools(self) -> Sequence[Transform]:
        """The calculator."""
        return [ToolTransform([Calculator()], max_auxiliary_turns=self.MAX_AUXILIARY_TURNS)]

    def make_reward(self) -> ArithmeticRewardParser:
        """See :class:`~torchrl_llm.rewards.ArithmeticRewardParser`."""
        return ArithmeticRewardParser()
