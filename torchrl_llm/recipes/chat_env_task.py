"""User-defined chat environments as tasks of a recipe: a class, or a function that makes one.

A :class:`~torchrl_llm.envs.TaskEnv` has the attributes that a recipe needs. A plain
:class:`~torchrl_llm.envs.DatasetChatEnv` does not, so this module creates it and inspects its rows,
its number of turns, and whether it writes a reward.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torchrl_llm._log import tell_once
from torchrl_llm.envs import DatasetChatEnv, TaskEnv
from torchrl_llm.envs.transforms import StepCounter
from torchrl_llm.errors import ConfigError
from torchrl_llm.recipes.data_config import hold_out
from torchrl_llm.rewards import RewardParser, as_reward


class Part(NamedTuple):
    """Part of an environment's rows: a ``split``, and the number of held-out rows."""

    split: str
    num_held_out: int | None


class ChatEnvTask:
    """Creates a chat environment, with the interface of a task.

    A constructor (or function) that has an argument ``split`` is called with ``"train"`` and
    ``"test"``; otherwise the last rows are held out.

    Args:
        name: name in the recipe.
        make: a subclass of :class:`~torchrl_llm.envs.DatasetChatEnv`, or a function that returns
            one; called with ``num_envs``, ``repeats``, ``group_repeats``, ``seed``, ``shuffle``,
            ``tokenizer`` and ``system_prompt``, if they are given.
    """

    COLUMNS = ()
    PROGRAM = None
    NEEDS_LARGER_MODEL = False
    MAX_AUXILIARY_TURNS = 0
    make_tools = TaskEnv.make_tools
    tool_schemas = TaskEnv.tool_schemas
    num_players = TaskEnv.num_players

    def __init__(self, name: str, make: Callable[..., Any]) -> None:
        self.name, self.make = name, make
        own = make.__init__ if inspect.isclass(make) else make
        self._parameters = dict(inspect.signature(own).parameters)
        self._parameters.pop("self", None)

    @property
    def arguments(self) -> list[str]:
        """Names of the arguments that it declares."""
        nameless = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        return [name for name, p in self._parameters.items() if p.kind not in nameless]

    def __call__(
        self,
        *,
        part: Part | None = None,
        max_steps: int | None = None,
        reward: Any = None,
        **kwargs: Any,
    ) -> DatasetChatEnv:
        """Make the environment.

        Args:
            part: rows to use.
            max_steps: turns after which an episode is cut.
            reward: reward to use if the environment has none.
            kwargs: arguments of its constructor.

        Raises:
            ConfigError: it does not take these arguments, is not a chat environment, or has no
                reward.
        """
        if part is not None and "split" in self._parameters:
            kwargs["split"] = part.split
        env = self._made(kwargs)
        if part is not None and "split" not in self._parameters:
            _keep(env, part, self.name)
        self._add_reward(env, reward)
        if (limit := self._limit(env, max_steps)) is not None:
            env.append_transform(StepCounter(max_steps=limit))
        return env

    def max_turns(self, max_steps: int | None = None) -> int:
        """Largest number of model calls in an episode.

        Args:
            max_steps: limit of steps; by default the environment's limit.
        """
        return max_steps or self._own_limit or 1

    @functools.cached_property
    def _own_limit(self) -> int | None:
        env = self._made({})
        try:
            return _counted(env)
        finally:
            env.close()

    def _made(self, kwargs: dict[str, Any]) -> DatasetChatEnv:
        takes_all = any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())
        unknown = [key for key in kwargs if key not in self._parameters and not takes_all]
        if unknown:
            raise ConfigError(
                f"env.dataset={self.name} does not take {', '.join(unknown)}: give its "
                "constructor **kwargs and pass them on to DatasetChatEnv"
            )
        env = self.make(**kwargs)
        if not isinstance(env, DatasetChatEnv):
            raise ConfigError(
                f"env.dataset={self.name} must make a DatasetChatEnv or a TaskEnv, got {env!r}; "
                "append_transform in a statement of its own and return the environment itself"
            )
        return env

    def _add_reward(self, env: DatasetChatEnv, reward: Any) -> None:
        has = any(isinstance(each, RewardParser) for each in env.transform)
        if reward is not None:
            if has:
                raise ConfigError(
                    f"reward.function has no effect: env.dataset={self.name} has a reward already"
                )
            env.append_transform(as_reward(reward))
        elif not has and "reward" not in env.full_reward_spec.keys():
            raise ConfigError(
                f"env.dataset={self.name} has no reward: append a RewardParser to it, or give "
                "reward=FILE.py:FUNCTION"
            )

    def _limit(self, env: DatasetChatEnv, max_steps: int | None) -> int | None:
        """Limit of turns to enforce here; ``None`` if the environment counts turns."""
        own = _counted(env)
        if own is not None:
            if max_steps not in (None, own):
                raise ConfigError(
                    f"env.max_steps={max_steps} has no effect: env.dataset={self.name} counts its "
                    f"turns itself, up to {own}"
                )
            return None
        if max_steps is None:
            tell_once(
                f"env.dataset={self.name} has no limit of turns: an episode is one turn of the "
                "model. env.max_steps changes that"
            )
        return max_steps or 1


def _counted(env: DatasetChatEnv) -> int | None:
    limits = [each.max_steps for each in env.transform if isinstance(each, StepCounter)]
    return min((limit for limit in limits if limit is not None), default=None)


def _keep(env: DatasetChatEnv, part: Part, name: str) -> None:
    """Restrict an environment to one part of its rows."""
    loader = env.primer.dataloader
    if not hasattr(loader, "rows"):
        raise ConfigError(
            f"env.dataset={name} reads a data loader, of which no rows can be held out: give its "
            "constructor an argument split, or set eval.num_prompts=0"
        )
    train, held_out = hold_out(loader.rows, part.num_held_out, where=f"env.dataset={name}")
    loader.rows = train if part.split == "train" else held_out
    env.reset_dataloader()
