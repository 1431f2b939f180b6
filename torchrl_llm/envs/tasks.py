"""The tasks by name, as a recipe's ``env.dataset`` gives them.

Each is a subclass of :class:`~torchrl_llm.envs.datasets.TaskEnv`, imported when it is asked for. A
task of your own has no name here and is given as ``"module:class"``.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING

from torchrl_llm.errors import ConfigError

if TYPE_CHECKING:
    from torchrl_llm.envs.datasets.base import TaskEnv

__all__ = ["TASKS", "check_options", "check_task", "task_class", "task_options"]

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
    """Refuse the name of a task that there is not; of those in :data:`TASKS` none is imported.

    Args:
        name: a key of :data:`TASKS`, or ``"module:class"`` of a task of your own.

    Raises:
        ConfigError: for another name, a module that cannot be imported, or a class that is no task.
    """
    if ":" in name:
        _class_of_yours(name)
    elif name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"unknown task {name!r}; there are {sorted(TASKS)}{hint}; one of your own is given as "
            "'module:class'"
        )


def task_class(name: str) -> type[TaskEnv]:
    """The environment of a task.

    Args:
        name: a key of :data:`TASKS`, or ``"module:class"`` of a task of your own.

    Raises:
        ConfigError: as :func:`check_task`.

    Example:
        >>> task_class("arithmetic").__name__
        'ArithmeticEnv'
    """
    if ":" in name:
        return _class_of_yours(name)
    check_task(name)
    module, _, attribute = TASKS[name].partition(":")
    return getattr(import_module(module), attribute)


def task_options(name: str) -> tuple[str, ...]:
    """The settings that a task has beside those of every task.

    Args:
        name: as of :func:`task_class`.

    Returns:
        Names of keyword arguments of its class, in their order.

    Raises:
        ConfigError: as :func:`check_task`.

    Example:
        >>> task_options("countdown")
        ('num_count', 'max_number', 'max_target')
    """
    from torchrl_llm.envs.datasets.base import DatasetChatEnv, TaskEnv

    shared = {*_keywords(TaskEnv), *_keywords(DatasetChatEnv)}
    bases = inspect.getmro(task_class(name))
    own = [key for base in bases[: bases.index(TaskEnv)] for key in _keywords(base)]
    return tuple(key for key in dict.fromkeys(own) if key not in shared)


def check_options(name: str, options: Iterable[str]) -> None:
    """Refuse settings that a task does not have; without any, the task is not imported.

    Args:
        name: as of :func:`task_class`.
        options: names of settings, the keys below ``env.options`` in a recipe.

    Raises:
        ConfigError: for a setting that the task does not have.

    Example:
        >>> check_options("countdown", ["max_number"])
    """
    for option in options:
        allowed = task_options(name)
        if option not in allowed:
            raise ConfigError(
                f"env.options.{option} is no setting of the task {name!r}; it has {sorted(allowed)}"
            )


def _class_of_yours(name: str) -> type[TaskEnv]:
    """The class that ``"module:class"`` names."""
    from torchrl_llm.envs.datasets.base import TaskEnv

    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"the task {name!r} cannot be imported ({error}); write 'module:class', and put the "
            "folder of the module into PYTHONPATH"
        ) from error
    if not (inspect.isclass(found) and issubclass(found, TaskEnv)):
        raise ConfigError(f"the task {name!r} must be a subclass of TaskEnv, got {found!r}")
    return found


def _keywords(cls: type) -> list[str]:
    """Arguments that a class's constructor takes by name alone."""
    if "__init__" not in vars(cls):
        return []
    parameters = inspect.signature(cls.__init__).parameters.values()
    return [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
