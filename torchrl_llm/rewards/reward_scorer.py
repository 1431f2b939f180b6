"""Scorers: objects with ``score(sample)``; classes, functions or reward parsers.

A :class:`Scorer` takes a :class:`Sample` and returns a number or a :class:`RewardScore`.
:func:`as_scorer` converts a function or a :class:`~torchrl_llm.rewards.RewardParser`.

Next: :mod:`torchrl_llm.rewards.judge` and :mod:`~torchrl_llm.rewards.form_rewards` are scorers;
:mod:`torchrl_llm.rewards.reward_components` adds a weight and a place to run.

Shape legend: ``R`` tokens of a response.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torchrl.envs import Transform

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.errors import ConfigError, RewardError

_FLOAT32_MAX = torch.finfo(torch.float32).max
_USUAL = (float, bool, bool, bool)
_Takes = Literal["sample", "response", "answer", "row"]


class RewardScore(NamedTuple):
    """The score of one response.

    Attributes:
        reward: the reward; it must be finite.
        success: whether the task is solved.
        has_answer: whether the response contains an answer block, correct or not. It ends the
            episode if ``set_done_if_answer`` is on.
        has_think: whether the response contains a reasoning block.
    """

    reward: float
    success: bool = False
    has_answer: bool = False
    has_think: bool = False


class Sample(NamedTuple):
    """Input of a scorer: one row.

    Attributes:
        response: what the model wrote, without the prompt.
        answer: the row's answer; ``None`` if the row has no answer.
        num_tokens: tokens of the response, including the token that ended it; ``None`` if the rows
            have no tokens.
        finish_reason: how the response ended; ``None`` if unknown.
        columns: the columns that the scorer requested, by name.
    """

    response: str
    answer: Any = None
    num_tokens: int | None = None
    finish_reason: FinishReason | None = None
    columns: Mapping[str, Any] = {}


class Scorer(ABC):
    """Scores one response at a time; a subclass defines ``score``.

    Attributes:
        columns: names of the columns that the scorer reads, for example ``"query"``.
        per_token: whether a score is a sequence of numbers, one for each token of the response.
        needs_answer: whether the scorer compares with an answer, so that rows must have an answer.

    Example:
        >>> class Polite(Scorer):
        ...     def score(self, sample):
        ...         return float("please" in sample.response)
        >>> Polite().score(Sample("please wait"))
        1.0
    """

    columns: Sequence[str] = ()
    per_token: bool = False
    needs_answer: bool = False

    @abstractmethod
    def score(self, sample: Sample) -> float | RewardScore | Sequence[float]:
        """Score a response.

        If the component runs in threads, the method is called from several threads at once, so it
        must not change ``self``. An exception makes the component invalid; it does not count as
        zero.

        Args:
            sample: the row.

        Returns:
            A finite number; a :class:`~torchrl_llm.rewards.RewardScore`; or, with ``per_token``,
            ``sample.num_tokens`` finite numbers.
        """


class BatchScorer(Scorer):
    """Scores all responses of a step at once, for example with a judge model."""

    @abstractmethod
    def score_batch(
        self, samples: Sequence[Sample]
    ) -> Sequence[float | RewardScore | BaseException]:
        """Score the responses.

        Args:
            samples: the rows.

        Returns:
            One score per row, or the exception of a failed row. If the method raises, all rows
            fail.
        """

    def score(self, sample: Sample) -> float | RewardScore:
        """Score one response; raise an error if scoring failed."""
        (score,) = self.score_batch([sample])
        if isinstance(score, BaseException):
            raise score
        return score


class FunctionScorer(Scorer):
    """A function as a scorer; its argument names select its inputs.

    Args:
        function: the function.
        takes: inputs of the function; by default read from its argument names.
        needs_answer: as in :class:`Scorer`.

    Raises:
        ConfigError: when the function cannot be called with any of these inputs.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        takes: _Takes | None = None,
        needs_answer: bool | None = None,
    ) -> None:
        self.function, self.takes = function, takes or _taken(function)
        self.columns = ("row",) if self.takes == "row" else ()
        self.needs_answer = self.takes == "answer" if needs_answer is None else needs_answer

    def score(self, sample: Sample) -> Any:
        """Call the function."""
        if self.takes == "answer":
            return self.function(sample.response, sample.answer)
        if self.takes == "sample":
            return self.function(sample)
        if self.takes == "response":
            return self.function(sample.response)
        ended = sample.finish_reason
        told = {"finish_reason": None if ended is None else ended.name.lower()}
        return self.function(sample.response, {**sample.columns.get("row", {}), **told})


def as_scorer(scorer: Any) -> Scorer:
    """Convert a scorer, a :class:`RewardParser` or a function to a scorer.

    Args:
        scorer: a scorer, a :class:`RewardParser` or a function. The argument names of a function
            select its inputs: ``(response, answer)``, ``(response, row)``, ``(response)``, or a
            :class:`Sample`.

    Raises:
        ConfigError: for anything else.
    """
    if isinstance(scorer, Scorer):
        return scorer
    if isinstance(scorer, Transform) and hasattr(scorer, "score"):
        return FunctionScorer(scorer.score, "answer", scorer.needs_answer)
    if not callable(scorer):
        raise ConfigError(
            f"a component is a Scorer, a RewardParser or a function of a Sample, got {scorer!r}"
        )
    return FunctionScorer(scorer)


def _taken(function: Callable[..., Any]) -> _Takes:
    """Return the inputs of a user's function."""
    name = getattr(function, "__name__", repr(function))
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"the reward {name} is a coroutine; return the number, not a promise")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # builtin functions may have no signature
        return "sample"
    kinds = inspect.Parameter
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = sum(p.default is kinds.empty for p in parameters if p.name in names)
    told = {p.name for p in parameters} & {"row", "finish_reason"}
    never = sorted(told - {"row"} if names[1:2] == ["row"] else told)
    by_name = any(p.kind is p.KEYWORD_ONLY and p.default is kinds.empty for p in parameters)
    takes_none = not (names or any(p.kind is p.VAR_POSITIONAL for p in parameters))
    problem = ""
    if names[:1] in (["completions"], ["prompts"], ["completion_ids"]):
        problem = (
            "is one of TRL's, which gets lists; here a reward sees one row: "
            "def reward(response, answer) or def reward(response, row)"
        )
    elif "response" in names[1:]:
        problem = "would get the response first: write (response, answer) or (response, row)"
    elif never:
        problem = (
            f"would never get {never[0]!r}: write (response, row), where "
            'row["answer"] and row["finish_reason"] are to be read'
        )
    elif needed > 2 or by_name or takes_none:
        problem = (
            "cannot be called: it must take (response, answer), (response, row), (response) or "
            "(sample)"
        )
    if problem:
        raise ConfigError(f"the reward {name}{inspect.signature(function)} {problem}")
    if names[1:2] == ["row"]:
        return "row"
    if needed == 2 or names[1:2] == ["answer"]:
        return "answer"
    return "response" if names[:1] == ["response"] else "sample"


def checked_flag(name: str, value: Any) -> bool:
    """Convert a returned value to a bool.

    Args:
        name: meaning of the flag, for the error message.
        value: a value that can be converted to a bool.

    Raises:
        RewardError: for ``None`` and texts.

    Example:
        >>> checked_flag("success", 1)
        True
    """
    if value is None or isinstance(value, (str, bytes)):
        raise RewardError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def is_usual(score: tuple[Any, ...]) -> bool:
    """Whether a score needs no check.

    Args:
        score: a reward and three flags.
    """
    return tuple(map(type, score)) == _USUAL and abs(score[0]) <= _FLOAT32_MAX


def checked_score(score: Any) -> RewardScore:
    """Check that the reward is one number, finite in float32, and that the flags are bools.

    Args:
        score: a number, a tensor of one element, or a :class:`RewardScore`.

    Raises:
        RewardError: for anything else.

    Example:
        >>> checked_score(0.5)
        RewardScore(reward=0.5, success=True, has_answer=True, has_think=False)
    """
    if not isinstance(score, RewardScore):
        value = _number(score)
        return RewardScore(value, success=value > 0, has_answer=True)
    if is_usual(score):  # the usual case
        return score
    flags = {name: checked_flag(name, getattr(score, name)) for name in RewardScore._fields[1:]}
    return score._replace(reward=_number(score.reward), **flags)


def _number(value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise RewardError(f"a reward must be one number, got a tensor {tuple(value.shape)}")
    if isinstance(value, (str, bytes)) or value is None:
        raise RewardError(f"a reward must be one number, got {value!r}")
    try:
        value = float(value)
    except (TypeError, ValueError) as error:
        raise RewardError(f"a reward must be one number, got {type(value).__name__}") from error
    except OverflowError:
        value = math.inf
    if not abs(value) <= _FLOAT32_MAX:
        raise RewardError(f"a reward must be finite in float32, got {value}")
    return value
