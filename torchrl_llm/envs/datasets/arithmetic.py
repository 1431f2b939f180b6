"""Sums of two two-digit numbers: the task of the embedded model, made on the spot.

Every problem there is belongs to exactly one split, so held-out accuracy is about problems that
were never trained on; the split is a constant of the task and depends on no seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

from torchrl_llm._registry import register
from torchrl_llm.data.row_files import GeneratedRows
from torchrl_llm.envs.datasets.task_env import TaskEnv
from torchrl_llm.errors import ConfigError
from torchrl_llm.rewards.arithmetic import ArithmeticRewardParser

_NUM_HELD_OUT = 512
_SPLIT_SEED = 20_240_607


@cache
def addition_pairs(split: str) -> tuple[tuple[int, int], ...]:
    """The summands of every problem of a split, in a fixed shuffled order.

    Args:
        split: ``"train"`` (7,588 problems) or ``"test"`` (the 512 that are held out).

    Raises:
        ConfigError: for another split.

    Example:
        >>> train, test = addition_pairs("train"), addition_pairs("test")
        >>> len(train), len(test), len({*train, *test})
        (7588, 512, 8100)
    """
    if split not in ("train", "test"):
        raise ConfigError(f"split must be 'train' or 'test', got {split!r}")
    order = torch.randperm(90 * 90, generator=torch.Generator().manual_seed(_SPLIT_SEED)).tolist()
    chosen = order[:_NUM_HELD_OUT] if split == "test" else order[_NUM_HELD_OUT:]
    return tuple((10 + number // 90, 10 + number % 90) for number in chosen)


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

    @classmethod
    def default_dataset(cls, split: str | None) -> GeneratedRows:
        """The problems of a split, ``train`` if not given."""
        pairs = addition_pairs("train" if split is None else split)
        return GeneratedRows(lambda index: addition_problem(*pairs[index]), len(pairs))

    def make_reward(self) -> ArithmeticRewardParser:
        """See :class:`~torchrl_llm.rewards.ArithmeticRewardParser`."""
        return ArithmeticRewardParser()
