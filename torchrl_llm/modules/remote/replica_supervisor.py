"""Keeps the replicas of a pool alive, and knows which weights they must hold.

It runs in an actor of its own that needs no CPU. It asks every replica for a heartbeat and for
its load once in ``interval_s``; one that died, does not answer, or gets no further with what was
asked of it is ended and built again, and gets the current weights before it serves. Clients ask it
where the replicas are (:meth:`Supervisor.poll`) and tell it of those that failed them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from torchrl._utils import logger

from torchrl_llm._ray import ActorOptions, RemoteObject, get, require_ray
from torchrl_llm.errors import ConfigError, ResourceError, WeightUpdateError, WorkerError
from torchrl_llm.modules.backends.backend_port import Backend
from torchrl_llm.modules.remote.balancer import LoadSnapshot
from torchrl_llm.modules.remote.pool_wire import ObjectStoreSource
from torchrl_llm.modules.remote.replica import Replica, ReplicaFacts, ReplicaStatus
from torchrl_llm.weights.weight_source import WeightReceipt, WeightSource

_STARTERS = 256
_BACKOFF_S = 0.5
_MOST_DELTAS = 8
_STATES = ("serving", "waiting", "starting", "failed")


@dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """What a pool is made of.

    Args:
        factory: makes a backend, in the process of a replica.
        num_replicas: how many.
        options: what each replica needs, and the limits of its start and of its calls.
        what: what the pool is; begins error messages.
        placement: how Ray spreads the replicas over machines.
        interval_s: seconds between two heartbeats.
        health_timeout_s: seconds without one after which a replica counts as dead.
        stall_timeout_s: seconds without progress after which a replica that answers, but does not
            get on with its requests, is ended. It must be longer than the longest request of a
            backend that does not count its steps.
        max_failures: so often in a row may a replica fail, without having answered a request in
            between, until it is given up.

    Raises:
        ConfigError: for a value outside its range.
    """

    factory: Callable[[], Backend]
    num_replicas: int = 1
    options: ActorOptions = field(default_factory=ActorOptions)
    what: str = "a pool of engines"
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    interval_s: float = 1.0
    health_timeout_s: float = 30.0
    stall_timeout_s: float = 300.0
    max_failures: int = 3

    def __post_init__(self) -> None:
        if self.num_replicas < 1 or self.max_failures < 1:
            raise ConfigError("num_replicas and max_failures must be at least 1")
        if min(self.interval_s, self.health_timeout_s, self.stall_timeout_s) <= 0:
            raise ConfigError("interval_s, health_timeout_s and stall_timeout_s must be above 0")
        if not callable(self.factory):
            raise ConfigError(
                "a pool needs a function that makes a backend, such as "
                f"functools.partial(FakeBackend, ...); got {type(self.factory).__name__}"
            )


class ReplicaAddress(NamedTuple):
    """Where a replica is; another incarnation is another process."""

    index: int
    incarnation: int
    remote: RemoteObject


class PoolTable(NamedTuple):
    """What a client knows of a pool.

    Attributes:
        membership: rises when a replica comes or goes.
        version: of the weights that every replica holds at least.
        digest: of these weights; ``None`` for those that the factory made.
        addresses: of the replicas that serve, by index; ``None`` where the client knows them.
        loads: of all replicas.
        failed: why replicas were given up, by index.
    """

    membership: int
    version: int
    digest: str | None
    addresses: dict[int, ReplicaAddress] | None
    loads: list[LoadSnapshot]
    failed: dict[int, str]


class _Sent(NamedTuple):
    source: Any  # None for one that could be opened only once
    version: int
    kind: str

    def open(self, timeout_s: float) -> WeightSource:
        if isinstance(self.source, WeightSource):
            return self.source
        return get(self.source, timeout_s=timeout_s, what="the source of weights")


@dataclass(eq=False)
class _Member:
    index: int
    incarnation: int = 0
    remote: RemoteObject | None = None
    # "waiting": built, and for weights that can be had only when they are sent next.
    state: Literal["starting", "waiting", "serving", "failed"] = "starting"
    reason: str = ""
    failures: int = 0
    status: ReplicaStatus | None = None
    probe: tuple[Any, float] | None = None


class Supervisor:
    """Builds, watches and rebuilds the replicas of a pool, and sends them weights.

    Args:
        spec: what the pool is made of.
        place: name of what it reserves in the cluster, for ``free_place``.
    """

    def __init__(self, spec: PoolSpec, place: str) -> None:
        self._spec, self._place = spec, place
        self._members = [_Member(index) for index in range(spec.num_replicas)]
        self._lock = threading.RLock()
        self._updating = threading.Lock()
        self._stopped = threading.Event()
        self._starting = threading.Lock()
        self._facts: ReplicaFacts | None = None
        self._look = threading.Event()
        self._membership = 0
        self._version = 0
        self._digest: str | None = None
        # What a new replica must be given, in this order, to hold the current weights.
        self._sent: tuple[_Sent, ...] = ()
        self._group: Any = None
        self._rebuilt = 0

    # -- start and end ------------------------------------------------------------------------

    def start(self) -> ReplicaFacts:
        """Start all replicas, unless they were.

        Returns:
            What they have in common.

        Raises:
            ResourceError: there is no place for them.
            WorkerError: one did not start in time.
            Exception: what the factory raised.
        """
        with self._starting:
            if self._facts is None:
                self._facts = self._start()
            return self._facts

    def _start(self) -> ReplicaFacts:
        try:
            self._reserve()
            with ThreadPoolExecutor(min(_STARTERS, len(self._members))) as pool:
                remotes = list(pool.map(self._create, range(len(self._members))))
            facts = [remote.call("facts") for remote in remotes]
        except BaseException:
            self.stop()
            raise
        for member, remote in zip(self._members, remotes, strict=True):
            self._admit(member, remote)
        threading.Thread(target=self._watch, daemon=True).start()
        return facts[0]

    def stop(self) -> None:
        """End all replicas and give their place back."""
        self._stopped.set()
        ray = require_ray(self._spec.what)
        with self._lock:
            for member in self._members:
                if member.remote is not None:
                    member.remote.shutdown()
        if self._group is not None:
            ray.util.remove_placement_group(self._group)

    def wait(self) -> None:
        """Return when it is stopped; for whoever must know that it died without that."""
        self._stopped.wait()

    def _reserve(self) -> None:
        bundle = self._spec.options.bundle
        if not bundle:
            return
        ray = require_ray(self._spec.what)
        number, limit = len(self._members), self._spec.options.start_timeout_s
        free_place(self._place)  # of one that died under this pool's name
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

    # -- what clients ask ---------------------------------------------------------------------

    def poll(self, known: int = -1) -> PoolTable:
        """Where the replicas are and what they do.

        Args:
            known: the membership that the caller knows; the addresses are left out where it is
                still so.
        """
        with self._lock:
            addresses = None
            if known != self._membership:
                addresses = {
                    m.index: ReplicaAddress(m.index, m.incarnation, m.remote)
                    for m in self._members
                    if m.state == "serving"
                }
            return PoolTable(
                self._membership,
                self._version,
                self._digest,
                addresses,
                [_load(member) for member in self._members],
                {m.index: m.reason for m in self._members if m.state == "failed"},
            )

    def report(self, index: int, incarnation: int, reason: str) -> None:
        """A client says that a replica is of no use any more: it died, or its engine did."""
        self._retire(self._members[index], incarnation, reason)

    def suspect(self) -> None:
        """A client got no answer: look at once."""
        self._look.set()

    def stats(self) -> dict[str, Any]:
        """Version, replicas by state, and how many were built again."""
        with self._lock:
            states = [member.state for member in self._members]
            return {
                "version": self._version,
                "rebuilt": self._rebuilt,
                **{state: states.count(state) for state in _STATES},
            }

    # -- weights ------------------------------------------------------------------------------

    def update_weights(
        self, source: WeightSource | Any, kind: str, reusable: bool, version: int, timeout_s: float
    ) -> list[WeightReceipt]:
        """Send weights to all replicas.

        A replica that does not get what others got, or gives no answer, is built again. When none
        gets them, the old weights and their version stay.

        Args:
            source: where they are, or a reference to that in Ray's object store.
            kind: that of the source.
            reusable: whether the source can be opened again, for replicas that are built later.
            version: their number, not below the current one.
            timeout_s: most seconds that a replica may take.

        Returns:
            The receipts of all replicas that serve.

        Raises:
            ConfigError: for a version that falls.
            WeightUpdateError: no replica got them.
            WorkerError: no replica serves, or none answered.
        """
        with self._updating:
            if version < self._version:
                raise ConfigError(
                    f"version {version} of the weights comes after version {self._version}"
                )
            with self._lock:
                targets = [(m, m.incarnation, m.remote) for m in self._members]
                targets = [t for t in targets if t[0].state in ("serving", "waiting")]
            if not targets:
                raise WorkerError(f"{self._spec.what}: no replica serves, so none can be updated")
            refs = [
                remote.submit("update_weights", source, version, timeout_s, lane="change")
                for _, _, remote in targets
            ]
            receipts, errors = self._gather(refs, targets, timeout_s)
            unknown = {i for i, error in errors.items() if isinstance(error, WorkerError)}
            for member, incarnation, _ in targets:
                # It may hold these weights or not, or take them when nobody waits any more.
                if member.index in unknown:
                    self._retire(member, incarnation, str(errors[member.index]))
            if not receipts:
                raise next(iter(errors.values()))
            self._remember(_Sent(source if reusable else None, version, kind), timeout_s)
            with self._lock:
                self._version, self._digest = version, receipts[0].digest
            for member, incarnation, remote in targets:
                if member.index in errors:
                    reason = f"version {version} did not arrive: {errors[member.index]}"
                    self._retire(member, incarnation, reason)
                elif member.state == "waiting":
                    self._admit(member, remote)
            return receipts

    def _gather(
        self, refs: list[Any], targets: list[tuple[_Member, int, RemoteObject]], timeout_s: float
    ) -> tuple[list[WeightReceipt], dict[int, Exception]]:
        deadline = time.monotonic() + timeout_s + self._spec.interval_s
        receipts: list[WeightReceipt] = []
        errors: dict[int, Exception] = {}
        for ref, (member, _, remote) in zip(refs, targets, strict=True):
            try:
                left = max(0.05, deadline - time.monotonic())
                got = remote.result(ref, timeout_s=left, call="an update of the weights")
                if receipts and got[0].digest != receipts[0].digest:
                    raise WeightUpdateError(
                        f"{remote.what} got {got[0].digest}, others {receipts[0].digest}"
                    )
                receipts.extend(got)
            except Exception as error:  # the edge: what a replica raised becomes its failure
                errors[member.index] = error
        return receipts, errors

    def _remember(self, sent: _Sent, timeout_s: float) -> None:
        """Keep what a new replica needs, and not more of it than a few times the weights."""
        before = () if sent.kind == "full" else self._sent
        if sent.kind == "adapter":
            before = tuple(old for old in before if old.kind != "adapter")
        self._sent = (*before, sent)
        kinds = [old.kind for old in self._sent]
        whole = kinds[0] == "full" and set(kinds[1:]) == {"delta"}
        if whole and len(kinds) > _MOST_DELTAS and all(old.source for old in self._sent):
            weights = {}
            for old in self._sent:
                weights.update(old.open(timeout_s).receive())
            self._sent = (_Sent(ObjectStoreSource.put(weights), sent.version, "full"),)

    # -- watching -----------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stopped.is_set():
            self._look.wait(self._spec.interval_s)
            self._look.clear()
            try:
                self._probe_all()
            except Exception as error:  # the edge: the watch must go on
                logger.warning(f"{self._spec.what}: looking after its replicas failed: {error!r}")

    def _probe_all(self) -> None:
        ray = require_ray(self._spec.what)
        with self._lock:
            up = ("serving", "waiting")
            serving = [(m, m.incarnation) for m in self._members if m.state in up]
            for member, _ in serving:
                if member.probe is None:
                    ref = member.remote.submit("status", lane="control")
                    member.probe = (ref, time.monotonic())
            probes = {member.probe[0]: (member, life) for member, life in serving}
        if not probes:
            return
        refs = list(probes)
        ready, late = ray.wait(refs, num_returns=len(refs), timeout=self._spec.interval_s)
        for ref in ready:
            member, incarnation = probes[ref]
            try:
                status = get(ref, timeout_s=5.0, what=f"the status of replica {member.index}")
            except Exception as error:  # the edge: no status is a sign of death
                self._retire(member, incarnation, str(error))
                continue
            with self._lock:
                if member.incarnation == incarnation:
                    member.probe, member.status = None, status
                    if status.completed:
                        member.failures = 0
            if status.broken is not None:
                self._retire(member, incarnation, f"its engine is broken: {status.broken}")
            elif status.idle_s > self._spec.stall_timeout_s:
                self._retire(
                    member,
                    incarnation,
                    f"no progress with {status.requests} requests for {status.idle_s:.0f} s",
                )
        for ref in late:
            member, incarnation = probes[ref]
            silent = time.monotonic() - (member.probe or (None, time.monotonic()))[1]
            if silent > self._spec.health_timeout_s:
                self._retire(member, incarnation, f"no heartbeat for {silent:.0f} s")

    # -- rebuilding ---------------------------------------------------------------------------

    def _retire(self, member: _Member, incarnation: int, reason: str) -> None:
        with self._lock:
            alive = member.state in ("serving", "waiting")
            if member.incarnation != incarnation or not alive or self._stopped.is_set():
                return
            logger.warning(f"{member.remote.what}: {reason}; it is built again")
            member.state, member.reason = "starting", reason
            member.failures += 1
            member.probe = member.status = None
            self._membership += 1
            # One that hangs would keep its resources.
            member.remote.shutdown()
        threading.Thread(target=self._rebuild, args=(member,), daemon=True).start()

    def _rebuild(self, member: _Member) -> None:
        while not self._stopped.is_set():
            if member.failures >= self._spec.max_failures:
                with self._lock:
                    member.state = "failed"
                    self._membership += 1
                return
            remote = None
            try:
                remote = self._create(member.index)
                self._catch_up(member, remote)
                return
            except Exception as error:  # the edge: a failed start is tried again
                if remote is not None:
                    remote.shutdown()
                with self._lock:
                    member.failures += 1
                    member.reason = f"{type(error).__name__}: {error}"
                self._stopped.wait(_BACKOFF_S * 2**member.failures)

    def _catch_up(self, member: _Member, remote: RemoteObject) -> None:
        """Give a new replica the current weights and, in the moment that it has them, work."""
        done: tuple[_Sent, ...] = ()
        limit = self._spec.options.timeout_s
        while True:
            with self._updating:
                sent = self._sent
                if any(old.source is None for old in sent):
                    self._admit(member, remote, state="waiting")
                    return
                if sent == done or self._stopped.is_set():
                    self._admit(member, remote)
                    return
            todo = sent[len(done) :] if sent[: len(done)] == done else sent
            for old in todo:
                remote.call("update_weights", old.source, old.version, limit, timeout_s=limit + 1)
            done = sent

    def _admit(
        self,
        member: _Member,
        remote: RemoteObject,
        state: Literal["serving", "waiting"] = "serving",
    ) -> None:
        with self._lock:
            if self._stopped.is_set():
                remote.shutdown()
                return
            if member.remote is not remote:
                self._rebuilt += member.remote is not None
                member.incarnation += 1
            member.remote, member.state = remote, state
            self._membership += 1


def free_place(name: str) -> None:
    """Give back what a supervisor has reserved; Ray keeps it beyond the supervisor's death.

    Args:
        name: of the place; nothing to do where there is none.
    """
    ray = require_ray("a pool's place", running=False)
    if not ray.is_initialized():
        return
    with contextlib.suppress(ValueError):
        ray.util.remove_placement_group(ray.util.get_placement_group(name))


def _load(member: _Member) -> LoadSnapshot:
    status = member.status
    if status is None:
        return LoadSnapshot(member.index, 0, None, member.state == "serving")
    return LoadSnapshot(
        member.index, status.requests, status.cache_usage, member.state == "serving"
    )
