"""The parts of a reward: what scores a response, how much it counts, and where it runs.

Next: :class:`~torchrl_llm.rewards.composite_reward.CompositeReward` adds them up;
:mod:`torchrl_llm.rewards.judge`, :mod:`~torchrl_llm.rewards.form_rewards` and
:mod:`~torchrl_llm.rewards.form_rewards` are scorers.

Shape legend: ``K`` components, ``N`` rows, ``R`` tokens of a response.
"""

from __future__ import annotations

import inspect
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.errors import ConfigError, RewardError
from torchrl_llm.rewards.reward_parser import RewardParser, RewardScore, checked_score
from torchrl_llm.rewards.reward_runner import Outcome, call_reward, check_limits, run_rows
from torchrl_llm.sandbox.workers import WorkerPool

Where = Literal["inline", "threads", "processes"]


@dataclass(frozen=True, slots=True)
class Sample:
    """What a scorer sees of a row.

    Args:
        response: what the model wrote, without the prompt.
        answer: the row's answer; ``None`` where it has none.
        num_tokens: tokens of the response, the one that ended it included; ``None`` where the rows
            have no tokens.
        finish_reason: how the response ended; ``None`` where it is not known.
        columns: the columns that the scorer asked for, by name.
    """

    response: str
    answer: Any = None
    num_tokens: int | None = None
    finish_reason: FinishReason | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


class Scorer(ABC):
    """Scores one response at a time; a subclass writes :meth:`score`.

    Attributes:
        columns: names of the columns of the rows that it reads, ``"query"`` for example.
        per_token: whether a score is a sequence of numbers, one for each token of the response.
        needs_answer: whether it compares with an answer, so that rows must have some.

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

        Called from several threads at once where the component runs in threads, so it must not
        change ``self``. What it raises makes its part of the reward invalid, never zero.

        Args:
            sample: the row.

        Returns:
            A finite number; a :class:`~torchrl_llm.rewards.RewardScore`; or, where
            ``per_token`` is set, ``sample.num_tokens`` finite numbers.
        """


class BatchScorer(ABC):
    """Scores all responses of a step at once, for what is faster so: a model that judges.

    Attributes:
        columns: names of the columns of the rows that it reads.
        needs_answer: as of a :class:`Scorer`.
    """

    columns: Sequence[str] = ()
    needs_answer: bool = False

    @abstractmethod
    def score_batch(
        self, samples: Sequence[Sample]
    ) -> Sequence[float | RewardScore | BaseException]:
        """Score the responses.

        Args:
            samples: the rows.

        Returns:
            One score per row, or, where it failed, the exception. What is raised fails all rows.
        """


class _Function(Scorer):
    """A function of what its arguments say."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.takes = function, _taken(function)
        self.columns = ("row",) if self.takes == "row" else ()
        self.needs_answer = self.takes == "answer"

    def score(self, sample: Sample) -> Any:
        if self.takes == "sample":
            return self.function(sample)
        if self.takes == "response":
            return self.function(sample.response)
        if self.takes == "answer":
            return self.function(sample.response, sample.answer)
        ended = sample.finish_reason
        told = {"finish_reason": None if ended is None else ended.name.lower()}
        return self.function(sample.response, {**sample.columns.get("row", {}), **told})


def _taken(function: Callable[..., Any]) -> Literal["sample", "response", "answer", "row"]:
    """What a function of the user's wants to be called with."""
    name = getattr(function, "__name__", repr(function))
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"the reward {name} is a coroutine; return the number, not a promise")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin may have no signature
        return "sample"
    kinds = inspect.Parameter
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = sum(p.default is kinds.empty for p in parameters if p.name in names)
    if names[:1] in (["completions"], ["prompts"]):
        raise ConfigError(
            f"the reward {name}{inspect.signature(function)} is one of TRL's, which gets lists; "
            "here a reward sees one row: def reward(response, answer) or def reward(response, row)"
        )
    if "response" in names[1:]:
        raise ConfigError(
            f"the reward {name}{inspect.signature(function)} would get the response first: write "
            "(response, answer) or (response, row)"
        )
    told = {p.name for p in parameters} & {"row", "finish_reason"}
    if never := sorted(told - {"row"} if names[1:2] == ["row"] else told):
        raise ConfigError(
            f"the reward {name}{inspect.signature(function)} would never get {never[0]!r}: write "
            '(response, row), where row["answer"] and row["finish_reason"] are to be read'
        )
    by_name = any(p.kind is p.KEYWORD_ONLY and p.default is kinds.empty for p in parameters)
    if needed > 2 or by_name or not (names or any(p.kind is p.VAR_POSITIONAL for p in parameters)):
        raise ConfigError(
            f"the reward {name}{inspect.signature(function)} cannot be called: it must take "
            "(response, answer), (response, row), (response) or (sample)"
        )
    if names[1:2] == ["row"]:
        return "row"
    if needed == 2 or names[1:2] == ["answer"]:
        return "answer"
    return "response" if names[:1] == ["response"] else "sample"


def as_scorer(scorer: Any) -> Scorer | BatchScorer:
    """A scorer of what can be one: itself, a :class:`RewardParser`, or a function.

    Args:
        scorer: a function is called with what its arguments name: ``(response, answer)``,
            ``(response, row)``, ``(response)``, or else a :class:`Sample`.

    Raises:
        ConfigError: for anything else.
    """
    if isinstance(scorer, (Scorer, BatchScorer)):
        return scorer
    if isinstance(scorer, RewardParser):
        return _Parser(scorer)
    if not callable(scorer):
        raise ConfigError(
            f"a component is a Scorer, a RewardParser or a function of a Sample, got {scorer!r}"
        )
    return _Function(scorer)


class _Parser(Scorer):
    def __init__(self, parser: RewardParser) -> None:
        self.parser, self.needs_answer = parser, parser.needs_answer

    def score(self, sample: Sample) -> Any:
        return self.parser.score(sample.response, sample.answer)


@dataclass(frozen=True)
class Component:
    """A part of a reward and its terms.

    Args:
        scorer: a :class:`Scorer`, a :class:`BatchScorer`, a
            :class:`~torchrl_llm.rewards.RewardParser`, or a function as of :func:`as_scorer`.
        weight: what its value is multiplied with. Zero only records the value, and its failures
            do no harm.
        optional: whether the reward does without it where it fails, the weights of the others
            growing in proportion; otherwise its failure makes the whole reward invalid.
        run: ``"inline"``, one row after another; ``"threads"``, for what waits (for a server);
            ``"processes"``, for what keeps a CPU busy or may not end. A scorer for processes must
            be importable by name.
        num_workers: threads, 8 if not given; or processes, as many as CPUs but at most 4.
        timeout: seconds that a row may take (of a :class:`BatchScorer`, all rows); needs threads or
            processes. Only a process is stopped when its time is over.

    Raises:
        ConfigError: for terms that are impossible or have no effect.
    """

    scorer: Any
    weight: float = 1.0
    _: KW_ONLY
    optional: bool = False
    run: Where = "inline"
    num_workers: int | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "scorer", as_scorer(self.scorer))
        if self.run not in get_args(Where):
            raise ConfigError(f"run must be one of {get_args(Where)}, got {self.run!r}")
        if not math.isfinite(self.weight):
            raise ConfigError(f"weight must be finite, got {self.weight}")
        if self.num_workers is None:
            number = min(4, os.cpu_count() or 1) if self.run == "processes" else 8
            object.__setattr__(self, "num_workers", number)
        if self.num_workers < 1:
            raise ConfigError(f"num_workers must be at least 1, got {self.num_workers}")
        if self.run == "processes" and isinstance(self.scorer, BatchScorer):
            raise ConfigError("a BatchScorer has its rows together; run it in threads or inline")
        check_limits(0 if self.run == "inline" else self.num_workers, self.timeout)

    @property
    def per_token(self) -> bool:
        """Whether it scores each token of the response."""
        return isinstance(self.scorer, Scorer) and self.scorer.per_token

    def make_pool(self) -> WorkerPool | None:
        """The processes that it needs, not yet started."""
        if self.run != "processes":
            return None
        return WorkerPool(self.scorer.score, num_workers=self.num_workers)

    def outcomes(self, samples: Sequence[Sample], pool: WorkerPool | None) -> list[Outcome]:
        """Score rows.

        Args:
            samples: ``N`` rows.
            pool: of :meth:`make_pool`.

        Returns:
            ``N`` outcomes; a value is a score, or a float32 tensor ``[R]``.
        """
        threads = 0 if self.run == "inline" else self.num_workers
        if isinstance(self.scorer, BatchScorer):
            return self._batch_outcomes(samples, min(threads, 1))
        if pool is not None:
            # Each thread waits for a process, which keeps the limit.
            rows = [(sample, pool) for sample in samples]
            return run_rows(self._score_there, rows, num_threads=threads)
        rows = [(sample,) for sample in samples]
        return run_rows(self._score, rows, num_threads=threads, timeout=self.timeout)

    def _score(self, sample: Sample) -> RewardScore | Tensor:
        return self._checked(self.scorer.score(sample), sample)

    def _score_there(self, sample: Sample, pool: WorkerPool) -> RewardScore | Tensor:
        value = call_reward(pool, sample, timeout=self.timeout)
        # The only named tuples are those of scores.
        return self._checked(RewardScore(**value) if isinstance(value, dict) else value, sample)

    def _batch_outcomes(self, samples: Sequence[Sample], num_threads: int) -> list[Outcome]:
        if not samples:
            return []
        (batch,) = run_rows(
            self._score_batch, [(samples,)], num_threads=num_threads, timeout=self.timeout
        )
        seconds = batch.seconds / len(samples)
        if batch.error:
            return [batch._replace(seconds=seconds)] * len(samples)
        outcomes = []
        for value, sample in zip(batch.value, samples, strict=True):
            try:
                if isinstance(value, BaseException):  # asyncio.gather returns CancelledError too
                    outcomes.append(Outcome.failed(value, seconds))
                else:
                    outcomes.append(Outcome(self._checked(value, sample), seconds=seconds))
            except Exception as error:  # what a judge failed at is data
                outcomes.append(Outcome.failed(error, seconds))
        return outcomes

    def _score_batch(self, samples: Sequence[Sample]) -> list[Any]:
        values = list(self.scorer.score_batch(samples))
        if len(values) != len(samples):
            raise RewardError(f"{len(samples)} rows were given and {len(values)} came back")
        return values

    def _checked(self, value: Any, sample: Sample) -> RewardScore | Tensor:
        if not self.per_token:
            return checked_score(value)
        values = torch.as_tensor(value, dtype=torch.float32)
        if values.shape != (sample.num_tokens,):
            raise RewardError(
                f"a reward per token must have {sample.num_tokens} numbers, one for each token of "
                f"the response, got shape {tuple(values.shape)}"
            )
        if not bool(values.isfinite().all()):
            raise RewardError("a reward must be finite, got NaN or infinity at a token")
        return values


class WeightedTotal(NamedTuple):
    """A reward that was added up.

    Attributes:
        values: float64 ``[N]``, NaN where invalid.
        valid: bool ``[N]``.
        weights: float64 ``[K, N]``, what each value was multiplied with.
    """

    values: Tensor
    valid: Tensor
    weights: Tensor


def weighted_total(values: Tensor, weights: Tensor, optional: Tensor) -> WeightedTotal:
    r"""The weighted sum of components, of which some may have failed.

    :math:`r_n = s_n \sum_{k \in V_n} w_k v_{kn}` over the valid components :math:`V_n` of a row,
    where :math:`s_n` is 1 if none of them failed, else :math:`\sum_k w_k / \sum_{k \in V_n} w_k`.
    A row is invalid where a component failed that has a weight and is not optional, where no
    component with a weight is left, or where the sum is beyond float32.

    Args:
        values: float ``[K, N]``, NaN where a component failed.
        weights: float ``[K]``.
        optional: bool ``[K]``.

    Example:
        >>> values = torch.tensor([[1.0, 1.0], [0.0, float("nan")]])
        >>> total = weighted_total(values, torch.tensor([0.5, 1.5]), torch.tensor([False, True]))
        >>> total.values.tolist(), total.valid.tolist()
        ([0.5, 2.0], [True, True])
    """
    values_KN, weights_K1 = values.double(), weights.double().unsqueeze(-1)
    counts_K1 = weights_K1 != 0
    there_KN = ~values_KN.isnan() & counts_K1
    missing_KN = values_KN.isnan() & counts_K1
    valid_N = ~(missing_KN & ~optional.unsqueeze(-1)).any(0) & there_KN.any(0)
    scale_N = weights_K1.sum() / (weights_K1 * there_KN).sum(0)
    # A row that lacks nothing is not divided, and so not rounded.
    scale_N = scale_N.where(missing_KN.any(0), 1.0)
    weights_KN = (weights_K1 * scale_N).where(there_KN, 0.0)
    total_N = (weights_KN * values_KN.nan_to_num()).sum(0)
    valid_N = valid_N & (total_N.abs() <= torch.finfo(torch.float32).max)
    return WeightedTotal(total_N.where(valid_N, math.nan), valid_N, weights_KN)
