"""Base of transforms that hold rows until their group is complete, such as advantages.

:class:`GroupTransform` has the queues. It collects rows into trajectories and trajectories into
groups, handles invalid and incomplete groups, counts, and has a state that resumes exactly. Its
subclasses define the processing of a complete group.

A **selector** chooses the trajectories of a group that take part. It is any function from
trajectories to one flag each. The other trajectories are not in any statistic, are not written, and
are counted as filtered. A group with fewer than two remaining trajectories is not written. Every
advantage estimator accepts selectors::

    MCAdvantage(8, selectors=[drop_truncated])

Estimators that compare returns also have ``keep_zero_variance`` and ``keep_return_bounds``, which
filter whole groups.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torchrl._utils import logger
from torchrl.envs import Transform

from torchrl_llm._checked import Ge, checked
from torchrl_llm.data.child_rows import is_own_child
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.nodes import leaf
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.replay_buffers.trajectory_queues import (
    GroupQueue,
    Trajectory,
    TrajectoryQueue,
    agent_of,
    as_path,
    group_value,
)
from torchrl_llm.data.rollouts import row_list, sampled_tokens
from torchrl_llm.errors import ConfigError, DataError

_COUNTS = (
    "completed_trajectories",
    "invalid_trajectories",
    "completed_groups",
    "written_groups",
    "invalid_groups",
    "filtered_groups",
    "unfilled_groups",
    "unfilled_trajectories",
    "invalid_tokens",
    "filtered_tokens",
    "unfilled_tokens",
)


Selector = Callable[[Sequence[Trajectory]], Sequence[bool]]
"""Function from the trajectories of a group to one flag each: whether it takes part."""


def drop_truncated(group: Sequence[Trajectory]) -> list[bool]:
    """Select episodes that were neither truncated nor cut to fit into training.

    Args:
        group: trajectories of one group.

    Returns:
        True for episodes that ended by themselves.

    Example:
        >>> from tensordict import TensorDict
        >>> row = TensorDict(next={"done": True, "truncated": True, "terminated": False})
        >>> drop_truncated([Trajectory([row])])
        [False]
    """
    return [not trajectory.truncated for trajectory in group]


def drop_incomplete(group: Sequence[Trajectory]) -> list[bool]:
    """Select trajectories without a response that was cut by its length limit.

    Args:
        group: trajectories of one group.

    Returns:
        True if no turn has ``length`` as its ``("tokens", "finish_reason")``.

    Example:
        >>> from tensordict import TensorDict
        >>> row = TensorDict(tokens={"finish_reason": int(FinishReason.LENGTH)})
        >>> drop_incomplete([Trajectory([row]), Trajectory([TensorDict()])])
        [False, True]
    """
    return [
        all(
            (reason := leaf(row, ("tokens", "finish_reason"))) is None
            or not FinishReason(int(reason)).cut
            for row in trajectory.rows
        )
        for trajectory in group
    ]


class GroupTransform(Transform):
    """Inverse transform of a replay buffer that works on whole groups of finished trajectories.

    Rows wait until their trajectory is done and their group is full. An episode that continues in a
    second row after a fork counts once. A trajectory with an invalid reward (``reward_valid``
    false, NaN, infinite) counts for the size of its group, but does not take part: its rows are not
    written. The same is true for trajectories that a selector excludes. If the group size is two or
    more, a group with fewer than two remaining trajectories is dropped.

    Args:
        group_size: size of a group; 1 if the estimator needs no group.
        prompt_key: key that identifies the group of a row. ``None`` means ``"group_id"``, which
            :class:`~torchrl_llm.envs.transforms.DataLoadingPrimer` writes; for rows without it,
            :attr:`fallback_key`, with one warning. Rows of different agents (``"agent"``) are in
            different groups.
        rewards_key: key of the rewards, ``[1, 1]`` per row, or ``[R, 1]`` aligned with the
            response's tokens.
        done_key: key of the flag that this row ends its trajectory.
        selectors: choose which valid trajectories of a full group take part; all by default.
        max_queued_groups: most waiting groups. If there are more, the oldest group is dropped and
            counted as unfilled, with one warning.
        verbose: log every call.

    Attributes:
        whole_groups: whether each write contains all trajectories of its groups, so that incomplete
            groups are dropped instead of waiting. Set it if episodes start together and not every
            player acts.

    Raises:
        ConfigError: a size is below 1.
    """

    whole_groups: bool = False
    counts: ClassVar[Literal["trajectories", "turns"]] = "trajectories"
    """The unit of the group size."""
    fallback_key: ClassVar[NestedKey] = "query"
    """Key that identifies the group if rows have no ``"group_id"`` and no key was given."""
    adds_keys_only = True
    requires_shared_write_state = True

    @checked
    def __init__(
        self,
        group_size: Annotated[int, Ge(1)],
        /,
        *,
        prompt_key: NestedKey | None = None,
        rewards_key: NestedKey = ("next", "reward"),
        done_key: NestedKey = ("next", "done"),
        selectors: Sequence[Selector] = (),
        max_queued_groups: Annotated[int, Ge(1)] = 4096,
        verbose: bool = False,
    ) -> None:
        super().__init__()
        self.prompt_key = prompt_key
        self.rewards_key, self.done_key = rewards_key, done_key
        self.selectors = tuple(selectors)
        self.max_queued_groups = max_queued_groups
        self.verbose = verbose
        self._trajectories = TrajectoryQueue(done_key)
        self._groups = GroupQueue(group_size, counts=self.counts)
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._warned: set[str] = set()

    @property
    def group_size(self) -> int:
        """Size of a group."""
        return self._groups.size

    @abstractmethod
    def complete(self, groups: Sequence[Sequence[Trajectory]]) -> list[list[TensorDict] | None]:
        """Process the groups that one write completed.

        Args:
            groups: the selected trajectories of each group, at least two (one for groups of size
                one).

        Returns:
            The rows of each group, with the keys that this transform adds, or ``None`` to filter
            out the whole group.
        """

    def select(self, group: list[Trajectory]) -> list[Trajectory]:
        """Select the trajectories of a full group that take part.

        Args:
            group: its valid trajectories.

        Returns:
            The selected trajectories, possibly none.
        """
        for selector in self.selectors:
            flags = selector(group)
            group = [t for t, kept in zip(group, flags, strict=True) if kept]
        return group

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return sampled rows unchanged."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase | None) -> LazyStackedTensorDict | None:
        if tensordict is None:
            return None
        groups: list[list[Trajectory]] = []
        for rows in self._trajectories.push(row_list(tensordict)):
            trajectory = Trajectory.of(rows, self.rewards_key)
            self._counts["completed_trajectories"] += 1
            self._counts["invalid_trajectories"] += not trajectory.valid
            group = self._arrived(self._key(rows[0]), trajectory)
            if group is not None:
                groups += self._admitted(group)
        if self.whole_groups:
            self._give_up(list(self._groups.groups))
        while len(self._groups) > self.max_queued_groups:
            self._give_up_oldest()
        ready = [row for batch in self._batches(groups) for row in self._written(batch)]
        if self.verbose:
            logger.info(
                f"{type(self).__name__}: {len(ready)} of {tensordict.batch_size[0]} rows written, "
                f"{len(self._groups)} groups wait"
            )
        return lazy_rows(ready) if ready else None

    def _arrived(self, key: Hashable, trajectory: Trajectory) -> list[Trajectory] | None:
        """Queue a trajectory; return its group if that is now full."""
        return self._groups.push(key, trajectory)

    def _batches(self, groups: list[list[Trajectory]]) -> Iterator[list[list[Trajectory]]]:
        """Return batches of groups to complete together, from the groups that this write filled."""
        if groups:
            yield groups

    def _key(self, row: TensorDict) -> Hashable:
        if self.group_size == 1:
            return None
        if is_own_child(row):
            raise ConfigError(
                "a sub-agent that is trained by its own rewards (trained_by='own') has no group: "
                "choose an estimator that compares none, or trained_by='both'"
            )
        return self._group_of(row), agent_of(row)

    def _group_of(self, row: TensorDict) -> Hashable:
        if self.prompt_key is not None:
            value = leaf(row, as_path(self.prompt_key))
            if value is None:
                raise DataError(
                    f"rows are grouped by {self.prompt_key!r}, but one of them lacks it"
                )
            return group_value(value)
        value = leaf(row, ("group_id",))
        if value is not None:
            return group_value(value)
        value = leaf(row, as_path(self.fallback_key))
        if value is None:
            raise DataError(
                f'rows have neither "group_id" nor {self.fallback_key!r}, so their group is '
                "unknown: append a DataLoadingPrimer to the environment, or name the key with "
                "prompt_key=..."
            )
        self._warn(
            f'rows have no "group_id" and are grouped by {self.fallback_key!r}: equal prompts of '
            "different epochs or workers fall into one group. A DataLoadingPrimer stamps group_id"
        )
        return self.fallback_key, group_value(value)

    def _admitted(self, group: list[Trajectory]) -> list[list[Trajectory]]:
        """Return the selected part of a full group: a list of one group, or an empty list."""
        self._counts["completed_groups"] += 1
        least = min(2, self.group_size)
        valid = [trajectory for trajectory in group if trajectory.valid]
        if len(valid) < least:
            self._counts["invalid_groups"] += 1
            self._counts["invalid_tokens"] += sum(t.num_tokens for t in group)
            return []
        if len(valid) < len(group):
            self._counts["invalid_tokens"] += sum(t.num_tokens for t in group if not t.valid)
        selected = self.select(valid)
        if len(selected) < least:
            self._counts["filtered_groups"] += 1
            self._counts["filtered_tokens"] += sum(t.num_tokens for t in valid)
            return []
        if len(selected) < len(valid):
            self._counts["filtered_tokens"] += sum(t.num_tokens for t in valid)
            self._counts["filtered_tokens"] -= sum(t.num_tokens for t in selected)
        return [selected]

    def _written(self, groups: list[list[Trajectory]]) -> list[TensorDict]:
        written: list[TensorDict] = []
        for group, rows in zip(groups, self.complete(groups), strict=True):
            self._counts["written_groups" if rows else "filtered_groups"] += 1
            rows = rows or []
            if len(rows) < sum(len(trajectory.rows) for trajectory in group):
                self._counts["filtered_tokens"] += sum(t.num_tokens for t in group)
                self._counts["filtered_tokens"] -= sum(map(sampled_tokens, rows))
            written += rows
        return written

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(f"{type(self).__name__}: {message}")

    def waiting(self) -> Iterator[Trajectory]:
        """Return finished trajectories whose group is not full, to inspect or invalidate them."""
        return (t for group in self._groups.groups.values() for t in group)

    def unfinished(self) -> Iterator[TensorDict]:
        """Return the rows of unfinished trajectories, for the same purposes."""
        return (row for held in self._trajectories.open.values() for row in held)

    def held(self) -> Iterator[TensorDict]:
        """Return all rows that wait for their trajectory, their group, or other groups."""
        yield from self.unfinished()
        yield from (row for trajectory in self.waiting() for row in trajectory.rows)

    # -- queues and counts ------------------------------------------------------------------------

    def _give_up_oldest(self) -> None:
        self._give_up([next(iter(self._groups.groups))])
        self._warn(
            f"more than {self.max_queued_groups} groups wait for {self.group_size} trajectories; "
            "the oldest are dropped. Does the primer repeat each prompt "
            f"{self.group_size} times, and do all trajectories end?"
        )

    def _give_up(self, keys: Sequence[Hashable]) -> None:
        self._count_unfilled([self._groups.groups.pop(key) for key in keys])

    def _count_unfilled(self, groups: list[list[Trajectory]]) -> None:
        self._counts["unfilled_groups"] += len(groups)
        self._counts["unfilled_trajectories"] += sum(len(group) for group in groups)
        self._counts["unfilled_tokens"] += sum(t.num_tokens for group in groups for t in group)

    def clear_queues(self) -> int:
        """Drop and count incomplete groups and unfinished trajectories.

        Call this at the end of an epoch, because its incomplete groups will never fill.

        Returns:
            Number of dropped groups.
        """
        keys = list(self._groups.groups)
        self._give_up(keys)
        self._counts["unfilled_trajectories"] += len(self._trajectories)
        self._counts["unfilled_tokens"] += sum(
            sampled_tokens(row) for row in self._trajectories.clear()
        )
        return len(keys)

    def get_stats(self) -> dict[str, int]:
        """Return counts since the start or :meth:`reset_stats`, and current sizes of the queues.

        Returns:
            ``completed_trajectories``, of these ``invalid_trajectories``; ``completed_groups``, of
            these ``written_groups``, ``invalid_groups`` (fewer than two valid members) and
            ``filtered_groups`` (by a selector or the estimator); ``unfilled_groups``,
            ``unfilled_trajectories``; the sampled tokens in ``invalid_tokens``,
            ``filtered_tokens``, ``unfilled_tokens``; and ``queued_groups``,
            ``queued_trajectories``, ``queued_tokens``, ``open_trajectories``.
        """
        return {
            **self._counts,
            "queued_groups": len(self._groups),
            "queued_trajectories": self._groups.num_trajectories,
            "queued_tokens": self._groups.num_tokens + sum(map(sampled_tokens, self.unfinished())),
            "open_trajectories": len(self._trajectories),
        }

    def reset_stats(self) -> None:
        """Reset the counts; the queues do not change."""
        self._counts = dict.fromkeys(_COUNTS, 0)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the queues, with packed rows, and the counts."""
        return {
            "trajectories": self._trajectories.state_dict(),
            "groups": self._groups.state_dict(),
            "counts": dict(self._counts),
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the state of :meth:`get_extra_state`."""
        self._trajectories.load_state_dict(state["trajectories"])
        self._groups.load_state_dict(state["groups"])
        self._counts = dict(state["counts"])
