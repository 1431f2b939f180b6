"""Rows of child episodes: their links to the parent, and how they are trained.

A child that is trained by its parent's return joins the parent's trajectory. Its rows are placed
between the parent's rows, with the same ``"traj_id"``, so that estimators give them the parent's
advantage. :class:`~torchrl_llm.data.replay_buffers.JoinTurns` joins the turns of each conversation
separately. Every row of a child has

- ``"child_id"``, int64, the number of its conversation, and ``"parent_id"``, the ``traj_id`` of its
  parent;
- ``"depth"``, int64, 1 for a child of a parent that is not a child itself;
- ``"agent"``, a path of names, ``"/delegate"``: the part before the first slash belongs to the
  parent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, is_non_tensor, is_tensorclass
from torch import Tensor

from torchrl_llm.data.rollouts import sampled_tokens

# These flags are off for a child in the parent's trajectory, because only rows of the parent end
# it.
_ENDS = ("done", "terminated", "truncated")
_OWN = -2  # numbers from here downwards are separate trajectories of children


@dataclass(frozen=True, kw_only=True)
class ChildRows:
    """The rows of one child episode.

    Args:
        rows: its rows in the order of turns, without batch dimension.
        child_id: number of the conversation.
        parent_id: ``traj_id`` of the parent; -1 if it has none.
        depth: 1 for a child of a parent that is not a child itself.
        agent: path of names.
        trained_by: ``"parent"``, ``"own"`` or ``"both"``.
    """

    rows: list[TensorDict]
    child_id: int
    parent_id: int
    depth: int
    agent: str
    trained_by: str

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of all rows."""
        return sum(map(sampled_tokens, self.rows))

    def riding(self, parent: TensorDict) -> Iterator[TensorDict]:
        """Return the rows as part of the parent's trajectory, or as a separate trajectory.

        Args:
            parent: the row of the parent that made the call. Columns of the parent that a child
                lacks are added with neutral values.
        """
        rides = self.trained_by != "own"
        agent = str(parent["agent"]) if "agent" in parent.keys() else ""
        for row in self.rows:
            made = _filled(row, parent)
            made.set("child_id", torch.tensor(self.child_id))
            made.set("parent_id", torch.tensor(self.parent_id))
            made.set("depth", torch.tensor(self.depth))
            made.set("agent", NonTensorData(f"{agent}{self.agent}"))
            for name in ("group_id", "policy_version"):
                if (value := parent.get(name, None)) is not None and name not in row.keys():
                    made.set(name, value)
            if rides:
                self._ride(made, parent)
            elif (value := made.get("traj_id", None)) is not None:
                made.set("traj_id", torch.full_like(value, _OWN - self.child_id))
            yield made

    def _ride(self, row: TensorDict, parent: TensorDict) -> None:
        for name in ("traj_id", "env_step"):
            if (value := parent.get(name, None)) is not None:
                row.set(name, value)
        after = row.get("next")
        for name in _ENDS:
            if (flag := after.get(name, None)) is not None:
                after.set(name, torch.zeros_like(flag))
        if self.trained_by == "parent" and (reward := after.get("reward", None)) is not None:
            after.set("reward", torch.zeros_like(reward))


def is_own_child(row: TensorDictBase) -> bool:
    """Return whether a row belongs to a child with a separate trajectory.

    Args:
        row: without batch dimension.
    """
    return "child_id" in row.keys() and int(row.get("traj_id", torch.tensor(0))) <= _OWN


def _filled(row: TensorDict, like: TensorDict) -> TensorDict:
    """Return a row with neutral values in the columns that only ``like`` has."""
    made = row.copy()
    for name, value in like.items():
        if name == "next":
            made.set("next", _filled(row.get("next"), value))
        elif name not in row.keys():
            made.set(name, _neutral(name, value))
    return made


def _neutral(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.ones_like(value) if name == "reward_valid" else torch.zeros_like(value)
    if is_non_tensor(value):
        kind = type(getattr(value, "data", ""))
        return NonTensorData(kind() if kind in (str, tuple, list, dict) else value.data)
    if is_tensorclass(value):
        return value
    if isinstance(value, TensorDictBase):
        return TensorDict(
            {key: _neutral(key, value.get(key)) for key in value.keys()}, batch_size=[]
        )
    return value
