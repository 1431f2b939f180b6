"""Collector in a Ray actor: the same batches from a different process.

:mod:`torchrl_llm.collectors.ray_actor` runs in the actor;
:mod:`torchrl_llm.modules.remote.revived_actor` restarts it when it dies.
"""

from __future__ import annotations

import inspect
import itertools
import queue as queues
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

from tensordict import TensorDictBase
from torchrl._utils import logger
from torchrl.data import RayReplayBuffer as CoreRayReplayBuffer
from torchrl.data import ReplayBuffer as CoreReplayBuffer
from torchrl.envs import EnvBase

from torchrl_llm._checked import Ge, Gt, checked
from torchrl_llm._ray import RemoteObject, check_resources, require_ray
from torchrl_llm._registry import FullSignature
from torchrl_llm._threads import BackgroundLoop
from torchrl_llm.collectors.llm_collector import LLMCollector
from torchrl_llm.collectors.policy_versions import VersionedCollector, Weights
from torchrl_llm.collectors.ray_actor import CollectorHost, InFlight, PackedBatch, actor_options
from torchrl_llm.collectors.transport.channel import RowChannel
from torchrl_llm.errors import ConfigError, WeightUpdateError, WorkerError
from torchrl_llm.modules.remote import ObjectStoreSource
from torchrl_llm.modules.remote.revived_actor import RevivedActor, Sent, SentWeights
from torchrl_llm.weights import WeightUpdater, engine_weights
from torchrl_llm.weights.weight_source import WeightReceipt, WeightSource

_POLL_S = 0.2
_numbers = itertools.count()
# Actors have process numbers from 2**15 on; children of multiprocessing have numbers from 1 on. The
# numbers are random, because rows of a resumed run may still wait for their group.
_NUMBERS = 2**15
_first_number = secrets.randbelow(_NUMBERS)


class RayLLMCollector(VersionedCollector):
    """An :class:`~torchrl_llm.collectors.LLMCollector` in its own Ray actor.

    There are three ways to get its rows:

    - Iterate over it, or call :meth:`next`. Batches arrive in this process, or in a
      ``replay_buffer`` if one is given.
    - Call :meth:`start` with a ``replay_buffer``, which it fills asynchronously.
    - Call :meth:`start` with a :class:`~torchrl_llm.collectors.transport.RayChannel` as ``queue``,
      for a learner with a :class:`~torchrl_llm.collectors.ChannelCollector`. Rows are granted,
      claimed and counted, so that the counts include every token, even lost ones.

    A started collector is monitored. If its process dies or sends no heartbeat for
    ``worker_timeout_s``, the process is killed. Its claims go to other workers, and its undelivered
    tokens count as lost. The collector is restarted up to ``max_restarts`` times, under a new name
    and with the latest weights.

    Weights are put into Ray's object store once for all receivers. Each receiver returns the digest
    of the received weights.

    Args:
        env: an environment or (better) a callable that builds one; it is sent to the actor.
        total_dialog_turns: number of turns after which the collector ends, -1 for no end. The count
            starts at zero after a restart.
        replay_buffer: a buffer of this process, or a buffer in Ray, into which the actor writes
            directly.
        flatten_data: return rows instead of ``[*B, T]``; the default if a buffer or queue is given.
        weight_updater: updater in this process that sends weights to an engine in a third process.
            By default weights are sent to the policy in the actor.
        queue: a channel of rows, or a queue of Ray (``ray.util.queue.Queue``).
        ray_init_config: arguments of ``ray.init``, which is called if Ray is not running yet.
        remote_config: resources of the actor, see
            :func:`~torchrl_llm.collectors.ray_actor.actor_options`.
        sync_iter: ``False`` collects the next batch while the caller processes the current one.
        num_cpus: CPUs of the actor; 1 by default.
        num_gpus: GPUs of the actor; none by default.
        name: name of this collector; names of its workers in the channel begin with it.
        claim_rows: rows per claim; by default the turns of a batch.
        in_flight: what happens to unfinished conversations when new weights arrive, see
            :meth:`~torchrl_llm.collectors.LLMCollector.load_weights`.
        wait_for_updates: ``False`` does not wait until weights have arrived. The next update then
            waits for them and raises their errors.
        max_restarts: most restarts of the actor.
        worker_timeout_s: seconds without a heartbeat (a policy call, a claim, a delivery) after
            which the actor counts as hung; only with a channel.
        timeout_s: most seconds of a call, including :meth:`next`.
        **options: the other arguments of :class:`~torchrl_llm.collectors.LLMCollector`, which is
            built in the actor: ``policy`` (sent there) or ``policy_factory`` (called there),
            ``dialog_turns_per_batch``, ``yield_completed_trajectories``, ``postproc``, ...

    Attributes:
        worker_name: name of the collector in the channel; it is new after each restart.
        receipts: receipts of the last weights that the collector waited for.

    Raises:
        ConfigError: arguments contradict each other.
        TypeError: an argument is unknown.
        MissingExtraError: Ray is not installed.
        ResourceError: Ray is not running, or lacks the resources.
        WorkerError: the actor did not start in time.
        Exception: an exception while the environment or policy was built in the actor.
    """

    __signature__ = FullSignature(LLMCollector)
    init_random_frames = 0  # read by TorchRL's trainer

    @checked
    def __init__(
        self,
        env: EnvBase | Callable[[], EnvBase],
        *,
        total_dialog_turns: int = -1,
        replay_buffer: Any = None,
        flatten_data: bool | None = None,
        weight_updater: WeightUpdater | Callable[[], WeightUpdater] | None = None,
        queue: Any = None,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_config: Mapping[str, Any] | None = None,
        sync_iter: bool = True,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        name: str = "collector",
        claim_rows: int | None = None,
        in_flight: InFlight = "wait",
        wait_for_updates: bool = True,
        max_restarts: Annotated[int, Ge(0)] = 0,
        worker_timeout_s: Annotated[float, Gt(0)] = 300.0,
        timeout_s: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        ray = require_ray("RayLLMCollector", running=ray_init_config is None)
        for unknown in set(options) - set(inspect.signature(LLMCollector).parameters):
            raise TypeError(f"RayLLMCollector has no argument {unknown!r}")
        if (options.get("policy") is None) == (options.get("policy_factory") is None):
            raise ConfigError("pass exactly one of policy and policy_factory")
        if queue is not None and replay_buffer is not None:
            raise ConfigError("pass a replay_buffer or a queue, not both")
        if isinstance(queue, (queues.Queue, queues.SimpleQueue)):
            raise ConfigError(
                f"a {type(queue).__module__}.{type(queue).__name__} belongs to this process; pass "
                "a RayChannel or a ray.util.queue.Queue"
            )
        if not ray.is_initialized():
            ray.init(**(ray_init_config or {}))
        channel = queue if isinstance(queue, RowChannel) else None
        if claim_rows is not None and channel is None:
            raise ConfigError("claim_rows needs a channel as queue")
        self.replay_buffer, self.queue, self.channel = replay_buffer, queue, channel
        self.total_frames = total_dialog_turns
        self.sync_iter, self.wait_for_updates = sync_iter, wait_for_updates
        # A buffer of this process stays in this process. The actor writes only into a buffer in
        # Ray.
        self._local_buffer = isinstance(replay_buffer, CoreReplayBuffer) and not isinstance(
            replay_buffer, CoreRayReplayBuffer
        )
        beside = replay_buffer is not None or queue is not None
        collector_options = {
            **options,
            "total_dialog_turns": total_dialog_turns,
            "replay_buffer": None if self._local_buffer else replay_buffer,
            "flatten_data": beside if flatten_data is None else flatten_data,
            "queue": None if channel is not None else queue,
        }
        needs, placement = actor_options(
            remote_config, num_cpus=num_cpus, num_gpus=num_gpus, timeout_s=timeout_s
        )
        self.receipts: list[WeightReceipt] = []
        self.weight_updater = weight_updater
        self._collector_options = collector_options
        self._make_host = partial(
            CollectorHost, env, collector_options, channel=channel, claim_rows=claim_rows
        )
        self._needs, self._placement, self._name = needs, placement, name
        self._in_flight, self._worker_timeout_s = in_flight, worker_timeout_s
        self._ahead: Any = None  # a batch that the actor is already collecting
        self._run: Any = None
        self._loop: BackgroundLoop | None = None
        self._closed = False
        self._weights = SentWeights()
        self._pending: tuple[RemoteObject, Any, Sent] | None = None
        self._actor = RevivedActor(
            self._build,
            what=f"RayLLMCollector {name!r}",
            bring=lambda remote, sent: remote.call(
                "load_weights", sent.source, sent.version, "wait"
            ),
            weights=self._weights,
            max_restarts=max_restarts,
            on_dead=self._give_claims_back,
        )
        self._actor.start()
        version = self._actor.remote.read("collector.policy_version")
        first = Sent(None, version if isinstance(version, int) else 0, "number")
        self._weights.needed = self._arrived = (first,)
        turns = self._actor.remote.read("collector.dialog_turns_per_batch")
        self.requested_frames_per_batch = turns

    def _build(self) -> RemoteObject:
        number = next(_numbers)
        self.worker_name = f"{self._name}-{number}"
        number = _NUMBERS + (_first_number + number) % _NUMBERS
        factory = partial(self._make_host, number=number, name=self.worker_name)
        what = f"RayLLMCollector {self.worker_name!r}"
        check_resources(what, [self._needs.bundle])
        return RemoteObject(factory, self._needs, what=what, placement=self._placement)

    @property
    def restarts(self) -> int:
        """Number of restarts."""
        return self._actor.restarts

    def pid(self) -> int:
        """Return the process id of the actor.

        Raises:
            WorkerError: the actor died, does not answer, or is being restarted.
        """
        return self._actor.remote.pid()

    # -- batches ----------------------------------------------------------------------------------

    def next(self) -> TensorDictBase | None:
        """Return the next batch; ``None`` if it was written to the buffer or queue.

        Raises:
            StopIteration: the budget of turns is used up.
            WorkerError: the actor died, hung or timed out, and has no restarts left.
            Exception: an exception of policy or environment.
        """
        if self._loop is not None:
            raise ConfigError("this collector was started and collects by itself")
        if self.channel is not None:
            raise ConfigError("a collector with a channel is started: call start()")
        while True:
            try:
                there, packed = self._next_packed()
                break
            except WorkerError as error:
                self._actor.check()
                self._restart(error)
        if not there:
            raise StopIteration
        if packed is None:
            return None
        if self._local_buffer:
            self._write(packed)
            return None
        return packed.unpack()

    def _write(self, packed: PackedBatch) -> None:
        self.replay_buffer.extend(packed.rows)

    def _next_packed(self) -> tuple[bool, PackedBatch | None]:
        remote = self._actor.remote
        ref, self._ahead = self._ahead or remote.submit("next"), None
        found = remote.result(ref, call="next")
        if found[0] and not self.sync_iter:
            self._ahead = remote.submit("next")
        return found

    def _restart(self, error: WorkerError) -> None:
        """Restart the actor with the latest weights, or raise if no restart is left.

        Args:
            error: cause of the actor's death.
        """
        first_line = str(error).partition("\n")[0]
        logger.warning(f"{self.worker_name}: {first_line}")
        if self._actor.lose(error):
            self._actor.revive()
            if self._actor.is_up:
                version = self.policy_version
                logger.warning(f"restarted as {self.worker_name}, with weights {version}")

    def _give_claims_back(self) -> None:
        if self.channel is None:
            return
        counts = self.channel.forget(self.worker_name)
        if counts.claimed or counts.in_flight:
            logger.warning(
                f"{self.worker_name}: {counts.claimed} claimed rows go to others, "
                f"{counts.in_flight} tokens are lost"
            )

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Yield batches until the budget is used up; ``None`` for a batch that the actor wrote."""
        while True:
            try:
                batch = self.next()
            except StopIteration:
                return
            yield batch

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        return self.iterator()

    # -- next to training -----------------------------------------------------------------------

    def start(self) -> None:
        """Collect into the buffer, queue or channel until :meth:`shutdown`; return immediately.

        Errors in the actor are logged. Unless the actor is restarted, the next call of
        ``update_policy_weights_``, :meth:`check` or :meth:`shutdown` raises them.

        Raises:
            ConfigError: there is no buffer, queue or channel, or the collector was already started.
        """
        if self.replay_buffer is None and self.queue is None:
            raise ConfigError("start() needs a replay_buffer, a queue or a channel to collect into")
        if self._loop is not None:
            raise ConfigError("this collector was started before")
        self._loop = BackgroundLoop(self._look_after, name=f"watch of {self._name}")
        self._loop.start()

    def _look_after(self) -> bool:
        """Wait for the end of one call or of the actor; return whether more calls follow."""
        try:
            return self._collect()
        except WorkerError as error:
            if not self._closed:
                self._restart(error)
            return self._actor.is_up and not self._closed
        except Exception as error:
            # An exception of the policy or environment ends this collector and is raised in the
            # learner.
            logger.error(f"{self.worker_name} stopped: {type(error).__name__}: {error}")
            self._actor.fail(error)
            return False

    def _collect(self) -> bool:
        ray, remote = require_ray("RayLLMCollector"), self._actor.remote
        begun_s = looked_s = time.time()
        ahead, self._ahead = self._ahead, None
        self._run = ahead or remote.submit("next" if self._local_buffer else "run")
        while not ray.wait([self._run], timeout=_POLL_S)[0]:
            if self._actor.state == "ended":
                return False
            # A thousand collectors must not each ask five times per second.
            if self.channel is not None and time.time() - looked_s >= self._worker_timeout_s / 10:
                looked_s = time.time()
                self._check_heartbeat(begun_s)
        result = remote.result(self._run, call="collecting")
        if not self._local_buffer:
            logger.info(f"{self.worker_name} ended: {result}")
            if self.channel is not None:
                self.channel.forget(self.worker_name)
            return False
        there, packed = result
        if there:
            if not self._closed:
                self._ahead = remote.submit("next")
            self._write(packed)
        return there and not self._closed

    def _check_heartbeat(self, begun_s: float) -> None:
        counts, limit_s = self.channel.workers().get(self.worker_name), self._worker_timeout_s
        seen_s = begun_s if counts is None else max(counts.seen_s, begun_s)
        if time.time() - seen_s > limit_s:
            raise WorkerError(
                f"{self.worker_name!r} gave no heartbeat for {limit_s:g} s (no policy call "
                "ended, no claim was made); its environment or policy hangs, or worker_timeout_s "
                "is less than one call takes"
            )

    @property
    def is_running(self) -> bool:
        """Return whether the collector was started, and is collecting or restarting."""
        return self._loop is not None and self._loop.is_running

    def check(self) -> None:
        """Raise the error that ended the collector, if any.

        Raises:
            WorkerError: the process of the collector died or hung too often.
            Exception: an exception of policy, environment or buffer.
        """
        self._actor.check()

    # -- weights and versions ---------------------------------------------------------------------

    def _update(self, weights: Weights | None) -> None:
        self.check()
        source, version = None, self.policy_version + 1
        if self.weight_updater is not None:
            self.weight_updater.push_weights(weights)
        elif weights is not None:
            source = ObjectStoreSource.put(engine_weights(weights))
        self.load_weights(source, version=version)

    def load_weights(self, source: WeightSource | None, *, version: int) -> list[WeightReceipt]:
        """Let the collector in the actor load new weights.

        Args:
            source: source of the weights; ``None`` if they are already in place and only the
                version changes.
            version: their number.

        Returns:
            The receipts; an empty list while the collector restarts or with
            ``wait_for_updates=False``.

        Raises:
            WeightUpdateError: the weights did not arrive, or arrived changed.
            WorkerError: the collector is dead and has no restarts left.
        """
        self._settle()
        sent = Sent(source, version, "number" if source is None else source.kind)
        with self._weights.lock:
            self._weights.add(sent, timeout_s=self._needs.timeout_s)
            if self._actor.is_up:
                remote = self._actor.remote
                ref = remote.submit("load_weights", source, version, self._in_flight)
                self._pending = (remote, ref, sent)
            else:
                self.check()  # a restarted collector gets the weights before it samples
        if not self.wait_for_updates:
            return []
        self.receipts = self._settle()
        return self.receipts

    def _settle(self) -> list[WeightReceipt]:
        """Wait for the current weights, and compare the received digest with the sent one.

        Raises:
            WeightUpdateError: the weights did not arrive, or arrived changed.
            WorkerError: the collector died and has no restarts left.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return []
        (remote, ref, sent), needed = pending, self._weights.needed
        try:
            receipts = remote.result(ref, call="the update of weights")
            for receipt in receipts:
                digest = sent.source.digest or receipt.digest
                if (receipt.version, receipt.digest) != (sent.version, digest):
                    raise WeightUpdateError(
                        f"version {sent.version} with digest {digest} was sent to "
                        f"{self.worker_name!r}, and it got {receipt}"
                    )
        except WeightUpdateError:
            # The collector samples with the old weights, so the version must not change.
            self._weights.needed = self._arrived
            raise
        except WorkerError:
            # The monitor also notices this, and sends the weights to the restarted collector.
            if not self.is_running and self.restarts >= self._actor.max_restarts:
                raise
            return []
        self._arrived = needed
        return receipts

    def increment_version(self) -> None:
        """Count a new version of weights that are already in place."""
        self.load_weights(None, version=self.policy_version + 1)

    @property
    def policy_version(self) -> int:
        """Version of the last sent weights."""
        return self._weights.needed[-1].version

    # -- state and end ----------------------------------------------------------------------------

    @property
    def dialog_turns(self) -> int:
        """Number of turns collected since the last restart."""
        return self._actor.remote.read("collector.dialog_turns")

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environment in the actor; return the next seed."""
        return self._actor.remote.call("collector.set_seed", seed, static_seed)

    def set_postproc(self, postproc: Callable[[TensorDictBase], TensorDictBase]) -> None:
        """Set the post-processing of batches in the actor; see the arguments of the class."""
        self._actor.remote.call("collector.set_postproc", postproc)
        self._collector_options["postproc"] = postproc  # a restarted collector starts with it

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return all data that the next batch depends on; see :meth:`LLMCollector.state_dict`.

        Raises:
            WorkerError: the actor died or did not answer in time.
            CheckpointError: the environment is an ``AsyncEnvPool``.
        """
        state = self._actor.remote.call("collector.state_dict")
        return OrderedDict(collector=state, version=self.policy_version)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of :meth:`state_dict`; the weights must be sent again.

        Args:
            state_dict: state of a collector with the same configuration.
        """
        self._actor.remote.call("collector.load_state_dict", state_dict["collector"])
        self.load_weights(None, version=state_dict["version"])

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Stop collecting, close the environment, end the actor; can be called repeatedly.

        Args:
            timeout: seconds to wait for the current batch before the actor is killed; 10 by
                default.
            close_env: close the environment first.
            raise_on_error: raise the error that ended the collector, if any.
        """
        if not self._closed:
            self._closed = True
            self._stop(10.0 if timeout is None else timeout, close_env=close_env)
        if raise_on_error:
            self.check()

    def _stop(self, limit_s: float, *, close_env: bool) -> None:
        ray = require_ray("RayLLMCollector", running=False)
        if ray.is_initialized() and self._actor.is_up:
            remote = self._actor.remote
            # A dead or hung process cannot be called, and need not be.
            with suppress(WorkerError):
                remote.result(remote.submit("stop", lane="control"), timeout_s=limit_s)
                if self._run is not None:
                    ray.wait([self._run], timeout=limit_s)
                if close_env:
                    remote.result(remote.submit("close", lane="control"), timeout_s=limit_s)
        if self._loop is not None:
            with suppress(TimeoutError):
                self._loop.stop(limit_s)
        if ray.is_initialized():
            with suppress(WorkerError):  # the channel may end before its workers
                self._actor.end()

    def __repr__(self) -> str:
        return (
            f"RayLLMCollector({self.worker_name!r}, version={self.policy_version}, "
            f"restarts={self.restarts})"
        )
