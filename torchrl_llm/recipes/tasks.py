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
    """Refuse the name of a task that there is not.

    Args:
        name: a registered task, or ``"module:class"`` of a task of your own.

    Raises:
        ConfigError: for another name, a module that cannot be imported, or a class that is no task.
    """
    task_class(name)


def task_class(name: str) -> type[TaskEnv] | ChatEnvTask:
    """The environment of a task.

    Args:
        name: a registered task, or ``"module:class"`` of a task of your own.

    Returns:
        A class; that of a :class:`~torchrl_llm.envs.Session` or of the rules of a game is made
        here; of a plain :class:`~torchrl_llm.envs.DatasetChatEnv`, or a function that makes one,
        a :class:`~torchrl_llm.recipes.chat_env_task.ChatEnvTask`.

    Raises:
        ConfigError: as :func:`check_task`.

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
    """The settings that a task has besides those of every task.

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
    shared = {*_keywords(TaskEnv), *_keywords(DatasetChatEnv)}
    if isinstance(task := task_class(name), ChatEnvTask):
        own = task.arguments
    else:
        bases = inspect.getmro(task)
        own = [key for base in bases[: bases.index(TaskEnv)] for key in _keywords(base)]
    return tuple(key for key in dict.fromkeys(own) if key not in shared)


def check_options(name: str, options: Mapping[str, Any], *, path: str = "env.options") -> None:
    """Refuse settings that a task does not have; without any, the task is not imported.

    Args:
        name: as of :func:`task_class`.
        options: settings by name, the keys below ``env.options`` in a recipe.
        path: those keys' prefix, for the error.

    Raises:
        ConfigError: for a setting that the task does not have, or a value other than the few that
            it can have.

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
    """The few values that a setting can have in a file; none where it can have others.

    A class beside them, such as a parser, is for Python only.
    """
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    literals = [part for part in parts if get_origin(part) is Literal]
    plain = {part for part in parts if part in (str, int, float, bool, NoneType, Any)}
    return [] if plain else [word for part in literals for word in get_args(part)]


def _keywords(cls: type) -> list[str]:
    """Arguments that a class's constructor takes by name alone."""
    if "__init__" not in vars(cls):
        return []
    parameters = inspect.signature(cls.__init__).parameters.values()
    return [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]


def check_tools(names: Sequence[str]) -> None:
    """Refuse names that no tool can be made of; no tool is started.

    Args:
        names: registered names, or ``"module:name"`` of a tool or function of the user's.

    Raises:
        ConfigError: an unknown name, what is no tool, arguments that it needs, or a name twice.

    Example:
        >>> check_tools(["calculator"])
    """
    for name in names:
        _make(name)
    if twice := {name for name in names if list(names).count(name) > 1}:
        raise ConfigError(f"env.tools names {sorted(twice)} twice")


def add_tools(env: DatasetChatEnv, names: Sequence[str], *, max_turns: int) -> DatasetChatEnv:
    """Append the tools to an environment, in front of its reward; nothing without any.

    Args:
        env: a task.
        names: as of :func:`check_tools`.
        max_turns: most turns in a row that only call tools.

    Returns:
        The same environment.

    Raises:
        ConfigError: as :func:`check_tools`.
    """
    if names:
        insert_tools(env, tool_transform(names, max_turns=max_turns))
    return env


def tool_transform(names: Sequence[str], *, max_turns: int) -> ToolTransform:
    """Tools by name, as an environment takes them.

    Args:
        names: as of :func:`check_tools`.
        max_turns: as of :func:`add_tools`.

    Raises:
        ConfigError: as :func:`check_tools`.
    """
    return ToolTransform([_make(name) for name in names], max_auxiliary_turns=max_turns)


def _make(name: str) -> Tool:
    try:
        return as_tool(name)
    except (ConfigError, TypeError) as error:
        named = str(error).startswith(repr(name))
        raise ConfigError(f"env.tools: {error if named else f'{name!r}: {error}'}") from error
