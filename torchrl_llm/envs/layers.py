"""Layers of an environment: the transforms in all its wrappers, and what is below them."""

from __future__ import annotations

from abc import abstractmethod

from torchrl.envs import Compose, EnvBase, Transform, TransformedEnv


def innermost(env: EnvBase) -> EnvBase:
    """The environment below all transforms.

    Args:
        env: with transforms, or without.
    """
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env


def transforms_of(env: EnvBase) -> list[Transform]:
    """The transforms of an environment: of the outermost wrapper first, in its order.

    Args:
        env: with one transform, several or none, or inside others.
    """
    found: list[Transform] = []
    while isinstance(env, TransformedEnv):
        found += _own(env)
        env = env.base_env
    return found


def first_of(env: TransformedEnv, kinds: tuple[type, ...]) -> int | None:
    """The place of the first transform of some kinds in the outermost wrapper.

    Args:
        env: the environment.
        kinds: classes of transforms.

    Returns:
        The place; ``None`` where there is none.
    """
    return next((at for at, each in enumerate(_own(env)) if isinstance(each, kinds)), None)


def insert(
    env: TransformedEnv, transform: Transform, *, before: tuple[type, ...]
) -> TransformedEnv:
    """Put a transform in front of the first of some kinds, or last where there is none.

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
    """An environment that tells of a turn when its outcome is known, not in the step that it took.

    The rows that a step has told of are those of its ``"_step"``, which it writes itself.
    """

    @property
    @abstractmethod
    def tokens_held(self) -> int:
        """Sampled tokens of turns that are not told of yet."""
