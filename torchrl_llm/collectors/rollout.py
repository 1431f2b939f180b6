"""How a collector rolls out: fixed numbers of turns, whole trajectories, or a pool of environments.

Each way has ``collect() -> batch`` and a state; :class:`~torchrl_llm.collectors.LLMCollector`
chooses one and does the rest.

Shape legend: ``B`` rows of the environment, ``T`` steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack
from torchrl._utils import logger
from torchrl.envs import EnvBase, TransformedEnv

from torchrl_llm.collectors.collecting_thread import PauseGate
from torchrl_llm.data.rollouts import sampled_tokens, split_rollout
from torchrl_llm.errors import CheckpointError

Stamp = Callable[[TensorDictBase], TensorDictBase]


def env_state(env: EnvBase) -> list[dict[str, Any]]:
    """States of an environment and of its transforms, outermost first.

    A ``TransformedEnv`` has its transforms in ``state_dict()`` and not the environment below.

    Args:
        env: the environment.
    """
    states = []
    while isinstance(env, TransformedEnv):
        states.append(env.transform.state_dict())
        env = env.base_env
    states.append(env.state_dict())
    return states


def load_env_state(env: EnvBase, states: list[dict[str, Any]]) -> None:
    """Continue where :func:`env_state` was taken.

    Args:
        env: an environment that was built alike.
        states: what :func:`env_state` returned.

    Raises:
        CheckpointError: the environment has another number of layers.
    """
    layers: list[Any] = []
    while isinstance(env, TransformedEnv):
        layers.append(env.transform)
        env = env.base_env
    layers.append(env)
    if len(layers) != len(states):
        raise CheckpointError(
            f"the environment has {len(layers)} layers and the saved one had {len(states)}; build "
            "it as it was"
        )
    for layer, state in zip(layers, states, strict=True):
        layer.load_state_dict(state)


class Rollout(ABC):
    """One way to roll out.

    Args:
        env: the environment.
        policy: tensordict to tensordict.
        stamp: writes the policy's version into what the policy reads.
        turns_per_batch: turns of a batch.
        calls: policy calls go through it, so that weights do not change within one.
        verbose: log progress.

    Attributes:
        turns: turns of the batches so far, intermediate turns that were not yielded among them.
        sampled: tokens that the policy has sampled so far.
        after_call: called after each policy call, in the thread that collects; ``None`` for
            nothing.
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
        self.after_call: Callable[[], None] | None = None
        self._dropping = False

    @property
    @abstractmethod
    def tokens_in_flight(self) -> int:
        """Sampled tokens of rows that are in no batch yet."""

    def check_drop(self) -> None:
        """Raise :class:`~torchrl_llm.errors.ConfigError` where :meth:`drop` is impossible."""
        return

    @abstractmethod
    def drop(self) -> None:
        """Give up what is in flight and begin anew, before the next step.

        May be called from another thread.

        Raises:
            ConfigError: this way to roll out cannot.
        """

    @abstractmethod
    def collect(self) -> TensorDictBase:
        """Roll out one batch."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything that the next batch depends on, but for the policy."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""

    def _act(self, carrier: TensorDictBase) -> TensorDictBase | None:
        """The policy's answers; ``None`` where the rows were given up before or meanwhile."""
        with self.calls.work(), torch.no_grad():
            if self._dropping:
                return None
            acted = self.policy(self.stamp(carrier))
        self.sampled += sum(tokens_of_call(acted))
        if self.after_call is not None:
            self.after_call()
        # Answers that were cut short must not become turns: they count as sampled and lost.
        return None if self._dropping else acted

    def _log(self, collected: int) -> None:
        if self.verbose:
            logger.info(f"LLMCollector: {collected} of {self.turns_per_batch} turns")


def tokens_of_call(acted: TensorDictBase) -> list[int]:
    """Tokens that the policy sampled in one call.

    Args:
        acted: what the policy returned, ``[B]`` or with further batch dimensions.

    Returns:
        A number for each row, as :func:`~torchrl_llm.data.rollouts.sampled_tokens` counts them once
        they are rows; zeros for a policy without tokens.
    """
    counted = acted.select("tokens", "trace", strict=False)
    if counted.is_empty():
        return [0] * acted.numel()
    return [sampled_tokens(row) for row in split_rollout(counted).tensordicts]


def _stale_keys(env: EnvBase, policy: Any) -> set[str]:
    """What the policy writes anew in every call and neither it nor the environment reads.

    TorchRL carries such keys into the next step, where they are copied several times.
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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.carrier: TensorDictBase | None = None
        self._stale = _stale_keys(self.env, self.policy)

    def drop(self) -> None:
        """See :meth:`Rollout.drop`."""
        self._dropping = True

    def _drop_now(self) -> bool:
        """Whether the caller has to forget its rows; the next step resets the environment."""
        if not self._dropping:
            return False
        self._dropping, self.carrier = False, None
        return True

    def _step(self) -> TensorDictBase | None:
        """One step of all rows; the carrier moves on only when it has succeeded.

        ``None`` where the rows were given up before the policy had answered. The policy writes into
        the carrier, whose inner nodes may be those of the step before: split or copy a step before
        the next one.
        """
        if self.carrier is None:
            self.carrier = self.env.reset()
        acted = self._act(self.carrier)
        if acted is None:
            return None
        with torch.no_grad():
            stepped, carrier = self.env.step_and_maybe_reset(acted)
        self.carrier = self.without_stale(carrier)
        return stepped

    def without_stale(self, carrier: TensorDictBase) -> TensorDictBase:
        """The carrier without what the policy writes anew, in place."""
        for name in self._stale:
            carrier.pop(name, None)
        return carrier

    def state_dict(self) -> dict[str, Any]:
        """The carrier between two steps, the environment's state, and the count of turns."""
        carrier = None if self.carrier is None else self.carrier.clone(recurse=False)
        return {"carrier": carrier, "env": env_state(self.env), "turns": self.turns}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        load_env_state(self.env, state["env"])
        carrier = state["carrier"]
        self.carrier = None if carrier is None else carrier.clone(recurse=False)
        self.turns = state["turns"]


class StepRollout(Lockstep):
    """Batches of a fixed number of turns, whatever they begin or end.

    Args:
        reset_first: begin every batch with new conversations; those in flight are given up.
        flatten: rows instead of ``[*B, T]``.
        **kwargs: of :class:`Rollout`.
    """

    def __init__(self, *args: Any, reset_first: bool, flatten: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reset_first, self.flatten = reset_first, flatten
        self.steps: list[TensorDictBase] = []

    def collect(self) -> TensorDictBase:
        """``[*B, T]`` lazily stacked steps, or ``[B * T]`` rows, row ``b * T + t`` being step t."""
        if self.reset_first and not self.steps:
            self.carrier = None
        # Steps of a batch that an error or Ctrl-C cut short are its first steps when it goes on.
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

    def state_dict(self) -> dict[str, Any]:
        """As above, with the steps of a batch that was cut short."""
        return {**super().state_dict(), "steps": list(self.steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        super().load_state_dict(state)
        self.steps = list(state["steps"])
