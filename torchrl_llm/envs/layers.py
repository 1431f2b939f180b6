"""Layers of an environment: the transforms in all its wrappers, and the environment below them."""

from __future__ import annotations

from abc import abstractmethod

from torchrl.envs import Compose, EnvBase, Transform, TransformedEnv


def innermost(env: EnvBase) -> EnvBase:
    """The environment below all transforms.

    Args:
        env: an environment, with or without transforms.
    """
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env


def transforms_of(env: EnvBase) -> list[Transform]:
    """The transforms of an environment in order; the outermost wrapper's transforms come first.

    Args:
        env: an environment in any number of wrappers.
    """
    found: list[Transform] = []
    while isinstance(env, TransformedEnv):
        found += _own(env)
        env = env.base_env
    return found


def first_of(env: TransformedEnv, kinds: tuple[type, ...]) -> int | None:
    """Index of the first transform of the given classes in the outermost wrapper.

    Args:
        env: the environment.
        kinds: classes of transforms.

    Returns:
        The index; ``None`` if there is none.
    """
    return next((at for at, each in enumerate(_own(env)) if isinstance(each, kinds)), None)


def insert(
    env: TransformedEnv, transform: Transform, *, before: tuple[type, ...]
) -> TransformedEnv:
    """Insert a transform before the first one of the given classes, or last if there is none.

    Args:
        env: the environment.
        transform: the transform.
        before: classes of transforms.

    Returns:
        The environment.
    """
    place = first_of(env, before)
    if place is None:
        return env.append_transform(transform)
    return env.insert_transform(place, transform)


def _own(env: TransformedEnv) -> list[Transform]:
    transform = env.transform
    return list(transform) if isinstance(transform, Compose) else [transform]


class HoldsTurns:
    """An environment that reports a turn when its outcome is known, not in the step of the turn.

    It writes ``"_step"`` itself, which marks the rows that a step reports.
    """

    @property
    @abstractmethod
    def tokens_held(self) -> int:
        """Sampled tokens of turns that are not reported yet."""
