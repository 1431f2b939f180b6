"""Credit against the whole batch: REINFORCE++ and its variant with a group's mean as baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from torchrl_llm._registry import register
from torchrl_llm.data.replay_buffers.trajectory_queues import Trajectory
from torchrl_llm.errors import ConfigError
from torchrl_llm.functional.advantages import batch_normalize, group_advantages, leave_one_out
from torchrl_llm.objectives.credit.batch import BatchStatistics
from torchrl_llm.objectives.credit.columns import along_tokens, sampled_in_response
from torchrl_llm.objectives.credit.comparing import (
    ComparingCredit,
    check_choice,
    check_deviation,
    check_group,
)
from torchrl_llm.objectives.credit.return_credit import returns_to_go


@register("advantages", "batch")
class BatchNormalizedReturn(BatchStatistics, ComparingCredit):
    r"""REINFORCE++: returns against the mean and deviation of all tokens of the batch.

    :math:`A^{norm} = (A - mean_{batch}(A)) / std_{batch}(A)`, arXiv:2501.03262. Without a baseline
    :math:`A_t` is what comes after a turn (or a token, where rewards are per token: the paper puts
    :math:`-\beta \sum_{i \ge t} KL_i` there, which
    :class:`~torchrl_llm.envs.transforms.KLRewardTransform` does). With ``baseline="group"`` it is
    the episode's return less its group's mean (REINFORCE++-baseline), ``"leave_one_out"`` less that
    of the others.

    Args:
        group_size: trajectories of a group; 1 without a baseline.
        baseline: ``"none"``, ``"group"`` or ``"leave_one_out"``.
        gamma: discount from one turn to the next, without a baseline.
        over: what the statistics are taken over: every sampled token of the batch once (the paper
            and its code), or every row once (``"samples"``; Ludic's REINFORCE with baseline).
        normalize: ``"population"`` or ``"sample"`` deviation, or ``"none"`` for no division.
        eps: guards the division.
        eps_as: ``"floor"`` of the deviation, or ``"added"`` to it.
        **options: of :class:`~torchrl_llm.objectives.credit.BatchStatistics`,
            :class:`~torchrl_llm.objectives.credit.ComparingCredit` and
            :class:`~torchrl_llm.objectives.credit.CreditAssigner`.

    Raises:
        ConfigError: for arguments that are impossible, or would have no effect.

    Example:
        >>> from tensordict import TensorDict
        >>> def row(reward):
        ...     next_ = {"reward": torch.full((1, 1), reward), "done": torch.ones(1).bool()}
        ...     return TensorDict(next=next_)
        >>> rows = BatchNormalizedReturn().inv(torch.stack([row(0.0), row(4.0)]))
        >>> rows["advantage"].flatten().tolist()
        [-1.0, 1.0]
    """

    def __init__(
        self,
        group_size: int = 1,
        *,
        baseline: Literal["none", "group", "leave_one_out"] = "none",
        gamma: float = 1.0,
        over: Literal["tokens", "samples"] = "tokens",
        normalize: Literal["population", "sample", "none"] = "population",
        eps: float = 1e-6,
        eps_as: Literal["floor", "added"] = "floor",
        **options: Any,
    ) -> None:
        check_choice("baseline", baseline, ("none", "group", "leave_one_out"))
        check_choice("over", over, ("tokens", "samples"))
        check_deviation(normalize, eps, eps_as)
        if baseline != "none":
            check_group(group_size)
        super().__init__(group_size, **options)
        if not 0 <= gamma <= 1:
            raise ConfigError(f"gamma must be in [0, 1], got {gamma}")
        if baseline != "none" and gamma != 1:
            raise ConfigError("gamma has no effect with a baseline, which is one of whole episodes")
        if baseline == "none" and self.trajectory_return != "sum" and not self.judges_groups:
            raise ConfigError("trajectory_return has no effect without a baseline")
        self.baseline, self.gamma, self.over = baseline, gamma, over
        self.normalize, self.eps, self.eps_as = normalize, eps, eps_as

    def assign_all(self, groups: Sequence[Sequence[Trajectory]]) -> list[list[list[Tensor]]]:
        """Advantages of a batch; see the class."""
        columns = self._unnormalised(groups)
        flat = [
            (row, values)
            for group, of_group in zip(groups, columns, strict=True)
            for trajectory, of_rows in zip(group, of_group, strict=True)
            for row, values in zip(trajectory.rows, of_rows, strict=True)
        ]
        weights = [self._weights(row, values) for row, values in flat]
        normalised = batch_normalize(
            torch.cat([values.reshape(-1) for _, values in flat]),
            torch.cat(weights),
            normalize=self.normalize,
            eps=self.eps,
            eps_as=self.eps_as,
        )
        parts = iter(normalised.split([len(w) for w in weights]))
        return [[[along_tokens(row, next(parts)) for row in t.rows] for t in g] for g in groups]

    def compare(self, returns_N: Tensor, group_N: Tensor) -> Tensor:
        """Returns less their baseline, which is one of their group."""
        if self.baseline == "group":
            return group_advantages(returns_N, group_N, normalize="none")
        return leave_one_out(returns_N, group_N)

    def _unnormalised(self, groups: Sequence[Sequence[Trajectory]]) -> list[list[list[Tensor]]]:
        if self.baseline != "none":
            return ComparingCredit.assign_all(self, groups)
        return [[returns_to_go(t, self.gamma) for t in group] for group in groups]

    def _weights(self, row: Any, values: Tensor) -> Tensor:
        """How often each value of a row counts."""
        sampled = sampled_in_response(row).double()
        if values.numel() == 1:
            return sampled.sum().reshape(1) if self.over == "tokens" else sampled.new_ones(1)
        return sampled / (1 if self.over == "tokens" else sampled.sum().clamp(min=1))
