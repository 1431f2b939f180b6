"""The tasks by name, as a recipe's ``env.dataset`` gives them.

Each is a subclass of :class:`~torchrl_llm.envs.datasets.TaskEnv`, imported when it is asked for.
"""

from __future__ import annotations

import difflib
import inspect
from importlib import import_module
from typing import TYPE_CHECKING

from torchrl_llm.errors import ConfigError

if TYPE_CHECKING:
    from torchrl_llm.envs.datasets.base import TaskEnv

__all__ = ["TASKS", "check_task", "task_class", "task_options"]

TASKS: dict[str, str] = {
    "arithmetic": "torchrl_llm.envs.datasets.arithmetic:ArithmeticEnv",
    "calculator": "torchrl_llm.envs.datasets.calculator:CalculatorEnv",
    "countdown": "torchrl_llm.envs.datasets.countdown:CountdownEnv",
    "gsm8k": "torchrl_llm.envs.datasets.gsm8k:GSM8KEnv",
    "humaneval": "torchrl_llm.envs.datasets.humaneval:HumanEvalEnv",
    "ifeval": "torchrl_llm.envs.datasets.ifeval:IFEvalEnv",
    "key_door": "torchrl_llm.envs.games.key_door:KeyDoorEnv",
    "letter_counting": "torchrl_llm.envs.datasets.letter_counting:LetterCountingEnv",
    "math": "torchrl_llm.envs.datasets.math:MATHEnv",
    "text_reversal": "torchrl_llm.envs.datasets.text_reversal:TextReversalEnv",
    "tic_tac_toe": "torchrl_llm.envs.games.tic_tac_toe:TicTacToeEnv",
}
"""Name to ``"module:class"``."""


def check_task(name: str) -> None:
    """Refuse the name of a task that there is not, without importing anything.

    Args:
        name: a key of :data:`TASKS`.

    Raises:
        ConfigError: for another name.
    """
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"unknown task {name!r}; there are {sorted(TASKS)}{hint}")


def task_class(name: str) -> type[TaskEnv]:
    """The environment of a task.

    Args:
        name: a key of :data:`TASKS`.

    Raises:
        ConfigError: for another name.

    Example:
        >>> task_class("arithmetic").__name__
        'ArithmeticEnv'
    """
    check_task(name)
    module, _, attribute = TASKS[name].partition(":")
    return getattr(import_module(module), attribute)


def task_options(name: str) -> tuple[str, ...]:
    """The settings that a task has beside those of every task.

    Args:
        name: a key of :data:`TASKS`.

    Returns:
        Names of keyword arguments of its class, in their order.

    Raises:
        ConfigError: for another name.

    Example:
        >>> task_options("countdown")
        ('num_count', 'max_number', 'max_target')
    """
    from torchrl_llm.envs.datasets.base import DatasetChatEnv, TaskEnv

    shared = {*_keywords(TaskEnv), *_keywords(DatasetChatEnv)}
    bases = inspect.getmro(task_class(name))
    own = [key for base in bases[: bases.index(TaskEnv)] for key in _keywords(base)]
    return tuple(key for key in dict.fromkeys(own) if key not in shared)


def _keywords(cls: type) -> list[str]:
    """Arguments that a class's constructor takes by name alone."""
    if "__init__" not in vars(cls):
        return []
    parameters = inspect.signature(cls.__init__).parameters.values()
    return [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
