"""Generated tasks about numbers: sums, a calculator to call, Countdown.

No problem is in both splits, so held-out accuracy is measured on problems that were never trained
on. The splits are fixed and do not depend on a seed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchrl.envs import Transform, TransformedEnv

from torchrl_llm._registry import register
from torchrl_llm.data.row_files import GeneratedRows
from torchrl_llm.envs.datasets.task_env import PROMPTS, TaskEnv, check_split
from torchrl_llm.envs.delegate import Delegate
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.rewards import number_rewards
from torchrl_llm.rewards.number_rewards import CountdownProblem
from torchrl_llm.tools.calculator import Calculator
from torchrl_llm.tools.tool_transform import ToolTransform

_ADDITION_SEED = 20_240_607


@cache
def addition_pairs(split: str) -> tuple[tuple[int, int], ...]:
    """The summands of every problem of a split, in a fixed shuffled order.

    Args:
        split: ``"train"`` (7,588 problems) or ``"test"`` (the 512 that are held out).

    Raises:
        ConfigError: for an unknown split.

    Example:
        >>> train, test = addition_pairs("train"), addition_pairs("test")
        >>> len(train), len(test), len({*train, *test})
        (7588, 512, 8100)
    """
    numbers = _shuffled(split, 90 * 90, _ADDITION_SEED).tolist()
    return tuple((10 + number // 90, 10 + number % 90) for number in numbers)


def _shuffled(split: str, total: int, seed: int) -> Tensor:
    """Numbers of the problems of a split, in a fixed shuffled order."""
    check_split(split)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    return order[:_NUM_HELD_OUT] if split == "test" else order[_NUM_HELD_OUT:]


def addition_problem(first: int, second: int) -> Mapping[str, str]:
    """The row of a problem.

    Example:
        >>> addition_problem(37, 85)
        {'query': 'What is 37+85?', 'answer': '122'}
    """
    return {"query": f"What is {first}+{second}?", "answer": str(first + second)}


@register("tasks", "arithmetic")
class ArithmeticEnv(TaskEnv):
    """Additions such as ``What is 37+85?``, scored by the last number of the response.

    Rows have ``query`` and ``answer``, both strings. There are 7,588 problems to train on and 512
    held out (``split="test"``); no file and no network is needed.

    Args:
        kwargs: arguments of :class:`~torchrl_llm.envs.datasets.task_env.TaskEnv` and
            :class:`~torchrl_llm.envs.DatasetChatEnv`.

    Example:
        >>> env = ArithmeticEnv(num_envs=4, repeats=2, shuffle=False)
        >>> td = env.reset()
        >>> list(td["query"]), td["answer"][0]
        (['What is 87+76?', 'What is 87+76?', 'What is 85+81?', 'What is 85+81?'], '163')
    """

    COLUMNS = ("query", "answer")
    REWARD = number_rewards.ArithmeticRewardParser

    @classmethod
    def generate(cls, split: str) -> GeneratedRows:
        """The problems of a split."""
        pairs = addition_pairs(split)
        return GeneratedRows(lambda index: addition_problem(*pairs[index]), len(pairs))


_FIRST, _SECOND = range(100, 1000), range(10, 100)
_OPERATORS = "*-"
_NUM_HELD_OUT = 512
_CALCULATOR_SEED = 20_240_608


@cache
def calculator_problems(split: str) -> Tensor:
    """Numbers of the problems of a split, in a fixed shuffled order.

    Args:
        split: ``"train"`` (161,488 problems) or ``"test"`` (the 512 that are held out).

    Returns:
        int64 ``[N]``, each for :func:`calculator_problem`.

    Raises:
        ConfigError: for an unknown split.

    Example:
        >>> len(calculator_problems("train")), len(calculator_problems("test"))
        (161488, 512)
    """
    total = len(_OPERATORS) * len(_FIRST) * len(_SECOND)
    return _shuffled(split, total, _CALCULATOR_SEED)


def calculator_problem(number: int) -> Mapping[str, str]:
    """The row of a problem.

    Args:
        number: in ``[0, 162,000)``.

    Returns:
        ``query``, ``answer``, and ``expression``, the calculation in the query.

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

    The model calls the tool in the form of its chat template, reads the result as a tool message,
    and answers in a further turn. The last number of that turn is scored. There are 161,488
    problems to train on and 512 held out (``split="test"``).

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
    REWARD = number_rewards.ArithmeticRewardParser
    SYSTEM_PROMPT = "Use the calculator."
    MAX_AUXILIARY_TURNS = 2

    @classmethod
    def generate(cls, split: str) -> GeneratedRows:
        """The problems of a split."""
        numbers = calculator_problems(split)
        return GeneratedRows(lambda index: calculator_problem(int(numbers[index])), len(numbers))

    def make_tools(self) -> Sequence[Transform]:
        """The calculator."""
        return [ToolTransform([Calculator()], max_auxiliary_turns=self.MAX_AUXILIARY_TURNS)]


class _WithCalculator:
    """Agent of a child of :class:`DelegationEnv`: it may call the calculator before it answers."""

    def wrap(self, env: TransformedEnv) -> TransformedEnv:
        """Insert the calculator before the turn limit."""
        tools = ToolTransform([Calculator()], max_auxiliary_turns=CalculatorEnv.MAX_AUXILIARY_TURNS)
        return env.insert_transform(0, tools)


@register("tasks", "delegation")
class DelegationEnv(CalculatorEnv):
    """The problems of :class:`CalculatorEnv`, which a sub-agent computes.

    The tool ``calculator`` is a :class:`~torchrl_llm.envs.delegate.Delegate`: it opens a child
    episode with the question ``What is <expression>?``. The child has the real calculator. The
    parent reads the child's answer as the result of its call. Parent and child are one model, and
    both are trained by the parent's answer.

    Args:
        kwargs: arguments of :class:`~torchrl_llm.envs.datasets.TaskEnv` and
            :class:`~torchrl_llm.envs.DatasetChatEnv`.

    Example:
        >>> env = DelegationEnv(num_envs=1, split="test", shuffle=False)
        >>> [type(each).__name__ for each in env.transform][1:3]
        ['Delegate', 'CutAnswers']
    """

    MAX_CALLS: ClassVar[int] = 2

    def make_tools(self) -> Sequence[Transform]:
        """The tool that delegates an expression."""
        turns = CalculatorEnv.MAX_AUXILIARY_TURNS
        tool = Delegate(
            agent=_WithCalculator(),
            name=Calculator.name,
            argument="expression",
            description=Calculator.description,
            template="What is {task}?",
            system_prompt=self.SYSTEM_PROMPT,
            max_turns=1 + turns,
            max_calls=self.MAX_CALLS,
            max_auxiliary_turns=turns,
        )
        return [tool]

    @classmethod
    def max_turns(cls, max_steps: int | None = None) -> int | None:
        """Rows of an episode, including the rows of its children."""
        turns, thought = super().max_turns(max_steps), CalculatorEnv.MAX_AUXILIARY_TURNS
        return None if turns is None else turns * (1 + cls.MAX_CALLS * (1 + thought))


_NUM_ROWS = {"train": 2**18, "test": 1024}
# One problem in this many is held out.
_HELD_OUT = 16


def countdown_problem(
    index: int,
    *,
    split: str = "train",
    num_count: int = 4,
    max_number: int = 100,
    max_target: int = 1000,
) -> CountdownProblem:
    """A solvable problem, which depends only on the arguments.

    A random expression over some of the numbers is drawn until its value is a target; every
    division in it is exact, and the target is not one of the numbers.

    Args:
        index: number of the problem.
        split: ``"train"`` or ``"test"``; no problem is in both.
        num_count: number of numbers.
        max_number: the largest number; the smallest is 1.
        max_target: the largest target; the smallest is 1.

    Raises:
        ConfigError: for an unknown split, or settings for which no problem exists.

    Example:
        >>> countdown_problem(0)
        CountdownProblem(target=300, numbers=(20, 34, 49, 98))
    """
    check_split(split)
    if num_count < 2 or max_number < 2 or max_target < 2:
        raise ConfigError(
            "num_count, max_number and max_target must be at least 2, got "
            f"{num_count}, {max_number} and {max_target}"
        )
    # The standard library's generator accepts a string and gives the same numbers everywhere.
    rng = random.Random(f"countdown {split} {num_count} {max_number} {max_target} {index}")
    for _ in range(10_000):
        numbers = tuple(rng.randint(1, max_number) for _ in range(num_count))
        target = _random_value(rng, numbers)
        if target is None or not 1 <= target <= max_target or target in numbers:
            continue
        problem = CountdownProblem(int(target), numbers)
        if _is_held_out(problem) == (split == "test"):
            return problem
    raise ConfigError(
        f"no problem was found for num_count={num_count}, max_number={max_number} and "
        f"max_target={max_target}; choose wider limits"
    )


def _random_value(rng: random.Random, numbers: Sequence[int]) -> int | None:
    pool = rng.sample([Fraction(n) for n in numbers], rng.randint(2, len(numbers)))
    while len(pool) > 1:
        left, right = (pool.pop(rng.randrange(len(pool))) for _ in range(2))
        sign = rng.choice("+-*/")
        if sign == "/" and (not right or (left / right).denominator != 1):
            return None
        value = {"+": left + right, "-": left - right, "*": left * right}.get(sign)
        pool.append(left / right if value is None else value)
    return int(pool[0])


def _is_held_out(problem: CountdownProblem) -> bool:
    # From the sorted numbers: a different order does not make a different problem.
    key = repr((problem.target, sorted(problem.numbers))).encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:4], "big") % _HELD_OUT == 0


@register("tasks", "countdown")
class CountdownEnv(TaskEnv):
    """Number puzzles, scored by whether the expression in the answer block makes the target.

    Rows have ``query`` (the puzzle) and ``answer`` (target and numbers), both strings. There are
    262,144 generated puzzles to train on and 1,024 held out (``split="test"``); no combination of
    numbers and target is in both.

    Args:
        num_count: number of numbers in a generated puzzle.
        max_number: the largest number in it.
        max_target: the largest target in it.
        kwargs: arguments of :class:`~torchrl_llm.envs.datasets.task_env.TaskEnv` and
            :class:`~torchrl_llm.envs.DatasetChatEnv`. ``data_files`` reads puzzles from JSON-lines
            files with the columns ``target`` and ``numbers`` (or ``nums``).

    Raises:
        ConfigError: settings for which no problem exists, or settings next to your own data, where
            they would have no effect.

    Example:
        >>> env = CountdownEnv(shuffle=False)
        >>> td = env.reset()
        >>> print(td["query"][0])
        Make 300 of the numbers 20, 34, 49, 98.
        >>> td["answer"][0]
        'target=300, numbers=20,34,49,98'
    """

    COLUMNS = ("target",)
    REWARD = number_rewards.CountdownRewardParser
    NEEDS_LARGER_MODEL = True
    SYSTEM_PROMPT = PROMPTS["countdown"]

    def __init__(
        self, *, num_count: int = 4, max_number: int = 100, max_target: int = 1000, **kwargs: Any
    ) -> None:
        limits = {"max_number": max_number, "max_target": max_target}
        self.settings = {"num_count": num_count, **limits}
        super().__init__(**kwargs)

    @classmethod
    def generate(
        cls, split: str, num_count: int = 4, max_number: int = 100, max_target: int = 1000
    ) -> GeneratedRows:
        """Puzzles of a split, see ``countdown_problem``."""
        limits = {"num_count": num_count, "max_number": max_number, "max_target": max_target}
        make = partial(countdown_problem, split=split, **limits)
        make(0)  # impossible settings fail at construction, not in the first batch
        return GeneratedRows(partial(_problem_row, make), _NUM_ROWS[split])

    @staticmethod
    def make_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Target and numbers as ``query`` and ``answer``."""
        target, numbers = row["target"], row.get("numbers", row.get("nums"))
        whole = isinstance(numbers, Sequence) and not isinstance(numbers, str) and len(numbers) > 0
        if not whole or not all(_is_whole(n) and n >= 0 for n in numbers) or not _is_whole(target):
            raise DataError(
                "a puzzle has a whole 'target' and whole 'numbers' that are not negative, got "
                f"{dict(row)}"
            )
        listed = ", ".join(map(str, numbers))
        return {
            "query": f"Make {target} of the numbers {listed}.",
            "answer": f"target={target}, numbers={','.join(map(str, numbers))}",
        }


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _problem_row(make: Any, index: int) -> Mapping[str, Any]:
    return make(index)._asdict()
