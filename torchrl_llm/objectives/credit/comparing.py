"""Base class of the advantage estimators that compare the returns of a group's trajectories.

It computes the return of each trajectory and filters groups that are not worth training on. If more
trajectories are sampled than trained, :class:`MCAdvantageSelector` chooses among the candidates.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from math import comb, fsum
from operator import itemgetter
from statistics import fmean
from typing import Annotated, Any, Literal, Unpack

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_llm._checked import Ge, Pair, checked
from torchrl_llm.data.nodes import leaf
from torchrl_llm.data.replay_buffers.trajectory_queues import (
    GroupQueue,
    Trajectory,
    as_path,
    task_path,
)
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.functional.advantages import Deviation, are_equal
from torchrl_llm.functional.padding import row_index
from torchrl_llm.objectives.credit import credit_assigner


class MCAdvantageSelector:
    """Chooses the trajectories of a group from its candidates.

    Args:
        strategy: ``"first"`` takes the first candidates to arrive. ``"uniform"`` sorts the
            candidates by return and picks at even distances, from the worst to the best.
            ``"balanced"`` considers all choices whose mean return is inside the bounds and takes
            the one whose mean is closest to their middle; among equally close choices it takes the
            one with the widest range of returns. Without bounds, ``"balanced"`` is ``"uniform"``.
        max_combinations: if there are at most this many choices, ``"balanced"`` tries them all. If
            there are more, it starts with the best mix of lowest and highest returns, and swaps
            members as long as this improves the choice.
        in_keys: keys that :meth:`select` reads from each candidate; the strategies use the first
            key. A key is ``"return"``, or a key of the last row of the trajectory. Subclasses may
            also read all rows ``[T]`` with ``"trajectories"``, or one of their keys, such as
            ``("trajectories", "next", "reward")``.

    Raises:
        ConfigError: for an unknown strategy, ``max_combinations`` below 1, or empty ``in_keys``.

    Example:
        >>> from tensordict import TensorDict
        >>> candidates = TensorDict({"return": torch.tensor([0.0, 0.0, 0.0, 1.0])}, [4])
        >>> selector = MCAdvantageSelector()
        >>> selector.select(candidates, group_size=2, keep_return_bounds=(0.0, 1.0))
        [0, 3]
    """

    @checked
    def __init__(
        self,
        strategy: Literal["balanced", "first", "uniform"] = "balanced",
        *,
        max_combinations: Annotated[int, Ge(1)] = 100_000,
        in_keys: list[NestedKey] | None = None,
    ) -> None:
        if in_keys is not None and not in_keys:
            raise ConfigError('in_keys must name something to choose by, such as "return"')
        self.strategy = strategy
        self.max_combinations = max_combinations
        self.in_keys: list[NestedKey] = ["return"] if in_keys is None else list(in_keys)

    def select(
        self,
        candidates: TensorDictBase,
        *,
        group_size: int,
        keep_return_bounds: tuple[float, float] | None = None,
    ) -> list[int] | None:
        """Choose the trajectories to train.

        Args:
            candidates: ``[C]`` with ``"return"``, floating ``[C]``, and the ``in_keys``; the first
                of them has one number per candidate.
            group_size: number to choose, at most ``C``.
            keep_return_bounds: exclusive bounds on the mean return of the choice.

        Returns:
            Indices of the chosen candidates; ``None`` if no choice is inside the bounds.

        Raises:
            ConfigError: when there are fewer candidates than ``group_size``, or several numbers per
                candidate.
        """
        returns = candidates.get(self.in_keys[0], None)
        if not isinstance(returns, Tensor) or returns.numel() != len(candidates):
            raise ConfigError(
                f"the strategies choose by one number per candidate at {self.in_keys[0]!r}, got "
                f"{getattr(returns, 'shape', returns)}; override select() to choose by more"
            )
        returns = returns.double().flatten()
        if len(returns) < group_size:
            raise ConfigError(f"cannot choose {group_size} of {len(returns)} candidates")
        if self.strategy == "balanced" and keep_return_bounds is not None:
            return self._balanced(returns, group_size, keep_return_bounds)
        chosen = list(range(group_size))
        if self.strategy != "first":
            order = returns.argsort(stable=True)
            places = torch.linspace(0, len(returns) - 1, group_size, dtype=torch.float64).round()
            chosen = sorted(order[places.long()].tolist())
        return chosen if _within(returns[chosen], keep_return_bounds) else None

    def _balanced(
        self, returns: Tensor, size: int, bounds: tuple[float, float]
    ) -> list[int] | None:
        middle = sum(bounds) / 2
        number = len(returns)
        if comb(number, size) <= self.max_combinations:
            chosen = _nearest(returns, torch.combinations(torch.arange(number), size), middle)
        else:
            # For every k: the k lowest returns, and the rest from the top.
            order = returns.argsort(stable=True)
            ends = [torch.cat([order[:k], order[number - size + k :]]) for k in range(size + 1)]
            chosen, better = None, _nearest(returns, torch.stack(ends), middle)
            while chosen is None or _distance(returns, better, middle) < _distance(
                returns, chosen, middle
            ):
                chosen = better
                better = _nearest(returns, _neighbours(chosen, number), middle)
        # The middle has the same distance to both bounds, so if any choice is inside the bounds,
        # the choice nearest to the middle is also inside.
        return chosen if _within(returns[chosen], bounds) else None


def _within(returns: Tensor, bounds: tuple[float, float] | None) -> bool:
    """Whether the mean of the returns is between the exclusive bounds."""
    return bounds is None or bool(bounds[0] < returns.mean() < bounds[1])


def _nearest(returns: Tensor, choices: Tensor, middle: float) -> list[int]:
    """The choice among ``[M, size]`` whose mean is nearest to the middle; the widest on a tie."""
    values = returns[choices]
    distance = (values.mean(1) - middle).abs()
    # Means of the same returns in a different order differ by rounding.
    nearest = distance <= distance.amin() + 1e-12 * (returns.abs().amax() + abs(middle))
    width = values.amax(1) - values.amin(1)
    return sorted(choices[width.where(nearest, -1.0).argmax()].tolist())


def _neighbours(chosen: list[int], number: int) -> Tensor:
    """All choices that differ from this one in exactly one member."""
    outside = sorted(set(range(number)) - set(chosen))
    return torch.tensor([[*(c for c in chosen if c != a), b] for a in chosen for b in outside])


def _distance(returns: Tensor, chosen: list[int], middle: float) -> float:
    return abs(returns[chosen].mean().item() - middle)


TrajectoryReturn = Literal["sum", "max", "mean", "last"]

_RETURNS = {"sum": fsum, "max": max, "mean": fmean, "last": itemgetter(-1)}


def check_deviation(normalize: str, eps: float, eps_as: str = "floor", **others: bool) -> None:
    """Raise a :class:`~torchrl_llm.errors.ConfigError` for settings that the division ignores.

    Args:
        normalize: ``"none"`` divides by nothing.
        eps: small number that prevents a division by 0; 1e-6 by default.
        eps_as: ``"floor"`` (the default) or ``"added"``.
        **others: names of further arguments of the division, and whether they were changed.
    """
    others = {"eps": eps != 1e-6, "eps_as": eps_as != "floor", **others}
    changed = [name for name, value in others.items() if value]
    if normalize == "none" and changed:
        raise ConfigError(
            f"{' and '.join(changed)} without effect: normalize='none' divides by nothing"
        )


GroupSize = Annotated[int, Ge(2), "a single trajectory has no group to be better than"]
"""The size of a group whose members are compared."""


def trajectory_returns(group: Sequence[Trajectory], reduction: TrajectoryReturn) -> Tensor:
    """Compute the return of each trajectory from the rewards of its turns.

    Args:
        group: ``G`` trajectories.
        reduction: sum, maximum, mean or last value over the turns. The rewards of the tokens of a
            turn are always summed.

    Returns:
        float64 ``[G]``.

    Example:
        >>> trajectory_returns([Trajectory([], totals=[1.0, 2.0])], "last")
        tensor([2.], dtype=torch.float64)
    """
    reduce = _RETURNS[reduction]
    return torch.tensor([reduce(trajectory.totals) for trajectory in group], dtype=torch.float64)


class ComparingOptions(credit_assigner.CreditOptions, total=False):
    """Arguments that all advantage estimators that compare trajectories share.

    Attributes:
        trajectory_return: how the return of a trajectory is computed from the rewards of its turns:
            sum, max, mean or last.
        keep_return_bounds: exclusive ``(low, high)`` bounds on the mean return of a group; groups
            outside the bounds are not written (dynamic sampling of DAPO, arXiv:2503.14476, section
            3.2). All rules that filter groups use the return of the task, without the penalty of a
            :class:`~torchrl_llm.envs.transforms.kl.kl_penalty.KLTransform`.
        keep_zero_variance: with ``False``, groups whose returns are all equal (within float32
            precision) are not written, because there is nothing to compare. Estimators that divide
            by a deviation give such a group zeros even with a KL penalty, because the division
            would scale the penalty to the size of the task's reward. Estimators that do not divide
            keep the differences of the penalty.
        candidate_group_size: number of trajectories sampled per group; larger than the number
            trained. Trajectories that are not chosen are filtered out, even if they arrive after
            the choice.
        candidate_selection_min_size: number of candidates at which the first choice is tried;
            ``group_size`` by default. A new choice is tried with each further candidate, until a
            chosen group passes ``keep_return_bounds`` and ``keep_zero_variance``. If no choice
            passes, the group is filtered out.
        candidate_selector: chooses the trajectories; a
            :class:`~torchrl_llm.objectives.MCAdvantageSelector` by default.
    """

    trajectory_return: TrajectoryReturn
    keep_return_bounds: tuple[float, float] | None
    keep_zero_variance: bool
    candidate_group_size: int | None
    candidate_selection_min_size: int | None
    candidate_selector: MCAdvantageSelector | None


class ComparingCredit(credit_assigner.CreditAssigner):
    """Base class of the estimators that compare the returns of a group with ``compare``.

    Args:
        group_size: number of trajectories per group that are trained.
        trajectory_return: see :class:`ComparingOptions`, which also documents the next arguments.
        keep_return_bounds: bounds on the mean return of groups that are written.
        keep_zero_variance: whether groups whose returns are all equal are written.
        candidate_group_size: number of trajectories sampled per group; larger than ``group_size``.
        candidate_selection_min_size: number of candidates at which the first choice is tried.
        candidate_selector: chooses the trajectories.
        **options: see :class:`~torchrl_llm.objectives.credit.CreditOptions`.

    Raises:
        ConfigError: for arguments that are invalid or would have no effect.
    """

    @checked
    def __init__(
        self,
        group_size: int,
        /,
        *,
        trajectory_return: TrajectoryReturn = "sum",
        keep_return_bounds: Annotated[tuple[float, float], Pair()] | None = None,
        keep_zero_variance: bool = True,
        candidate_group_size: int | None = None,
        candidate_selection_min_size: int | None = None,
        candidate_selector: MCAdvantageSelector | None = None,
        **options: Unpack[credit_assigner.CreditOptions],
    ) -> None:
        super().__init__(group_size, **options)
        if group_size == 1 and (candidate_group_size is not None or not keep_zero_variance):
            raise ConfigError(
                "keep_zero_variance=False and candidate_group_size need a group size of at least 2"
            )
        self.trajectory_return = trajectory_return
        self.keep_return_bounds = keep_return_bounds
        self.keep_zero_variance = keep_zero_variance
        self.normalize: Deviation = "none"
        self._trained_size = group_size
        self.candidate_group_size = candidate_group_size
        self.candidate_selection_min_size = candidate_selection_min_size
        self.candidate_selector = candidate_selector
        # Groups whose choice has been made, and how many of their candidates are still missing.
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
        self.candidate_selector = candidate_selector or MCAdvantageSelector()
        self._groups = GroupQueue(candidate_group_size)

    @property
    def group_size(self) -> int:
        """Number of trajectories per group that are trained."""
        return self._trained_size

    @property
    def judges_groups(self) -> bool:
        """Whether groups may be filtered, or chosen from candidates, by their returns."""
        chooses = self.candidate_group_size is not None
        return chooses or self.keep_return_bounds is not None or not self.keep_zero_variance

    def returns(self, group: Sequence[Trajectory]) -> Tensor:
        """Compute the returns that filter groups, without a KL penalty, float64 ``[G]``."""
        reduce = _RETURNS[self.trajectory_return or "sum"]
        return torch.tensor([reduce(turns) for turns in self._task_totals(group)]).double()

    def is_level(self, group: Sequence[Trajectory]) -> bool:
        """Whether the returns that filter groups are equal within float32 precision."""
        reduce = _RETURNS[self.trajectory_return or "sum"]
        magnitudes = [reduce(list(map(abs, turns))) for turns in self._task_totals(group)]
        return are_equal(self.returns(group), torch.tensor(magnitudes, dtype=torch.float64))

    def level(
        self, groups: Sequence[Sequence[Trajectory]], values_N: Tensor, sizes: Sequence[int]
    ) -> Tensor:
        """Set the values of each group without differences to one value, in place.

        Args:
            groups: trajectories.
            values_N: ``[N]``, one per trajectory; a group with more values is left unchanged.
            sizes: number of values of each group.
        """
        path = task_path(as_path(self.rewards_key))
        for group, part in zip(groups, values_N.split(list(sizes)), strict=True):
            # A group of single turns is always compared within float32 precision.
            single = all(len(trajectory.rows) < 2 for trajectory in group)
            if len(part) != len(group) or (single and leaf(group[0].rows[0], path) is None):
                continue
            divides = self.normalize != "none"
            if (divides or are_equal(part, part.abs())) and self.is_level(group):
                part.fill_(part[0])
        return values_N

    def _task_totals(self, group: Sequence[Trajectory]) -> list[list[float]]:
        """Rewards of the turns of each trajectory, without a KL penalty."""
        path = task_path(as_path(self.rewards_key))
        if leaf(group[0].rows[0], path) is None:
            return [trajectory.totals for trajectory in group]
        return [
            [
                total if (task := leaf(row, path)) is None else task.sum().item()
                for row, total in zip(each.rows, each.totals, strict=True)
            ]
            for each in group
        ]

    def select(self, group: list[Trajectory]) -> list[Trajectory]:
        """Select candidates among the trajectories that the selectors keep."""
        group = super().select(group)
        if self.candidate_group_size is not None:
            group = self._chosen(group) or []
        return group if self._worth(group) else []

    def _worth(self, group: list[Trajectory]) -> bool:
        """Whether a group is trained, according to its returns."""
        if not group or not self.judges_groups:
            return bool(group)
        if not self.keep_zero_variance and self.is_level(group):
            return False
        return _within(self.returns(group), self.keep_return_bounds)

    @abstractmethod
    def compare(self, returns_N: Tensor, group_N: Tensor) -> Tensor:
        """Compute advantages from returns.

        Args:
            returns_N: float64 ``[N]``, returns of the trajectories of all groups.
            group_N: int64 ``[N]``, the group of each trajectory.

        Returns:
            Advantages, ``[N]``.
        """

    def assign(self, group: Sequence[Trajectory]) -> list[list[Tensor]]:
        """Return the advantages of a single group."""
        return self.assign_all([group])[0]

    def assign_all(self, groups: Sequence[Sequence[Trajectory]]) -> list[list[list[Tensor]]]:
        """Return the advantages of all groups, compared in one call."""
        flat = [trajectory for group in groups for trajectory in group]
        sizes = [len(group) for group in groups]
        returns = self.level(groups, trajectory_returns(flat, self.trajectory_return), sizes)
        return credit_assigner.per_trajectory(groups, self.compare(returns, row_index(sizes)))

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
        """Let the selector choose, if there are more than ``group_size`` candidates."""
        if len(candidates) <= self.group_size:
            return candidates
        columns: dict[Any, Any] = {}
        for key in self.candidate_selector.in_keys:
            if key == "trajectories" or key[0] == "trajectories":
                rows = [lazy_stack(list(candidate.rows)) for candidate in candidates]
                columns["trajectories"] = lazy_stack(rows)
            elif key != "return":
                columns[key] = torch.stack([self._of_last_row(c, key) for c in candidates])
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
        """See the base class; missing candidates are no longer expected."""
        self._late.clear()
        return super().clear_queues()

    def get_extra_state(self) -> dict[str, Any]:
        """Return the queues, counts and missing candidates."""
        return {**super().get_extra_state(), "late": dict(self._late)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`get_extra_state` returned."""
        super().set_extra_state(state)
        self._late = dict(state["late"])
