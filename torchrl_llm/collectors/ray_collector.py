"""The collector in a Ray actor: the same batches, from a process of its own.

What runs over there is in :mod:`torchrl_llm.collectors.ray_host`; several of them side by side are
:class:`~torchrl_llm.collectors.RayCollectorGroup`.
"""

from __future__ import annotations

import itertools
import queue as queues
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from typing import Any, Literal

from tensordict import TensorDictBase
from torch import nn
from torchrl._utils import logger
from torchrl.collectors import BaseCollector
from torchrl.data import RayReplayBuffer as CoreRayReplayBuffer
from torchrl.data import ReplayBuffer as CoreReplayBuffer
from torchrl.envs import EnvBase

from torchrl_llm._ray import ActorOptions, RemoteObject, check_resources, require_ray
from torchrl_llm.collectors.background import BackgroundLoop
from torchrl_llm.collectors.ray_host import CollectorHost
from torchrl_llm.collectors.transport.base import RowChannel
from torchrl_llm.envs.transforms.policy_version import PolicyVersion
from torchrl_llm.errors import ConfigError, TorchRLLLMError, WeightUpdateError, WorkerError
from torchrl_llm.modules.backends.weights import WeightReceipt, WeightSource
from torchrl_llm.modules.remote import ObjectStoreSource
from torchrl_llm.weight_update import WeightUpdater, engine_weights

__all__ = ["RayLLMCollector", "actor_options"]

_POLL_S = 0.2
_THREADS = 4
# Process numbers from here on are those of actors; children of multiprocessing count from 1.
_FIRST_NUMBER = 2**15
_numbers = itertools.count()
_PLACEMENT = ("memory", "scheduling_strategy", "accelerator_type", "runtime_env")

Weights = nn.Module | TensorDictBase | Mapping[str, Any]


def actor_options(
    remote_config: Mapping[str, Any] | None, **given: Any
) -> tuple[ActorOptions, dict[str, Any]]:
    """What an actor needs, from TorchRL's ``remote_config``.

    Args:
        remote_config: fields of :class:`~torchrl_llm._ray.ActorOptions`, and ``memory``,
            ``scheduling_strategy``, ``accelerator_type``, ``runtime_env`` of Ray.
        given: fields that override it; ``None`` for those that were not given.

    Returns:
        The options, and what is left for Ray.

    Raises:
        ConfigError: for another key.
    """
    config = dict(remote_config or {})
    placement = {name: config.pop(name) for name in _PLACEMENT if name in config}
    known = {field.name for field in fields(ActorOptions)}
    unknown = sorted(set(config) - known)
    if unknown:
        raise ConfigError(
            f"remote_config has {unknown[0]!r}; it may have {sorted(known | set(_PLACEMENT))}"
        )
    config |= {name: value for name, value in given.items() if value is not None}
    options = ActorOptions(**config)
    return replace(options, max_concurrency=max(options.max_concurrency, _THREADS)), placement


class RayLLMCollector(BaseCollector):
    """An :class:`~torchrl_llm.collectors.LLMCollector` in a Ray actor of its own.

    Three ways to get what it collects:

    - iterate over it (or call :meth:`next`): batches come here, and with a ``replay_buffer`` they
      are written into it;
    - :meth:`start` it with a ``replay_buffer`` that is filled beside training;
    - :meth:`start` it with a :class:`~torchrl_llm.collectors.transport.RayChannel` as ``queue``,
      for a learner with a :class:`~torchrl_llm.collectors.ChannelCollector`: rows are granted,
      claimed and counted, so that it is known what became of each token, also of the lost ones.

    The collector is watched while it is started. Should its process die, or give no sign of life
    for ``worker_timeout_s``, it is killed, its claims go to others, what it had sampled and not
    delivered is counted as lost, and it is built anew up to ``max_restarts`` times: under another
    name, and with the latest weights before it samples anything.

    Weights go through Ray's object store, once for all receivers; each echoes their digest.

    Args:
        env: an environment or, better, a callable that builds one: it is sent to the actor.
        policy: sent to the actor.
        policy_factory: builds the policy there; exactly one of the two.
        dialog_turns_per_batch: see :class:`~torchrl_llm.collectors.LLMCollector`, as the following.
        yield_only_last_steps: see there.
        yield_completed_trajectories: see there.
        postproc: see there; runs in the actor.
        total_dialog_turns: see there; counted anew after a restart.
        async_envs: see there.
        replay_buffer: of this process, or one that lives in Ray: that one is written to by the
            actor itself.
        reset_at_each_iter: see there.
        flatten_data: see there.
        weight_updater: brings weights to an engine that is in neither process, and runs here; by
            default weights are sent to the policy in the actor.
        queue: a channel of rows, or a queue of Ray (``ray.util.queue.Queue``).
        track_policy_version: see there.
        verbose: see there.
        ray_init_config: arguments of ``ray.init``, where Ray does not run yet.
        remote_config: what the actor needs, see :func:`actor_options`.
        sync_iter: ``False`` collects the next batch while the caller works on the last one.
        num_cpus: CPUs of the actor; 1 by default.
        num_gpus: GPUs of the actor; none by default.
        name: of this collector; begins the names of its workers in the channel.
        claim_rows: rows that are claimed at once; the turns of a batch by default.
        in_flight: what becomes of conversations that have begun when weights come, see
            :meth:`~torchrl_llm.collectors.LLMCollector.load_weights`.
        wait_for_updates: ``False`` does not wait until weights have arrived; the next update does,
            and raises what went wrong.
        max_restarts: how often it may be built anew.
        worker_timeout_s: seconds without a sign of life (a policy call, a claim, a delivery) after
            which it is taken for hung; of a channel only.
        timeout_s: most seconds that a call of it may take, :meth:`next` included.

    Raises:
        ConfigError: for arguments that contradict each other.
        MissingExtraError: Ray is not installed.
        ResourceError: Ray is not running, or has less than what is needed.
        WorkerError: it did not start in time.
        Exception: what building environment or policy raised over there.
    """

    def __init__(
        self,
        env: EnvBase | Callable[[], EnvBase],
        *,
        policy: Callable[[TensorDictBase], TensorDictBase] | None = None,
        policy_factory: Callable[[], Callable[[TensorDictBase], TensorDictBase]] | None = None,
        dialog_turns_per_batch: int | None = None,
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
        ray_init_config: Mapping[str, Any] | None = None,
        remote_config: Mapping[str, Any] | None = None,
        sync_iter: bool = True,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        name: str = "collector",
        claim_rows: int | None = None,
        in_flight: Literal["wait", "keep", "abort"] = "wait",
        wait_for_updates: bool = True,
        max_restarts: int = 0,
        worker_timeout_s: float = 300.0,
        timeout_s: float | None = None,
    ) -> None:
        super().__init__()
        ray = require_ray("RayLLMCollector", running=ray_init_config is None)
        if (policy is None) == (policy_factory is None):
            raise ConfigError("pass exactly one of policy and policy_factory")
        if queue is not None and replay_buffer is not None:
            raise ConfigError("pass a replay_buffer or a queue, not both")
        if isinstance(queue, (queues.Queue, queues.SimpleQueue)):
            raise ConfigError(
                f"a {type(queue).__module__}.{type(queue).__name__} belongs to this process; pass "
                "a RayChannel or a ray.util.queue.Queue"
            )
        if in_flight not in ("wait", "keep", "abort"):
            raise ConfigError(f"in_flight must be wait, keep or abort, got {in_flight!r}")
        if max_restarts < 0 or worker_timeout_s <= 0:
            raise ConfigError("max_restarts must not be negative, worker_timeout_s be positive")
        if not ray.is_initialized():
            ray.init(**(ray_init_config or {}))
        self.replay_buffer, self.queue = replay_buffer, queue
        self.channel = queue if isinstance(queue, RowChannel) else None
        if claim_rows is not None and self.channel is None:
            raise ConfigError("claim_rows needs a channel as queue")
        self.total_frames = total_dialog_turns
        self.name, self.sync_iter, self.in_flight = name, sync_iter, in_flight
        self.wait_for_updates, self.max_restarts = wait_for_updates, max_restarts
        self.worker_timeout_s = worker_timeout_s
        self.options, self._placement = actor_options(
            remote_config, num_cpus=num_cpus, num_gpus=num_gpus, timeout_s=timeout_s
        )
        # A buffer of this process stays here; one in Ray is written to from over there.
        self._local_buffer = isinstance(replay_buffer, CoreReplayBuffer) and not isinstance(
            replay_buffer, CoreRayReplayBuffer
        )
        beside = replay_buffer is not None or queue is not None
        self._collector_options = {
            "policy": policy,
            "policy_factory": policy_factory,
            "dialog_turns_per_batch": dialog_turns_per_batch,
            "yield_only_last_steps": yield_only_last_steps,
            "yield_completed_trajectories": yield_completed_trajectories,
            "postproc": postproc,
            "total_dialog_turns": total_dialog_turns,
            "async_envs": async_envs,
            "replay_buffer": None if self._local_buffer else replay_buffer,
            "reset_at_each_iter": reset_at_each_iter,
            "flatten_data": beside if flatten_data is None else flatten_data,
            "queue": None if self.channel is not None else queue,
            "track_policy_version": track_policy_version,
            "verbose": verbose,
        }
        self._env, self._claim_rows = env, claim_rows
        self._lock = threading.RLock()
        self._latest: tuple[WeightSource | None, int] = (None, 0)
        self._pending: Any = None
        self._ahead: Any = None
        self._run: Any = None
        self._watch: BackgroundLoop | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self.restarts = 0
        self.receipts: list[WeightReceipt] = []
        self.weight_updater = weight_updater
        self._remote: RemoteObject | None = self._build()
        self.requested_frames_per_batch = self._remote.read("collector.dialog_turns_per_batch")
        version = self._remote.read("collector.policy_version")
        self._latest = (None, version if isinstance(version, int) else 0)

    # -- the actor --------------------------------------------------------------------------------

    def _build(self) -> RemoteObject:
        number = next(_numbers)
        self.worker_name = f"{self.name}-{number}"
        factory = partial(
            CollectorHost,
            self._env,
            self._collector_options,
            number=(_FIRST_NUMBER + number) % 2**16,
            channel=self.channel,
            name=self.worker_name,
            claim_rows=self._claim_rows,
        )
        what = f"RayLLMCollector {self.worker_name!r}"
        check_resources(what, [self.options.bundle])
        return RemoteObject(factory, self.options, what=what, placement=self._placement or None)

    def _alive(self) -> RemoteObject:
        self._raise_failure()
        if self._closed:
            raise ConfigError("this collector was shut down")
        remote = self._remote
        if remote is None:
            raise WorkerError(f"RayLLMCollector {self.name!r} is being built anew")
        return remote

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def pid(self) -> int:
        """Process of the actor.

        Raises:
            WorkerError: it died or does not answer.
        """
        return self._alive().pid()

    def _lose(self) -> None:
        """End the actor, and give back what it had claimed."""
        with self._lock:
            remote, self._remote, self._ahead, self._pending = self._remote, None, None, None
        if remote is not None:
            remote.shutdown()
        if self.channel is not None:
            counts = self.channel.forget(self.worker_name)
            if counts.claimed or counts.in_flight:
                logger.warning(
                    f"{self.worker_name}: {counts.claimed} claimed rows go to others, "
                    f"{counts.in_flight} tokens are lost"
                )

    def _revive(self, error: BaseException) -> None:
        """Build the actor anew after it died, with the latest weights, or fail with its error."""
        logger.warning(f"{self.worker_name}: {type(error).__name__}: {error}")
        self._lose()
        if self._closed:
            return
        if self.restarts >= self.max_restarts:
            self._failure = error
            return
        self.restarts += 1
        remote = self._build()
        brought = None
        while True:
            with self._lock:
                latest = self._latest
                if latest is brought or self._closed:
                    self._remote = remote
                    break
            self._bring(remote, latest)
            brought = latest
        logger.warning(f"built anew as {self.worker_name}, at version {latest[1]} of the weights")

    def _bring(self, remote: RemoteObject, latest: tuple[WeightSource | None, int]) -> None:
        source, version = latest
        if source is None:
            remote.call("collector.set_policy_version", version)
        else:
            remote.call("load_weights", source, version, "wait")

    # -- batches ----------------------------------------------------------------------------------

    def next(self) -> TensorDictBase | None:
        """The next batch; ``None`` where it was written to the buffer or queue.

        Raises:
            StopIteration: the budget of turns is used up.
            WorkerError: the actor died, hung or did not answer in time, and may not be built anew.
            Exception: what policy or environment raised.
        """
        while True:
            try:
                there, packed = self._next_packed()
            except WorkerError as error:
                if self._remote is None:
                    raise
                self._revive(error)
                self._raise_failure()
                continue
            break
        if not there:
            raise StopIteration
        if packed is None:
            return None
        if self._local_buffer:
            self.replay_buffer.extend(packed.rows)
            return None
        return packed.unpack()

    def _next_packed(self) -> Any:
        if self._watch is not None:
            raise ConfigError("this collector was started and collects by itself")
        if self.channel is not None:
            raise ConfigError("a collector with a channel is started: call start()")
        remote = self._alive()
        ref = remote.submit("next") if self._ahead is None else self._ahead
        self._ahead = None
        found = remote.result(ref, call="next")
        if found[0] and not self.sync_iter:
            self._ahead = remote.submit("next")
        return found

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Batches until the budget is used up; ``None`` for each that was written elsewhere."""
        while True:
            try:
                batch = self.next()
            except StopIteration:
                return
            yield batch

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        return self.iterator()

    # -- beside training --------------------------------------------------------------------------

    def start(self) -> None:
        """Collect into the buffer, queue or channel until :meth:`shutdown`; returns at once.

        What goes wrong over there is logged, and raised by the next call of
        :meth:`update_policy_weights_`, :meth:`check` or :meth:`shutdown`, unless it was built anew.

        Raises:
            ConfigError: there is neither of them, or it was started before.
        """
        if self.replay_buffer is None and self.queue is None:
            raise ConfigError("start() needs a replay_buffer, a queue or a channel to collect into")
        self._alive()
        if self._watch is not None:
            raise ConfigError("this collector was started before")
        self._set_off()
        self._watch = BackgroundLoop(self._look_after, name=f"watch of {self.name}")
        self._watch.start()

    def _set_off(self) -> None:
        self._started_s = time.time()
        self._run = self._remote.submit("next" if self._local_buffer else "run")

    def _look_after(self) -> bool:
        """One look at the run: whether to go on looking."""
        ray = require_ray("RayLLMCollector")
        remote = self._remote
        ready, _ = ray.wait([self._run], timeout=_POLL_S)
        try:
            if not ready:
                self._check_signs_of_life()
                return True
            result = remote.result(self._run, call="collecting")
            if self._local_buffer:
                there, packed = result
                if there:
                    self._run = remote.submit("next")
                    self.replay_buffer.extend(packed.rows)
                return there
            logger.info(f"{self.worker_name} ended: {result}")
            if self.channel is not None:
                self.channel.forget(self.worker_name)
            return False
        except WorkerError as error:
            if self._closed:
                return False
            self._revive(error)
        except TorchRLLLMError as error:
            self._give_up(error)
        except Exception as error:
            # Whatever policy or environment raised ends this collector, and reaches the learner.
            self._give_up(error)
        if self._failure is not None or self._closed:
            return False
        self._set_off()
        return True

    def _give_up(self, error: BaseException) -> None:
        logger.error(f"{self.worker_name} stopped: {type(error).__name__}: {error}")
        self._lose()
        self._failure = error

    def _check_signs_of_life(self) -> None:
        if self.channel is None:
            return
        counts = self.channel.workers().get(self.worker_name)
        seen_s = self._started_s if counts is None else max(counts.seen_s, self._started_s)
        if time.time() - seen_s > self.worker_timeout_s:
            raise WorkerError(
                f"{self.worker_name!r} gave no sign of life for {self.worker_timeout_s:g} s (no "
                "policy call ended, no claim was made); its environment or policy hangs, or "
                "worker_timeout_s is less than one call takes"
            )

    @property
    def is_running(self) -> bool:
        """Whether it was started and still collects, or is being built anew."""
        return self._watch is not None and self._watch.is_running

    def check(self) -> None:
        """Raise what ended a collector that was started; nothing while it runs.

        Raises:
            WorkerError: its process died or hung too often.
            Exception: what policy, environment or buffer raised.
        """
        if self._watch is not None and self._watch.failure is not None:
            self._failure = self._watch.failure
        self._raise_failure()

    # -- weights and versions ---------------------------------------------------------------------

    def update_policy_weights_(
        self,
        policy_or_weights: Weights | None = None,
        *,
        weights: TensorDictBase | Mapping[str, Any] | None = None,
        policy: nn.Module | None = None,
        state_dict: Mapping[str, Any] | None = None,
        version: int | None = None,
    ) -> None:
        """Bring weights to the policy over there, under the next version.

        They are copied before this returns, so that training may go on; see ``wait_for_updates``
        for when they have arrived. A collector that is being built anew gets them before it
        samples.

        Args:
            policy_or_weights: the trained module, its state dict, or a tensordict of its weights.
                Without any, only the version counts up.
            weights: the same by another name of TorchRL's.
            policy: the same.
            state_dict: the same.
            version: number of these weights; one more than the last by default.

        Raises:
            ConfigError: more than one source, or weights that are not the policy's.
            WeightUpdateError: they did not arrive, or not as they were sent.
            WorkerError: the collector is dead and may not be built anew.
        """
        given = [x for x in (policy_or_weights, weights, policy, state_dict) if x is not None]
        if len(given) > 1:
            raise ConfigError("pass the weights once")
        self.check()
        version = self.policy_version + 1 if version is None else version
        source = None
        if self.weight_updater is not None:
            self.weight_updater.push_weights(given[0] if given else None)
        elif given:
            source = ObjectStoreSource.put(engine_weights(given[0]))
        self.load_weights(source, version=version)

    def load_weights(self, source: WeightSource | None, *, version: int) -> list[WeightReceipt]:
        """Tell the collector over there where new weights are.

        Args:
            source: where; ``None`` for weights that have their place already, so that only the
                version is told.
            version: their number.

        Returns:
            What arrived; nothing where the collector is being built anew, or need not be waited
            for.

        Raises:
            WeightUpdateError: they did not arrive, or not as they were sent.
            WorkerError: the collector is dead and may not be built anew.
        """
        self._settle()
        with self._lock:
            self._latest = (source, version)
            remote = self._remote
            if remote is None:
                self._raise_failure()
                return []
            if source is None:
                self._pending = remote.submit("collector.set_policy_version", version)
            else:
                self._pending = remote.submit("load_weights", source, version, self.in_flight)
        if self.wait_for_updates:
            return self._settle()
        return []

    def _settle(self) -> list[WeightReceipt]:
        """Wait for the update under way, and check what arrived."""
        with self._lock:
            remote, pending, self._pending = self._remote, self._pending, None
            source, version = self._latest
        if pending is None or remote is None:
            return []
        try:
            receipts = remote.result(pending, call="the update of weights") or []
        except WorkerError:
            # Whoever watches it finds the same, and brings the weights to its successor.
            if self._watch is None and self.restarts >= self.max_restarts:
                raise
            return []
        for receipt in receipts:
            if receipt.version != version or (source.digest or receipt.digest) != receipt.digest:
                raise WeightUpdateError(
                    f"version {version} with digest {source.digest} was sent to "
                    f"{self.worker_name!r}, and it got {receipt}"
                )
        self.receipts = receipts
        return receipts

    def increment_version(self) -> None:
        """Count a new version of weights that have their place already."""
        self.load_weights(None, version=self.policy_version + 1)

    @property
    def policy_version(self) -> int:
        """Number of the last weights that were sent."""
        return self._latest[1]

    def get_policy_version(self) -> int:
        """The same as :attr:`policy_version`, for callers that can only call methods."""
        return self._latest[1]

    # -- state and end ----------------------------------------------------------------------------

    @property
    def total_dialog_turns(self) -> int:
        """Turns after which the collector ends; -1 for no end."""
        return self.total_frames

    @property
    def dialog_turns_per_batch(self) -> int:
        """Turns of a batch."""
        return self.requested_frames_per_batch

    @property
    def dialog_turns(self) -> int:
        """Turns collected so far, since the last restart."""
        return self._alive().read("collector.dialog_turns")

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environment over there; returns the next seed."""
        return self._alive().call("collector.set_seed", seed, static_seed)

    def set_postproc(self, postproc: Callable[[TensorDictBase], TensorDictBase]) -> None:
        """Set the post-processing of batches over there; see the arguments of the class."""
        self._alive().call("collector.set_postproc", postproc)
        self._collector_options["postproc"] = postproc

    def state_dict(self) -> OrderedDict[str, Any]:
        """What the next batch depends on, as :meth:`LLMCollector.state_dict` has it.

        Raises:
            WorkerError: the actor died or did not answer in time.
            CheckpointError: for an ``AsyncEnvPool``.
        """
        state = self._alive().call("collector.state_dict")
        return OrderedDict(collector=state, version=self.policy_version)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken; the weights are to be sent again.

        Args:
            state_dict: of a collector that was built alike.
        """
        self._alive().call("collector.load_state_dict", state_dict["collector"])
        self._latest = (None, state_dict["version"])

    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool = True,
        raise_on_error: bool = True,
    ) -> None:
        """Stop collecting, close the environment, end the actor; may be called twice.

        Args:
            timeout: seconds to wait for the batch under way, before the actor is ended anyway; 10
                by default.
            close_env: close the environment first.
            raise_on_error: raise what ended the collector, if something did.
        """
        if not self._closed:
            self._closed = True
            limit_s = 10.0 if timeout is None else timeout
            remote = self._remote
            if remote is not None:
                self._stop(remote, limit_s, close_env=close_env)
            if self._watch is not None:
                with suppress(TimeoutError):
                    self._watch.stop(limit_s)
            with suppress(WorkerError):  # the channel may be gone before its workers
                self._lose()
        if raise_on_error:
            self.check()

    def _stop(self, remote: RemoteObject, limit_s: float, *, close_env: bool) -> None:
        ray = require_ray("RayLLMCollector")
        # A process that is dead or hangs cannot be asked, and need not be.
        with suppress(WorkerError):
            remote.result(remote.submit("stop", control=True), timeout_s=limit_s)
            if self._run is not None:
                ray.wait([self._run], timeout=limit_s)
            if close_env:
                remote.result(remote.submit("close", control=True), timeout_s=limit_s)

    def __enter__(self) -> RayLLMCollector:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.shutdown(raise_on_error=error is None)

    def __repr__(self) -> str:
        return (
            f"RayLLMCollector({self.worker_name!r}, version={self.policy_version}, "
            f"restarts={self.restarts}/{self.max_restarts})"
        )
