"""Collector in a Ray actor: the same batches, from another process.

What runs in the actor is in :mod:`torchrl_llm.collectors.ray_actor`, how it comes back when it dies
in :mod:`torchrl_llm.modules.remote.revived_actor`.
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
# Process numbers from 2**15 on are those of actors; children of multiprocessing count from 1.
# Drawn, because rows of the run that this one continues may still wait for their group.
_NUMBERS = 2**15
_first_number = secrets.randbelow(_NUMBERS)


class RayLLMCollector(VersionedCollector):
    """An :class:`~torchrl_llm.collectors.LLMCollector` in its own Ray actor.

    Three ways to get what it collects:

    - iterate over it (or call :meth:`next`): batches come here, and with a ``replay_buffer`` they
      are written into it;
    - :meth:`start` it with a ``replay_buffer`` that is filled next to training;
    - :meth:`start` it with a :class:`~torchrl_llm.collectors.transport.RayChannel` as ``queue``,
      for a learner with a :class:`~torchrl_llm.collectors.ChannelCollector`: rows are granted,
      claimed and counted, so that it is known what became of each token, also of the lost ones.

    The collector is watched while it is started. Should its process die, or give no heartbeat
    for ``worker_timeout_s``, it is killed, its claims go to others, what it had sampled and not
    delivered is counted as lost, and it is restarted up to ``max_restarts`` times: under another
    name, and with the latest weights before it samples anything.

    Weights go through Ray's object store, once for all receivers; each echoes their digest.

    Args:
        env: an environment or, better, a callable that builds one: it is sent to the actor.
        total_dialog_turns: turns after which the collector ends, -1 for no end; counted from zero
            after a restart.
        replay_buffer: of this process, or one that lives in Ray: that one is written to by the
            actor itself.
        flatten_data: rows instead of ``[*B, T]``; the default where a buffer or queue is given.
        weight_updater: brings weights to an engine that is in neither process, and runs here; by
            default weights are sent to the policy in the actor.
        queue: a channel of rows, or a queue of Ray (``ray.util.queue.Queue``).
        ray_init_config: arguments of ``ray.init``, where Ray does not run yet.
        remote_config: what the actor needs, see
            :func:`~torchrl_llm.collectors.ray_actor.actor_options`.
        sync_iter: ``False`` collects the next batch while the caller works on the last one.
        num_cpus: CPUs of the actor; 1 by default.
        num_gpus: GPUs of the actor; none by default.
        name: of this collector; begins the names of its workers in the channel.
        claim_rows: rows that are claimed at once; the turns of a batch by default.
        in_flight: what becomes of conversations that have begun when weights come, see
            :meth:`~torchrl_llm.collectors.LLMCollector.load_weights`.
        wait_for_updates: ``False`` does not wait until weights have arrived; the next update does,
            and raises what went wrong.
        max_restarts: how often it may be restarted.
        worker_timeout_s: seconds without a heartbeat (a policy call, a claim, a delivery) after
            which it is taken for hung; of a channel only.
        timeout_s: most seconds that a call of it may take, :meth:`next` included.
        **options: the other arguments of :class:`~torchrl_llm.collectors.LLMCollector`, which is
            built in the actor: ``policy`` (sent there) or ``policy_factory`` (called there),
            ``dialog_turns_per_batch``, ``yield_completed_trajectories``, ``postproc``, ...

    Attributes:
        worker_name: its name in the channel, another one after each restart.
        receipts: of the last weights that were waited for.

    Raises:
        ConfigError: for arguments that contradict each other.
        TypeError: an argument that neither collector has.
        MissingExtraError: Ray is not installed.
        ResourceError: Ray is not running, or has less than what is needed.
        WorkerError: it did not start in time.
        Exception: what building environment or policy raised in the actor.
    """

    __signature__ = FullSignature(LLMCollector)
    init_random_frames = 0  # TorchRL's trainer reads it

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
        # A buffer of this process stays here; one in Ray is written to by the actor.
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
        self._ahead: Any = None  # a batch that the actor collects already
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
        """How often it was restarted."""
        return self._actor.restarts

    def pid(self) -> int:
        """Process of the actor.

        Raises:
            WorkerError: it died, does not answer, or is being restarted.
        """
        return self._actor.remote.pid()

    # -- batches ----------------------------------------------------------------------------------

    def next(self) -> TensorDictBase | None:
        """The next batch; ``None`` where it was written to the buffer or queue.

        Raises:
            StopIteration: the budget of turns is used up.
            WorkerError: the actor died, hung or did not answer in time, and may not be restarted.
            Exception: what policy or environment raised.
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
        """Restart the actor with the latest weights, or give it up.

        Args:
            error: what it died of.
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
        """Batches until the budget is used up; ``None`` for each that the actor wrote."""
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
        """Collect into the buffer, queue or channel until :meth:`shutdown`; returns at once.

        What goes wrong in the actor is logged, and raised by the next call of
        ``update_policy_weights_``, :meth:`check` or :meth:`shutdown`, unless it was restarted.

        Raises:
            ConfigError: there is neither of them, or it was started before.
        """
        if self.replay_buffer is None and self.queue is None:
            raise ConfigError("start() needs a replay_buffer, a queue or a channel to collect into")
        if self._loop is not None:
            raise ConfigError("this collector was started before")
        self._loop = BackgroundLoop(self._look_after, name=f"watch of {self._name}")
        self._loop.start()

    def _look_after(self) -> bool:
        """One call of the actor to its end, or to that of the actor: whether others follow."""
        try:
            return self._collect()
        except WorkerError as error:
            if not self._closed:
                self._restart(error)
            return self._actor.is_up and not self._closed
        except Exception as error:
            # Whatever policy or environment raised ends this collector, and reaches the learner.
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
            # With a thousand collectors each of them cannot ask five times a second.
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
        """Whether it was started and still collects, or is being restarted."""
        return self._loop is not None and self._loop.is_running

    def check(self) -> None:
        """Raise what ended the collector for good; nothing while it lives.

        Raises:
            WorkerError: its process died or hung too often.
            Exception: what policy, environment or buffer raised.
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
        """Tell the collector in the actor where new weights are.

        Args:
            source: where; ``None`` for weights that have their place already, so that only the
                version is told.
            version: their number.

        Returns:
            What arrived; nothing where the collector is being restarted, or need not be waited
            for.

        Raises:
            WeightUpdateError: they did not arrive, or not as they were sent.
            WorkerError: the collector is dead and may not be restarted.
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
                self.check()  # being restarted, it gets them before it samples
        if not self.wait_for_updates:
            return []
        self.receipts = self._settle()
        return self.receipts

    def _settle(self) -> list[WeightReceipt]:
        """Wait for the weights under way, and compare what arrived with what was sent.

        Raises:
            WeightUpdateError: they did not arrive, or not as they were sent.
            WorkerError: it died, and will not be restarted.
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
            # It samples with the old ones, and nobody may say otherwise.
            self._weights.needed = self._arrived
            raise
        except WorkerError:
            # Whoever watches it finds the same, and brings the weights to its successor.
            if not self.is_running and self.restarts >= self._actor.max_restarts:
                raise
            return []
        self._arrived = needed
        return receipts

    def increment_version(self) -> None:
        """Count a new version of weights that have their place already."""
        self.load_weights(None, version=self.policy_version + 1)

    @property
    def policy_version(self) -> int:
        """Number of the last weights that were sent."""
        return self._weights.needed[-1].version

    # -- state and end ----------------------------------------------------------------------------

    @property
    def dialog_turns(self) -> int:
        """Turns collected so far, since the last restart."""
        return self._actor.remote.read("collector.dialog_turns")

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environment in the actor; returns the next seed."""
        return self._actor.remote.call("collector.set_seed", seed, static_seed)

    def set_postproc(self, postproc: Callable[[TensorDictBase], TensorDictBase]) -> None:
        """Set the post-processing of batches in the actor; see the arguments of the class."""
        self._actor.remote.call("collector.set_postproc", postproc)
        self._collector_options["postproc"] = postproc  # a restarted one begins with it

    def state_dict(self) -> OrderedDict[str, Any]:
        """What the next batch depends on, as :meth:`LLMCollector.state_dict` has it.

        Raises:
            WorkerError: the actor died or did not answer in time.
            CheckpointError: for an ``AsyncEnvPool``.
        """
        state = self._actor.remote.call("collector.state_dict")
        return OrderedDict(collector=state, version=self.policy_version)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken; the weights are to be sent again.

        Args:
            state_dict: of a collector that was built alike.
        """
        self._actor.remote.call("collector.load_state_dict", state_dict["collector"])
        self.load_weights(None, version=state_dict["version"])

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
            self._stop(10.0 if timeout is None else timeout, close_env=close_env)
        if raise_on_error:
            self.check()

    def _stop(self, limit_s: float, *, close_env: bool) -> None:
        ray = require_ray("RayLLMCollector", running=False)
        if ray.is_initialized() and self._actor.is_up:
            remote = self._actor.remote
            # A process that is dead or hangs cannot be asked, and need not be.
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
            with suppress(WorkerError):  # the channel may be gone before its workers
                self._actor.end()

    def __repr__(self) -> str:
        return (
            f"RayLLMCollector({self.worker_name!r}, version={self.policy_version}, "
            f"restarts={self.restarts})"
        )
