"""What rules of credit have in common that compare the returns of a group's trajectories.

The return of a trajectory, groups that are not worth training on, and groups of which more
trajectories are sampled than trained.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Hashable, Sequence
from statistics import fmean
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_llm.data.replay_buffers.trajectory_queues import GroupQueue, Trajectory
from torchrl_llm.data.wire import leaf
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.functional.padding import row_index
from torchrl_llm.objectives.credit.candidate_selection import MCAdvantageSelector
from torchrl_llm.objectives.credit.credit_assigner import CreditAssigner

TrajectoryReturn = Literal["sum", "max", "mean", "last"]

_RETURNS = {
    "sum": lambda trajectory: trajectory.total,
    "max": lambda trajectory: max(trajectory.totals),
    "mean": lambda trajectory: fmean(trajectory.totals),
    "last": lambda trajectory: trajectory.totals[-1],
}
RETURNS = tuple(_RETURNS)
"""The ways to make one return of the rewards of the turns."""


def check_choice(name: str, value: object, allowed: Collection[object]) -> None:
    """Raise a :class:`~torchrl_llm.errors.ConfigError` for a value that is not among the allowed.

    Args:
        name: of the argument.
        value: what was given.
        allowed: what may be given.
    """
    if value not in allowed:
        raise ConfigError(f"{name} must be {', '.join(map(str, allowed))}; got {value!r}")


def check_deviation(normalize: str, eps: float, eps_as: str = "floor", **others: bool) -> None:
    """Raise a :class:`~torchrl_llm.errors.ConfigError` for a division that cannot be as said.

    Args:
        normalize: ``"population"``, ``"sample"`` or ``"none"``.
        eps: guards the division, at least 0; 1e-6 where nobody changed it.
        eps_as: ``"floor"`` or ``"added"``; the former where nobody changed it.
        **others: names of further arguments of the division, and whether they were changed.
    """
    check_choice("normalize", normalize, ("population", "sample", "none"))
    check_choice("eps_as", eps_as, ("floor", "added"))
    if not eps >= 0:
        raise ConfigError(f"eps must not be negative, got {eps}")
    others = {"eps": eps != 1e-6, "eps_as": eps_as != "floor", **others}
    changed = [name for name, value in others.items() if value]
    if normalize == "none" and changed:
        raise ConfigError(
            f"{' and '.join(changed)} without effect: normalize='none' divides by nothing"
        )


def check_group(size: int, name: str = "group_size") -> None:
    """Raise a :class:`~torchrl_llm.errors.ConfigError` for a group without anybody to compare with.

    Args:
        size: of the group.
        name: of the argument.
    """
    if size < 2:
        raise ConfigError(
            f"{name} must be at least 2, got {size}: a single trajectory has no group to be better "
            "than"
        )


def trajectory_returns(group: Sequence[Trajectory], reduction: TrajectoryReturn) -> Tensor:
    """The return of each trajectory from the rewards of its turns.

    Args:
        group: ``G`` trajectories.
        reduction: the turns' sum, largest, mean or last; the rewards of a turn's tokens are added
            up in any case.

    Returns:
        float64 ``[G]``.

    Example:
        >>> trajectory_returns([Trajectory([], totals=[1.0, 2.0])], "last")
        tensor([2.], dtype=torch.float64)
    """
    reduce = _RETURNS[reduction]
    return torch.tensor([reduce(trajectory) for trajectory in group], dtype=torch.float64)


class ComparingCredit(CreditAssigner):
    """Base of the rules that compare the returns of a group's trajectories: see :meth:`compare`.

    Args:
        group_size: trajectories of a group that are trained.
        trajectory_return: the return of a trajectory from the rewards of its turns: their sum, max,
            mean or last.
        keep_return_bounds: exclusive ``(low, high)`` bounds on the mean return of a group; groups
            outside are not written (dynamic sampling of DAPO, arXiv:2503.14476, section 3.2).
        keep_zero_variance: ``False`` does not write groups whose returns are all equal: their
            advantages are zero, so they add nothing but to the denominator of the loss.
        candidate_group_size: trajectories that are sampled of a group, more than are trained; those
            that are not chosen are filtered, also where they come after the choice was made.
        candidate_selection_min_size: how many candidates must be there for a choice to be tried;
            ``group_size`` by default. It is tried again with each further candidate until it gives
            a group that is worth training on (see the two arguments above), and the group is
            filtered if none does.
        candidate_selector: makes the choice;
            :class:`~torchrl_llm.objectives.MCAdvantageSelector` by default.
        **options: of :class:`~torchrl_llm.objectives.credit.CreditAssigner`.

    Raises:
        ConfigError: for arguments that are impossible, or would have no effect.
    """

    def __init__(
        self,
        group_size: int,
        /,
        *,
        trajectory_return: TrajectoryReturn = "sum",
        keep_return_bounds: tuple[float, float] | None = None,
        keep_zero_variance: bool = True,
        candidate_group_size: int | None = None,
        candidate_selection_min_size: int | None = None,
        candidate_selector: MCAdvantageSelector | None = None,
        **options: Any,
    ) -> None:
        super().__init__(group_size, **options)
        check_choice("trajectory_return", trajectory_return, RETURNS)
        if keep_return_bounds is not None:
            low, high = keep_return_bounds
            if not low < high:
                raise ConfigError(f"keep_return_bounds must rise, got {keep_return_bounds}")
        if group_size == 1 and (candidate_group_size is not None or not keep_zero_variance):
            raise ConfigError(
                "keep_zero_variance=False and candidate_group_size need a group size of at least 2"
            )
        self.trajectory_return = trajectory_return
        self.keep_return_bounds = keep_return_bounds
        self.keep_zero_variance = keep_zero_variance
        self._trained_size = group_size
        self.candidate_group_size = candidate_group_size
        self.candidate_selection_min_size = candidate_selection_min_size
        self.candidate_selector = candidate_selector
        # Groups whose choice is made, and how many of their candidates are still to come.
        self._late: dict[Hashable, int] = {}
        if candidate_group_size is None:
            if candidate_selection_min_size is not None or candidate_selector is not None:
                raise ConfigError(
                    "candidate_selection_min_size and candidate_selector have no effect without "
                    "candidate_group_size"
                )
            return
        least = group_size if candidate_selection_min_size is None else candidate_selection_min_size
        if not group_size <= least <= candidate_group_size or group_size == candidate_group_size:
            raise ConfigError(
                f"sizes must be in this order: group size {group_size}, "
                f"candidate_selection_min_size {least}, candidate_group_size "
                f"{candidate_group_size}, and the last larger than the first"
            )
        if least == group_size and keep_return_bounds is None and keep_zero_variance:
            raise ConfigError(
                "the first candidates would always be taken: give keep_return_bounds, "
                "keep_zero_variance=False or a larger candidate_selection_min_size"
            )
        self.candidate_selection_min_size = least
        if candidate_selector is None:
            self.candidate_selector = MCAdvantageSelector()
        self._groups = GroupQueue(candidate_group_size)

    @property
    def group_size(self) -> int:
        """Trajectories of a group that are trained."""
        return self._trained_size

    @property
    def judges_groups(self) -> bool:
        """Whether groups may be filtered, or chosen from candidates, by their returns."""
        chooses = self.candidate_group_size is not None
        return chooses or self.keep_return_bounds is not None or not self.keep_zero_variance

    def returns(self, group: Sequence[Trajectory]) -> Tensor:
        """Returns of a group's trajectories, float64 ``[G]``."""
        return trajectory_returns(group, self.trajectory_return)

    def select(self, group: list[Trajectory]) -> list[Trajectory]:
        """Those that the selectors leave, of these the chosen candidates, if they are worth it."""
        group = super().select(group)
        if self.candidate_group_size is not None:
            group = self._chosen(group) or []
        return group if self._worth(group) else []

    def _worth(self, group: list[Trajectory]) -> bool:
        """Whether a group's returns are such that it is trained."""
        if not group or not self.judges_groups:
            return bool(group)
        returns = self.returns(group)
        if not self.keep_zero_variance and bool((returns == returns[0]).all()):
            return False
        if self.keep_return_bounds is None:
            return True
        low, high = self.keep_return_bounds
        return bool(low < returns.mean() < high)

    @abstractmethod
    def compare(self, returns_N: Tensor, group_N: Tensor) -> Tensor:
        """The rule itself.

        Args:
            returns_N: float64 ``[N]``, returns of the trajectories of all groups.
            group_N: int64 ``[N]``, the group of each.

        Returns:
            Advantages, ``[N]``.
        """

    def assign(self, group: Sequence[Trajectory]) -> list[list[Tensor]]:
        """Advantages of one group alone."""
        return self.assign_all([group])[0]

    def assign_all(self, groups: Sequence[Sequence[Trajectory]]) -> list[list[list[Tensor]]]:
        """Advantages of all groups, compared in one call."""
        flat = [trajectory for group in groups for trajectory in group]
        index = row_index([len(group) for group in groups])
        advantages = self.compare(trajectory_returns(flat, self.trajectory_return), index)
        # Copies, not views, so that a kept row does not keep its whole batch.
        copies = iter(torch.unbind_copy(advantages.view(-1, 1, 1)))
        return [[[next(copies)] * len(t.rows) for t in group] for group in groups]

    # -- candidates -------------------------------------------------------------------------------

    def _arrived(self, key: Hashable, trajectory: Trajectory) -> list[Trajectory] | None:
        if self.candidate_group_size is None:
            return super()._arrived(key, trajectory)
        if key in self._late:
            self._late[key] -= 1
            if not self._late[key]:
                del self._late[key]
            self._counts["filtered_tokens" if trajectory.valid else "invalid_tokens"] += (
                trajectory.num_tokens
            )
            return None
        group = super()._arrived(key, trajectory)
        if group is not None:
            return group
        waiting = self._groups.groups[key]
        if len(waiting) < self.candidate_selection_min_size:
            return None
        valid = [candidate for candidate in waiting if candidate.valid]
        candidates = super().select(valid)
        chosen = self._chosen(candidates) if len(candidates) >= self.group_size else None
        if chosen is None or not self._worth(chosen):
            return None
        self._late[key] = self.candidate_group_size - len(waiting)
        if len(self._late) > self.max_queued_groups:
            del self._late[next(iter(self._late))]
        return self._groups.groups.pop(key)

    def _chosen(self, candidates: list[Trajectory]) -> list[Trajectory] | None:
        """The selector's choice; all where there are no more than are trained."""
        if len(candidates) <= self.group_size:
            return candidates
        columns = {
            key: torch.stack([self._of_last_row(c, key) for c in candidates])
            for key in self.candidate_selector.in_keys
            if key != "return"
        }
        indices = self.candidate_selector.select(
            TensorDict({"return": self.returns(candidates), **columns}, [len(candidates)]),
            group_size=self.group_size,
            keep_return_bounds=self.keep_return_bounds,
        )
        return None if indices is None else [candidates[i] for i in indices]

    @staticmethod
    def _of_last_row(trajectory: Trajectory, key: Any) -> Tensor:
        value = leaf(trajectory.rows[-1], (key,) if isinstance(key, str) else tuple(key))
        if value is None:
            raise DataError(f"the selector of candidates reads {key!r}, which a row does not have")
        return value

    def clear_queues(self) -> int:
        """As in the base; candidates that are still to come are no longer expected."""
        self._late.clear()
        return super().clear_queues()

    def get_extra_state(self) -> dict[str, Any]:
        """Queues, counts, and candidates that are still to come."""
        return {**super().get_extra_state(), "late": dict(self._late)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`get_extra_state` was taken."""
        super().set_extra_state(state)
        self._late = dict(state["late"])
