"""Rewards from plain functions; :func:`as_reward` converts functions and scorers to rewards.

Next: :mod:`torchrl_llm.rewards.composite_reward` adds several rewards with weights.
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
    """A reward computed by a function of a response and its row's answer, or of the whole row.

    The answer is ``None`` if the rows have no answer. A value above zero counts as success. To set
    success yourself, return a :class:`~torchrl_llm.rewards.RewardScore`.

    Args:
        function: ``f(response, answer)``; ``f(response, row)``; ``f(response)``; or ``f(sample)``
            with a :class:`~torchrl_llm.rewards.Sample`. An argument named ``row`` gets the row of
            the data as a dict, plus ``"finish_reason"``: how the answer ended, for example
            ``"length"`` if the token limit cut it.
        options: arguments of :class:`~torchrl_llm.rewards.RewardParser`.

    Raises:
        ConfigError: when the function cannot be called in any of these ways.

    Example:
        >>> FunctionReward(lambda response, answer: response == answer).score("4", "4")
        True
    """

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(**options)
        self.scorer = as_scorer(function)
        self.needs_answer, self._columns = self.scorer.needs_answer, self.scorer.columns

    def score(self, response: str, answer: Any) -> Any:
        """Call the function for a response without a row."""
        return self.scorer.score(Sample(response, answer))

    def _scorer(self) -> Scorer:
        return self.scorer


def of_program(response: str) -> float:
    """Placeholder for runs in which the program must return the reward.

    Args:
        response: the last answer of a program that returned no reward.

    Raises:
        RewardError: always.
    """
    raise RewardError(
        "the program has returned no reward, and the run has none: return a number, or give "
        "reward=FILE.py:FUNCTION"
    )


def as_reward(reward: Any) -> RewardParser:
    """Turn a reward given by a user into a transform.

    Args:
        reward: a :class:`~torchrl_llm.rewards.RewardParser`; a function for
            :class:`FunctionReward`; a :class:`~torchrl_llm.rewards.Scorer` or
            :class:`~torchrl_llm.rewards.Component`; or a class of one of these kinds that needs no
            arguments. Or a mapping from names to several rewards, each alone or as ``(reward,
            weight)``; the first reward is the task.

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
    except (Exception, SystemExit) as error:  # a class of the user may raise any exception
        raise ConfigError(
            f"{cls.__name__}() raised {type(error).__name__}: {error} at {place_of(error)}"
        ) from error


def _component(part: Any) -> Component:
    part, weight = part if isinstance(part, (tuple, list)) else (part, 1.0)
    return part if isinstance(part, Component) else Component(part, weight)
