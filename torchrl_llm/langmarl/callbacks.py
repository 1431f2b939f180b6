"""Callbacks of training in language space; one that raises does not end the training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from torchrl._utils import logger

from torchrl_llm._checked import Ge, checked
from torchrl_llm._progress import ProgressBar
from torchrl_llm.langmarl.environment import Trajectory


class Callback:
    """Base of what is told how training goes; each method does nothing."""

    def on_iteration_start(self, iteration: int, trainer: Any) -> None:
        """An iteration begins."""

    def on_iteration_end(self, iteration: int, stats: Mapping[str, Any], trainer: Any) -> None:
        """An iteration has ended; its policies are saved."""

    def on_episode_complete(self, trajectory: Trajectory, trainer: Any) -> None:
        """An episode has ended and is saved; in any thread."""

    def on_policy_update(self, agent_id: str, old_policy: str, new_policy: str) -> None:
        """The policy of an agent has changed."""

    def on_resume(self, trainer: Any) -> None:
        """Training is about to go on; ``trainer.history`` has what was done before."""


def fire(callbacks: Sequence[Callback], hook: str, *args: Any) -> None:
    """Tell callbacks; one that raises is logged.

    Args:
        callbacks: are told.
        hook: name of the method.
        args: its arguments.
    """
    for callback in callbacks:
        try:
            getattr(callback, hook)(*args)
        except Exception as error:  # a callback that fails ends no training
            name = type(callback).__name__
            logger.warning(f"{name}.{hook} failed: {type(error).__name__}: {error}")


class LoggingCallback(Callback):
    """Logs begin and end of each iteration through the trainer's ``RunLogger``."""

    def on_iteration_start(self, iteration: int, trainer: Any) -> None:
        """Log the begin."""
        trainer.logger.info(f"iteration {iteration} begins")

    def on_iteration_end(self, iteration: int, stats: Mapping[str, Any], trainer: Any) -> None:
        """Log the end, with the mean reward."""
        trainer.logger.info(f"iteration {iteration} ends: avg_reward {stats['avg_reward']:.3f}")


class ProgressCallback(Callback):
    """Shows how many iterations are done, with the mean reward of the last one.

    Args:
        bar: shows it.
    """

    def __init__(self, bar: ProgressBar) -> None:
        self.bar = bar

    def on_iteration_end(self, iteration: int, stats: Mapping[str, Any], trainer: Any) -> None:
        """Update the bar."""
        self.bar.update(iteration + 1, f"reward {stats['avg_reward']:.3f}")


class CheckpointCallback(Callback):
    """Writes the newest and the best policies as files after each iteration.

    The trainer writes them when training ends, and keeps all policies in any case.
    """

    def on_iteration_end(self, iteration: int, stats: Mapping[str, Any], trainer: Any) -> None:
        """Write them."""
        trainer.save_policy_files()


class EarlyStoppingCallback(Callback):
    """Ends training when the mean reward does not rise any more.

    It decides by the statistics of all iterations, those before a resume included.

    Args:
        patience: iterations without an improvement, after which training ends.
        min_delta: a smaller rise is no improvement.

    Raises:
        ConfigError: a patience below 1, or a negative ``min_delta``.
    """

    @checked
    def __init__(
        self, patience: Annotated[int, Ge(1)] = 3, min_delta: Annotated[float, Ge(0)] = 0.01
    ) -> None:
        self.patience, self.min_delta = patience, min_delta

    def should_stop(self, rewards: Sequence[float]) -> bool:
        """Whether the last iterations have brought no improvement.

        Args:
            rewards: mean reward of each iteration.

        Example:
            >>> stopping = EarlyStoppingCallback(patience=2)
            >>> [stopping.should_stop([0.1, 0.5, 0.5, 0.5][:n]) for n in (2, 3, 4)]
            [False, False, True]
        """
        best, waited = float("-inf"), 0
        for reward in rewards:
            better = reward > best + self.min_delta
            best, waited = (reward, 0) if better else (best, waited + 1)
        return waited >= self.patience

    def on_iteration_end(self, iteration: int, stats: Mapping[str, Any], trainer: Any) -> None:
        """End training, or not."""
        self.on_resume(trainer)

    def on_resume(self, trainer: Any) -> None:
        """End training that had ended before."""
        # An iteration whose episodes have all failed says nothing.
        if self.should_stop([each["avg_reward"] for each in trainer.history if each["rewards"]]):
            trainer.should_stop, trainer.ended_by = True, "the mean reward does not rise any more"
