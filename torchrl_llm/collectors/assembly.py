"""Assembles turns into trajectories, per row of the environment.

:class:`Assembly` holds the turns of each row until a trajectory is done. It supports players who
share an episode: if a step without a turn of a player has a reward or an end for this player, both
are added to the player's last row. It also supports child episodes: their rows follow the calling
row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_llm.data.child_rows import ChildRows
from torchrl_llm.data.nodes import new_node
from torchrl_llm.data.rollouts import ends_trajectory, sampled_tokens, split_batch
from torchrl_llm.data.saved_state import SavedState


class Assembly(SavedState):
    """The rows of unfinished trajectories, by index in the environment.

    Args:
        num_places: rows of the environment.
        last_only: keep only the last row of each trajectory.

    Attributes:
        absent: for each player, the number of episodes in which the player never acted, and the sum
            of the player's rewards in them.
    """

    saved = ("absent", "_early")
    saved_rows = ("open", "finished")

    def __init__(self, num_places: int, last_only: bool) -> None:
        self.last_only = last_only
        self.open: list[list[TensorDict]] = [[] for _ in range(num_places)]
        self.open_tokens = [0] * num_places
        self.finished: deque[tuple[int, list[TensorDict]]] = deque()
        self.absent: dict[str, tuple[int, float]] = {}
        # Rewards of players before their first turn.
        self._early = [0.0] * num_places

    def add_step(
        self,
        step: TensorDictBase,
        tokens: Sequence[int],
        running: Sequence[bool] | None = None,
        children: Mapping[int, Sequence[ChildRows]] | None = None,
    ) -> None:
        """Add the turns of a step.

        Args:
            step: ``[B]``; rows excluded by ``"_step"`` are not turns.
            tokens: number of sampled tokens per row.
            running: rows whose trajectory continues; all by default.
            children: child episodes of the step, by the row of their parent.
        """
        size, children = step.batch_size[0], children or {}
        acts = step.get("_step", None)
        acts = [True] * size if acts is None else acts.reshape(size, -1).any(-1).tolist()
        brings = None if all(acts) else _brings(step.get("next"), size)
        for place, row in enumerate(split_batch(step.exclude("_step"))):
            if running is not None and not running[place]:
                continue
            if acts[place]:
                self.add(place, row, tokens[place], children.get(place, ()))
            elif brings[place]:
                self.bring(place, row)

    def add(
        self, place: int, row: TensorDict, tokens: int, children: Sequence[ChildRows] = ()
    ) -> None:
        """Add a turn; a turn with the done flag finishes its trajectory.

        Args:
            place: index of its row in the environment.
            row: the turn.
            tokens: number of sampled tokens.
            children: child episodes that the turn started.
        """
        if early := self._take_early(place):
            reward = row.get(("next", "reward"))
            row = row.copy().set("next", row.get("next").copy().set("reward", reward + early))
        held = self.open[place]
        held.append(row)
        self.open_tokens[place] += tokens
        for child in children:
            rows = list(child.riding(row))
            if child.trained_by == "own":
                self.finished.append((len(rows), rows))
                continue
            # The children follow the calling row, unless that row ends the trajectory.
            at = len(held) - ends_trajectory(row)
            held[at:at] = rows
            self.open_tokens[place] += child.num_tokens
        if ends_trajectory(row):
            self._finish(place)

    def bring(self, place: int, late: TensorDict) -> None:
        """Add the reward and end of a step in which a player did not act to the player's last row.

        Args:
            place: index of the row in the environment.
            late: the row of that step.
        """
        held = self.open[place]
        if held:
            held[-1] = with_late(held[-1], late)
            if ends_trajectory(held[-1]):
                self._finish(place)
            return
        reward = late.get(("next", "reward"), None)
        self._early[place] += 0.0 if reward is None else float(reward.sum())
        if ends_trajectory(late):
            name = str(late["agent"])
            times, total = self.absent.get(name, (0, 0.0))
            self.absent[name] = (times + 1, total + self._take_early(place))

    def _take_early(self, place: int) -> float:
        early, self._early[place] = self._early[place], 0.0
        return early

    def _finish(self, place: int) -> None:
        held = self.open[place]
        self.open_tokens[place] = 0
        self.finished.append((len(held), held[-1:] if self.last_only else held))
        self.open[place] = []

    @property
    def tokens(self) -> int:
        """Number of sampled tokens of the stored rows that will be returned."""
        finished = (row for _, trajectory in self.finished for row in trajectory)
        return sum(self.open_tokens) + sum(map(sampled_tokens, finished))

    def clear_open(self) -> None:
        """Drop unfinished trajectories."""
        self.open = [[] for _ in self.open]
        self._early = [0.0] * len(self.open)
        self.open_tokens = [0] * len(self.open)

    def take(self, turns: int) -> tuple[int, list[TensorDict]]:
        """Take finished trajectories with at least ``turns`` turns together, or all."""
        taken, rows = 0, []
        while self.finished and taken < turns:
            number, trajectory = self.finished.popleft()
            taken += number
            rows += trajectory
        return taken, rows

    @property
    def finished_turns(self) -> int:
        """Number of turns of finished trajectories that have not been taken."""
        return sum(number for number, _ in self.finished)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of :meth:`state_dict`."""
        super().load_state_dict(state)
        self.open_tokens = [sum(map(sampled_tokens, held)) for held in self.open]


def _brings(next_td: TensorDictBase, size: int) -> list[bool]:
    """Return a step's rows with a reward, an end or an error for a player who did not act."""
    found = torch.zeros(size, dtype=torch.bool)
    for name, nothing in (("reward", 0), ("done", 0), ("reward_valid", 1)):
        if (values := next_td.get(name, None)) is not None:
            found |= (values.reshape(size, -1) != nothing).any(-1).cpu()
    return found.tolist()


# The ways in which a late step changes a row: sums, flags combined by or, flags combined by and.
_LATE_SUMS, _LATE_FLAGS = ("reward",), ("done", "terminated", "truncated", "success")


def with_late(row: TensorDict, late: TensorDict) -> TensorDict:
    """Add reward and end of a later step, in which the player did not act, to a row.

    Args:
        row: the player's last row; not changed.
        late: the row of the later step.

    Returns:
        The row, or a changed copy.
    """
    now, then = row.get("next")._tensordict, late.get("next")._tensordict
    changed = {}
    for name in (*_LATE_SUMS, *_LATE_FLAGS, "reward_valid", "truncation_reason", "error"):
        new, old = then.get(name, None), now.get(name, None)
        if new is None or old is None:
            continue
        if name in _LATE_SUMS:
            changed[name] = old + new
        elif name in _LATE_FLAGS:
            changed[name] = old | new
        elif name == "reward_valid":
            changed[name] = old & new
        elif name == "truncation_reason":
            changed[name] = new if bool(then["done"].any()) else old
        elif not bool(then["reward_valid"].all()):
            changed[name] = new
    # Copy only the two nodes, because a copy of the whole row takes milliseconds.
    return new_node({**row._tensordict, "next": new_node({**now, **changed})})
