"""Pairs the best and the worst trajectory of each group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_llm import functional as F
from torchrl_llm._checked import checked
from torchrl_llm._registry import register
from torchrl_llm.data.replay_buffers.trajectory_queues import Trajectory
from torchrl_llm.functional.advantages import are_equal
from torchrl_llm.objectives.credit.comparing import (
    ComparingCredit,
    ComparingOptions,
    GroupSize,
    trajectory_returns,
)


@register("advantages", "best_worst")
class BestWorst(ComparingCredit):
    """Keeps the best and the worst trajectory of each group, with advantages 1 and -1.

    Their rows get ``"pair_id"``, int64, and ``"is_chosen"``, bool, so that a loss of pairs
    (:class:`~torchrl_llm.objectives.OnlineDPOLoss`) can compare them; other losses read the
    advantage. With ``positive_only``, only the best trajectories are trained. Among equal returns
    the first trajectory is chosen. All other trajectories, and groups whose returns are all equal,
    are filtered out.

    Args:
        group_size: trajectories of a group.
        **options: see :class:`~torchrl_llm.objectives.credit.ComparingOptions`.

    Raises:
        ConfigError: for a size below 2.

    Example:
        >>> def row(reward):
        ...     next_ = {"reward": torch.full((1, 1), reward), "done": torch.ones(1).bool()}
        ...     return TensorDict(next=next_, group_id=torch.tensor(7))
        >>> rows = BestWorst(3).inv(torch.stack([row(0.5), row(1.0), row(0.0)]))
        >>> rows["advantage"].flatten().tolist(), rows["is_chosen"].tolist()
        ([1.0, -1.0], [True, False])
    """

    @checked
    def __init__(self, group_size: GroupSize, **options: Unpack[ComparingOptions]) -> None:
        super().__init__(group_size, **options)
        self._number = 0

    def select(self, group: list[Trajectory]) -> list[Trajectory]:
        """Select the best and the worst trajectory; none if all are equal."""
        group = super().select(group)
        if len(group) < 2:
            return []
        returns = trajectory_returns(group, self.trajectory_return)
        if are_equal(returns, returns.abs()):
            return []
        return [group[int(returns.argmax())], group[int(returns.argmin())]]

    def compare(self, returns_N: Tensor, group_N: Tensor) -> Tensor:
        """Return 1 for the better of two trajectories, -1 for the other."""
        return F.group_advantages(returns_N, group_N, normalize="none").sign()

    def complete(self, groups: Sequence[Sequence[Trajectory]]) -> list[list[TensorDict] | None]:
        """Return the rows of the pairs, with their pair columns."""
        written = super().complete(groups)
        for rows in written:
            self._number += 1
            for row in rows or ():
                row.set("pair_id", torch.tensor(self._number))
                row.set("is_chosen", (row[self.advantage_key] > 0).reshape(()))
        return written

    def get_extra_state(self) -> dict[str, Any]:
        """Return the queues and counts, including the count of pairs."""
        return {**super().get_extra_state(), "pairs": self._number}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`get_extra_state` returned."""
        super().set_extra_state(state)
        self._number = state["pairs"]
