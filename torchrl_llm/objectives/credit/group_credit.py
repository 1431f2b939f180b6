"""Credit from the other trajectories of the same prompt: GRPO's rule, RLOO's, ScaleRL's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_llm._registry import register
from torchrl_llm.data.replay_buffers.trajectory_queues import Trajectory
from torchrl_llm.errors import ConfigError
from torchrl_llm.functional.advantages import group_advantages, hybrid_advantages, leave_one_out
from torchrl_llm.functional.padding import row_index
from torchrl_llm.objectives.credit.batch import BatchStatistics
from torchrl_llm.objectives.credit.columns import along_tokens
from torchrl_llm.objectives.credit.comparing import (
    ComparingCredit,
    TrajectoryReturn,
    check_choice,
    check_deviation,
    check_group,
)


@register("advantages", "group")
class MCAdvantage(ComparingCredit):
    r"""Advantage of a trajectory over the others of the same prompt.

    :math:`A_i = (R_i - \bar R) / \max(\sigma, 10^{-6})` over the valid trajectories of a group
    (arXiv:2402.03300, section 4.1.2), the same for all rows of a trajectory. Equal returns give
    exact zeros. Rows wait in queues until their group is complete, see
    :class:`~torchrl_llm.objectives.credit.CreditAssigner`.

    Args:
        grpo_size: trajectories of a group.
        prompt_key: what tells groups apart; ``None`` for ``"group_id"``, else ``"query"``.
        rewards_key: rewards, ``[1, 1]`` a row, or ``[R, 1]`` aligned with the response's tokens.
        advantage_key: where the advantage goes: ``[1, 1]``; ``[T, 1]`` for per-token rewards with
            ``trajectory_return=None``.
        done_key: where a row says that its trajectory ends with it.
        verbose: log every call.
        trajectory_return: the return of a trajectory from the rewards of its turns: their sum, max,
            mean or last. ``None`` normalises every reward of the group by itself, as TorchRL does
            by default: each turn (or token) has an advantage of its own over all turns of all
            trajectories. For single-turn trajectories the five are the same.
        normalize: the deviation: ``"sample"`` (divides by G - 1; TorchRL, TRL), ``"population"``
            (by G; Ludic), or ``"none"`` for no division (Dr. GRPO, arXiv:2503.20783).
        eps: guards the division.
        eps_as: ``"floor"`` of the deviation (TorchRL), or ``"added"`` to it (TRL with 1e-4, Ludic
            with 1e-8).
        positive_only: negative advantages become 0; ``"before_std"`` before the division, by the
            deviation of what is left, as Ludic does.
        **options: of :class:`~torchrl_llm.objectives.credit.ComparingCredit` (dynamic sampling,
            candidates) and :class:`~torchrl_llm.objectives.credit.CreditAssigner`.

    Raises:
        ConfigError: for a size below 2 or arguments that do not go together.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_llm.data.replay_buffers import ReplayBuffer
        >>> def row(reward):
        ...     next_ = {"reward": torch.full((1, 1), reward), "done": torch.ones(1).bool()}
        ...     return TensorDict(next=next_, group_id=torch.tensor(7))
        >>> buffer = ReplayBuffer(transform=MCAdvantage(grpo_size=2))
        >>> buffer.extend([row(0.0)]).tolist(), buffer.extend([row(1.0)]).tolist()
        ([], [0, 1])
        >>> [round(r["advantage"].item(), 4) for r in buffer[:].unbind(0)]
        [-0.7071, 0.7071]
    """

    def __init__(
        self,
        grpo_size: int,
        prompt_key: NestedKey | None = None,
        rewards_key: NestedKey = ("next", "reward"),
        advantage_key: NestedKey = "advantage",
        done_key: NestedKey = ("next", "done"),
        verbose: bool = False,
        *,
        trajectory_return: TrajectoryReturn | None = "sum",
        normalize: Literal["sample", "population", "none"] = "sample",
        eps: float = 1e-6,
        eps_as: Literal["floor", "added"] = "floor",
        positive_only: bool | Literal["before_std"] = False,
        **options: Any,
    ) -> None:
        check_group(grpo_size, "grpo_size")
        super().__init__(
            grpo_size,
            prompt_key=prompt_key,
            rewards_key=rewards_key,
            advantage_key=advantage_key,
            done_key=done_key,
            verbose=verbose,
            trajectory_return="sum" if trajectory_return is None else trajectory_return,
            positive_only=bool(positive_only),
            **options,
        )
        check_deviation(normalize, eps, eps_as)
        check_choice("positive_only", positive_only, (False, True, "before_std"))
        if trajectory_return is None and self.judges_groups:
            raise ConfigError(
                "keep_return_bounds, keep_zero_variance=False and candidate_group_size judge a "
                "group by its returns: give trajectory_return"
            )
        self.trajectory_return = trajectory_return
        self._how = {
            "normalize": normalize,
            "eps": eps,
            "eps_as": eps_as,
            "positive_only": positive_only,
        }

    @property
    def grpo_size(self) -> int:
        """Trajectories of a group."""
        return self.group_size

    def compare(self, returns_N: Tensor, group_N: Tensor) -> Tensor:
        """Advantages of returns; see the class."""
        return group_advantages(returns_N, group_N, **self._how)

    def assign_all(self, groups: Sequence[Sequence[Trajectory]]) -> list[list[list[Tensor]]]:
        """As in the base, or each reward by itself."""
        if self.trajectory_return is not None:
            return super().assign_all(groups)
        flat = [reward.reshape(-1).double() for g in groups for t in g for reward in t.rewards]
        sizes = [sum(reward.numel() for t in group for reward in t.rewards) for group in groups]
        advantages = self.compare(torch.cat(flat), row_index(sizes))
        parts = iter(advantages.split([len(rewards) for rewards in flat]))
        return [[[along_tokens(row, next(parts)) for row in t.rows] for t in g] for g in groups]


@register("advantages", "leave_one_out")
class LeaveOneOutAdvantage(ComparingCredit):
    r"""RLOO: a trajectory's return against the mean of the *others* of its group.

    :math:`A_i = R_i - \frac{1}{G-1} \sum_{j \ne i} R_j`, arXiv:2402.14740 section 2.3: a baseline
    that does not contain the return it is subtracted from, so the gradient has no bias.

    Args:
        group_size: trajectories of a group.
        **options: of :class:`~torchrl_llm.objectives.credit.ComparingCredit` and
            :class:`~torchrl_llm.objectives.credit.CreditAssigner`.

    Raises:
        ConfigError: for a size below 2.

    Example:
        >>> from tensordict import TensorDict
        >>> def row(reward):
        ...     next_ = {"reward": torch.full((1, 1), reward), "done": torch.ones(1).bool()}
        ...     return TensorDict(next=next_, group_id=torch.tensor(7))
        >>> rows = LeaveOneOutAdvantage(3).inv(torch.stack([row(0.0), row(0.0), row(3.0)]))
        >>> rows["advantage"].flatten().tolist()
        [-1.5, -1.5, 3.0]
    """

    def __init__(self, group_size: int, **options: Any) -> None:
        check_group(group_size)
        super().__init__(group_size, **options)

    def compare(self, returns_N: Tensor, group_N: Tensor) -> Tensor:
        """Advantages of returns; see the class."""
        return leave_one_out(returns_N, group_N)


@register("advantages", "hybrid")
class HybridNormalizedReturn(BatchStatistics, ComparingCredit):
    r"""ScaleRL: centred in the group, divided by the deviation of the batch.

    :math:`A_i = (R_i - \bar R_{group}) / \max(\sigma_{batch}, \epsilon)`, arXiv:2510.13786. A group
    that nearly always succeeds does not get the large advantages that its own small deviation would
    give. Use with ``keep_zero_variance=False``, as the paper does: groups without a signal would
    only shrink the deviation.

    Args:
        group_size: trajectories of a group.
        normalize: ``"population"`` or ``"sample"`` deviation, or ``"none"``.
        deviation_of: of the centred returns (``"advantages"``: the paper, Ludic) or of the returns
            themselves (``"returns"``: TRL's ``scale_rewards="batch"``).
        eps: guards the division.
        eps_as: ``"floor"`` of the deviation, or ``"added"`` to it (Ludic with 1e-8).
        **options: of :class:`~torchrl_llm.objectives.credit.BatchStatistics`,
            :class:`~torchrl_llm.objectives.credit.ComparingCredit` and
            :class:`~torchrl_llm.objectives.credit.CreditAssigner`.

    Raises:
        ConfigError: for impossible arguments.

    Example:
        >>> from tensordict import TensorDict
        >>> def row(group, reward):
        ...     next_ = {"reward": torch.full((1, 1), reward), "done": torch.ones(1).bool()}
        ...     return TensorDict(next=next_, group_id=torch.tensor(group))
        >>> rows = [row(0, 0.0), row(0, 2.0), row(1, 0.0), row(1, 2.0)]
        >>> HybridNormalizedReturn(2).inv(torch.stack(rows))["advantage"].flatten().tolist()
        [-1.0, 1.0, -1.0, 1.0]
    """

    def __init__(
        self,
        group_size: int,
        *,
        normalize: Literal["population", "sample", "none"] = "population",
        deviation_of: Literal["advantages", "returns"] = "advantages",
        eps: float = 1e-6,
        eps_as: Literal["floor", "added"] = "floor",
        **options: Any,
    ) -> None:
        check_group(group_size)
        super().__init__(group_size, **options)
        check_choice("deviation_of", deviation_of, ("advantages", "returns"))
        check_deviation(normalize, eps, eps_as, deviation_of=deviation_of != "advantages")
        self._how = {
            "normalize": normalize,
            "deviation_of": deviation_of,
            "eps": eps,
            "eps_as": eps_as,
        }

    def compare(self, returns_N: Tensor, group_N: Tensor) -> Tensor:
        """Advantages of returns; see the class."""
        return hybrid_advantages(returns_N, group_N, **self._how)
