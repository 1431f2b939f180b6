"""Task of small repairs: a shell in a folder with one or two broken files, and hidden tests.

A problem is one of a few mistakes (``repairs.yaml``) with a name and a number filled in. No problem
is in both splits; the splits are fixed and do not depend on a seed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from torchrl.envs import Transform

from torchrl_llm._registry import register
from torchrl_llm.data.row_files import GeneratedRows
from torchrl_llm.envs.datasets.task_env import PROMPTS, TaskEnv, check_split
from torchrl_llm.rewards.code import FilesRewardParser
from torchrl_llm.tools.shell import ShellTransform

_MISTAKES = yaml.safe_load(Path(__file__).with_name("repairs.yaml").read_text(encoding="utf-8"))
_MODULES = ("shop", "orders", "stock", "sales", "report", "plan", "team", "market", "store")
_MODULES += ("games", "tools", "count")
_NUMBERS = range(3, 41)
_NUM_HELD_OUT = 256
_SEED = 20_261_129


@cache
def repair_problems(split: str) -> tuple[int, ...]:
    """Numbers of the problems of a split, in a fixed shuffled order.

    Args:
        split: ``"train"`` (4,304 problems) or ``"test"`` (the 256 that are held out).

    Raises:
        ConfigError: for an unknown split.

    Example:
        >>> len(repair_problems("train")), len(repair_problems("test"))
        (4304, 256)
    """
    check_split(split)
    order = list(range(len(_MISTAKES) * len(_MODULES) * len(_NUMBERS)))
    random.Random(_SEED).shuffle(order)
    return tuple(order[:_NUM_HELD_OUT] if split == "test" else order[_NUM_HELD_OUT:])


def repair_problem(number: int) -> Mapping[str, Any]:
    """The row of a problem.

    Args:
        number: in ``[0, 4,560)``.

    Returns:
        ``query``, ``answer`` (``module``, ``entry_point`` and ``tests``), ``files`` and
        ``solution``. Both map paths to texts: the broken files, and the correct ones.

    Example:
        >>> row = repair_problem(1000)
        >>> row["query"], row["answer"]["module"]
        ('`cost(price, count)` in stock.py must be the price of all pieces together, and 15 for \
the way.', 'stock')
    """
    number, at = divmod(number, len(_NUMBERS))
    number, module = divmod(number, len(_MODULES))
    mistake = _filled(_MISTAKES[number], _MODULES[module], str(_NUMBERS[at]))
    right, wrong = mistake["right"], mistake["wrong"]
    files = {path: text.replace(right, wrong) for path, text in mistake["files"].items()}
    answer = {name: mistake[name] for name in ("entry_point", "tests")}
    return {
        "query": mistake["query"],
        "answer": {"module": _MODULES[module], **answer},
        "files": files,
        "solution": mistake["files"],
    }


def _filled(value: Any, module: str, number: str) -> Any:
    if isinstance(value, Mapping):
        return {_filled(k, module, number): _filled(v, module, number) for k, v in value.items()}
    return value.replace("MODULE", module).replace("NUMBER", number)


@register("tasks", "repairs")
class RepairsEnv(TaskEnv):
    """Small mistakes in one or two files, which the model repairs with a shell.

    At the start the shell's working directory holds the files of the row. At the end hidden tests
    check the function that the query names, in a different sandbox: the reward is 1 if all of them
    pass, otherwise 0. There are 4,304 problems to train on and 256 held out (``split="test"``).

    Args:
        kwargs: arguments of :class:`~torchrl_llm.envs.datasets.TaskEnv` and
            :class:`~torchrl_llm.envs.DatasetChatEnv`. ``data_files`` reads problems from JSON-lines
            files with the columns that ``repair_problem`` returns (``solution`` is not needed).

    Example:
        >>> env = RepairsEnv(num_envs=1, split="test", shuffle=False)
        >>> td = env.reset()
        >>> sorted(td["files"][0]), td["answer"][0]["entry_point"]
        (['report.py'], 'ranking')
    """

    COLUMNS = ("query", "answer", "files")
    REWARD = FilesRewardParser
    NEEDS_LARGER_MODEL = True
    SYSTEM_PROMPT = PROMPTS["repairs"]
    MAX_AUXILIARY_TURNS = 8

    @classmethod
    def generate(cls, split: str) -> GeneratedRows:
        """The problems of a split."""
        numbers = repair_problems(split)
        return GeneratedRows(lambda index: repair_problem(numbers[index]), len(numbers))

    def make_tools(self) -> Sequence[Transform]:
        """The shell."""
        return [ShellTransform(max_auxiliary_turns=self.MAX_AUXILIARY_TURNS)]
