"""Ray actor of a :class:`~torchrl_llm.collectors.RayLLMCollector`, both of its sides.

:class:`CollectorHost` runs inside the actor. :class:`CollectorActor` is this process's side: it
starts the actor, watches it, restarts it when it dies, and tells it of weights.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDictBase, lazy_stack
from torchrl._utils import logger

from torchrl_llm._ray import ActorOptions, RemoteObject, check_resources, require_ray
from torchrl_llm.collectors.collecting_thread import BackgroundLoop
from torchrl_llm.collectors.collecting_worker import CollectorWorker
from torchrl_llm.collectors.llm_collector import LLMCollector
from torchrl_llm.collectors.transport.channel import RowChannel
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.rollouts import split_rollout
from torchrl_llm.data.wire import PackedRows, pack_rows, unpack_row_list
from torchrl_llm.envs.ids import set_process_number
from torchrl_llm.errors import ConfigError, WeightUpdateError, WorkerError
from torchrl_llm.weights.weight_source import WeightReceipt, WeightSource

_POLL_S = 0.2
_THREADS = 4
_numbers = itertools.count()
# Process numbers from 2**15 on are those of actors; children of multiprocessing count from 1.
# Drawn, because rows of the run that this one continues may still wait for their group.
_NUMBERS = 2**15
_first_number = secrets.randbelow(_NUMBERS)
_PLACEMENT = ("memory", "scheduling_strategy", "accelerator_type", "runtime_env")
# Where the ids of a process may begin, and how many it can give out before the next such place.
_STARTS, _APART = 2**13, 2**21

InFlight = Literal["wait", "keep", "abort"]


class PackedBatch(NamedTuple):
    """A batch on its way: its rows in wire form, and the shape that they had.

    Attributes:
        rows: in the order of ``batch.reshape(-1)``.
        shape: batch size of the batch.
    """

    rows: PackedRows
    shape: torch.Size

    @classmethod
    def of(cls, batch: TensorDictBase) -> PackedBatch:
        """Pack a batch of shape ``[N]`` or ``[B, T]``."""
        return cls(pack_rows(split_rollout(batch)), batch.batch_size)

    def unpack(self) -> TensorDictBase:
        """The batch: a lazy stack ``[N]``, or of such along the last dimension."""
        return _stacked(unpack_row_list(self.rows), self.shape)


def _stacked(rows: list[Any], shape: torch.Size) -> TensorDictBase:
    if len(shape) == 1:
        return lazy_rows(rows)
    # Step by step, as a collector stacks them.
    steps = [_stacked(rows[t :: shape[-1]], shape[:-1]) for t in range(shape[-1])]
    return lazy_stack(steps, -1)


class CollectorHost:
    """A collector in an actor, with or without a channel.

    Args:
        env: of :class:`~torchrl_llm.collectors.LLMCollector`.
        options: its other arguments.
        number: tells the ids of this process apart from those of others.
        channel: gets what is collected by :meth:`run`.
        name: of this worker in the channel.
        claim_rows: see :class:`~torchrl_llm.collectors.collecting_worker.CollectorWorker`.
    """

    def __init__(
        self,
        env: Any,
        options: Mapping[str, Any],
        *,
        number: int,
        channel: RowChannel | None = None,
        name: str = "",
        claim_rows: int | None = None,
    ) -> None:
        set_process_number(number, first=secrets.randbelow(_STARTS) * _APART)
        self.collector = LLMCollector(env, **options)
        self.worker: CollectorWorker | None = None
        if channel is not None:
            self.worker = CollectorWorker(self.collector, channel, name=name, claim_rows=claim_rows)
        self._stopping = threading.Event()
        self._batches = iter(self.collector)

    def next(self) -> tuple[bool, PackedBatch | None]:
        """Whether there was another batch, and it, unless the actor wrote it."""
        for batch in self._batches:
            return True, None if batch is None else PackedBatch.of(batch)
        return False, None

    def run(self) -> str:
        """Collect until :meth:`stop` or the end; returns why it ended."""
        if self.worker is not None:
            return self.worker.run()
        for _ in self._batches:
            if self._stopping.is_set():
                return "it was stopped"
        return "it has collected all its turns"

    def stop(self) -> None:
        """End :meth:`run` after the batch under way."""
        self._stopping.set()
        if self.worker is not None:
            self.worker.stop()

    def close(self) -> None:
        """Close the environment."""
        self.collector.shutdown(timeout=0, raise_on_error=False)

    def load_weights(
        self, source: WeightSource, version: int, in_flight: InFlight
    ) -> list[WeightReceipt]:
        """See :meth:`~torchrl_llm.collectors.LLMCollector.load_weights`."""
        if self.worker is not None:
            return self.worker.load_weights(source, version, in_flight)
        return self.collector.load_weights(source, version=version, in_flight=in_flight)

    def set_policy_version(self, version: int) -> None:
        """Name the version of weights that another process has changed."""
        self.collector.set_policy_version(version)


def actor_options(
    remote_config: Mapping[str, Any] | None, **given: Any
) -> tuple[ActorOptions, dict[str, Any]]:
    """What an actor needs, from TorchRL's ``remote_config``.

    Args:
        remote_config: fields of ``ActorOptions``, and ``memory``,
            ``scheduling_strategy``, ``accelerator_type``, ``runtime_env`` of Ray.
        given: fields that override it; ``None`` for those that were not given.

    Returns:
        The options, and what is left for Ray.

    Raises:
        ConfigError: for another key.

    Example:
        >>> actor_options({"num_cpus": 2, "memory": 2**30}, num_cpus=0.5)[0].num_cpus
        0.5
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


class _Weights(NamedTuple):
    """What a collector should sample with: where it is, or ``None`` for where it was."""

    source: WeightSource | None
    version: int


@dataclass(kw_only=True, eq=False, repr=False)
class CollectorActor:
    """A collector in an actor that is restarted when it dies.

    Args:
        env: see :class:`~torchrl_llm.collectors.RayLLMCollector`, as all others.
        collector_options: arguments of the collector in the actor.
        options: what the actor needs.
        placement: options of Ray that say where it goes.
        name: begins the names of its workers.
        channel: gets what it collects.
        claim_rows: rows that it claims at once.
        in_flight: what becomes of conversations that have begun when weights come.
        max_restarts: how often it may be restarted.
        worker_timeout_s: seconds without a heartbeat after which it is taken for hung.

    Attributes:
        worker_name: its name in the channel, another one after each restart.
        restarts: how often it was restarted.
        failure: what ended it for good.
        weights: the latest that it was told of; those before where they did not arrive.
    """

    env: Any
    collector_options: dict[str, Any]
    options: ActorOptions
    placement: Mapping[str, Any]
    name: str
    channel: RowChannel | None
    claim_rows: int | None
    in_flight: InFlight
    max_restarts: int
    worker_timeout_s: float

    def __post_init__(self) -> None:
        self.restarts = 0
        self.failure: BaseException | None = None
        self.closed = False
        self._lock = threading.RLock()
        self._pending: Any = None
        self._run: Any = None
        self._watch: BackgroundLoop | None = None
        self._on_batch: Callable[[PackedBatch], None] | None = None
        self._remote: RemoteObject | None = self._build()
        version = self._remote.read("collector.policy_version")
        self.weights = self._arrived = _Weights(None, version if isinstance(version, int) else 0)

    # -- life -------------------------------------------------------------------------------------

    def _build(self) -> RemoteObject:
        number = next(_numbers)
        self.worker_name = f"{self.name}-{number}"
        factory = partial(
            CollectorHost,
            self.env,
            self.collector_options,
            number=_NUMBERS + (_first_number + number) % _NUMBERS,
            channel=self.channel,
            name=self.worker_name,
            claim_rows=self.claim_rows,
        )
        what = f"RayLLMCollector {self.worker_name!r}"
        check_resources(what, [self.options.bundle])
        return RemoteObject(factory, self.options, what=what, placement=self.placement or None)

    @property
    def remote(self) -> RemoteObject:
        """The actor.

        Raises:
            ConfigError: it was shut down.
            WorkerError: it is being restarted.
            Exception: what ended it for good.
        """
        self.check()
        if self.closed:
            raise ConfigError("this collector was shut down")
        if self._remote is None:
            raise WorkerError(f"RayLLMCollector {self.name!r} is being restarted")
        return self._remote

    @property
    def started(self) -> bool:
        """Whether :meth:`start` was called."""
        return self._watch is not None

    @property
    def is_running(self) -> bool:
        """Whether it was started and still collects, or is being restarted."""
        return self._watch is not None and self._watch.is_running

    def check(self) -> None:
        """Raise what ended it for good; nothing while it lives."""
        if self._watch is not None and self._watch.failure is not None:
            self.failure = self._watch.failure
        if self.failure is not None:
            raise self.failure

    def _lose(self) -> None:
        """End the actor, and give back what it had claimed."""
        with self._lock:
            remote, self._remote, self._pending = self._remote, None, None
        if remote is not None:
            remote.shutdown()
        if self.channel is not None:
            counts = self.channel.forget(self.worker_name)
            if counts.claimed or counts.in_flight:
                logger.warning(
                    f"{self.worker_name}: {counts.claimed} claimed rows go to others, "
                    f"{counts.in_flight} tokens are lost"
                )

    def revive(self, error: WorkerError) -> None:
        """Restart the actor after it died, with the latest weights, or fail for good.

        Args:
            error: what it died of.
        """
        first_line = str(error).partition("\n")[0]
        logger.warning(f"{self.worker_name}: {first_line}")
        self._lose()
        if self.restarts >= self.max_restarts:
            self.failure = error
        if self.failure is not None or self.closed:
            return
        self.restarts += 1
        remote, brought = self._build(), None
        while True:
            with self._lock:
                latest = self.weights
                if self.closed:
                    remote.shutdown()
                    return
                if latest is brought:
                    # Whatever is sent from now on goes to the new one.
                    self._remote, self._arrived = remote, latest
                    break
            if latest.source is None:
                remote.call("set_policy_version", latest.version)
            else:
                remote.call("load_weights", *latest, "wait")
            brought = latest
        logger.warning(f"restarted as {self.worker_name}, with weights {latest.version}")

    # -- the run ----------------------------------------------------------------------------------

    def start(self, on_batch: Callable[[PackedBatch], None] | None) -> None:
        """Let it collect, and watch it, in a thread of this process.

        Args:
            on_batch: gets each batch here; ``None`` where the actor writes them.
        """
        self._on_batch = on_batch
        self._set_off()
        self._watch = BackgroundLoop(self._look_after, name=f"watch of {self.name}")
        self._watch.start()

    def _set_off(self) -> None:
        self._begun_s = self._looked_s = time.time()
        self._run = self.remote.submit("run" if self._on_batch is None else "next")

    def _look_after(self) -> bool:
        """One look at the run: whether to go on looking."""
        ray = require_ray("RayLLMCollector")
        remote = self._remote
        if remote is None:
            return False
        ready, _ = ray.wait([self._run], timeout=_POLL_S)
        try:
            if not ready:
                self._check_heartbeat()
                return True
            result = remote.result(self._run, call="collecting")
        except WorkerError as error:
            if self.closed:
                return False
            self.revive(error)
            if self.failure is not None or self.closed:
                return False
            self._set_off()
            return True
        except Exception as error:
            # Whatever policy or environment raised ends this collector, and reaches the learner.
            logger.error(f"{self.worker_name} stopped: {type(error).__name__}: {error}")
            self._lose()
            self.failure = error
            return False
        return self._handle(remote, result)

    def _handle(self, remote: RemoteObject, result: Any) -> bool:
        if self._on_batch is None:
            logger.info(f"{self.worker_name} ended: {result}")
            if self.channel is not None:
                self.channel.forget(self.worker_name)
            return False
        there, batch = result
        if there:
            if not self.closed:
                self._run = remote.submit("next")
            self._on_batch(batch)
        return there and not self.closed

    def _check_heartbeat(self) -> None:
        now, limit_s = time.time(), self.worker_timeout_s
        # With a thousand collectors each of them cannot ask five times a second.
        if self.channel is None or now - self._looked_s < limit_s / 10:
            return
        self._looked_s = now
        counts = self.channel.workers().get(self.worker_name)
        seen_s = self._begun_s if counts is None else max(counts.seen_s, self._begun_s)
        if now - seen_s > limit_s:
            raise WorkerError(
                f"{self.worker_name!r} gave no heartbeat for {limit_s:g} s (no policy call "
                "ended, no claim was made); its environment or policy hangs, or worker_timeout_s "
                "is less than one call takes"
            )

    def stop(self, limit_s: float, *, close_env: bool) -> None:
        """End the run after the batch under way, and then the actor, in any case.

        Args:
            limit_s: seconds to wait for that batch.
            close_env: close the environment first.
        """
        if self.closed:
            return
        self.closed = True
        ray = require_ray("RayLLMCollector", running=False)
        remote = self._remote
        if remote is not None and ray.is_initialized():
            # A process that is dead or hangs cannot be asked, and need not be.
            with suppress(WorkerError):
                remote.result(remote.submit("stop", lane="control"), timeout_s=limit_s)
                if self._run is not None:
                    ray.wait([self._run], timeout=limit_s)
                if close_env:
                    remote.result(remote.submit("close", lane="control"), timeout_s=limit_s)
        if self._watch is not None:
            with suppress(TimeoutError):
                self._watch.stop(limit_s)
        if ray.is_initialized():
            with suppress(WorkerError):  # the channel may be gone before its workers
                self._lose()

    # -- weights ----------------------------------------------------------------------------------

    def send(self, source: WeightSource | None, version: int) -> None:
        """Tell it of weights, without waiting for them to arrive.

        Args:
            source: where they are; ``None`` where only their number is told.
            version: their number.

        Raises:
            WeightUpdateError: those before did not arrive.
            Exception: what ended it for good.
        """
        self.settle()
        with self._lock:
            self.weights = _Weights(source, version)
            remote = self._remote
            if remote is None:
                self.check()  # being restarted, it gets them before it samples
            elif source is None:
                self._pending = remote.submit("set_policy_version", version)
            else:
                self._pending = remote.submit("load_weights", source, version, self.in_flight)

    def settle(self) -> list[WeightReceipt]:
        """Wait for the weights under way, and compare what arrived with what was sent.

        Raises:
            WeightUpdateError: they did not arrive, or not as they were sent.
            WorkerError: it died, and will not be restarted.
        """
        with self._lock:
            remote, pending, self._pending = self._remote, self._pending, None
            sent = self.weights
        if pending is None or remote is None:
            return []
        try:
            receipts = remote.result(pending, call="the update of weights") or []
            self._compare(receipts, sent)
        except WeightUpdateError:
            # It samples with the old ones, and nobody may say otherwise.
            self.weights = self._arrived
            raise
        except WorkerError:
            # Whoever watches it finds the same, and brings the weights to its successor.
            if not self.is_running and self.restarts >= self.max_restarts:
                raise
            return []
        self._arrived = sent
        return receipts

    def _compare(self, receipts: list[WeightReceipt], sent: _Weights) -> None:
        for receipt in receipts:
            digest = sent.source.digest or receipt.digest
            if (receipt.version, receipt.digest) != (sent.version, digest):
                raise WeightUpdateError(
                    f"version {sent.version} with digest {digest} was sent to "
                    f"{self.worker_name!r}, and it got {receipt}"
                )
