"""Keeps the replicas of a pool alive, with the current weights.

The supervisor runs in a separate actor that needs no CPU. Every ``interval_s`` it asks each replica
for a heartbeat and its load. A replica that died, does not answer, or makes no progress with its
requests is stopped and rebuilt. It gets the current weights before it serves. Clients ask the
supervisor for the replicas (:meth:`Supervisor.poll`) and report failed replicas.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from torchrl._utils import logger

from torchrl_llm._checked import Ge, Gt, checked
from torchrl_llm._ray import ActorOptions, RemoteObject, get, require_ray
from torchrl_llm.errors import ConfigError, ResourceError, WeightUpdateError, WorkerError
from torchrl_llm.modules.backends.backend_port import Backend
from torchrl_llm.modules.remote.balancer import LoadSnapshot
from torchrl_llm.modules.remote.replica import Replica, ReplicaFacts, ReplicaStatus
from torchrl_llm.modules.remote.revived_actor import Life, RevivedActor, Sent, SentWeights
from torchrl_llm.weights.weight_source import WeightReceipt, WeightSource

_STARTERS = 256
_STATES = ("serving", "waiting", "starting", "failed")


@checked
@dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """Settings of a pool.

    Args:
        factory: function that makes a backend, called in the process of a replica.
        num_replicas: number of replicas.
        options: resources of each replica, and the time limits of its start and its calls.
        what: description of the pool, the start of error messages.
        placement: Ray's placement strategy of the replicas over machines.
        interval_s: seconds between two heartbeats.
        health_timeout_s: seconds without a heartbeat after which a replica counts as dead.
        stall_timeout_s: seconds without progress on its requests after which a replica is stopped,
            even if it sends heartbeats. For a backend that does not count its steps, it must be
            longer than the longest request.
        max_failures: a replica is abandoned after this many failures in a row without an answered
            request.

    Raises:
        ConfigError: for a value outside its range.
    """

    factory: Callable[[], Backend]
    num_replicas: Annotated[int, Ge(1)] = 1
    options: ActorOptions = field(default_factory=ActorOptions)
    what: str = "a pool of engines"
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    interval_s: Annotated[float, Gt(0)] = 1.0
    health_timeout_s: Annotated[float, Gt(0)] = 30.0
    stall_timeout_s: Annotated[float, Gt(0)] = 300.0
    max_failures: Annotated[int, Ge(1)] = 3

    def __post_init__(self) -> None:
        if not callable(self.factory):
            raise ConfigError(
                "a pool needs a function that makes a backend, such as "
                f"functools.partial(FakeBackend, ...); got {type(self.factory).__name__}"
            )


class PoolTable(NamedTuple):
    """The state of a pool, for a client.

    Attributes:
        membership: a number that changes when a replica joins or leaves.
        version: minimum version of the weights on all replicas.
        digest: digest of these weights; ``None`` for the weights that the factory made.
        lives: lives of the serving replicas, by index; ``None`` if the client already knows them.
        loads: loads of all replicas.
        failed: reasons why replicas were abandoned, by index.
    """

    membership: int
    version: int
    digest: str | None
    lives: dict[int, Life] | None
    loads: list[LoadSnapshot]
    failed: dict[int, str]


@dataclass(eq=False)
class _Member:
    index: int
    actor: RevivedActor
    status: ReplicaStatus | None = None
    probe: _Probe | None = None


class _Probe(NamedTuple):
    life: Life
    ref: Any
    asked_s: float


class Supervisor:
    """Builds, watches and rebuilds the replicas of a pool, and sends them weights.

    Args:
        spec: settings of the pool.
        place: name of its reservation in the cluster, for ``free_place``.
    """

    def __init__(self, spec: PoolSpec, place: str) -> None:
        self._spec, self._place = spec, place
        self._weights = SentWeights()
        self._members = [_Member(i, self._actor(i)) for i in range(spec.num_replicas)]
        self._stopped = threading.Event()
        self._starting = threading.Lock()
        self._facts: ReplicaFacts | None = None
        self._look = threading.Event()
        # The version of the weights, and their digest as they arrived.
        self._current: tuple[int, str | None] = (0, None)
        self._group: Any = None

    def _actor(self, index: int) -> RevivedActor:
        limit = self._spec.options.timeout_s

        def bring(remote: RemoteObject, sent: Sent) -> None:
            args = (sent.source, sent.version, limit)
            remote.call("update_weights", *args, timeout_s=limit + 1)

        return RevivedActor(
            partial(self._create, index),
            what=f"replica {index} of {self._spec.what}",
            bring=bring,
            weights=self._weights,
            max_restarts=self._spec.max_failures - 1,
        )

    # -- start and end ------------------------------------------------------------------------

    def start(self) -> ReplicaFacts:
        """Start all replicas, unless they are already started.

        Returns:
            Their common properties.

        Raises:
            ResourceError: the cluster has too few resources for all replicas.
            WorkerError: a replica did not start in time.
            Exception: what the factory raised.
        """
        with self._starting:
            if self._facts is None:
                self._facts = self._start()
            return self._facts

    def _start(self) -> ReplicaFacts:
        actors = [member.actor for member in self._members]
        try:
            self._reserve()
            with ThreadPoolExecutor(min(_STARTERS, len(actors))) as pool:
                list(pool.map(RevivedActor.start, actors))
            facts = [actor.remote.call("facts") for actor in actors]
        except BaseException:
            self.stop()
            raise
        threading.Thread(target=self._watch, daemon=True).start()
        return facts[0]

    def stop(self) -> None:
        """Stop all replicas and release their resources."""
        self._stopped.set()
        ray = require_ray(self._spec.what)
        for member in self._members:
            member.actor.end()
        if self._group is not None:
            ray.util.remove_placement_group(self._group)

    def wait(self) -> None:
        """Return when the supervisor is stopped; for callers that must notice its death."""
        self._stopped.wait()

    def _reserve(self) -> None:
        bundle = self._spec.options.bundle
        if not bundle:
            return
        ray = require_ray(self._spec.what)
        number, limit = len(self._members), self._spec.options.start_timeout_s
        free_place(self._place)  # of a dead supervisor with this pool's name
        self._group = ray.util.placement_group(
            [bundle] * number, strategy=self._spec.placement, name=self._place
        )
        if not self._group.wait(limit):
            raise ResourceError(
                f"{self._spec.what}: Ray found no place for {number} x {bundle} "
                f"({self._spec.placement}) within {limit:g} s; free are {ray.available_resources()}"
            )

    def _create(self, index: int) -> RemoteObject:
        placement: dict[str, Any] = {}
        if self._group is not None:
            strategies = require_ray(self._spec.what).util.scheduling_strategies
            placement["scheduling_strategy"] = strategies.PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=index
            )
        options = self._spec.options
        return RemoteObject(
            partial(Replica, self._spec.factory, timeout_s=options.timeout_s),
            options,
            what=f"replica {index} of {self._spec.what}",
            placement=placement,
        )

    # -- calls of clients ---------------------------------------------------------------------

    def poll(self, known: int = -1) -> PoolTable:
        """Return the replicas and their current state.

        Args:
            known: the membership that the caller knows. If it is still current, the lives are left
                out.
        """
        lives = {m.index: m.actor.current for m in self._members if m.actor.state == "serving"}
        membership = hash(tuple((index, life.number) for index, life in lives.items()))
        failed = {m.index: m.actor.failure for m in self._members if m.actor.state == "failed"}
        return PoolTable(
            membership,
            *self._current,
            None if membership == known else lives,
            [_load(member) for member in self._members],
            {index: f"{type(why).__name__}: {why}" for index, why in failed.items()},
        )

    def report(self, index: int, life: int, reason: str) -> None:
        """Receive a client's report that a replica is unusable: it or its engine died."""
        self._retire(self._members[index], life, WorkerError(reason))

    def suspect(self) -> None:
        """Receive a client's report that a replica did not answer, and check it immediately."""
        self._look.set()

    def stats(self) -> dict[str, Any]:
        """Return the version, the replicas by state, and the number of rebuilds."""
        states = [member.actor.state for member in self._members]
        return {
            "version": self._current[0],
            "rebuilt": sum(member.actor.restarts for member in self._members),
            **{state: states.count(state) for state in _STATES},
        }

    # -- weights ------------------------------------------------------------------------------

    def update_weights(
        self, source: WeightSource | Any, kind: str, reusable: bool, version: int, timeout_s: float
    ) -> list[WeightReceipt]:
        """Send weights to all replicas.

        A replica that does not get the same weights as the others, or does not answer, is rebuilt.
        If no replica gets them, the old weights and their version stay.

        Args:
            source: their source, or a reference to it in Ray's object store.
            kind: kind of the source.
            reusable: whether the source can be opened again, for replicas that are rebuilt later.
            version: their version number, not below the current one.
            timeout_s: most seconds for each replica.

        Returns:
            The receipts of all replicas that serve.

        Raises:
            ConfigError: for a decreasing version.
            WeightUpdateError: no replica got the weights.
            WorkerError: no replica serves, or none answered.
        """
        with self._weights.lock:
            if version < self._current[0]:
                raise ConfigError(
                    f"version {version} of the weights comes after version {self._current[0]}"
                )
            targets = [(m, m.actor.current) for m in self._members if m.actor.is_up]
            if not targets:
                raise WorkerError(f"{self._spec.what}: no replica serves, so none can be updated")
            refs = [
                life.remote.submit("update_weights", source, version, timeout_s, lane="change")
                for _, life in targets
            ]
            receipts, errors = self._gather(refs, targets, timeout_s)
            if receipts:
                sent = Sent(source if reusable else None, version, kind)
                self._weights.add(sent, timeout_s=timeout_s)
                self._current = (version, receipts[0].digest)
            for member, life in targets:
                error = errors.get(member.index)
                if error is None:
                    member.actor.serve()
                elif receipts or isinstance(error, WorkerError):
                    # The replica may have these weights or not, or receive them after the time
                    # limit.
                    why = WorkerError(f"version {version} did not arrive: {error}")
                    self._retire(member, life.number, why)
            if not receipts:
                raise next(iter(errors.values()))
            return receipts

    def _gather(
        self, refs: list[Any], targets: list[tuple[_Member, Life]], timeout_s: float
    ) -> tuple[list[WeightReceipt], dict[int, Exception]]:
        deadline = time.monotonic() + timeout_s + self._spec.interval_s
        receipts: list[WeightReceipt] = []
        errors: dict[int, Exception] = {}
        for ref, (member, life) in zip(refs, targets, strict=True):
            try:
                left = max(0.05, deadline - time.monotonic())
                got = life.remote.result(ref, timeout_s=left, call="an update of the weights")
                if receipts and got[0].digest != receipts[0].digest:
                    raise WeightUpdateError(
                        f"{life.remote.what} got {got[0].digest}, others {receipts[0].digest}"
                    )
                receipts.extend(got)
            except Exception as error:  # any exception: a replica's error becomes its failure
                errors[member.index] = error
        return receipts, errors

    # -- watching -----------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stopped.is_set():
            self._look.wait(self._spec.interval_s)
            self._look.clear()
            try:
                self._probe_all()
            except Exception as error:  # any exception: the watch must continue
                logger.warning(f"{self._spec.what}: watching its replicas failed: {error!r}")

    def _probe_all(self) -> None:
        ray = require_ray(self._spec.what)
        probes = {probe.ref: (m, probe) for m in self._members if (probe := _probe(m)) is not None}
        if not probes:
            return
        refs = list(probes)
        ready, late = ray.wait(refs, num_returns=len(refs), timeout=self._spec.interval_s)
        for ref in ready:
            member, probe = probes[ref]
            member.probe = None
            try:
                status = get(ref, timeout_s=5.0, what=f"the status of replica {member.index}")
                member.status = status
                if status.completed:
                    member.actor.failures = 0
                self._check(status)
            except Exception as error:  # any exception: a replica without a status counts as dead
                self._retire(member, probe.life.number, error)
        for ref in late:
            member, probe = probes[ref]
            silent = time.monotonic() - probe.asked_s
            if silent > self._spec.health_timeout_s:
                self._retire(
                    member, probe.life.number, WorkerError(f"no heartbeat for {silent:.0f} s")
                )

    def _check(self, status: ReplicaStatus) -> None:
        if status.broken is not None:
            raise WorkerError(f"its engine is broken: {status.broken}")
        if status.idle_s > self._spec.stall_timeout_s:
            raise WorkerError(
                f"no progress with {status.requests} requests for {status.idle_s:.0f} s"
            )

    def _retire(self, member: _Member, life: int, failure: Exception) -> None:
        """Stop a replica, and rebuild it in a thread."""
        if member.actor.lose(failure, life):
            logger.warning(f"{member.actor.what}: {failure}; it is rebuilt")
            member.status = None
            threading.Thread(target=member.actor.revive, daemon=True).start()


def _probe(member: _Member) -> _Probe | None:
    """Return the pending status request of a replica; ``None`` while it starts."""
    if not member.actor.is_up:
        return None
    life, probe = member.actor.current, member.probe
    if probe is None or probe.life is not life:
        ref = life.remote.submit("status", lane="control")
        probe = member.probe = _Probe(life, ref, time.monotonic())
    return probe


def free_place(name: str) -> None:
    """Release a supervisor's reservation; Ray keeps it after the supervisor's death.

    Args:
        name: name of the reservation; no effect if there is none.
    """
    ray = require_ray("a pool's place", running=False)
    if not ray.is_initialized():
        return
    with contextlib.suppress(ValueError):
        ray.util.remove_placement_group(ray.util.get_placement_group(name))


def _load(member: _Member) -> LoadSnapshot:
    status, serves = member.status, member.actor.state == "serving"
    if status is None:
        return LoadSnapshot(member.index, 0, None, serves)
    return LoadSnapshot(member.index, status.requests, status.cache_usage, serves)
