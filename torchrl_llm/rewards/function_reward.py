"""Rewards that are plain functions, and the one way in which anything becomes a reward.

Next: :mod:`torchrl_llm.rewards.composite_reward` for several of them with weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torchrl_llm.data.failures import place_of
from torchrl_llm.errors import ConfigError, RewardError, TorchRLLLMError
from torchrl_llm.rewards.composite_reward import CompositeReward
from torchrl_llm.rewards.reward_components import Component
from torchrl_llm.rewards.reward_parser import RewardParser
from torchrl_llm.rewards.reward_scorer import Sample, Scorer, as_scorer


class FunctionReward(RewardParser):
    """The reward of a function of a response and its row's answer, or of the whole row.

    The answer is ``None`` where the rows have none. A value above zero counts as success; a
    function that returns a :class:`~torchrl_llm.rewards.RewardScore` says itself what is one.

    Args:
        function: ``f(response, answer)``, ``f(response, row)`` (a second argument of the name
            ``row`` is the row of the data, a dict, to which ``"finish_reason"`` is added: how the
            answer ended, ``"length"`` where its limit of tokens has cut it), ``f(response)``, or
            ``f(sample)`` (a :class:`~torchrl_llm.rewards.Sample`).
        options: arguments of :class:`~torchrl_llm.rewards.RewardParser`.

    Raises:
        ConfigError: what cannot be called so.

    Example:
        >>> FunctionReward(lambda response, answer: response == answer).score("4", "4")
        True
    """

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(**options)
        self.scorer = as_scorer(function)
        self.needs_answer, self._columns = self.scorer.needs_answer, self.scorer.columns

    def score(self, response: str, answer: Any) -> Any:
        """What the function says of a response, where there is no row."""
        return self.scorer.score(Sample(response, answer))

    def _scorer(self) -> Scorer:
        return self.scorer


def of_program(response: str) -> float:
    """The reward of rows without one, whose programs have to return it.

    Args:
        response: the last answer of a program that has returned nothing.

    Raises:
        RewardError: always.
    """
    raise RewardError(
        "the program has returned no reward, and the run has none: return a number, or give "
        "reward=FILE.py:FUNCTION"
    )


def as_reward(reward: Any) -> RewardParser:
    """What somebody names as the reward of a task, as a transform.

    Args:
        reward: a :class:`~torchrl_llm.rewards.RewardParser`; a function as of
            :class:`FunctionReward`; a :class:`~torchrl_llm.rewards.Scorer` or
            :class:`~torchrl_llm.rewards.Component`; a class of one of these that needs no
            arguments; or several, a mapping of names to these, each alone or with a weight behind
            it, whose first is the task.

    Raises:
        ConfigError: for anything else.

    Example:
        >>> def right(response, answer):
        ...     return response == answer
        >>> def short(response):
        ...     return len(response) < 3
        >>> as_reward({"right": right, "short": (short, 0.5)}).score("4", "4").reward
        1.5
    """
    if inspect.isclass(reward) and issubclass(reward, (RewardParser, Scorer)):
        reward = _made(reward)
    if isinstance(reward, RewardParser):
        return reward
    if isinstance(reward, (Scorer, Component)):
        return CompositeReward({"reward": reward})
    if isinstance(reward, Mapping):
        return CompositeReward({name: _component(part) for name, part in reward.items()})
    if callable(reward):
        return FunctionReward(reward)
    raise ConfigError(
        f"a reward is a function of (response, answer) or (response, row), a RewardParser, or a "
        f"mapping of names to several, got {reward!r}"
    )


def _made(cls: type) -> Any:
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        raise ConfigError(f"{cls.__name__} needs arguments: {error}") from error
    try:
        return cls()
    except TorchRLLLMError:
        raise
    except (Exception, SystemExit) as error:  # one of the user's may raise anything
        raise ConfigError(
            f"{cls.__name__}() raised {type(error).__name__}: {error} at {place_of(error)}"
        ) from error


def _component(part: Any) -> Component:
    part, weight = part if isinstance(part, (tuple, list)) else (part, 1.0)
    return part if isinstance(part, Component) else Component(part, weight)
