"""Components of a reward: a scorer, its weight, and where it runs.

Next: :class:`~torchrl_llm.rewards.composite_reward.CompositeReward` adds components up.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from torchrl_llm._checked import Ge, checked
from torchrl_llm.errors import ConfigError, RewardError
from torchrl_llm.rewards.reward_runner import Outcome, call_reward, check_limits, run_rows
from torchrl_llm.rewards.reward_scorer import (
    BatchScorer,
    RewardScore,
    Sample,
    as_scorer,
    checked_score,
)
from torchrl_llm.sandbox.workers import WorkerPool

Where = Literal["inline", "threads", "processes"]
_NEUTRAL = Outcome(RewardScore(0.0))


@checked
@dataclass(frozen=True)
class Component:
    """A component of a reward.

    Args:
        scorer: a :class:`Scorer`, a :class:`BatchScorer`, a
            :class:`~torchrl_llm.rewards.RewardParser`, or a function for :func:`as_scorer`.
        weight: factor of the scorer's value. With 0 the value is only recorded, and failures have
            no effect.
        optional: if an optional component fails, it is left out, and the weights of the other
            components grow. If any other component fails, the whole reward is invalid.
        run: ``"inline"``, row by row; ``"threads"``, for scorers that wait (for a server);
            ``"processes"``, for scorers that use much CPU or may not end. A scorer for processes
            must be importable by name.
        num_workers: number of threads (8 by default), or number of processes (by default the number
            of CPUs, at most 4).
        timeout: time limit per row in seconds (for a :class:`BatchScorer`, for all rows); needs
            threads or processes. Processes are stopped at the limit; threads are not stopped.

    Raises:
        ConfigError: for settings that are invalid or have no effect.
    """

    scorer: Any
    weight: float = 1.0
    _: KW_ONLY
    optional: bool = False
    run: Where = "inline"
    num_workers: Annotated[int, Ge(1)] | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "scorer", as_scorer(self.scorer))
        if not math.isfinite(self.weight):
            raise ConfigError(f"weight must be finite, got {self.weight}")
        if self.num_workers is None:
            number = min(4, os.cpu_count() or 1) if self.run == "processes" else 8
            object.__setattr__(self, "num_workers", number)
        if self.run == "processes" and isinstance(self.scorer, BatchScorer):
            raise ConfigError("a BatchScorer has its rows together; run it in threads or inline")
        check_limits(0 if self.run == "inline" else self.num_workers, self.timeout)

    def make_pool(self) -> WorkerPool | None:
        """Make the pool of processes that the component needs; the pool is not started."""
        if self.run != "processes":
            return None
        return WorkerPool(self.scorer.score, num_workers=self.num_workers)

    def outcomes(
        self, samples: Sequence[Sample | Exception | None], pool: WorkerPool | None = None
    ) -> list[Outcome]:
        """Score rows.

        Args:
            samples: ``N`` rows. An exception stands for a row without a response, and ``None`` for
                a row that is not scored, whose score is 0.
            pool: result of :meth:`make_pool`.

        Returns:
            ``N`` outcomes; the value of an outcome is a score, or a float32 tensor ``[R]``.
        """
        outcomes = [
            _NEUTRAL if sample is None or isinstance(sample, Sample) else Outcome.failed(sample)
            for sample in samples
        ]
        there = [at for at, sample in enumerate(samples) if isinstance(sample, Sample)]
        for at, outcome in zip(there, self._run([samples[at] for at in there], pool), strict=True):
            outcomes[at] = outcome
        return outcomes

    def _run(self, samples: Sequence[Sample], pool: WorkerPool | None) -> list[Outcome]:
        threads = 0 if self.run == "inline" else self.num_workers
        if isinstance(self.scorer, BatchScorer):
            return self._run_batch(samples, min(threads, 1)) if samples else []
        rows = [(sample,) for sample in samples]
        if pool is not None:
            # Each thread waits for a process; the process enforces the limit.
            return run_rows(partial(self._score_there, pool), rows, num_threads=threads)
        return run_rows(self._score, rows, num_threads=threads, timeout=self.timeout)

    def _score(self, sample: Sample) -> RewardScore | Tensor:
        value = self.scorer.score(sample)
        return self._checked(value, sample) if self.scorer.per_token else checked_score(value)

    def _score_there(self, pool: WorkerPool, sample: Sample) -> RewardScore | Tensor:
        value = call_reward(pool, sample, timeout=self.timeout)
        # All named tuples are scores.
        return self._checked(RewardScore(**value) if isinstance(value, dict) else value, sample)

    def _run_batch(self, samples: Sequence[Sample], num_threads: int) -> list[Outcome]:
        (batch,) = run_rows(
            self._score_batch, [(samples,)], num_threads=num_threads, timeout=self.timeout
        )
        seconds = batch.seconds / len(samples)
        if batch.error:
            return [batch._replace(seconds=seconds)] * len(samples)
        rows = zip(batch.value, samples, strict=True)
        return [row._replace(seconds=seconds) for row in run_rows(self._of_batch, list(rows))]

    def _score_batch(self, samples: Sequence[Sample]) -> list[Any]:
        values = list(self.scorer.score_batch(samples))
        if len(values) != len(samples):
            raise RewardError(f"{len(samples)} rows were given and {len(values)} came back")
        return values

    def _of_batch(self, value: Any, sample: Sample) -> RewardScore | Tensor:
        if isinstance(value, BaseException):  # asyncio.gather returns CancelledError too
            raise value
        return self._checked(value, sample)

    def _checked(self, value: Any, sample: Sample) -> RewardScore | Tensor:
        if not self.scorer.per_token:
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
