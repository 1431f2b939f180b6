"""Whole trajectories of a pool whose environments step on their own."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NonTensorData, TensorDictBase, lazy_stack
from torchrl.envs import AsyncEnvPool

from torchrl_llm.collectors.rollout import Rollout, tokens_of_call
from torchrl_llm.collectors.whole_trajectories import Assembly
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.rollouts import split_batch
from torchrl_llm.errors import CheckpointError, ConfigError


class AsyncTrajectoryRollout(Rollout):
    """Whole trajectories of a pool whose environments step on their own.

    While some environments run (a tool, a slow reward), the policy answers those that are ready,
    all of them in one call.

    Args:
        last_only: the last turn of each trajectory only.
        **kwargs: of :class:`Rollout`; ``env`` is an ``AsyncEnvPool`` of environments of one row.
    """

    env: AsyncEnvPool

    def __init__(self, *args: Any, last_only: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if len(self.env.batch_size) != 2 or self.env.batch_size[1] != 1:
            # TorchRL's pool takes the rows of a larger member for members.
            raise ConfigError(
                "the environments of an AsyncEnvPool must have batch size (1,), got a pool of "
                f"size {tuple(self.env.batch_size)}; put more members into the pool instead"
            )
        if self.env.stack == "dense":
            raise ConfigError(
                "AsyncEnvPool(stack='dense') cannot hold rows of different length; build it with "
                "stack='lazy'"
            )
        self.assembly = Assembly(self.env.batch_size[0], last_only)
        self._stepping: dict[int, int] = {}

    @property
    def running(self) -> int:
        """Environments that are in a step."""
        return len(self._stepping)

    @property
    def tokens_in_flight(self) -> int:
        """See :attr:`Rollout.tokens_in_flight`."""
        return self.assembly.tokens + sum(self._stepping.values())

    def drop(self) -> None:
        """Refused, see :meth:`check_drop`."""
        self.check_drop()

    def check_drop(self) -> None:
        """Refused: environments are in the middle of their steps.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "what is in flight in an AsyncEnvPool cannot be dropped: its environments are never "
            "all between two steps; let it go on under the new weights (in_flight='wait')"
        )

    def collect(self) -> TensorDictBase:
        """Rows ``[N]`` of trajectories with at least ``turns_per_batch`` turns together."""
        if not self.running and not self.assembly.finished:
            self._send(list(self.env.reset().unbind(0)))
        while (finished := self.assembly.finished_turns) < self.turns_per_batch:
            self._log(finished)
            stepped, carriers = self.env.async_step_and_maybe_reset_recv(min_get=1)
            for part in stepped.unbind(0):
                (row,) = split_batch(part.exclude("env_index"))
                self.assembly.add(self._index(part), row)
                del self._stepping[self._index(part)]
            self._send(list(carriers.unbind(0)))
        taken, rows = self.assembly.take(self.turns_per_batch)
        self.turns += taken
        return lazy_rows(rows)

    @staticmethod
    def _index(part: TensorDictBase) -> int:
        value = part.get("env_index")
        value = getattr(value, "data", value)
        while isinstance(value, (list, tuple)):
            value = value[0]
        return int(value)

    def _send(self, carriers: list[TensorDictBase]) -> None:
        indices = [self._index(carrier) for carrier in carriers]
        plain = [carrier.exclude("env_index") for carrier in carriers]
        acted = self._act(plain[0] if len(plain) == 1 else torch.cat(plain, 0))
        self._stepping.update(zip(indices, tokens_of_call(acted), strict=True))
        for place, index in enumerate(indices):
            part = acted[place : place + 1]
            # One send for each, because the pool would lay one index on all rows of a batch.
            part.set("env_index", NonTensorData(index, batch_size=part.batch_size))
            self.env.async_step_and_maybe_reset_send(lazy_stack([part]))

    def state_dict(self) -> dict[str, Any]:
        """Refused: environments are in the middle of their steps.

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError(
            "a collector over an AsyncEnvPool cannot be saved: its environments run on their own "
            "and are never all between two steps. Use one batched environment for exact resume"
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refused as :meth:`state_dict` is.

        Raises:
            CheckpointError: always.
        """
        self.state_dict()
