"""Watches the rewards of a run: steps without rewards, steps without a signal, frequent failures.

:class:`~torchrl_llm.trainers.run.TrainingRun` passes the rows of each step to it, and reports its
findings.

Next: :mod:`torchrl_llm.data.failures` shows the first failure of each kind when it happens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import torch
from tensordict import LazyStackedTensorDict, TensorDict

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.failures import Failure, failures_of
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.data.rollouts import ends_trajectory, row_list
from torchrl_llm.data.row_text import row_text
from torchrl_llm.data.saved_state import SavedState
from torchrl_llm.trainers.episode_metrics import Episodes

# Limit of memory, because a reward may give each of its errors a new name.
_MOST_SORTS = 1000


class FailureTally(SavedState):
    """Counts of each kind of failure, with the message of the first one.

    Example:
        >>> tally = FailureTally()
        >>> tally.add([Failure("KeyError", "'x'", "reward.py:3, in score")] * 2)
        >>> tally.most_frequent()
        "reward failed 2 times, 2 of them by KeyError: 'x' at reward.py:3, in score"
    """

    saved = ("_totals", "_counts", "_messages")

    def __init__(self) -> None:
        self._totals: Counter[str] = Counter()
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._messages: dict[tuple[str, str, str], str] = {}

    def add(self, failures: list[Failure]) -> None:
        """Count failures.

        Args:
            failures: what failed.
        """
        for failure in failures:
            self._totals[failure.source] += 1
            if failure.sort in self._counts or len(self._counts) < _MOST_SORTS:
                self._counts[failure.sort] += 1
                self._messages.setdefault(failure.sort, failure.message)

    def most_frequent(self) -> str:
        """The most frequent failure and its count; empty if nothing failed."""
        if not self._counts:
            return ""
        (sort, count), *_ = self._counts.most_common(1)
        source, kind, place = sort
        message = self._messages[sort]
        where = f" at {place}" if place else ""
        return (
            f"{source} failed {self._totals[source]} times, {count} of them by {kind}"
            f"{': ' if message else ''}{message}{where}"
        )


class RewardWatch(SavedState):
    """Checks the rewards of each step.

    Args:
        on_all_invalid: effect of a step without any valid reward: ``error`` ends the run,
            ``continue`` does not.
        no_signal_steps: number of consecutive steps with equal rewards after which a warning
            appears. The next warning can appear only after rewards have differed. ``None`` for no
            warning.

    Attributes:
        failures: failures of all steps.

    Example:
        >>> from torchrl_llm.data.ragged import lazy_rows
        >>> def rows(*rewards):
        ...     cells = [torch.tensor([[reward]]) for reward in rewards]
        ...     done = {"done": torch.tensor([True])}
        ...     return lazy_rows([TensorDict(next={"reward": cell, **done}) for cell in cells])
        >>> watch = RewardWatch(no_signal_steps=2)
        >>> [watch.see(rows(0.0, 0.0)) is None for _ in range(3)]
        [True, False, True]
        >>> watch.see(rows(0.0, 1.0)), watch.see(rows(float("nan"))), watch.is_all_invalid
        (None, None, True)
    """

    saved = ("_equal", "failures")

    def __init__(
        self,
        *,
        on_all_invalid: Literal["error", "continue"] = "error",
        no_signal_steps: int | None = 5,
    ) -> None:
        self.on_all_invalid, self.no_signal_steps = on_all_invalid, no_signal_steps
        self.failures = FailureTally()
        self.is_all_invalid = False
        self._of_step = FailureTally()
        self._num_rows = 0
        self._equal: list[float] = []  # the reward of each of the last steps, all equal in each

    def see(self, rows: LazyStackedTensorDict) -> str | None:
        """Check the rows of a step.

        Args:
            rows: 1-d stack of all rows collected for it.

        Returns:
            A warning, if there is one.
        """
        self._num_rows, self._of_step = len(rows), FailureTally()
        for row in row_list(rows):
            failures = failures_of(row)
            self.failures.add(failures)
            self._of_step.add([f for f in failures if not f.source.startswith("tool ")])
        episodes = Episodes(rows)
        returns = episodes.task_returns[episodes.returns.isfinite()]
        self.is_all_invalid = not returns.numel()
        if self.no_signal_steps is None or returns.numel() < 2:
            return None
        if not episodes.are_equal():
            self._equal.clear()
            return None
        self._equal.append(returns[0].item())
        del self._equal[: -self.no_signal_steps - 1]  # one more: the warning has already appeared
        return self._notice(rows) if len(self._equal) == self.no_signal_steps else None

    @property
    def ends_run(self) -> bool:
        """Whether the last step ends the run."""
        return self.is_all_invalid and self.on_all_invalid == "error"

    def explain(self) -> str:
        """Why nothing can be learned from the last step."""
        return (
            f"none of the {self._num_rows} rows of this step has a valid reward, so that nothing "
            f"can be learned from them: {self._of_step.most_frequent() or 'no error is recorded'}"
        )

    def _notice(self, rows: LazyStackedTensorDict) -> str:
        last = f"{self._equal[-1]:g}" + " in the last" * (len(set(self._equal)) > 1)
        ends = [row for row in row_list(rows) if ends_trajectory(row)]
        answers = "\n\n".join(
            f"{row_text(row)}\n  reward:   {self._equal[-1]:g}" for row in (ends[0], ends[-1])
        )
        return (
            f"no signal: in each of the last {len(self._equal)} steps all answers had the same "
            f"reward ({last}), and comparing them teaches nothing. Two of the {len(ends)} "
            f"answers of this step:\n{answers}\n{_advice(rows, ends)}"
        )


def _advice(rows: LazyStackedTensorDict, ends: Sequence[TensorDict]) -> str:
    """Advice on what to check."""
    success = [bool(row.get(("next", "success"), torch.zeros(1)).any()) for row in ends]
    if all(success):
        return "All of them are right: the prompts are too easy for this model."
    advice = [
        "the form that the reward expects: a correct answer in a different form earns nothing"
    ]
    finish = read_rows(rows, ("tokens", "finish_reason"), None)
    cut = [FinishReason(int(reason)).cut for reason in finish or ()]
    if any(cut):
        share = f"{sum(cut) / len(cut):.0%}"
        advice.append(f"inference_model.max_tokens, which cut {share} of the answers")
    if any(success):
        advice.append("the reward itself, which does not tell right answers from wrong ones")
    else:
        advice.append("the model, which may be too small for the task: none of them is right")
    return f"Look at {'; '.join(advice)}."
