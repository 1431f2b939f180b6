"""Expert iteration's selection: of all answers to a prompt, only the best are kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from tensordict.utils import NestedKey

from torchrl_llm.data.replay_buffers.grouping import GroupTransform, Selector
from torchrl_llm.data.replay_buffers.trajectory_queues import Trajectory
from torchrl_llm.errors import ConfigError


class TopKRewardSelector(GroupTransform):
    """Writes the best trajectories of a prompt into a replay buffer, and only them.

    Trajectories wait until those of their prompt have ``total_dialog_turns`` turns together; then
    the ``topk_size`` with the highest return (sum of rewards) are written if they are strictly
    above the median return of the group. Of equals the first to come are taken.

    Args:
        total_dialog_turns: turns of a group, for single-turn episodes the repeats of a prompt.
        topk_size: most trajectories to write of a group.
        prompt_key: what tells groups apart; ``None`` for ``"group_id"``, or ``("text", "prompt")``
            with one warning where rows have none.
        rewards_key: the rewards.
        done_key: where a row says that its trajectory ends with it.
        verbose: log every call.
        selectors: which trajectories take part at all, see
            :mod:`torchrl_llm.data.replay_buffers.grouping`.
        max_queued_groups: bound on the groups that wait.

    Raises:
        ConfigError: more is to be kept than there is.

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
        # The mean of the two middle returns where their number is even.
        median = torch.tensor(returns, dtype=torch.float64).quantile(0.5).item()
        order = sorted(range(len(group)), key=lambda i: -returns[i])[: self.topk_size]
        return [row for i in order if returns[i] > median for row in group[i].rows] or None
