"""Statistics over a whole batch, for rules of credit that compare trajectories of all prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from torchrl_llm.data.replay_buffers.trajectory_queues import GroupQueue, Trajectory
from torchrl_llm.errors import ConfigError
from torchrl_llm.objectives.credit.credit_assigner import CreditAssigner


class BatchStatistics(CreditAssigner):
    """Base of the rules whose ``assign_all`` looks at all groups of a batch at once.

    The batch is what one write into the buffer completes, which in a synchronous loop is the rows
    of a step. Where rows come in small portions (a collector that runs beside the trainer), that
    would be a statistic over a few: ``batch_size`` lets complete groups wait for one another.
    Groups that are filtered out by a selector or by their returns are not part of a batch. Where
    each rank of a distributed run has a buffer of its own, a batch is one of that rank.

    Args:
        group_size: trajectories of a group.
        batch_size: trajectories of a batch, a multiple of the group size; a group with invalid
            members counts in full. ``None`` takes what each write completes.
        **options: of :class:`~torchrl_llm.objectives.credit.CreditAssigner` or of the rule.

    Raises:
        ConfigError: for a size that is no multiple.
    """

    def __init__(
        self, group_size: int, /, *, batch_size: int | None = None, **options: Any
    ) -> None:
        super().__init__(group_size, **options)
        if batch_size is not None and (batch_size < 1 or batch_size % group_size):
            raise ConfigError(
                f"batch_size must be a multiple of the group size {group_size}, got {batch_size}"
            )
        self.batch_size = batch_size
        self._waiting = GroupQueue(group_size)
        self._number = 0

    def assign(self, group: Sequence[Trajectory]) -> list[list[Tensor]] | None:
        """Advantages of a group that is a batch of its own."""
        return self.assign_all([group])[0]

    def _batches(self, groups: list[list[Trajectory]]) -> Iterator[list[list[Trajectory]]]:
        if self.batch_size is None:
            yield from super()._batches(groups)
            return
        waiting = self._waiting.groups
        for group in groups:
            waiting[self._number] = group
            self._number += 1
            if len(waiting) == self.batch_size // self.group_size:
                batch = list(waiting.values())
                waiting.clear()
                yield batch

    def clear_queues(self) -> int:
        """As in the base; complete groups that wait for their batch are given up too."""
        waiting = list(self._waiting.groups.values())
        self._waiting.groups.clear()
        self._count_unfilled(waiting)
        return len(waiting) + super().clear_queues()

    def get_stats(self) -> dict[str, int]:
        """As in the base; what waits for its batch is among what is queued."""
        stats = super().get_stats()
        stats["queued_groups"] += len(self._waiting)
        stats["queued_trajectories"] += self._waiting.num_trajectories
        stats["queued_tokens"] += self._waiting.num_tokens
        return stats

    def get_extra_state(self) -> dict[str, Any]:
        """Queues, counts, and the groups that wait for their batch."""
        return {**super().get_extra_state(), "waiting": self._waiting.state_dict()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`get_extra_state` was taken."""
        super().set_extra_state(state)
        self._waiting.load_state_dict(state["waiting"])
        self._number = 1 + max(self._waiting.groups, default=-1)
