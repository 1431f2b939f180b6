"""Base of advantage estimators: inverse transforms of a replay buffer that write ``advantage``.

An advantage estimator gets whole groups of finished trajectories and returns the advantage of each
row. :class:`~torchrl_llm.data.replay_buffers.grouping.GroupTransform` queues and counts the rows.
:class:`BatchStatistics` is the base class of the estimators that use all groups of a batch.

Next: :mod:`torchrl_llm.objectives.credit.return_credit` has the estimators that need no group;
:mod:`torchrl_llm.objectives.credit.comparing` has the base class of the estimators that compare the
trajectories of a group.

Shape legend: ``T`` tokens of a row, ``R`` of its response.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, TypedDict, Unpack

import torch
from tensordict import TensorDict
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_llm._checked import Ge, checked
from torchrl_llm._registry import FullSignature
from torchrl_llm.data.enums import Source
from torchrl_llm.data.nodes import leaf
from torchrl_llm.data.replay_buffers.grouping import GroupTransform, Selector
from torchrl_llm.data.replay_buffers.trajectory_queues import GroupQueue, Trajectory
from torchrl_llm.errors import ConfigError, DataError


class CreditOptions(TypedDict, total=False):
    """Arguments that all advantage estimators share.

    Attributes:
        advantage_key: key of the advantage, ``[1, 1]`` or ``[T, 1]``; float32, or float64 if the
            rewards are float64.
        positive_only: negative advantages become 0, after any normalisation.
        keep_zero_advantage: with ``False``, trajectories whose advantages are all 0 are not
            written. They add nothing to the sum of the loss, but they count in its denominator, so
            without them the mean is larger. Together with ``positive_only``, only trajectories with
            a positive advantage are kept.
        prompt_key: key that identifies the group; ``None`` uses ``"group_id"`` if present,
            otherwise ``"query"``.
        rewards_key: key of the rewards, ``[1, 1]`` per row, or ``[R, 1]`` aligned with the
            response's tokens.
        done_key: key of the flag that marks the last row of a trajectory.
        selectors: select which valid trajectories of a full group are used, see
            :mod:`torchrl_llm.data.replay_buffers.grouping`; all by default.
        max_queued_groups: largest number of groups that wait. If there are more, the oldest group
            is dropped and counted as unfilled; the first drop logs a warning.
        verbose: log every call.
    """

    advantage_key: NestedKey
    positive_only: bool
    keep_zero_advantage: bool
    prompt_key: NestedKey | None
    rewards_key: NestedKey
    done_key: NestedKey
    selectors: Sequence[Selector]
    max_queued_groups: int
    verbose: bool


class CreditAssigner(GroupTransform):
    """Writes the advantage of rows as they enter a replay buffer, group by group.

    The estimator reads rewards when rows are written. The transform that was appended last runs
    first, so append a transform that changes rewards *after* the advantage estimator. If
    :class:`~torchrl_llm.data.replay_buffers.JoinTurns` is appended before the estimator, the
    estimator sees one row per turn.

    Args:
        group_size: number of trajectories per group; 1 for estimators that need no group.
        advantage_key: see :class:`CreditOptions`, which also documents the next arguments.
        positive_only: negative advantages become 0.
        keep_zero_advantage: whether trajectories whose advantages are all 0 are written.
        **options: the other fields of :class:`CreditOptions`, about grouping.

    Attributes:
        reads_tokens: whether the estimator reads rewards per token. Recipes pass rewards per token
            only if this is true.
    """

    __signature__ = FullSignature()
    reads_tokens: ClassVar[bool] = False

    def __init__(
        self,
        group_size: int,
        /,
        *,
        advantage_key: NestedKey = "advantage",
        positive_only: bool = False,
        keep_zero_advantage: bool = True,
        **options: Unpack[CreditOptions],
    ) -> None:
        super().__init__(group_size, **options)
        self.advantage_key = advantage_key
        self.positive_only = positive_only
        self.keep_zero_advantage = keep_zero_advantage

    @abstractmethod
    def assign(self, group: Sequence[Trajectory]) -> list[list[Tensor]] | None:
        """Compute the advantages of one group.

        Args:
            group: the valid trajectories of the group. There are at least two for estimators with
                groups, and fewer than ``group_size`` if some are invalid.

        Returns:
            One list per trajectory, with one tensor ``[1, 1]`` or ``[T, 1]`` per row. ``None``
            filters the whole group out.
        """

    def assign_all(self, groups: Sequence[Sequence[Trajectory]]) -> list[list[list[Tensor]] | None]:
        """Compute the advantages of groups that were completed together; by default group by group.

        Args:
            groups: as for :meth:`assign`.

        Returns:
            The result of :meth:`assign` for each group.
        """
        return [self.assign(group) for group in groups]

    def complete(self, groups: Sequence[Sequence[Trajectory]]) -> list[list[TensorDict] | None]:
        """Return the rows with their advantages."""
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


class BatchStatistics(CreditAssigner):
    """Base class of the estimators whose ``assign_all`` uses all groups of a batch at once.

    By default, a batch consists of the groups that one write into the buffer completes. In a
    synchronous loop these are the rows of a step. An asynchronous collector writes few rows at a
    time, so such a batch would be small. With ``batch_size``, complete groups wait until the batch
    has this size. Groups that are filtered out are not part of a batch. In a distributed run each
    rank has its own buffer and its own batch.

    Args:
        group_size: trajectories of a group.
        batch_size: trajectories per batch, a multiple of the group size; a group with invalid
            trajectories counts as a full group. ``None`` uses the groups that each write completes.
        **options: see :class:`CreditOptions`.

    Raises:
        ConfigError: for a size that is not a multiple of the group size.
    """

    @checked
    def __init__(
        self,
        group_size: int,
        /,
        *,
        batch_size: Annotated[int, Ge(1)] | None = None,
        **options: Unpack[CreditOptions],
    ) -> None:
        super().__init__(group_size, **options)
        if batch_size is not None and batch_size % group_size:
            raise ConfigError(
                f"batch_size must be a multiple of the group size {group_size}, got {batch_size}"
            )
        self.batch_size = batch_size
        self._waiting = GroupQueue(group_size)
        self._number = 0

    def assign(self, group: Sequence[Trajectory]) -> list[list[Tensor]] | None:
        """Return the advantages of a group that is a batch by itself."""
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

    def held(self) -> Iterator[TensorDict]:
        """See the base class; includes groups that wait for their batch."""
        yield from super().held()
        waiting = (t for group in self._waiting.groups.values() for t in group)
        yield from (row for trajectory in waiting for row in trajectory.rows)

    def clear_queues(self) -> int:
        """See the base class; also drops complete groups that wait for their batch."""
        waiting = list(self._waiting.groups.values())
        self._waiting.groups.clear()
        self._count_unfilled(waiting)
        return len(waiting) + super().clear_queues()

    def get_stats(self) -> dict[str, int]:
        """See the base class; groups that wait for their batch count as queued."""
        stats = super().get_stats()
        stats["queued_groups"] += len(self._waiting)
        stats["queued_trajectories"] += self._waiting.num_trajectories
        stats["queued_tokens"] += self._waiting.num_tokens
        return stats

    def get_extra_state(self) -> dict[str, Any]:
        """Return the queues, the counts, and the groups that wait for their batch."""
        return {**super().get_extra_state(), "waiting": self._waiting.state_dict()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`get_extra_state` returned."""
        super().set_extra_state(state)
        self._waiting.load_state_dict(state["waiting"])
        self._number = 1 + max(self._waiting.groups, default=-1)


def along_tokens(row: TensorDict, values: Tensor) -> Tensor:
    """Build the advantage column of a row.

    Args:
        row: with ``("tokens", "full")`` where there is more than one value.
        values: one number, or one per token of the response (``R`` in any shape).

    Returns:
        ``[1, 1]``, or ``[T, 1]`` with 0 before the response.

    Raises:
        DataError: when there are more values than the row has tokens.

    Example:
        >>> row = TensorDict(tokens={"full": torch.arange(3)})
        >>> along_tokens(row, torch.tensor([1.0, 2.0])).tolist()
        [[0.0], [1.0], [2.0]]
    """
    if values.numel() == 1:
        return values.reshape(1, 1).clone()
    full = leaf(row, ("tokens", "full"))
    if full is None or full.shape[0] < values.numel():
        length = None if full is None else full.shape[0]
        raise DataError(
            f"a row has {values.numel()} rewards, one a token of the response, and "
            f'("tokens", "full") of length {length}'
        )
    return torch.cat([values.new_zeros(full.shape[0] - values.numel()), values.reshape(-1)])[
        :, None
    ]


def sampled_in_response(row: TensorDict) -> Tensor:
    """Return which tokens of the response were sampled, not written by a tool or a template.

    Args:
        row: with ``("tokens", "response")``; if missing, one token is assumed.

    Returns:
        bool ``[R]``.

    Example:
        >>> sampled_in_response(TensorDict(tokens={"response": torch.arange(2)}))
        tensor([True, True])
    """
    response = leaf(row, ("tokens", "response"))
    size = 1 if response is None else response.shape[0]
    source = leaf(row, ("trace", "source"))
    if source is None:
        return torch.ones(size, dtype=torch.bool)
    return source[source.shape[0] - size :] == Source.SAMPLED


def sampled_in_row(row: TensorDict, length: int) -> Tensor:
    """Return which tokens of a row were sampled; tokens before the response were not.

    Args:
        row: as for :func:`sampled_in_response`.
        length: ``T``, number of tokens of the row.

    Returns:
        bool ``[T]``.
    """
    own = sampled_in_response(row)
    return torch.nn.functional.pad(own, (length - own.shape[0], 0))


def per_trajectory(
    groups: Sequence[Sequence[Trajectory]], advantages_N: Tensor
) -> list[list[list[Tensor]]]:
    """Convert one advantage per trajectory to the format of :meth:`CreditAssigner.assign_all`.

    Args:
        groups: ``N`` trajectories in groups.
        advantages_N: ``[N]``, in the order of the groups.

    Returns:
        For each trajectory of each group, its advantage ``[1, 1]`` once per row.
    """
    # Copies, not views: a view would keep the whole batch in memory.
    copies = iter(torch.unbind_copy(advantages_N.view(-1, 1, 1)))
    return [[[next(copies)] * len(t.rows) for t in group] for group in groups]
