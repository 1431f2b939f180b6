"""Selection for expert iteration: keeps only the best answers to each prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from tensordict.utils import NestedKey

from torchrl_llm.data.replay_buffers.grouping import GroupTransform, Selector
from torchrl_llm.data.replay_buffers.trajectory_queues import Trajectory
from torchrl_llm.errors import ConfigError


class TopKRewardSelector(GroupTransform):
    """Writes only the best trajectories of each prompt into a replay buffer.

    Trajectories wait until their prompt has ``total_dialog_turns`` turns in total; then the
    ``topk_size`` trajectories with the highest return (sum of rewards) are written if they are
    strictly above the median return of the group. Ties go to the first to arrive.

    Args:
        total_dialog_turns: turns of a group; for single-turn episodes, the repeats of a prompt.
        topk_size: most trajectories to write per group.
        prompt_key: key that identifies groups; ``None`` for ``"group_id"``, or, with one warning,
            ``("text", "prompt")`` if rows do not have it.
        rewards_key: key of the rewards.
        done_key: key of the flag that a trajectory ends with a row.
        verbose: log every call.
        selectors: filters of the trajectories that take part, see
            :mod:`torchrl_llm.data.replay_buffers.grouping`.
        max_queued_groups: most waiting groups.

    Raises:
        ConfigError: ``topk_size`` exceeds ``total_dialog_turns``.

    Example:
        >>> from torchrl_llm.data.replay_buffers import ReplayBuffer
        >>> def row(reward):
        ...     next_ = {"reward": torch.full((1, 1), reward), "done": torch.ones(1).bool()}
        ...     return TensorDict(next=next_, group_id=torch.tensor(0))
        >>> buffer = ReplayBuffer(transform=TopKRewardSelector(4, 2, verbose=False))
        >>> buffer.extend([row(r) for r in (0.0, 3.0, 1.0, 2.0)]).tolist()
        [0, 1]
        >>> [r["next", "reward"].item() for r in buffer[:].unbind(0)]
        [3.0, 2.0]
    """

    counts = "turns"
    fallback_key = ("text", "prompt")

    def __init__(
        self,
        total_dialog_turns: int,
        topk_size: int,
        prompt_key: NestedKey | None = None,
        rewards_key: NestedKey = ("next", "reward"),
        done_key: NestedKey = ("next", "done"),
        verbose: bool = True,
        *,
        selectors: Sequence[Selector] = (),
        max_queued_groups: int = 4096,
    ) -> None:
        super().__init__(
            total_dialog_turns,
            prompt_key=prompt_key,
            rewards_key=rewards_key,
            done_key=done_key,
            verbose=verbose,
            selectors=selectors,
            max_queued_groups=max_queued_groups,
        )
        if not 1 <= topk_size <= total_dialog_turns:
            raise ConfigError(
                f"topk_size must be between 1 and total_dialog_turns={total_dialog_turns}, got "
                f"{topk_size}"
            )
        self.topk_size = topk_size

    @property
    def total_dialog_turns(self) -> int:
        """Turns of a group."""
        return self.group_size

    def complete(self, groups: Sequence[Sequence[Trajectory]]) -> list[list[TensorDict] | None]:
        """Rows of the best trajectories of each group, the best first."""
        return [self._best(group) for group in groups]

    def _best(self, group: Sequence[Trajectory]) -> list[TensorDict] | None:
        returns = [trajectory.total for trajectory in group]
        # The mean of the two middle returns if their number is even.
        median = torch.tensor(returns, dtype=torch.float64).quantile(0.5).item()
        order = sorted(range(len(group)), key=lambda i: -returns[i])[: self.topk_size]
        return [row for i in order if returns[i] > median for row in group[i].rows] or None
