"""Collector: rolls out a policy in an environment, into batches or a buffer.

:mod:`torchrl_llm.collectors.rollout` implements the rollout. This module implements the options,
the budget, asynchronous collection, versions and weights of the policy, and exact resume.
"""

from __future__ import annotations

import queue as queues
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Literal

from tensordict import TensorDictBase
from torch import nn
from torchrl.envs import AsyncEnvPool, EnvBase

from torchrl_llm._checked import Ge, checked
from torchrl_llm._threads import BackgroundLoop, PauseGate
from torchrl_llm.collectors.policy_versions import VersionedCollector, VersionedPolicy, Weights
from torchrl_llm.collectors.rollout import (
    AsyncTrajectoryRollout,
    Rollout,
    StepRollout,
    TrajectoryRollout,
    WaveRollout,
)
from torchrl_llm.data.rollouts import split_rollout
from torchrl_llm.data.wire import pack_rows
from torchrl_llm.envs.transforms.policy_version import PolicyVersion
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules.policies.llm_wrapper import LLMWrapperBase
from torchrl_llm.weights import InProcessWeights, WeightUpdater
from torchrl_llm.weights.weight_source import WeightReceipt, WeightSource

_POLL_S = 0.05


def put_batch(queue: Any, batch: TensorDictBase, stopping: threading.Event | None = None) -> None:
    """Put a batch into a queue; wait while the queue is full.

    Args:
        queue: has ``put(item, timeout=...)``. A queue of the standard library's :mod:`queue` gets
            the batch itself. Any other queue gets the packed rows, because sending single tensors
            would need hundreds of file descriptors.
        batch: the batch.
        stopping: event that drops the batch, so that a thread can end even if the queue is full.
    """
    in_process = isinstance(queue, (queues.Queue, queues.SimpleQueue))
    item = batch if in_process else pack_rows(split_rollout(batch))
    while stopping is None or not stopping.is_set():
        try:
            queue.put(item, timeout=_POLL_S)
            return
        except queues.Full:
            continue


class LLMCollector(VersionedCollector):
    """Rolls out a policy in an environment of conversations.

    Iterate over the collector to get batches. With a ``replay_buffer`` (or ``queue``), iterate to
    fill the buffer step by step, or call ``start`` to fill it asynchronously.

    A batch has shape ``[*B, T]``. With ``flatten_data`` it consists of rows ``[N]``
    (:func:`~torchrl_llm.data.rollouts.split_rollout`). Completed trajectories are always rows,
    trajectory by trajectory, in the order in which the trajectories end.

    Args:
        env: an environment, or a callable that builds one.
        policy: a module from tensordict to tensordict, with ragged or dense output.
        policy_factory: function that builds the policy. Pass either ``policy`` or
            ``policy_factory``.
        dialog_turns_per_batch: least number of turns per batch; 1 by default if
            ``yield_completed_trajectories`` is set.
        yield_only_last_steps: return only the last row of each trajectory, which contains the whole
            conversation. Implies ``yield_completed_trajectories``.
        yield_completed_trajectories: return only finished trajectories. The environment must end
            its episodes; otherwise nothing is ever yielded.
        postproc: function applied to each batch before it is yielded or written.
        total_dialog_turns: number of turns after which the collector ends, including turns dropped
            by ``yield_only_last_steps``; -1 for no end.
        async_envs: whether the environment is an ``AsyncEnvPool`` of environments of one row each,
            which step independently; detected by default. Only for completed trajectories.
        replay_buffer: buffer into which batches are written, with ``extend``.
        reset_at_each_iter: start each batch with new conversations. A batch of completed
            trajectories then has one trajectory per row of the environment. Finished trajectories
            wait for the others, and ``dialog_turns_per_batch`` must not be given.
        flatten_data: return rows instead of ``[*B, T]``; the default with a buffer or queue.
        weight_updater: updater that sends weights to the policy, or a callable that makes it. By
            default :class:`~torchrl_llm.weights.InProcessWeights`: shared weights stay shared,
            other weights are copied in place.
        queue: queue into which batches are written, with ``put``. A queue of this process gets
            tensordicts. Any other queue gets :class:`~torchrl_llm.data.wire.PackedRows`, which the
            receiver unpacks.
        track_policy_version: write ``"policy_version"`` into every row, with a new
            :class:`~torchrl_llm.envs.transforms.PolicyVersion` (``True``) or the given one.
        verbose: log progress.

    Raises:
        ConfigError: arguments contradict each other.

    Example:
        >>> import torch
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl_llm.data import Chat, History
        >>> from torchrl_llm.envs import DatasetChatEnv
        >>> from torchrl.envs import StepCounter
        >>> rows = [{"query": "Hi"}, {"query": "Bye"}]
        >>> env = DatasetChatEnv(dataset=rows, shuffle=False, num_envs=2)
        >>> env = env.append_transform(StepCounter(max_steps=1))
        >>> def policy(td):
        ...     chats = td["history"].prompt.chats
        ...     answer = [{"role": "assistant", "content": "Hello"}]
        ...     td["history"].full = History.of([chat + answer for chat in chats])
        ...     return td
        >>> options = {"dialog_turns_per_batch": 2, "total_dialog_turns": 4, "flatten_data": True}
        >>> collector = LLMCollector(env, policy=policy, **options)
        >>> [batch["history", "full"].content for batch in collector]
        [[['Hi', 'Hello'], ['Bye', 'Hello']], [['Hi', 'Hello'], ['Bye', 'Hello']]]
    """

    @checked
    def __init__(
        self,
        env: EnvBase | Callable[[], EnvBase],
        *,
        policy: Callable[[TensorDictBase], TensorDictBase] | None = None,
        policy_factory: Callable[[], Callable[[TensorDictBase], TensorDictBase]] | None = None,
        dialog_turns_per_batch: Annotated[int, Ge(1)] | None = None,
        yield_only_last_steps: bool | None = None,
        yield_completed_trajectories: bool | None = None,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        total_dialog_turns: int = -1,
        async_envs: bool | None = None,
        replay_buffer: Any = None,
        reset_at_each_iter: bool = False,
        flatten_data: bool | None = None,
        weight_updater: WeightUpdater | Callable[[], WeightUpdater] | None = None,
        queue: Any = None,
        track_policy_version: bool | PolicyVersion = False,
        verbose: bool = False,
    ) -> None:
        super().__init__()
        if (policy is None) == (policy_factory is None):
            raise ConfigError("pass exactly one of policy and policy_factory")
        if queue is not None and replay_buffer is not None:
            raise ConfigError("pass a replay_buffer or a queue, not both")
        last_only = bool(yield_only_last_steps)
        completed = yield_completed_trajectories
        if completed is None:
            completed = last_only
        if last_only and not completed:
            raise ConfigError(
                "yield_only_last_steps=True needs yield_completed_trajectories=True (or None)"
            )
        if completed and reset_at_each_iter and dialog_turns_per_batch is not None:
            raise ConfigError(
                "dialog_turns_per_batch has no effect where each batch of completed trajectories "
                "begins anew (reset_at_each_iter=True): it is one of each row of the environment"
            )
        if completed and flatten_data is False:
            raise ConfigError(
                "completed trajectories differ in length and are yielded as rows; "
                "flatten_data=False has no effect with them"
            )
        if dialog_turns_per_batch is None:
            if not completed:
                raise ConfigError(
                    "dialog_turns_per_batch is needed: how many turns make a batch (a multiple of "
                    "the environment's batch size)"
                )
            dialog_turns_per_batch = 1
        self.env = env if isinstance(env, EnvBase) else env()
        self.policy = policy if policy_factory is None else policy_factory()
        if isinstance(self.policy, LLMWrapperBase):
            self.policy.register_collector(self)
        self.replay_buffer, self.queue = replay_buffer, queue
        self.postproc = postproc
        self.reset_at_each_iter = reset_at_each_iter
        if flatten_data is None:
            flatten_data = replay_buffer is not None or queue is not None
        self.flatten_data = flatten_data
        self.yield_completed_trajectories, self.yield_only_last_steps = completed, last_only
        self.total_frames = total_dialog_turns
        self.requested_frames_per_batch = dialog_turns_per_batch
        self.verbose = verbose
        self.async_envs = isinstance(self.env, AsyncEnvPool)
        if async_envs is not None and async_envs != self.async_envs:
            raise ConfigError(
                f"async_envs={async_envs}, but the environment is a {type(self.env).__name__}; "
                "asynchronous environments are an AsyncEnvPool"
            )
        self._policy = VersionedPolicy(self.policy, track_policy_version)
        self._iter = -1
        self._background: BackgroundLoop | None = None
        self._closed = False
        self._calls, self._batches = PauseGate(), PauseGate()
        self._rollout = self._make_rollout()
        self.weight_updater = InProcessWeights() if weight_updater is None else weight_updater

    def _make_rollout(self) -> Rollout:
        if self.async_envs and self.reset_at_each_iter:
            raise ConfigError(
                "the environments of an AsyncEnvPool never begin together: leave "
                "reset_at_each_iter out"
            )
        if self.async_envs and not self.yield_completed_trajectories:
            raise ConfigError(
                "the environments of an AsyncEnvPool are never at the same step: pass "
                "yield_completed_trajectories=True"
            )
        if self.yield_completed_trajectories:
            kind = WaveRollout if self.reset_at_each_iter else TrajectoryRollout
            make = partial(
                AsyncTrajectoryRollout if self.async_envs else kind,
                last_only=self.yield_only_last_steps,
            )
        else:
            make = partial(
                StepRollout, reset_first=self.reset_at_each_iter, flatten=self.flatten_data
            )
        return make(
            self.env,
            self.policy,
            self._policy.stamp,
            turns_per_batch=self.requested_frames_per_batch,
            calls=self._calls,
            verbose=self.verbose,
        )

    # -- batches ----------------------------------------------------------------------------------

    @property
    def dialog_turns(self) -> int:
        """Number of turns collected so far."""
        return self._rollout.turns

    @property
    def _frames(self) -> int:
        # TorchRL's ``stats`` reads this attribute.
        return self._rollout.turns

    @property
    def exhausted(self) -> bool:
        """Whether the collector's budget of turns is used up."""
        return 0 <= self.total_frames <= self._rollout.turns

    @property
    def after_call(self) -> Callable[[], None] | None:
        """Function that is called after each policy call, in the collecting thread."""
        return self._rollout.after_call

    @after_call.setter
    def after_call(self, function: Callable[[], None] | None) -> None:
        self._rollout.after_call = function

    def rollout(self) -> TensorDictBase:
        """Collect one batch, without writing it anywhere."""
        self._check_usable()
        if self._pre_collect_hook is not None:
            self._pre_collect_hook()
        with self._batches.work():
            batch = self._rollout.collect()
            self._iter += 1
        if self.postproc is not None:
            batch = self.postproc(batch)
        if self._post_collect_hook is not None:
            self._post_collect_hook(batch)
        return batch

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Yield batches until the budget is used up; ``None`` for a batch in buffer or queue."""
        if self._background is not None:
            raise ConfigError("this collector was started and fills its buffer by itself")
        while not self.exhausted:
            batch = self.rollout()
            if self.replay_buffer is None and self.queue is None:
                yield batch
            else:
                self._deliver(batch)
                yield None

    def _deliver(self, batch: TensorDictBase) -> None:
        if self.replay_buffer is not None:
            self.replay_buffer.extend(batch)
            return
        stopping = None if self._background is None else self._background.stopping
        put_batch(self.queue, batch, stopping)

    def set_postproc(self, postproc: Callable[[TensorDictBase], TensorDictBase]) -> None:
        """Set the post-processing of batches.

        Args:
            postproc: function from batch to batch.

        Raises:
            ConfigError: a post-processing is already set.
        """
        if self.postproc is not None:
            raise ConfigError("this collector has a postproc already")
        self.postproc = postproc

    # -- next to training -------------------------------------------------------------------------

    def start(self) -> None:
        """Collect into the buffer or queue in a separate thread, until :meth:`shutdown`.

        An error of policy or environment ends the thread. It is logged immediately, and raised by
        the next call of :meth:`wait_for_rows`, ``update_policy_weights_``, :meth:`state_dict` or
        :meth:`shutdown`.

        Raises:
            ConfigError: there is neither buffer nor queue, or the collector was already started.
        """
        if self.replay_buffer is None and self.queue is None:
            raise ConfigError("start() needs a replay_buffer or a queue to collect into")
        self._check_usable()
        if self._background is not None:
            raise ConfigError("this collector was started before")
        self._background = BackgroundLoop(self._collect_once, name="LLMCollector")
        self._background.start()

    def _collect_once(self) -> bool:
        if self.exhausted:
            return False
        with self._batches.work(self._background.stopping) as enters:
            if enters:
                batch = self.rollout()
                # The batch is written before a save is possible, so that it is not missing on both
                # sides.
                if self.replay_buffer is not None:
                    self._deliver(batch)
        # Wait for a full queue outside the lock, because the consumer of the queue may be the
        # thread that pauses.
        if enters and self.replay_buffer is None:
            self._deliver(batch)
        return True

    @property
    def is_running(self) -> bool:
        """Whether the thread of :meth:`start` collects."""
        return self._background is not None and self._background.is_running

    def wait_for_rows(self, num_rows: int, *, timeout_s: float | None = None) -> None:
        """Wait until the buffer has enough rows.

        Args:
            num_rows: least number of rows in the buffer.
            timeout_s: seconds to wait; ``None`` for no limit.

        Raises:
            TimeoutError: the rows did not arrive in time.
            ConfigError: the collector is not running, so the rows will never arrive.
            Exception: the exception that ended the collecting thread.
        """
        if self.replay_buffer is None:
            raise ConfigError("wait_for_rows needs a replay_buffer")
        deadline = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
        while len(self.replay_buffer) < num_rows:
            self._raise_failure()
            # Checked before the length is read again, because the last rows may arrive in between.
            running = self.is_running
            if len(self.replay_buffer) >= num_rows:
                return
            if not running:
                self._raise_failure()
                raise ConfigError(
                    f"the buffer holds {len(self.replay_buffer)} of {num_rows} rows, and the "
                    "collector does not run: start() it, raise total_dialog_turns, or see whether "
                    "a transform of the buffer holds rows back"
                )
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"the buffer holds {len(self.replay_buffer)} of {num_rows} rows after "
                    f"{timeout_s} s"
                )
            time.sleep(_POLL_S)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Pause collection within the context; the current batch is written first.

        Save collector and buffer inside the context, so that they are consistent.
        """
        with self._batches.pause():
            yield

    def _raise_failure(self) -> None:
        if self._background is not None and self._background.failure is not None:
            failure, self._background.failure = self._background.failure, None
            raise failure

    def _check_usable(self) -> None:
        if self._closed:
            raise ConfigError("this collector was shut down")

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Stop the thread, close the environment, and raise the thread's error, if any.

        Args:
            timeout: seconds to wait for the current batch; ``None`` for no limit.
            close_env: close the environment.
            raise_on_error: raise an error of the thread that has not been raised yet.

        Raises:
            TimeoutError: the thread is still running; the environment stays open.
        """
        if self._background is not None:
            self._background.stop(timeout)
        if close_env and not self._closed:
            self.env.close(raise_if_closed=False)
        self._closed = True
        if raise_on_error:
            self._raise_failure()

    # -- weights and versions ---------------------------------------------------------------------

    def _update(self, weights: Weights | None) -> None:
        self._raise_failure()
        with self._calls.pause():  # after the current policy call
            self.weight_updater.push_weights(weights)
            self.increment_version()

    def publish(self, weights: Weights | None = None) -> None:
        """Send weights to the policy without counting a version.

        Call it once before the first batch if the policy starts with different weights, and after a
        resume from a checkpoint, because no training step produced these weights.

        Args:
            weights: see ``update_policy_weights_``.

        Raises:
            WeightUpdateError: the weights did not arrive.
        """
        self._raise_failure()
        with self._calls.pause():
            versions = self._policy.state_dict()
            if isinstance(self.policy_version, int):  # updaters send weights with the next number
                self._policy.set_version(self.policy_version - 1)
            try:
                self.weight_updater.push_weights(weights)
            finally:
                self._policy.load_state_dict(versions)

    @checked
    def load_weights(
        self,
        source: WeightSource,
        *,
        version: int,
        in_flight: Literal["wait", "keep", "abort"] = "wait",
    ) -> list[WeightReceipt]:
        """Load weights with a given version number; remote collectors use it.

        Args:
            source: source of the weights.
            version: their version number, which later tokens carry.
            in_flight: what happens to unfinished conversations. ``"wait"``: the current policy call
                ends first, and the new weights sample the next turns. ``"keep"``: the new weights
                sample the next tokens of the current call. ``"abort"``: the current call is stopped
                if the backend supports it (vLLM and pools of vLLM engines). The conversations are
                dropped, even if the weights then do not arrive, and new ones start.

        Returns:
            A receipt per copy of the weights.

        Raises:
            ConfigError: the policy has no weights in this process, or does not support
                ``in_flight``.
            WeightUpdateError: the weights did not arrive; the old weights and their version stay.
        """
        if in_flight == "abort":
            self._rollout.check_drop()
        if in_flight == "keep" and self._policy.counts_versions:
            return self._policy.load(source, version)
        # An engine without a version starts to count at this update, so the current call must end
        # first.
        if in_flight == "keep" and not self._policy.begins_to_count:
            raise ConfigError(
                "in_flight='keep' changes weights within a policy call, which needs a backend "
                "that counts the version of each token, such as vLLM's; use 'wait'"
            )
        with self._calls.pause(self._cut_short if in_flight == "abort" else None):
            return self._policy.load(source, version)

    def _cut_short(self) -> None:
        self._rollout.drop()
        self._policy.abort()

    def set_policy_version(self, version: int) -> None:
        """Set the version of weights that were changed outside of this collector.

        Args:
            version: the version number.
        """
        self._policy.set_version(version)

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the policy has sampled in this process."""
        return self._rollout.sampled

    @property
    def tokens_in_flight(self) -> int:
        """Number of sampled tokens of conversations that are not in a batch yet."""
        return self._rollout.tokens_in_flight

    def take_absent(self) -> dict[str, tuple[int, float]]:
        """Return the players without a turn (and row) in an episode, since the last call.

        Returns:
            For each such player, the number of such episodes and the sum of the rewards.
        """
        assembly = getattr(self._rollout, "assembly", None)
        if assembly is None:
            return {}
        absent, assembly.absent = assembly.absent, {}
        return absent

    def increment_version(self) -> None:
        """Count a new version of the policy, in rows and in the trace of tokens."""
        self._policy.increment_version()

    @property
    def policy_version(self) -> int | str | None:
        """Version of the tracker, or else of the policy; ``None`` if neither has a version."""
        return self._policy.version

    @property
    def policy_version_tracker(self) -> PolicyVersion | None:
        """The transform that writes the version into rows, if requested."""
        return self._policy.tracker

    @property
    def policy_module(self) -> nn.Module:
        """The module that holds the policy's weights.

        Raises:
            ConfigError: the module is not in this process.
        """
        return self._policy.module

    def get_policy_model(self) -> nn.Module:
        """Return the model inside the policy.

        Raises:
            ConfigError: the module is not in this process.
        """
        return self._policy.model

    # -- state ------------------------------------------------------------------------------------

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environment; returns the next seed."""
        return self.env.set_seed(seed, static_seed=static_seed)

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return the state: unfinished trajectories, environment, counts, version.

        The state does not contain the policy's weights and the random generators, which belong to
        the process. The call waits for the current batch.

        Raises:
            CheckpointError: the environment is an ``AsyncEnvPool``.
        """
        self._raise_failure()
        with self._batches.pause():
            return OrderedDict(
                rollout=self._rollout.state_dict(),
                iterations=self._iter,
                versions=self._policy.state_dict(),
            )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of :meth:`state_dict` exactly.

        Args:
            state_dict: state of a collector with the same configuration.
        """
        with self._batches.pause():
            self._rollout.load_state_dict(state_dict["rollout"])
            self._iter = state_dict["iterations"]
            self._policy.load_state_dict(state_dict["versions"])

    def __repr__(self) -> str:
        return (
            f"LLMCollector({type(self.env).__name__}, {type(self.policy).__name__}, "
            f"dialog_turns={self.dialog_turns}/{self.total_dialog_turns})"
        )
