"""Tools beside a task's own, from a recipe's ``env.tools``."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torchrl_llm._registry import find
from torchrl_llm.envs import TaskEnv
from torchrl_llm.errors import ConfigError
from torchrl_llm.tools import Tool, ToolTransform
from torchrl_llm.tools.tool_transform import as_tool


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


def add_tools(env: TaskEnv, names: Sequence[str], *, max_turns: int) -> TaskEnv:
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
        tools = [_make(name) for name in names]
        env.append_transform(ToolTransform(tools, max_auxiliary_turns=max_turns))
    return env


def _make(name: str) -> Tool:
    try:
        found: Any = find("tools", name)
        if inspect.isclass(found):
            if not issubclass(found, Tool):
                raise ConfigError(f"{found.__name__} is no Tool and no function")
            return found()
        return as_tool(found)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"env.tools: {name!r}: {error}") from error
