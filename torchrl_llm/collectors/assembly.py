"""Turns of environments put together to trajectories, row by row of the environment.

:class:`Assembly` holds the turns of each row until a trajectory is done. It knows of players who
share an episode (what a step without a turn of theirs brings comes to their last own row) and of
child episodes (whose rows ride with the row that called).
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
    """Rows by place in the environment until their trajectory is done.

    Args:
        num_places: rows of the environment.
        last_only: keep the last row of each trajectory only.

    Attributes:
        absent: name of each player who never acted in an episode, to how often that was and the sum
            of the rewards.
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
        """Add the turns of a step of all rows.

        Args:
            step: ``[B]``; rows that ``"_step"`` leaves out are no turns.
            tokens: how many were sampled in each row.
            running: rows whose trajectory goes on; all if not given.
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
        """Add a turn; one that is done finishes its trajectory.

        Args:
            place: of its row in the environment.
            row: the turn.
            tokens: how many were sampled in it.
            children: episodes that it has opened.
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
            # Behind the row that called, unless that one ends the trajectory.
            at = len(held) - ends_trajectory(row)
            held[at:at] = rows
            self.open_tokens[place] += child.num_tokens
        if ends_trajectory(row):
            self._finish(place)

    def bring(self, place: int, late: TensorDict) -> None:
        """Bring the reward and the end of a step without a turn to the last own row.

        Args:
            place: of the row.
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
        """Sampled tokens of what is here and will be given out or belongs to what will be."""
        finished = (row for _, trajectory in self.finished for row in trajectory)
        return sum(self.open_tokens) + sum(map(sampled_tokens, finished))

    def clear_open(self) -> None:
        """Forget the trajectories that have not ended."""
        self.open = [[] for _ in self.open]
        self._early = [0.0] * len(self.open)
        self.open_tokens = [0] * len(self.open)

    def take(self, turns: int) -> tuple[int, list[TensorDict]]:
        """Finished trajectories of at least ``turns`` turns, or all there are."""
        taken, rows = 0, []
        while self.finished and taken < turns:
            number, trajectory = self.finished.popleft()
            taken += number
            rows += trajectory
        return taken, rows

    @property
    def finished_turns(self) -> int:
        """Turns of the trajectories that are finished, and not taken yet."""
        return sum(number for number, _ in self.finished)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        super().load_state_dict(state)
        self.open_tokens = [sum(map(sampled_tokens, held)) for held in self.open]


def _brings(next_td: TensorDictBase, size: int) -> list[bool]:
    """Rows of a step that have a reward, an end or an error for who did not act."""
    found = torch.zeros(size, dtype=torch.bool)
    for name, nothing in (("reward", 0), ("done", 0), ("reward_valid", 1)):
        if (values := next_td.get(name, None)) is not None:
            found |= (values.reshape(size, -1) != nothing).any(-1).cpu()
    return found.tolist()


# What a late step adds to a row: sums, flags that either sets, flags that both need.
_LATE_SUMS, _LATE_FLAGS = ("reward",), ("done", "terminated", "truncated", "success")


def with_late(row: TensorDict, late: TensorDict) -> TensorDict:
    """A row with the reward and the end of a later step, in which its player did not act.

    Args:
        row: the player's last own row; not changed.
        late: the row of the later step.

    Returns:
        The row, or a copy where something is to be brought to it.
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
    # A copy of the two nodes alone: one of all that a row holds takes milliseconds.
    return new_node({**row._tensordict, "next": new_node({**now, **changed})})
