"""Tasks and tools as a recipe's group ``env`` names them: their classes, settings and checks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from torchrl_llm._registry import constructor_arguments, find
from torchrl_llm.envs import GameEnv, Session, SessionEnv
from torchrl_llm.envs.datasets.task_env import DatasetChatEnv, TaskEnv, insert_tools
from torchrl_llm.envs.games.game import Rules
from torchrl_llm.errors import ConfigError
from torchrl_llm.recipes.chat_env_task import ChatEnvTask
from torchrl_llm.tools import Tool, ToolTransform
from torchrl_llm.tools.tool_transform import as_tool


def check_task(name: str) -> None:
    """Reject the name of an unknown task.

    Args:
        name: a registered task, or ``"module:class"`` of your own task.

    Raises:
        ConfigError: an unknown name, a module that cannot be imported, or a class that is not a
            task.
    """
    task_class(name)


def task_class(name: str) -> type[TaskEnv] | ChatEnvTask:
    """The environment of a task.

    Args:
        name: a registered task, or ``"module:class"`` of your own task.

    Returns:
        A class. For a :class:`~torchrl_llm.envs.Session` or the rules of a game this function makes
        the class; for a plain :class:`~torchrl_llm.envs.DatasetChatEnv`, or a function that makes
        one, it returns a :class:`~torchrl_llm.recipes.chat_env_task.ChatEnvTask`.

    Raises:
        ConfigError: as for :func:`check_task`.

    Example:
        >>> task_class("arithmetic").__name__
        'ArithmeticEnv'
    """
    found = find("tasks", name)
    for world, env in ((Session, SessionEnv), (Rules, GameEnv)):
        if inspect.isclass(found) and issubclass(found, world):
            return env.of(found)
    if inspect.isclass(found) and issubclass(found, TaskEnv):
        return found
    if inspect.isfunction(found) or (inspect.isclass(found) and issubclass(found, DatasetChatEnv)):
        return ChatEnvTask(name, found)
    raise ConfigError(
        f"the task {name!r} must be a subclass of TaskEnv, DatasetChatEnv, Session or Game, or "
        f"a function that makes an environment, got {found!r}"
    )


def task_options(name: str) -> tuple[str, ...]:
    """The settings that a task has in addition to the settings of every task.

    Args:
        name: as for :func:`task_class`.

    Returns:
        Names of keyword arguments of its class, in their order.

    Raises:
        ConfigError: as for :func:`check_task`.

    Example:
        >>> task_options("countdown")
        ('num_count', 'max_number', 'max_target')
    """
    shared = {*_keywords(TaskEnv), *_keywords(DatasetChatEnv)}
    if isinstance(task := task_class(name), ChatEnvTask):
        own = task.arguments
    else:
        bases = inspect.getmro(task)
        own = [key for base in bases[: bases.index(TaskEnv)] for key in _keywords(base)]
    return tuple(key for key in dict.fromkeys(own) if key not in shared)


def check_options(name: str, options: Mapping[str, Any], *, path: str = "env.options") -> None:
    """Reject settings that a task does not have; without settings the task is not imported.

    Args:
        name: as for :func:`task_class`.
        options: settings by name, the keys below ``env.options`` in a recipe.
        path: prefix of these keys, for the error.

    Raises:
        ConfigError: the task does not have the setting, or the setting does not allow the value.

    Example:
        >>> check_options("gsm8k", {"answer_format": "automatic"})
        Traceback (most recent call last):
        ...
        torchrl_llm.errors.ConfigError: env.options.answer_format must be one of ['tags', 'auto', \
'flexible-extract', 'strict-match'], got 'automatic'
    """
    if not options:
        return
    allowed, task = task_options(name), task_class(name)
    made = constructor_arguments(task.make if isinstance(task, ChatEnvTask) else task)
    for option, value in options.items():
        if option not in allowed:
            raise ConfigError(
                f"{path}.{option} is no setting of the task {name!r}; it has {sorted(allowed)}"
            )
        words = _words(made[option].annotation)
        if words and value not in words:
            raise ConfigError(f"{path}.{option} must be one of {words}, got {value!r}")


def _words(hint: Any) -> list[Any]:
    """The values of a setting with a fixed list of values; empty for other settings.

    A class in the same type hint, such as a parser, is only for Python.
    """
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    literals = [part for part in parts if get_origin(part) is Literal]
    plain = {part for part in parts if part in (str, int, float, bool, NoneType, Any)}
    return [] if plain else [word for part in literals for word in get_args(part)]


def _keywords(cls: type) -> list[str]:
    """Keyword-only arguments of a class's constructor."""
    if "__init__" not in vars(cls):
        return []
    parameters = inspect.signature(cls.__init__).parameters.values()
    return [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]


def check_tools(names: Sequence[str]) -> None:
    """Reject names that do not make a tool; does not start tools.

    Args:
        names: registered names, or ``"module:name"`` of a user-defined tool or function.

    Raises:
        ConfigError: an unknown name, an object that is not a tool, missing arguments, or a name
            twice.

    Example:
        >>> check_tools(["calculator"])
    """
    for name in names:
        _make(name)
    if twice := {name for name in names if list(names).count(name) > 1}:
        raise ConfigError(f"env.tools names {sorted(twice)} twice")


def add_tools(env: DatasetChatEnv, names: Sequence[str], *, max_turns: int) -> DatasetChatEnv:
    """Insert the tools into an environment, before its reward; without tools it is not changed.

    Args:
        env: a task.
        names: as for :func:`check_tools`.
        max_turns: most turns in a row that only call tools.

    Returns:
        The same environment.

    Raises:
        ConfigError: as for :func:`check_tools`.
    """
    if names:
        insert_tools(env, tool_transform(names, max_turns=max_turns))
    return env


def tool_transform(names: Sequence[str], *, max_turns: int) -> ToolTransform:
    """The transform of tools by name, for an environment.

    Args:
        names: as for :func:`check_tools`.
        max_turns: as for :func:`add_tools`.

    Raises:
        ConfigError: as for :func:`check_tools`.
    """
    return ToolTransform([_make(name) for name in names], max_auxiliary_turns=max_turns)


def _make(name: str) -> Tool:
    try:
        return as_tool(name)
    except (ConfigError, TypeError) as error:
        named = str(error).startswith(repr(name))
        raise ConfigError(f"env.tools: {error if named else f'{name!r}: {error}'}") from error
