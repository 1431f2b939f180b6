"""Callbacks of training in language space; an error in a callback does not end the training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from torchrl._utils import logger

from torchrl_llm._checked import Ge, checked
from torchrl_llm._progress import ProgressBar
from torchrl_llm.langmarl.environment import Trajectory


class Callback:
    """Base of callbacks; its methods do nothing."""

    def on_iteration_start(self, iteration: int, trainer: Any) -> None:
        """An iteration begins."""

    def on_iteration_end(self, iteration: int, stats: Mapping[str, Any], trainer: Any) -> None:
        """An iteration has ended; its policies are saved."""

    def on_episode_complete(self, trajectory: Trajectory, trainer: Any) -> None:
        """An episode has ended and is saved; called in any thread."""

    def on_policy_update(self, agent_id: str, old_policy: str, new_policy: str) -> None:
        """The policy of an agent has changed."""

    def on_resume(self, trainer: Any) -> None:
        """Training is about to resume; ``trainer.history`` contains the earlier iterations."""


def fire(callbacks: Sequence[Callback], hook: str, *args: Any) -> None:
    """Call a hook of all callbacks; errors are logged.

    Args:
        callbacks: the callbacks.
        hook: name of the hook method.
        args: arguments of the hook.
    """
    for callback in callbacks:
        try:
            getattr(callback, hook)(*args)
        except Exception as error:  # an error in a callback must not end training
            name = type(callback).__name__
            logger.warning(f"{name}.{hook} failed: {type(error).__name__}: {error}")


class LoggingCallback(Callback):
    """Logs the start and the end of each iteration with the trainer's ``RunLogger``."""

    def on_iteration_start(self, iteration: int, trainer: Any) -> None:
        """Log the start."""
        trainer.logger.info(f"iteration {iteration} begins")

    def on_iteration_end(self, iteration: int, stats: Mapping[str, Any], trainer: Any) -> None:
        """Log the end, with the mean reward."""
        trainer.logger.info(f"iteration {iteration} ends: avg_reward {stats['avg_reward']:.3f}")


class ProgressCallback(Callback):
    """Shows the number of finished iterations and the mean reward of the last one.

    Args:
        bar: the progress bar.
    """

    def __init__(self, bar: ProgressBar) -> None:
        self.bar = bar

    def on_iteration_end(self, iteration: int, stats: Mapping[str, Any], trainer: Any) -> None:
        """Update the bar."""
        self.bar.update(iteration + 1, f"reward {stats['avg_reward']:.3f}")


class CheckpointCallback(Callback):
    """Writes the newest and the best policies as files after each iteration.

    The trainer writes these files when training ends, and always keeps all policies.
    """

    def on_iteration_end(self, iteration: int, stats: Mapping[str, Any], trainer: Any) -> None:
        """Write them."""
        trainer.save_policy_files()


class EarlyStoppingCallback(Callback):
    """Ends training when the mean reward no longer rises.

    The decision uses the statistics of all iterations, including those before a resume.

    Args:
        patience: number of iterations without improvement after which training ends.
        min_delta: a smaller rise does not count as an improvement.

    Raises:
        ConfigError: a patience below 1, or a negative ``min_delta``.
    """

    @checked
    def __init__(
        self, patience: Annotated[int, Ge(1)] = 3, min_delta: Annotated[float, Ge(0)] = 0.01
    ) -> None:
        self.patience, self.min_delta = patience, min_delta

    def should_stop(self, rewards: Sequence[float]) -> bool:
        """Whether the last iterations brought no improvement.

        Args:
            rewards: mean rewards, one per iteration.

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
        """End training if there was no improvement."""
        self.on_resume(trainer)

    def on_resume(self, trainer: Any) -> None:
        """End training if it had already been stopped before."""
        # Ignore iterations whose episodes have all failed.
        if self.should_stop([each["avg_reward"] for each in trainer.history if each["rewards"]]):
            trainer.should_stop, trainer.ended_by = True, "the mean reward does not rise any more"
