"""Credit assigners: inverse transforms of a replay buffer that write ``advantage``.

A rule of credit sees whole groups of finished trajectories and says one thing: the advantage of
each row. The waiting and counting is
:class:`~torchrl_llm.data.replay_buffers.grouping.GroupTransform`'s.

Next: :mod:`torchrl_llm.objectives.credit.group` is a rule.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from tensordict import TensorDict
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_llm.data.replay_buffers.grouping import GroupTransform
from torchrl_llm.data.replay_buffers.trajectories import Trajectory

__all__ = ["CreditAssigner"]


class CreditAssigner(GroupTransform):
    """Writes the advantage of rows as they enter a replay buffer, group by group.

    Args:
        group_size: trajectories of a group; 1 where a rule needs no group.
        advantage_key: where the advantage goes, float32 ``[1, 1]`` or ``[T, 1]``.
        **options: of :class:`~torchrl_llm.data.replay_buffers.grouping.GroupTransform`.
    """

    def __init__(
        self, group_size: int, *, advantage_key: NestedKey = "advantage", **options: Any
    ) -> None:
        super().__init__(group_size, **options)
        self.advantage_key = advantage_key

    @abstractmethod
    def assign(self, group: Sequence[Trajectory]) -> list[list[Tensor]] | None:
        """Advantages of one group.

        Args:
            group: ``group_size`` trajectories, invalid ones among them (``trajectory.valid``).

        Returns:
            For each trajectory, for each of its rows, float32 ``[1, 1]`` or ``[T, 1]``; what is
            said of invalid ones is ignored. ``None`` filters the whole group out.
        """

    def complete(self, group: Sequence[Trajectory]) -> list[TensorDict] | None:
        """The rows of the valid trajectories with their advantages."""
        advantages = self.assign(group)
        if advantages is None:
            return None
        rows = []
        for trajectory, of_rows in zip(group, advantages, strict=True):
            if trajectory.valid:
                for row, advantage in zip(trajectory.rows, of_rows, strict=True):
                    row.set(self.advantage_key, advantage)
                rows += trajectory.rows
        return rows
