"""PettingZoo's parallel environments, made by name; ``langmarl.pistonball`` plays one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torchrl_llm._imports import require
from torchrl_llm.errors import ConfigError, DataError, MissingExtraError


def make_pettingzoo(name: str, **settings: Any) -> Any:
    """Make a parallel environment of PettingZoo.

    Args:
        name: family and environment, ``"butterfly/pistonball_v6"``.
        settings: arguments of its ``parallel_env``. Unless ``render_mode`` is ``"human"``, SDL runs
            without a screen (``SDL_VIDEODRIVER=dummy``, unless it is set).

    Returns:
        A ``pettingzoo.ParallelEnv``.

    Raises:
        MissingExtraError: PettingZoo, or a package that the environment needs, is not installed.
        ConfigError: there is no environment of that name.
    """
    require("pettingzoo", extra="pettingzoo", feature="make_pettingzoo")
    if settings.get("render_mode") != "human":
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    module = f"pettingzoo.{name.replace('/', '.')}"
    try:
        return import_module(module).parallel_env(**settings)
    except ModuleNotFoundError as error:
        if module.startswith(str(error.name)):
            raise ConfigError(f"PettingZoo has no environment {name!r}") from error
        told = f'{name} needs the package {error.name!r}: pip install "torchrl_llm[pettingzoo]"'
        raise MissingExtraError(told) from error


def joint_step(env: Any, actions: Mapping[str, Any]) -> dict[str, float]:
    """Step all agents of a parallel environment; returns the reward of each.

    Raises:
        DataError: no agent is left to act, or an action is missing or not in its action space.
    """
    if not env.agents or set(actions) != set(env.agents):
        raise DataError(f"actions are for the agents {env.agents}, got {list(actions)}")
    for name, action in actions.items():
        if not (space := env.action_space(name)).contains(action):
            raise DataError(f"the action of {name} must be in {space}, got {action!r}")
    return {name: float(reward) for name, reward in env.step(dict(actions))[1].items()}
