"""Whole trajectories of one environment, as they end or all those that begin together.

:class:`TrajectoryRollout` starts a new conversation wherever one has ended, so that the policy
always has all rows to answer; :class:`WaveRollout` begins all rows of a batch together and waits
for the last of them, so that nothing is sampled by weights older than the batch.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_llm.collectors.rollout import Lockstep
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.rollouts import ends_trajectory, sampled_tokens, split_batch
from torchrl_llm.data.wire import pack_rows, unpack_row_list
from torchrl_llm.errors import ConfigError


class Assembly:
    """Rows by place in the environment until their trajectory is done.

    Args:
        num_places: rows of the environment.
        last_only: keep the last row of each trajectory only.
    """

    def __init__(self, num_places: int, last_only: bool) -> None:
        self.last_only = last_only
        self.open: list[list[TensorDict]] = [[] for _ in range(num_places)]
        self.open_tokens = 0
        self.finished: deque[tuple[int, list[TensorDict]]] = deque()

    def add(self, place: int, row: TensorDict) -> None:
        """Add a turn; one that is done finishes its trajectory."""
        held = self.open[place]
        held.append(row)
        self.open_tokens += sampled_tokens(row)
        if ends_trajectory(row):
            self.open_tokens -= sum(map(sampled_tokens, held))
            self.finished.append((len(held), held[-1:] if self.last_only else held))
            self.open[place] = []

    @property
    def tokens(self) -> int:
        """Sampled tokens of what is here and will be given out or belongs to what will be."""
        finished = (row for _, trajectory in self.finished for row in trajectory)
        return self.open_tokens + sum(map(sampled_tokens, finished))

    def clear_open(self) -> None:
        """Forget the trajectories that have not ended."""
        self.open = [[] for _ in self.open]
        self.open_tokens = 0

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

    def state_dict(self) -> dict[str, Any]:
        """All rows."""
        finished = list(self.finished)
        rows = [row for held in self.open for row in held]
        rows += [row for _, trajectory in finished for row in trajectory]
        return {
            "open": [len(held) for held in self.open],
            "finished": [(number, len(trajectory)) for number, trajectory in finished],
            "rows": pack_rows(rows),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        rows = iter(unpack_row_list(state["rows"]))
        self.open = [[next(rows) for _ in range(length)] for length in state["open"]]
        self.open_tokens = sum(sampled_tokens(row) for held in self.open for row in held)
        self.finished = deque(
            (number, [next(rows) for _ in range(length)]) for number, length in state["finished"]
        )


class TrajectoryRollout(Lockstep):
    """Whole trajectories, in the order in which they end.

    Args:
        last_only: the last turn of each trajectory only.
        **kwargs: of :class:`Rollout`.
    """

    def __init__(self, *args: Any, last_only: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if len(self.env.batch_size) != 1:
            raise ConfigError(
                "yield_completed_trajectories needs an environment with one batch dimension, got "
                f"batch size {tuple(self.env.batch_size)}"
            )
        self.assembly = Assembly(self.env.batch_size[0], last_only)

    def collect(self) -> TensorDictBase:
        """Rows ``[N]`` of trajectories with at least ``turns_per_batch`` turns together."""
        while (finished := self.assembly.finished_turns) < self.turns_per_batch:
            self._log(finished)
            if self._drop_now():
                self.assembly.clear_open()
            step = self._step()
            for place, row in enumerate([] if step is None else split_batch(step)):
                self.assembly.add(place, row)
        taken, rows = self.assembly.take(self.turns_per_batch)
        self.turns += taken
        return lazy_rows(rows)

    @property
    def tokens_in_flight(self) -> int:
        """See :attr:`Rollout.tokens_in_flight`."""
        return self.assembly.tokens

    def state_dict(self) -> dict[str, Any]:
        """As above, with the trajectories in flight."""
        return {**super().state_dict(), "assembly": self.assembly.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        super().load_state_dict(state)
        self.assembly.load_state_dict(state["assembly"])


class WaveRollout(TrajectoryRollout):
    """Batches of all trajectories that begin together, one a row of the environment.

    Rows that have ended wait for the others: they are neither stepped nor answered. What is dropped
    is the whole batch.

    Args:
        **kwargs: of :class:`TrajectoryRollout`; ``turns_per_batch`` is not used.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.running: Tensor | None = None

    def collect(self) -> TensorDictBase:
        """Rows ``[N]`` of as many trajectories as the environment has rows."""
        if self.running is None:
            self.running = torch.ones(self.env.batch_size, dtype=torch.bool)
        while self.running.any():
            self._log(self.assembly.finished_turns)
            if self._drop_now():
                # What has ended goes with what has not: another wave cannot complete its groups.
                self.assembly = Assembly(len(self.running), self.assembly.last_only)
                self.running = torch.ones_like(self.running)
            self._step_running()
        self.running = None
        taken, rows = self.assembly.take(self.assembly.finished_turns)
        self.turns += taken
        return lazy_rows(rows)

    def _step_running(self) -> None:
        if self.carrier is None:
            self.carrier = self.env.reset()
        acted = self._act(self.carrier)
        if acted is None:  # given up before the policy had answered
            return
        with torch.no_grad():
            stepped = self.env.step(acted)
        running = self.running.tolist()
        done = stepped.get(("next", "done")).reshape(len(running), -1).any(-1).cpu()
        still = self.running & ~done
        carrier = None
        if still.any():
            carrier = self.without_stale(self.env.step_mdp(stepped))
            carrier.set("_step", still.view_as(stepped.get(("next", "done"))).to(carrier.device))
        for place, row in enumerate(split_batch(stepped.exclude("_step"))):
            if running[place]:
                self.assembly.add(place, row)
        self.carrier, self.running = carrier, still

    def state_dict(self) -> dict[str, Any]:
        """As above, with the rows that have not ended."""
        return {**super().state_dict(), "running": self.running}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        super().load_state_dict(state)
        self.running = state["running"]
