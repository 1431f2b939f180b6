"""Base of the advantage estimators: inverse transforms of a replay buffer that write ``advantage``.

An advantage estimator sees whole groups of finished trajectories and says one thing: the advantage
of each row. :class:`~torchrl_llm.data.replay_buffers.grouping.GroupTransform` does the waiting and
counting. :class:`BatchStatistics` is the base of the estimators that look at all groups of a batch.

Next: :mod:`torchrl_llm.objectives.credit.return_credit` has the estimators that need no group,
:mod:`torchrl_llm.objectives.credit.comparing` what those share that compare the trajectories of a
group.

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
    """Arguments that every advantage estimator takes besides its own.

    Attributes:
        advantage_key: where the advantage goes, ``[1, 1]`` or ``[T, 1]``; float32, or float64 where
            the rewards are.
        positive_only: negative advantages become 0, after any normalisation.
        keep_zero_advantage: ``False`` does not write trajectories all of whose advantages are 0.
            They add nothing but to the denominator of the loss, which they change: a mean over what
            is left is larger. With ``positive_only`` this keeps only what was better than expected.
        prompt_key: what tells groups apart; ``None`` for ``"group_id"``, else ``"query"``.
        rewards_key: rewards, ``[1, 1]`` per row, or ``[R, 1]`` aligned with the response's tokens.
        done_key: where a row says that its trajectory ends with it.
        selectors: which valid trajectories of a full group take part, see
            :mod:`torchrl_llm.data.replay_buffers.grouping`; all by default.
        max_queued_groups: bound on the groups that wait; beyond it the oldest is given up and
            counted as unfilled, with one warning.
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

    Rewards are read when rows are written, so a reward that another transform of the buffer adds is
    seen when that transform is appended *after* the advantage estimator: what is appended last runs
    first. With :class:`~torchrl_llm.data.replay_buffers.JoinTurns` appended before it, an estimator
    sees one row per turn.

    Args:
        group_size: trajectories of a group; 1 where an estimator needs no group.
        advantage_key: see :class:`CreditOptions`, as for the others.
        positive_only: negative advantages become 0.
        keep_zero_advantage: whether trajectories without any advantage are written.
        **options: how rows are grouped, the rest of :class:`CreditOptions`.

    Attributes:
        reads_tokens: whether the reward of each token is read where rows have one. Recipes give it
            to an estimator only where this is true.
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
        """Advantages of one group.

        Args:
            group: the trajectories that take part: two at least where there are groups, fewer
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


class BatchStatistics(CreditAssigner):
    """Base of the estimators whose ``assign_all`` looks at all groups of a batch at once.

    The batch is what one write into the buffer completes, which in a synchronous loop is the rows
    of a step. Where rows come in small portions (from an asynchronous collector), that
    would be a statistic over a few: ``batch_size`` lets complete groups wait for one another.
    Groups that are filtered out by a selector or by their returns are not part of a batch. Where
    each rank of a distributed run has a buffer of its own, a batch is one of that rank.

    Args:
        group_size: trajectories of a group.
        batch_size: trajectories of a batch, a multiple of the group size; a group with invalid
            members counts in full. ``None`` takes what each write completes.
        **options: see :class:`CreditOptions`.

    Raises:
        ConfigError: for a size that is not a multiple.
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

    def held(self) -> Iterator[TensorDict]:
        """As in the base; what waits for its batch is among them."""
        yield from super().held()
        waiting = (t for group in self._waiting.groups.values() for t in group)
        yield from (row for trajectory in waiting for row in trajectory.rows)

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


def along_tokens(row: TensorDict, values: Tensor) -> Tensor:
    """An advantage column of a row.

    Args:
        row: with ``("tokens", "full")`` where there is more than one value.
        values: one number, or one a token of the response (``R`` in any shape).

    Returns:
        ``[1, 1]``, or ``[T, 1]`` with 0 before the response.

    Raises:
        DataError: more values than the row has tokens.

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
    """Which tokens of the response were sampled, and not written by a tool or a template.

    Args:
        row: with ``("tokens", "response")``; without it one token is assumed.

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
    """Which tokens of a row were sampled; those before the response were not.

    Args:
        row: as for :func:`sampled_in_response`.
        length: ``T``, tokens of the row.

    Returns:
        bool ``[T]``.
    """
    own = sampled_in_response(row)
    return torch.nn.functional.pad(own, (length - own.shape[0], 0))


def per_trajectory(
    groups: Sequence[Sequence[Trajectory]], advantages_N: Tensor
) -> list[list[list[Tensor]]]:
    """One advantage per trajectory as :meth:`CreditAssigner.assign_all` returns them.

    Args:
        groups: ``N`` trajectories in groups.
        advantages_N: ``[N]``, in the order of the groups.

    Returns:
        For each group, for each trajectory, its advantage ``[1, 1]`` once for each of its rows.
    """
    # Copies, not views, so that a kept row does not keep its whole batch.
    copies = iter(torch.unbind_copy(advantages_N.view(-1, 1, 1)))
    return [[[next(copies)] * len(t.rows) for t in group] for group in groups]
