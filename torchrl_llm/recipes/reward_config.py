"""Rewards next to a task's own reward, from a recipe's ``reward.components``.

Each component is a group of keys under a user-defined name: the terms of a
:class:`~torchrl_llm.rewards.Component` (``weight``, ``optional``, ``run``, ``num_workers``,
``timeout``), the scorer, and its arguments. The scorer is a registered reward by ``type``, or an
import path by ``_target_``. The component ``task`` is the task's own reward and always exists.

Next: :mod:`torchrl_llm.rewards.composite_reward` adds them up.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import make_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torchrl_llm import rewards
from torchrl_llm._registry import absolute_path, constructor_arguments, find, import_named, names
from torchrl_llm._settings import ensure, naming
from torchrl_llm.envs import TaskEnv
from torchrl_llm.errors import ConfigError
from torchrl_llm.recipes.strict_config import from_mapping

TASK = "task"
_PATH = "reward.components"

Settings = Mapping[str, Mapping[str, Any]]


# The keys of every component: the arguments of :class:`~torchrl_llm.rewards.Component`.
_TERMS = {
    name: (parameter.annotation, parameter.default)
    for name, parameter in constructor_arguments(rewards.Component).items()
    if name != "scorer"
}
_Terms = make_dataclass("_Terms", [(name, *term) for name, term in _TERMS.items()], kw_only=True)


def check_components(settings: Settings) -> dict[str, dict[str, Any]]:
    """Reject settings that cannot make a reward.

    Registered scorers are constructed for the check. A user-defined scorer is imported and its
    arguments are checked, but it is not constructed, because it may load a model.

    Args:
        settings: name to the keys of a component.

    Returns:
        The same, with the paths of files made absolute.

    Raises:
        ConfigError: an unknown key or type, a target that cannot be imported, arguments that it
            does not take, or weights that cannot be added up.

    Example:
        >>> check_components({"length": {"longest": 20, "weight": 0.5}})
        {'length': {'longest': 20, 'weight': 0.5}}
        >>> check_components({"length": {"longst": 20}})
        Traceback (most recent call last):
        ...
        torchrl_llm.errors.ConfigError: reward.components.length: missing a required argument: \
'longest'; LengthReward takes longest, shortest, cushion, unit
    """
    checked = {name: _absolute(name, part) for name, part in settings.items()}
    parts = {name: _component(name, part, make=False) for name, part in checked.items()}
    if parts:
        with naming(_PATH):
            rewards.CompositeReward(_with_task(parts))
    return checked


def make_reward(config: Any, *, alone: bool) -> Any:
    """The reward that replaces the task's own; ``None`` to keep the task's.

    Args:
        config: the group ``reward``.
        alone: whether the task has no own reward, so that without ``reward.function`` the
            components are the reward; the first component counts as the task's.

    Returns:
        An argument for :func:`~torchrl_llm.rewards.as_reward`.

    Raises:
        ConfigError: see :func:`check_components` and :func:`check_function`.
    """
    if config.function is not None:
        return check_function(config.function)
    if not (alone and config.components):
        return None
    return {k: _component(k, part, make=True) for k, part in config.components.items()}


def check_function(name: str) -> rewards.RewardParser:
    """The reward that ``reward.function`` names.

    Args:
        name: a registered reward, or ``package.module:name`` or ``path/to/file.py:name`` of a
            function or a class.

    Raises:
        ConfigError: the name is unknown, or the object cannot be a reward.

    Example:
        >>> type(check_function("exact")).__name__
        'ExactReward'
    """
    with naming("reward.function"):
        found = find("rewards", name)
        able = callable(found) or isinstance(found, rewards.Scorer)
        ensure(able or ":" not in name, f"{name} is {found!r}, and no function")
        arguments = constructor_arguments(found) if inspect.isclass(found) else {}
        needed = [key for key, each in arguments.items() if each.default is each.empty]
        ensure(
            not needed and (":" in name or inspect.isclass(found)),
            f"{name!r} has settings ({', '.join(needed) or 'see the docs'}); write it as a part of "
            f"the reward: reward.components.{name}.KEY=VALUE",
        )
        return rewards.as_reward(found)


def known_scorers(settings: Settings) -> dict[str, Any]:
    """Scorers besides the task, by name; a user-defined class is not constructed.

    Args:
        settings: name to the keys of a component.
    """
    parts = {name: part for name, part in settings.items() if name != TASK}
    return {name: _component(name, part, make=False).scorer for name, part in parts.items()}


def has_token_rewards(settings: Settings) -> bool:
    """Whether a component scores each token of a response.

    Args:
        settings: name to the keys of a component.
    """
    parts = [_target(name, part) for name, part in settings.items() if name != TASK]
    return any(getattr(part, "per_token", False) for part in parts)


def add_components(env: TaskEnv, settings: Settings) -> TaskEnv:
    """Append the configured components to an environment that has a reward.

    Args:
        env: a task; its own reward becomes the component ``task``, and still defines success and
            the end of an episode.
        settings: name to the keys of a component; without any, the environment is not changed.

    Returns:
        The same environment.

    Raises:
        ConfigError: see :func:`check_components`.
    """
    if settings:
        parts = {name: _component(name, part, make=True) for name, part in settings.items()}
        env.append_transform(rewards.CompositeReward(_with_task(parts), set_done_if_answer=False))
    return env


def _with_task(parts: Mapping[str, rewards.Component]) -> dict[str, rewards.Component]:
    """The task first, whose success counts."""
    task = parts.get(TASK, rewards.Component(rewards.WrittenReward()))
    return {TASK: task} | {name: part for name, part in parts.items() if name != TASK}


def _component(name: str, settings: Mapping[str, Any], *, make: bool) -> rewards.Component:
    path = f"{_PATH}.{name}"
    ensure(hasattr(settings, "items"), f"{path} is a group of keys, got {settings!r}")
    options = {key: value for key, value in settings.items() if key not in _TERMS}
    given = {key: value for key, value in settings.items() if key in _TERMS}
    with naming(path):
        if name == TASK:
            ensure(
                set(settings) <= {"weight"},
                f"the task's own reward has a weight and no other key here, got {list(settings)}",
            )
            scorer: Any = rewards.WrittenReward()
        else:
            scorer = _scorer(name, options, make=make)
        if isinstance(scorer, rewards.BatchScorer) and "run" not in given:
            given["run"] = "threads"  # it waits for others
        return rewards.Component(scorer, **vars(from_mapping(_Terms, given)))


def _target(name: str, settings: Mapping[str, Any]) -> Any:
    """The imported or registered object of a component; it is not called or checked."""
    path, kind = settings.get("_target_"), settings.get("type")
    ensure(path is None or kind is None, "type and _target_ both say what scores; pass one")
    if path is not None:
        return _import(path)
    kind = name if kind is None else kind
    ensure(
        kind in names("rewards"),
        f"type must be one of {names('rewards')}, got {kind!r}; or give _target_, what to import: "
        "package.module:name or path/to/file.py:name",
    )
    return find("rewards", kind)


def _scorer(name: str, options: dict[str, Any], *, make: bool) -> Any:
    target = _target(name, options)
    path, _ = options.pop("_target_", None), options.pop("type", None)
    if path is not None:
        return _of_user(path, target, options, make=make)
    _check_call(target, options)
    return target(**options)


def _of_user(path: str, target: Any, options: Mapping[str, Any], *, make: bool) -> Any:
    if inspect.isclass(target):
        _check_call(target, options)
        return target(**options) if make else _in_place_of(target)
    if not inspect.isroutine(target):
        ensure(not options, f"{path} is an object already and takes no arguments: {options}")
        return target
    # Component passes further inputs by signature: an answer, a row.
    _check_call(target, options, None, whole=False)
    return partial(target, **options) if options else target


def _in_place_of(target: type) -> Any:
    """A placeholder of the same kind as a scorer class, whose constructor may take long."""
    if issubclass(target, rewards.BatchScorer):
        return rewards.JudgeReward(list)
    ensure(
        issubclass(target, (rewards.Scorer, rewards.RewardParser)) or "__call__" in dir(target),
        f"{target.__name__} is no Scorer, BatchScorer or RewardParser, nor can it be called",
    )
    return rewards.FormatReward()


def _check_call(
    target: Callable[..., Any], options: Mapping[str, Any], *before: Any, whole: bool = True
) -> None:
    """Reject arguments that a target does not take and, if they are complete, missing ones."""
    signature = inspect.signature(target)
    try:
        (signature.bind if whole else signature.bind_partial)(*before, **options)
    except TypeError as error:
        names = list(signature.parameters)[len(before) :]
        takes = ", ".join(names) or "no arguments"
        raise ConfigError(f"{error}; {target.__name__} takes {takes}") from None


def _import(path: Any) -> Any:
    """The object of ``package.module:name``, ``package.module.name`` or ``file.py:name``."""
    ensure(isinstance(path, str), f"_target_ must be a text, got {path!r}")
    try:
        return import_named(path)
    except ConfigError as error:
        raise ConfigError(f"_target_={error}") from error


def _absolute(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that are valid in a process with a different working folder."""
    ensure(hasattr(settings, "items"), f"{_PATH} has groups of keys, got {settings!r}")
    settings = dict(settings)
    if settings.get("type", name) == "model" and Path(str(settings.get("name"))).is_dir():
        settings["name"] = str(Path(settings["name"]).resolve())
    if isinstance(path := settings.get("_target_"), str):
        settings["_target_"] = absolute_path(path)
    return settings
