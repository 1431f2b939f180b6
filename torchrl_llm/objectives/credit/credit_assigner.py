"""Credit assigners: inverse transforms of a replay buffer that write ``advantage``.

A rule of credit sees whole groups of finished trajectories and says one thing: the advantage of
each row. The waiting and counting is
:class:`~torchrl_llm.data.replay_buffers.grouping.GroupTransform`'s.

Next: :mod:`torchrl_llm.objectives.credit.return_credit` has the rules that need no group,
:mod:`torchrl_llm.objectives.credit.comparing` what all rules have in common that compare the
trajectories of a group, :mod:`torchrl_llm.objectives.credit.batch` statistics over whole batches.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_llm.data.replay_buffers.grouping import GroupTransform
from torchrl_llm.data.replay_buffers.trajectory_queues import Trajectory


class CreditAssigner(GroupTransform):
    """Writes the advantage of rows as they enter a replay buffer, group by group.

    Rewards are read when rows are written, so a reward that another transform of the buffer adds is
    seen when that transform is appended *after* the rule of credit: what is appended last runs
    first. With :class:`~torchrl_llm.data.replay_buffers.JoinTurns` appended before it, a rule sees
    one row a turn.

    Args:
        group_size: trajectories of a group; 1 where a rule needs no group.
        advantage_key: where the advantage goes, ``[1, 1]`` or ``[T, 1]``; float32, or float64 where
            the rewards are.
        positive_only: negative advantages become 0, after any normalisation.
        keep_zero_advantage: ``False`` does not write trajectories all of whose advantages are 0.
            They add nothing but to the denominator of the loss, which they change: a mean over what
            is left is larger. With ``positive_only`` this keeps only what was better than expected.
        **options: of :class:`~torchrl_llm.data.replay_buffers.grouping.GroupTransform`.
    """

    def __init__(
        self,
        group_size: int,
        /,
        *,
        advantage_key: NestedKey = "advantage",
        positive_only: bool = False,
        keep_zero_advantage: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(group_size, **options)
        self.advantage_key = advantage_key
        self.positive_only = positive_only
        self.keep_zero_advantage = keep_zero_advantage

    @abstractmethod
    def assign(self, group: Sequence[Trajectory]) -> list[list[Tensor]] | None:
        """Advantages of one group.

        Args:
            group: the trajectories that take part: two at least where the rule has groups, fewer
                than ``group_size`` where some are invalid.

        Returns:
            For each trajectory, for each of its rows, ``[1, 1]`` or ``[T, 1]``. ``None`` filters
            the whole group out.
        """

    def assign_all(self, groups: Sequence[Sequence[Trajectory]]) -> list[list[list[Tensor]] | None]:
        """Advantages of the groups that are completed together; group by group unless overridden.

        Args:
            groups: as for :meth:`assign`.

        Returns:
            What :meth:`assign` returns, for each group.
        """
        return [self.assign(group) for group in groups]

    def complete(self, groups: Sequence[Sequence[Trajectory]]) -> list[list[TensorDict] | None]:
        """The rows with their advantages."""
        return [
            None if advantages is None else self._rows(group, advantages)
            for group, advantages in zip(groups, self.assign_all(groups), strict=True)
        ]

    def _rows(
        self, group: Sequence[Trajectory], advantages: Sequence[Sequence[Tensor]]
    ) -> list[TensorDict]:
        rows: list[TensorDict] = []
        for trajectory, of_rows in zip(group, advantages, strict=True):
            if self.positive_only:
                of_rows = [advantage.clamp(min=0) for advantage in of_rows]
            if not self.keep_zero_advantage and not any(bool(a.any()) for a in of_rows):
                continue
            dtype = torch.promote_types(trajectory.rewards[0].dtype, torch.float32)
            for row, advantage in zip(trajectory.rows, of_rows, strict=True):
                row.set(self.advantage_key, advantage.to(dtype))
            rows += trajectory.rows
        return rows
