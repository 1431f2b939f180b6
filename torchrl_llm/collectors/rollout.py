"""Ways to roll out: fixed numbers of turns, whole trajectories, or a pool of environments.

Each class has ``collect() -> batch`` and a state; :class:`~torchrl_llm.collectors.LLMCollector`
chooses one:

- :class:`StepRollout`: batches of a fixed number of turns;
- :class:`TrajectoryRollout`: starts a new conversation when one ends, so that the policy always
  answers all rows;
- :class:`WaveRollout`: starts all rows of a batch together and waits for the last one, so that the
  batch is sampled by the same weights;
- :class:`AsyncTrajectoryRollout`: answers the environments of a pool as they become ready.

If players share an episode (:mod:`torchrl_llm.envs.players`), only the rows of players who must act
are stepped and answered. The reward and the end of a step in which a player did not act are added
to that player's last row.

Shape legend: ``B`` rows of the environment, ``T`` steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import NonTensorData, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl._utils import logger
from torchrl.envs import AsyncEnvPool, EnvBase, TransformedEnv

from torchrl_llm._threads import PauseGate
from torchrl_llm.collectors.assembly import Assembly
from torchrl_llm.data.child_rows import ChildRows
from torchrl_llm.data.ragged import lazy_rows, read_rows
from torchrl_llm.data.rollouts import count_sampled, sampled_tokens, split_batch, split_rollout
from torchrl_llm.data.saved_state import SavedState
from torchrl_llm.envs.chat_env import ChatEnv
from torchrl_llm.envs.delegate import delegates_of
from torchrl_llm.envs.layers import HoldsTurns, innermost
from torchrl_llm.errors import CheckpointError, ConfigError

Stamp = Callable[[TensorDictBase], TensorDictBase]


def _layers(env: EnvBase) -> list[Any]:
    """Return the transforms of an environment, outermost first, and the base environment.

    ``state_dict()`` of a ``TransformedEnv`` contains its transforms, but not its base environment.
    """
    if not isinstance(env, TransformedEnv):
        return [env]
    return [env.transform, *_layers(env.base_env)]


def env_state(env: EnvBase) -> list[dict[str, Any]]:
    """Return the states of an environment and its transforms, outermost first.

    Args:
        env: the environment.
    """
    return [layer.state_dict() for layer in _layers(env)]


def load_env_state(env: EnvBase, states: list[dict[str, Any]]) -> None:
    """Restore the result of :func:`env_state`.

    Args:
        env: an environment with the same configuration.
        states: result of :func:`env_state`.

    Raises:
        CheckpointError: the number of layers differs.
    """
    layers = _layers(env)
    if len(layers) != len(states):
        raise CheckpointError(
            f"the environment has {len(layers)} layers and the saved one had {len(states)}; build "
            "it as it was"
        )
    for layer, state in zip(layers, states, strict=True):
        layer.load_state_dict(state)


class Rollout(SavedState, ABC):
    """Base class of the ways to roll out.

    Args:
        env: the environment.
        policy: tensordict to tensordict.
        stamp: function that writes the policy's version into the policy's input.
        turns_per_batch: turns of a batch.
        calls: lock for policy calls, so that weights do not change during a call.
        verbose: log progress.

    Attributes:
        turns: number of turns of all batches so far, including intermediate turns that were not
            yielded.
        sampled: number of tokens sampled so far.
        counts: number of sampled tokens of the last call, per row.
        after_call: function that is called after each policy call, in the collecting thread, or
            ``None``.
    """

    def __init__(
        self,
        env: EnvBase,
        policy: Callable[[TensorDictBase], TensorDictBase],
        stamp: Stamp,
        *,
        turns_per_batch: int,
        calls: PauseGate,
        verbose: bool = False,
    ) -> None:
        self.env, self.policy, self.stamp = env, policy, stamp
        self.turns_per_batch, self.calls, self.verbose = turns_per_batch, calls, verbose
        self.turns, self.sampled = 0, 0
        self.counts: list[int] = []
        self.after_call: Callable[[], None] | None = None
        self._dropping = False

    @property
    @abstractmethod
    def tokens_in_flight(self) -> int:
        """Number of sampled tokens of rows that are not in a batch yet."""

    def check_drop(self) -> None:
        """Raise :class:`~torchrl_llm.errors.ConfigError` if :meth:`drop` is not supported."""
        return

    @abstractmethod
    def drop(self) -> None:
        """Drop unfinished conversations and start new ones before the next step.

        The method is thread-safe.

        Raises:
            ConfigError: this class does not support it.
        """

    @abstractmethod
    def collect(self) -> TensorDictBase:
        """Roll out one batch."""

    def _act(self, carrier: TensorDictBase) -> TensorDictBase | None:
        """Return the policy's answers; ``None`` if the rows were dropped until then."""
        with self.calls.work(), torch.no_grad():
            if self._dropping:
                return None
            acted = self.policy(self.stamp(carrier))
        self.counts = tokens_of_call(acted)
        self.sampled += sum(self.counts)
        if self.after_call is not None:
            self.after_call()
        # Aborted answers must not become turns. They count as sampled and lost.
        return None if self._dropping else acted

    def _log(self, collected: int) -> None:
        if self.verbose:
            logger.info(f"LLMCollector: {collected} of {self.turns_per_batch} turns")


def tokens_of_call(acted: TensorDictBase) -> list[int]:
    """Return the number of tokens sampled in one policy call.

    Args:
        acted: output of the policy, ``[B]`` or with further batch dimensions.

    Returns:
        A number per row, as in :func:`~torchrl_llm.data.rollouts.sampled_tokens`; zeros for a
        policy without tokens.
    """
    if acted.batch_dims != 1:
        counted = acted.select("tokens", "trace", strict=False)
        if counted.is_empty():
            return [0] * acted.numel()
        return [sampled_tokens(row) for row in split_rollout(counted).tensordicts]
    responses = read_rows(acted, ("tokens", "response"), None)
    if responses is None:
        return [0] * acted.numel()
    sources = read_rows(acted, ("trace", "source"), None) or [None] * len(responses)
    return list(map(count_sampled, responses, sources))


def _stale_keys(env: EnvBase, policy: Any) -> set[str]:
    """Return keys that the policy writes in every call and neither policy nor environment reads.

    TorchRL would keep such keys for the next step and copy them several times.
    """
    written, read = (
        {key if isinstance(key, str) else key[0] for key in getattr(policy, name, ())}
        for name in ("out_keys", "in_keys")
    )
    specs = (env.full_observation_spec, env.full_state_spec, env.full_action_spec)
    known = {name for spec in specs if spec is not None for name in spec.keys()}
    return written - read - known


class Lockstep(Rollout):
    """Steps one environment, all its rows at a time."""

    saved = ("carrier", "turns")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.carrier: TensorDictBase | None = None
        self._delegates = delegates_of(self.env)
        for delegate in self._delegates:
            delegate.use_policy(self._act_for_children, keep_rows=True)
        self._stale = _stale_keys(self.env, self.policy)
        # The step_and_maybe_reset of a local chat environment is TorchRL's: step, next, reset.
        self._by_parts = isinstance(innermost(self.env), ChatEnv)

    def drop(self) -> None:
        """See :meth:`Rollout.drop`."""
        self._dropping = True

    @property
    def tokens_held(self) -> int:
        """Number of sampled tokens of turns that the environment has not returned yet."""
        return self.env.tokens_held if isinstance(self.env, HoldsTurns) else 0

    def _counts_of(self, step: TensorDictBase) -> list[int]:
        """Return the tokens of each turn of a step; the turn may come from an earlier call."""
        return tokens_of_call(step) if isinstance(self.env, HoldsTurns) else self.counts

    def _drop_now(self) -> bool:
        """Return whether to drop the rows; the next step then resets the environment."""
        if not self._dropping:
            return False
        self._dropping, self.carrier = False, None
        return True

    def _act_for_children(self, td: TensorDictBase) -> TensorDictBase:
        """Return the policy's answers for child episodes during a step."""
        with self.calls.work(), torch.no_grad():
            acted = self.policy(self.stamp(td))
        self.sampled += sum(tokens_of_call(acted))
        return acted

    def take_children(self) -> dict[int, list[ChildRows]]:
        """Remove and return the child episodes of the last step, by the row of their parent."""
        found: dict[int, list[ChildRows]] = {}
        for delegate in self._delegates:
            for place, children in delegate.take_rows().items():
                found.setdefault(place, []).extend(children)
        return found

    def _mark_active(self, running: Tensor | None = None) -> None:
        """Mark the running rows for the step; with shared episodes, only players who must act.

        Args:
            running: bool ``[B]``; all by default.
        """
        active = self.carrier.get("active", None)
        steps = None if running is None else running.unsqueeze(-1).to(self.carrier.device)
        if active is not None:
            steps = active.clone() if steps is None else active & steps
        if steps is not None:
            self.carrier.set("_step", steps)

    def _step(self) -> TensorDictBase | None:
        """Run one step of all rows; the carrier advances only after success.

        The result is ``None`` if the rows were dropped before the policy answered. The policy
        writes into the carrier, which may share nodes with the previous step. So split or copy a
        step before the next step.
        """
        if self.carrier is None:
            self.carrier = self.env.reset()
        self._mark_active()
        acted = self._act(self.carrier)
        if acted is None:
            return None
        with torch.no_grad():
            stepped, carrier = self._step_and_maybe_reset(acted)
        self.carrier = carrier
        return stepped

    def _step_and_maybe_reset(self, acted: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Do the same as the environment's method, without keys that the policy writes again."""
        env = self.env
        if not self._by_parts or acted.device != env.device:
            stepped, carrier = env.step_and_maybe_reset(acted)
            return stepped, carrier.exclude(*self._stale, inplace=True)
        # These are the parts of the method. Stale keys are dropped before they would be copied and
        # reset.
        stepped = env.step(acted)
        carrier = self.moved_on(stepped)
        if env._post_step_mdp_hooks is not None:
            stepped, carrier = env._post_step_mdp_hooks(stepped, carrier)
        return stepped, env.maybe_reset(carrier)

    def moved_on(self, stepped: TensorDictBase) -> TensorDictBase:
        """Return the carrier of the next step, without the keys that the policy writes again."""
        return self.env.step_mdp(stepped.exclude(*self._stale))

    def state_dict(self) -> dict[str, Any]:
        """Return the carrier, the environment's state, and the attributes of a subclass."""
        return {**super().state_dict(), "env": env_state(self.env)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of :meth:`state_dict`."""
        load_env_state(self.env, state["env"])
        super().load_state_dict(state)


class StepRollout(Lockstep):
    """Batches with a fixed number of turns, across episode boundaries.

    Args:
        reset_first: start every batch with new conversations; unfinished ones are dropped.
        flatten: return rows instead of ``[*B, T]``.
        **kwargs: see :class:`Rollout`.
    """

    saved = (*Lockstep.saved, "steps")

    def __init__(self, *args: Any, reset_first: bool, flatten: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse_players(self.env, "batches of a fixed number of turns")
        if self._delegates:
            raise ConfigError(
                "batches of a fixed number of turns have no room for the rows of children: pass "
                "yield_completed_trajectories=True"
            )
        self.reset_first, self.flatten = reset_first, flatten
        self.steps: list[TensorDictBase] = []

    def collect(self) -> TensorDictBase:
        """Return steps ``[*B, T]``, or rows ``[B * T]`` where row ``b * T + t`` is step t."""
        if self.reset_first and not self.steps:
            self.carrier = None
        # If an error or Ctrl-C interrupts a batch, its steps are kept for the next call.
        while (collected := sum(step.numel() for step in self.steps)) < self.turns_per_batch:
            self._log(collected)
            if self._drop_now():
                self.steps.clear()
            step = self._step()
            if step is not None:
                self.steps.append(step.clone(recurse=False))
        steps, self.steps = self.steps, []
        self.turns += collected
        rollout = lazy_stack(steps, -1)
        return split_rollout(rollout) if self.flatten else rollout

    @property
    def tokens_in_flight(self) -> int:
        """See :attr:`Rollout.tokens_in_flight`."""
        return sum(sum(tokens_of_call(step)) for step in self.steps)


def refuse_players(env: EnvBase, what: str) -> None:
    """Reject an environment with several players.

    Args:
        env: the environment.
        what: name of the way to roll out, for the message.

    Raises:
        ConfigError: its players share episodes.
    """
    if "active" in env.full_observation_spec.keys():
        raise ConfigError(
            f"{what} cannot hold the episodes of several players, whose rewards come after their "
            "last turn: pass yield_completed_trajectories=True, and one batched environment"
        )


class TrajectoryRollout(Lockstep):
    """Whole trajectories, in the order of their ends.

    Args:
        last_only: return only the last turn of each trajectory.
        **kwargs: see :class:`Rollout`.
    """

    saved = (*Lockstep.saved, "assembly")

    def __init__(self, *args: Any, last_only: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if len(self.env.batch_size) != 1:
            raise ConfigError(
                "yield_completed_trajectories needs an environment with one batch dimension, got "
                f"batch size {tuple(self.env.batch_size)}"
            )
        self.assembly = Assembly(self.env.batch_size[0], last_only)

    def collect(self) -> TensorDictBase:
        """Return rows ``[N]`` of trajectories with at least ``turns_per_batch`` turns in total."""
        while (finished := self.assembly.finished_turns) < self.turns_per_batch:
            self._log(finished)
            if self._drop_now():
                self.assembly.clear_open()
            step = self._step()
            if step is not None:
                counts = self._counts_of(step)
                self.assembly.add_step(step, counts, children=self.take_children())
        taken, rows = self.assembly.take(self.turns_per_batch)
        self.turns += taken
        return lazy_rows(rows)

    @property
    def tokens_in_flight(self) -> int:
        """See :attr:`Rollout.tokens_in_flight`."""
        return self.assembly.tokens + self.tokens_held

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of :meth:`state_dict`; external programs are started again."""
        super().load_state_dict(state)
        if isinstance(self.env, HoldsTurns):
            self.assembly.clear_open()


class WaveRollout(TrajectoryRollout):
    """Batches of trajectories that start together, one per row of the environment.

    Finished rows wait for the others, and are neither stepped nor answered. :meth:`drop` drops the
    whole batch.

    Args:
        **kwargs: see :class:`TrajectoryRollout`; ``turns_per_batch`` is not used.
    """

    saved = (*TrajectoryRollout.saved, "running")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.running: Tensor | None = None

    def collect(self) -> TensorDictBase:
        """Return rows ``[N]`` of as many trajectories as the environment has rows."""
        if self.running is None:
            self.running = torch.ones(self.env.batch_size, dtype=torch.bool)
        while self.running.any():
            self._log(self.assembly.finished_turns)
            if self._drop_now():
                # Finished rows are dropped together with unfinished rows, because a new wave cannot
                # complete their groups.
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
        self._mark_active(None if self.running.all() else self.running)
        acted = self._act(self.carrier)
        if acted is None:  # dropped before the policy answered
            return
        with torch.no_grad():
            stepped = self.env.step(acted)
        running = self.running.tolist()
        done = stepped.get(("next", "done")).reshape(len(running), -1).any(-1).cpu()
        still = self.running & ~done
        carrier = None
        if still.any():
            carrier = self.moved_on(stepped)
        # Finished rows of a wave are also not stepped.
        counts = self._counts_of(stepped)
        self.assembly.add_step(stepped, counts, running, self.take_children())
        self.carrier, self.running = carrier, still


class AsyncTrajectoryRollout(Rollout):
    """Whole trajectories from a pool of environments that step independently.

    While some environments are busy (with a tool or a slow reward), the policy answers all ready
    environments in one call.

    Args:
        last_only: return only the last turn of each trajectory.
        **kwargs: see :class:`Rollout`; ``env`` is an ``AsyncEnvPool`` of environments of one row.
    """

    env: AsyncEnvPool

    def __init__(self, *args: Any, last_only: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse_players(self.env, "an AsyncEnvPool, whose members are one row each,")
        if len(self.env.batch_size) != 2 or self.env.batch_size[1] != 1:
            # TorchRL's pool would treat each row of a larger environment as an environment.
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
        """Environments that are currently in a step."""
        return len(self._stepping)

    @property
    def tokens_in_flight(self) -> int:
        """See :attr:`Rollout.tokens_in_flight`."""
        return self.assembly.tokens + sum(self._stepping.values())

    def drop(self) -> None:
        """Raise an error; see :meth:`check_drop`."""
        self.check_drop()

    def check_drop(self) -> None:
        """Raise an error: environments are in the middle of their steps.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "what is in flight in an AsyncEnvPool cannot be dropped: its environments are never "
            "all between two steps; let it go on under the new weights (in_flight='wait')"
        )

    def collect(self) -> TensorDictBase:
        """Return rows ``[N]`` of trajectories with at least ``turns_per_batch`` turns in total."""
        if not self.running and not self.assembly.finished:
            self._send(list(self.env.reset().unbind(0)))
        while (finished := self.assembly.finished_turns) < self.turns_per_batch:
            self._log(finished)
            stepped, carriers = self.env.async_step_and_maybe_reset_recv(min_get=1)
            for part in stepped.unbind(0):
                (row,) = split_batch(part.exclude("env_index"))
                index = self._index(part)
                self.assembly.add(index, row, self._stepping.pop(index))
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
        self._stepping.update(zip(indices, self.counts, strict=True))
        for place, index in enumerate(indices):
            part = acted[place : place + 1]
            # Send to each environment separately, because the pool would use one index for all rows
            # of a batch.
            part.set("env_index", NonTensorData(index, batch_size=part.batch_size))
            self.env.async_step_and_maybe_reset_send(lazy_stack([part]))

    def state_dict(self) -> dict[str, Any]:
        """Raise an error: environments are in the middle of their steps.

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError(
            "a collector over an AsyncEnvPool cannot be saved: its environments run on their own "
            "and are never all between two steps. Use one batched environment for exact resume"
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise an error, as :meth:`state_dict` does.

        Raises:
            CheckpointError: always.
        """
        self.state_dict()
