"""Queues of the grouping transforms: rows to trajectories, trajectories to groups.

Rows arrive in any order and in any portions. :class:`TrajectoryQueue` holds the rows of each
trajectory until one is done; :class:`GroupQueue` holds trajectories until their group is full.
Both can be emptied, count what they hold, and have a state that resumes exactly.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from math import fsum, isfinite
from typing import Any, Literal

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_llm.data.chat import Chat
from torchrl_llm.data.nodes import leaf, plain_node
from torchrl_llm.data.rollouts import sampled_tokens
from torchrl_llm.data.saved_state import SavedState
from torchrl_llm.data.wire import pack_rows, unpack_row_list
from torchrl_llm.errors import DataError

CUT_TOKENS = "cut_tokens"
"""Number of removed sampled tokens of a row that was cut to fit into training."""


def was_cut(row: TensorDictBase) -> bool:
    """Whether a row was cut to fit into training (:func:`~torchrl_llm.data.overlong.cut_row`).

    Args:
        row: without batch dimension.
    """
    return leaf(row, (CUT_TOKENS,)) is not None


def as_path(key: NestedKey) -> tuple[str, ...]:
    """A key as a tuple of names.

    Args:
        key: a name or a tuple of names.
    """
    return (key,) if isinstance(key, str) else tuple(key)


def task_path(reward: tuple[str, ...]) -> tuple[str, ...]:
    """Key of the task's own reward, if a KL divergence is subtracted from a row's reward.

    Args:
        reward: key of the penalised reward.
    """
    return (*reward[:-1], f"{reward[-1]}_before_kl")


def group_value(value: Any) -> Hashable:
    """A hashable form of a group's identifier.

    Args:
        value: an integer tensor, a string, a chat, or nested lists and dicts of these.
    """
    match value:
        case Tensor():
            return value.item() if value.numel() == 1 else tuple(value.flatten().tolist())
        case NonTensorData():
            return group_value(value.data)
        case Chat():
            return group_value(value.messages)
        case dict():
            return tuple((key, group_value(item)) for key, item in sorted(value.items()))
        case list() | tuple():
            return tuple(group_value(item) for item in value)
    if hasattr(value, "chats"):
        # A History of one row: its only cell is the conversation.
        return group_value(plain_node(value).get("messages"))
    return value


def trajectory_of(row: TensorDictBase) -> tuple[Hashable, Hashable] | None:
    """Identifier of a row's trajectory; ``None`` if the row has none.

    Args:
        row: with ``traj_id``, and ``agent`` if there are several.
    """
    trajectory = leaf(row, ("traj_id",))
    return None if trajectory is None else (group_value(trajectory), agent_of(row))


def agent_of(row: TensorDictBase) -> Hashable:
    """Agent to whose trajectory a row belongs; ``None`` if there is only one agent.

    Args:
        row: without batch dimension. The ``"agent"`` of a child is a path of names, and its row is
            in the trajectory of the first (:mod:`torchrl_llm.data.child_rows`).
    """
    agent = leaf(row, ("agent",))
    name = None if agent is None else group_value(agent)
    return name.partition("/")[0] or None if isinstance(name, str) else name


@dataclass(slots=True)
class Trajectory:
    """The rows of one finished episode of one agent, in the order of its turns.

    Attributes:
        rows: tensordicts without batch dimension.
        rewards: rewards of each row, ``[1, 1]``, or ``[R, 1]`` if they are per token.
        totals: sum of each row's rewards.
        valid: whether every reward is a number and none is marked invalid.
    """

    rows: list[TensorDict]
    rewards: list[Tensor] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    valid: bool = True

    @classmethod
    def of(cls, rows: list[TensorDict], rewards_key: NestedKey) -> Trajectory:
        """Read rewards and validity.

        Args:
            rows: the rows.
            rewards_key: key of a row's rewards.

        Raises:
            DataError: a row has no reward.
        """
        rewards, totals, valid = [], [], True
        path = as_path(rewards_key)
        for row in rows:
            reward = leaf(row, path)
            if reward is None:
                raise DataError(
                    f"a row has no reward at {rewards_key!r}: append a reward transform to the "
                    f"environment, or name the key. The row has {sorted(map(str, row.keys(True)))}"
                )
            rewards.append(reward)
            one = reward.numel() == 1
            totals.append((reward if one else reward.sum(dtype=torch.float64)).item())
            flag = leaf(row, ("next", "reward_valid"))
            flag = leaf(row, ("reward_valid",)) if flag is None else flag
            # A sum is finite only if all its terms are.
            valid = valid and (flag is None or bool(flag.all())) and isfinite(totals[-1])
        return cls(rows, rewards, totals, valid)

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of all rows."""
        return sum(sampled_tokens(row) for row in self.rows)

    @property
    def total(self) -> float:
        """Sum of all rewards, rounded once, so independent of their order."""
        return fsum(self.totals)

    @property
    def truncated(self) -> bool:
        """Whether the episode was cut: it might have continued, or a row was too long to train."""
        return self.goes_on or any(map(was_cut, self.rows))

    @property
    def goes_on(self) -> bool:
        """Whether the future after the last row is unknown: truncated, and not terminated.

        The future of a row that was cut to fit into training is known: its rewards.
        """
        if was_cut(self.rows[-1]):
            return False
        cut, ended = (leaf(self.rows[-1], ("next", key)) for key in ("truncated", "terminated"))
        return cut is not None and bool(cut.any()) and not (ended is not None and ended.any())


class TrajectoryQueue(SavedState):
    """Holds rows until their trajectory is done.

    Rows of one trajectory have the same ``traj_id`` (and ``agent``, if there is one). Rows without
    ``traj_id`` must come as whole trajectories, one after the other.

    Args:
        done_key: key of the flag that the trajectory ends with this row.
    """

    saved_rows = ("open",)

    def __init__(self, done_key: NestedKey = ("next", "done")) -> None:
        self.done_key = done_key
        self.open: dict[Hashable, list[TensorDict]] = {}

    def push(self, rows: Iterable[TensorDictBase]) -> list[list[TensorDict]]:
        """Add rows and remove the trajectories that they finish.

        Args:
            rows: tensordicts without batch dimension; rows of one trajectory in order.

        Returns:
            The finished trajectories in the order of their last rows.

        Raises:
            DataError: rows lack the done key, or rows without identifier do not end with a done.
        """
        finished = []
        loose: list[TensorDict] = []
        done_path = as_path(self.done_key)
        for row in rows:
            done = leaf(row, done_path)
            if done is None:
                raise DataError(
                    f"a row has no {self.done_key!r}, so its trajectory's end is unknown"
                )
            key = trajectory_of(row)
            if key is None:
                loose.append(row)
                if done.any():
                    finished.append(loose)
                    loose = []
                continue
            held = self.open.get(key)
            if done.any():
                if held is not None:
                    del self.open[key]
                    held.append(row)
                finished.append([row] if held is None else held)
            elif held is None:
                self.open[key] = [row]
            else:
                held.append(row)
        if loose:
            raise DataError(
                f"the last {len(loose)} rows have no 'traj_id' and are not done at "
                f"{self.done_key!r}: such rows must be written as whole trajectories (collect with "
                "yield_completed_trajectories=True), or carry a trajectory id as ChatEnv's do"
            )
        return finished

    def __len__(self) -> int:
        return len(self.open)

    def clear(self) -> list[TensorDict]:
        """Drop the open trajectories; returns their rows."""
        rows = [row for held in self.open.values() for row in held]
        self.open.clear()
        return rows


class GroupQueue:
    """Holds finished trajectories until ``size`` of one group have arrived.

    Args:
        size: size of a group.
        counts: what the size counts, ``"trajectories"`` or their ``"turns"``.
    """

    def __init__(
        self, size: int, *, counts: Literal["trajectories", "turns"] = "trajectories"
    ) -> None:
        self.size, self.counts = size, counts
        self.groups: dict[Hashable, list[Trajectory]] = {}

    def push(self, key: Hashable, trajectory: Trajectory) -> list[Trajectory] | None:
        """Add a trajectory; returns its group once it is full.

        Args:
            key: the group.
            trajectory: a finished trajectory.
        """
        group = self.groups.setdefault(key, [])
        group.append(trajectory)
        by_turns = self.counts == "turns"
        if (sum(len(t.rows) for t in group) if by_turns else len(group)) < self.size:
            return None
        return self.groups.pop(key)

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def num_trajectories(self) -> int:
        """Trajectories that wait."""
        return sum(len(group) for group in self.groups.values())

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of the trajectories that wait."""
        return sum(t.num_tokens for group in self.groups.values() for t in group)

    def state_dict(self) -> dict[str, Any]:
        """The waiting groups in wire form."""
        waiting = [t for group in self.groups.values() for t in group]
        return {
            "keys": list(self.groups),
            "sizes": [len(group) for group in self.groups.values()],
            "lengths": [len(trajectory.rows) for trajectory in waiting],
            "rewards": [[r.clone() for r in trajectory.rewards] for trajectory in waiting],
            "totals": [trajectory.totals for trajectory in waiting],
            "valid": [trajectory.valid for trajectory in waiting],
            "rows": pack_rows(row for trajectory in waiting for row in trajectory.rows),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict`."""
        rows = iter(unpack_row_list(state["rows"]))
        waiting = iter(
            [
                Trajectory([next(rows) for _ in range(length)], rewards, totals, valid)
                for length, rewards, totals, valid in zip(
                    state["lengths"], state["rewards"], state["totals"], state["valid"], strict=True
                )
            ]
        )
        self.groups = {
            key: [next(waiting) for _ in range(size)]
            for key, size in zip(state["keys"], state["sizes"], strict=True)
        }
