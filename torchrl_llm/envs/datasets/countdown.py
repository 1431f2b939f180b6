"""Countdown: make a target of a few numbers by plus, minus, times and divided by.

Problems are computed from their index, each of them solvable; whether a problem is trained on or
held out follows from its numbers and target alone, so that no problem is in both splits.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

from torchrl_llm._registry import register
from torchrl_llm.data.row_files import GeneratedRows
from torchrl_llm.envs.datasets.task_env import TaskEnv
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.rewards.countdown import CountdownProblem, CountdownRewardParser

_NUM_ROWS = {"train": 2**18, "test": 1024}
# One problem in so many is held out.
_HELD_OUT = 16


def countdown_problem(
    index: int,
    *,
    split: str = "train",
    num_count: int = 4,
    max_number: int = 100,
    max_target: int = 1000,
) -> CountdownProblem:
    """A problem that can be solved, a function of the arguments alone.

    A random expression over some of the numbers is drawn until its value is a target; no division
    in it leaves a fraction, and the target is none of the numbers.

    Args:
        index: number of the problem.
        split: ``"train"`` or ``"test"``; no problem is in both.
        num_count: how many numbers there are.
        max_number: the largest number; the smallest is 1.
        max_target: the largest target; the smallest is 1.

    Raises:
        ConfigError: for another split, or settings without problems.

    Example:
        >>> countdown_problem(0)
        CountdownProblem(target=300, numbers=(20, 34, 49, 98))
    """
    if split not in _NUM_ROWS:
        raise ConfigError(f"split must be 'train' or 'test', got {split!r}")
    if num_count < 2 or max_number < 2 or max_target < 2:
        raise ConfigError(
            "num_count, max_number and max_target must be at least 2, got "
            f"{num_count}, {max_number} and {max_target}"
        )
    # A generator of the standard library takes a string and gives the same numbers everywhere.
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
    # Of the sorted numbers: the same problem in another order is the same problem.
    key = repr((problem.target, sorted(problem.numbers))).encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:4], "big") % _HELD_OUT == 0


@register("tasks", "countdown")
class CountdownEnv(TaskEnv):
    """Number puzzles, scored by whether the expression in the answer block makes the target.

    Rows have ``query`` (the puzzle) and ``answer`` (target and numbers), both strings. There are
    262,144 generated puzzles to train on and 1,024 held out (``split="test"``); the same numbers
    are never asked for the same target in both.

    Args:
        num_count: how many numbers a generated puzzle has.
        max_number: the largest number in it.
        max_target: the largest target in it.
        kwargs: arguments of :class:`~torchrl_llm.envs.datasets.task_env.TaskEnv` and
            :class:`~torchrl_llm.envs.DatasetChatEnv`. ``data_files`` reads puzzles from JSON-lines
            files with the columns ``target`` and ``numbers`` (or ``nums``).

    Raises:
        ConfigError: settings without problems, or settings beside data of your own, on which they
            would have no effect.

    Example:
        >>> env = CountdownEnv(shuffle=False)
        >>> td = env.reset()
        >>> print(td["query"][0])
        Make 300 of the numbers 20, 34, 49, 98.
        >>> td["answer"][0]
        'target=300, numbers=20,34,49,98'
    """

    COLUMNS = ("target",)
    SYSTEM_PROMPT = (
        "Write an arithmetic expression that is equal to the target. Use only the given numbers, "
        "each at most once, the signs + - * / and parentheses. Think step by step between <think> "
        "and </think>, then give the expression, and nothing else, between <answer> and </answer>, "
        "for example <answer>(25 + 3) * 4</answer>."
    )

    def __init__(
        self,
        *,
        num_count: int = 4,
        max_number: int = 100,
        max_target: int = 1000,
        dataset: Any = None,
        data_files: Any = None,
        split: str | None = None,
        **kwargs: Any,
    ) -> None:
        settings = {"num_count": num_count, "max_number": max_number, "max_target": max_target}
        if dataset is None and data_files is None:
            dataset = self._generated(split, settings)
        elif (num_count, max_number, max_target) != (4, 100, 1000):
            raise ConfigError(f"{settings} have no effect on dataset or data_files")
        super().__init__(dataset=dataset, data_files=data_files, split=split, **kwargs)

    @classmethod
    def default_dataset(cls, split: str | None) -> GeneratedRows:
        """Generated puzzles with the default settings, of the split ``train`` if not given."""
        return cls._generated(split, {})

    @staticmethod
    def _generated(split: str | None, settings: Mapping[str, int]) -> GeneratedRows:
        split = "train" if split is None else split
        make = partial(countdown_problem, split=split, **settings)
        make(0)  # impossible settings fail here, not in the first batch
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

    def make_reward(self) -> CountdownRewardParser:
        """See :class:`~torchrl_llm.rewards.CountdownRewardParser`."""
        return CountdownRewardParser()


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _problem_row(make: Any, index: int) -> Mapping[str, Any]:
    return make(index)._asdict()
