"""Replicas of an engine in Ray actors, used as a single backend.

A call is split into as many parts as there are replicas. The balancer chooses a replica for each
part. If a replica dies, its part goes to a different one. The total time of a call is limited.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, Self

import torch
from torch import Tensor

from torchrl_llm._checked import Ge, Gt, checked
from torchrl_llm._ray import (
    ActorOptions,
    RemoteObject,
    actor_exists,
    check_resources,
    get,
    require_ray,
)
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.ragged import RaggedColumn
from torchrl_llm.data.scoring import ScoreExtras, TokenScores
from torchrl_llm.errors import ConfigError, WorkerError
from torchrl_llm.modules.backends.backend_port import (
    Backend,
    Completion,
    EngineStatus,
    SamplingParams,
)
from torchrl_llm.modules.remote.balancer import LoadBalancer, LoadSnapshot, Strategy
from torchrl_llm.modules.remote.dispatch import Dispatcher, Part
from torchrl_llm.modules.remote.pool_wire import ObjectStoreSource, PackedCompletions
from torchrl_llm.modules.remote.replica import ReplicaFacts, Versions
from torchrl_llm.modules.remote.replica_supervisor import PoolSpec, Supervisor, free_place
from torchrl_llm.weights.weight_source import TensorSource, WeightReceipt, WeightSource


def _fact(name: str) -> Any:
    def of_the_replicas(pool: EnginePool) -> Any:
        return getattr(pool._started()[1], name)

    return property(of_the_replicas, doc=f"``{name}`` of the replicas.")


class EnginePool(Backend):
    """A backend whose engines run in Ray actors, each with its own weights.

    The pool is picklable after its start, so that collectors and other processes can share the
    replicas through copies of the pool. The replicas live until :meth:`shutdown`, or until the
    process that started them ends.

    - A replica that dies, hangs or loses its engine is rebuilt, and gets the current weights before
      it serves. Its requests run again on a different replica, at most ``max_retries`` times.
    - If no replica answers a request in time, or the request breaks every replica that tries it,
      the result is an aborted row without tokens (``on_failure="abort"``), or an error. If every
      replica was abandoned or the supervisor died, all requests raise an error.
    - After the first update, every completion carries the version of the weights that sampled it. A
      request never runs on weights that are older than the last update of the pool before the
      request.
    - Random numbers come from the caller's global generator, as in one process. The same state
      gives the same answers, independent of the replicas. A call with a seed runs on one replica.
    - Single prompts cannot be cancelled: :meth:`generate_cancellable` is the same as
      :meth:`generate`.

    Args:
        factory: function that makes a backend, called in the process of a replica; it is pickled
            with everything it contains.
        num_replicas: number of replicas.
        options: resources and limits of each replica. ``max_concurrency`` calls run at the same
            time in each replica; by default 64 calls on one CPU.
        strategy: strategy to choose a replica, see
            :class:`~torchrl_llm.modules.remote.balancer.LoadBalancer`.
        prefix_length: see there.
        overload_threshold: see there.
        sample_size: see there; by default two, if there are more than eight replicas. (In
            ``test/benchmarks/sim_replicas.py``, 32 clients that compare all of a hundred replicas,
            by loads that are a second old, reach a fifth less throughput than clients that draw two
            replicas.)
        max_retries: most retries of a request on different replicas.
        on_failure: result of a request that no replica answered: an aborted row, or a
            :class:`~torchrl_llm.errors.WorkerError`.
        timeout_s: most seconds of a call of the pool, including retries and waiting.
        tokenizer: the backends' tokenizer, for callers that compare it before they score.
        name: pools with this name in one Ray cluster share their replicas. The replicas end with
            the pool that started them, and the settings of that pool apply.
        what: description of the pool, the start of error messages.
        **settings: further fields of
            :class:`~torchrl_llm.modules.remote.replica_supervisor.PoolSpec`.

    Raises:
        ConfigError: for a value outside its range.

    Example:
        >>> from torchrl_llm.modules import FakeBackend
        >>> pool = EnginePool(partial(FakeBackend, vocab_size=16, eos_token_ids=(2,)))
        >>> pool.num_replicas
        1
    """

    @checked
    def __init__(
        self,
        factory: Callable[[], Backend],
        num_replicas: int = 1,
        *,
        options: ActorOptions | None = None,
        strategy: Strategy | tuple[Strategy, ...] | list[Strategy] = "requests",
        prefix_length: int | None = None,
        overload_threshold: float = 1.5,
        sample_size: int | None = None,
        max_retries: Annotated[int, Ge(0)] = 2,
        on_failure: Literal["abort", "error"] = "abort",
        timeout_s: Annotated[float, Gt(0)] = 600.0,
        tokenizer: Any = None,
        name: str | None = None,
        what: str = "a pool of engines",
        **settings: Any,
    ) -> None:
        options = ActorOptions(max_concurrency=64) if options is None else options
        self.spec = PoolSpec(
            factory=factory, num_replicas=num_replicas, options=options, what=what, **settings
        )
        self.tokenizer = tokenizer
        self._name = name
        self._owns = False
        self._freed: threading.Event | None = None  # set when the supervisor's place is released
        if sample_size is None and num_replicas > 8:
            sample_size = 2
        self._balance = partial(
            LoadBalancer,
            strategy=strategy,
            prefix_length=prefix_length,
            overload_threshold=overload_threshold,
            sample_size=sample_size,
        )
        self._max_retries = max_retries
        self._on_failure = on_failure
        self._timeout_s = timeout_s
        self._facts: ReplicaFacts | None = None
        self._dispatcher: Dispatcher | None = None
        # This process must sample with the weights that it sent last, or newer ones.
        self._minimum = 0

    def __getstate__(self) -> dict[str, Any]:
        dispatcher, _ = self._started()
        return {
            **self.__dict__,
            "_dispatcher": dispatcher.supervisor,
            "_owns": False,
            "_freed": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._dispatch_by(state["_dispatcher"])

    def _dispatch_by(self, supervisor: RemoteObject) -> None:
        self._dispatcher = Dispatcher(
            supervisor,
            num_replicas=self.num_replicas,
            what=self.spec.what,
            balance=self._balance,
            max_retries=self._max_retries,
        )

    # -- life ---------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start the replicas, unless they already run; return the pool.

        Raises:
            MissingExtraError: Ray is not installed.
            ResourceError: Ray is not running, or has too few resources for all replicas together.
            WorkerError: a replica did not start in time.
            Exception: an exception of the factory.
        """
        if self._dispatcher is not None:
            return self
        spec = self.spec
        require_ray(spec.what)
        if not actor_exists(self._name):
            check_resources(spec.what, [spec.options.bundle] * spec.num_replicas)
        limit = spec.options.start_timeout_s
        place = f"torchrl_llm {self._name or secrets.token_hex(8)}"
        supervisor = RemoteObject(
            partial(Supervisor, spec, place),
            ActorOptions(num_cpus=0, max_concurrency=32, start_timeout_s=limit, name=self._name),
            what=f"the supervisor of {spec.what}",
        )
        if supervisor.created:
            self._freed = threading.Event()
            supervisor.submit("wait").future().add_done_callback(
                # Run this in a thread, because Ray's own thread, which calls it, must not wait for
                # Ray.
                lambda _: threading.Thread(
                    target=_free, args=(place, self._freed), daemon=True
                ).start()
            )
        try:
            # The start-up limit applies separately to reserving a place and to starting the
            # replicas.
            self._facts = supervisor.call("start", timeout_s=2 * limit + 10)
        except BaseException:
            if supervisor.created:
                self._stop(supervisor)
            raise
        self._owns = supervisor.created
        self._dispatch_by(supervisor)
        return self

    def shutdown(self) -> None:
        """Stop all replicas; running requests fail. Call it on the pool that started them.

        A copy of the pool only drops its references. If the replicas have already ended, the call
        has no effect.
        """
        owns, self._owns = self._owns, False
        dispatcher, self._dispatcher = self._dispatcher, None
        ray = require_ray(self.spec.what, running=False)
        if owns and dispatcher is not None and ray.is_initialized():
            self._stop(dispatcher.supervisor)

    def _stop(self, supervisor: RemoteObject) -> None:
        # A supervisor that died has ended its replicas, too.
        with contextlib.suppress(WorkerError):
            supervisor.call("stop", timeout_s=10.0)
        supervisor.shutdown()
        if self._freed is not None:
            # After a later shutdown of Ray, a call from this pool would start Ray again.
            self._freed.wait(10.0)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def _started(self) -> tuple[Dispatcher, ReplicaFacts]:
        if self._dispatcher is None or self._facts is None:
            raise ConfigError(
                f"{self.spec.what} is not started: call start(), or use it in a with block"
            )
        return self._dispatcher, self._facts

    # -- properties ---------------------------------------------------------------------------

    @property
    def num_replicas(self) -> int:
        """Number of replicas, serving or not."""
        return self.spec.num_replicas

    @property
    def num_copies(self) -> int:
        """Number of processes that currently receive an update of the weights."""
        states = self.stats()
        return (states["serving"] + states["waiting"]) * self._started()[1].num_copies

    @property
    def counts_versions(self) -> bool:
        """Whether weights were sent to the pool; each token then carries their version."""
        if self._dispatcher is None:
            return False
        return self._minimum > 0 or self._dispatcher.recent().digest is not None

    vocab_size = _fact("vocab_size")
    max_length = _fact("max_length")
    eos_token_ids = _fact("eos_token_ids")
    native_arguments = _fact("native_arguments")
    records_support = _fact("records_support")

    @property
    def version(self) -> int:
        """Minimum version of the weights on all serving replicas.

        Raises:
            WorkerError: the supervisor died.
        """
        return self._started()[0].table().version

    @property
    def digest(self) -> str | None:
        """Digest of the current weights as received; ``None`` before the first update.

        Raises:
            WorkerError: the supervisor died.
        """
        return self._started()[0].table().digest

    def status(self) -> EngineStatus:
        """See :meth:`Backend.status`; the mean of the replicas that report it."""
        known = [load.cache_usage for load in self.loads() if load.cache_usage is not None]
        return EngineStatus(sum(known) / len(known) if known else None)

    def stats(self) -> dict[str, Any]:
        """Return version, replicas by state (``serving``, ``starting``, ``failed``), ``rebuilt``.

        Raises:
            WorkerError: the supervisor died.
        """
        return self._started()[0].supervisor.call("stats", timeout_s=30.0)

    def replica_pids(self) -> dict[int, int]:
        """Return the process id of each serving replica, by its index."""
        serving = self._started()[0].serving()
        return {index: remote.pid() for index, remote in serving.items()}

    def loads(self) -> list[LoadSnapshot]:
        """Return the known loads of the replicas, including all requests of this process so far."""
        return self._started()[0].loads()

    def create_load_balancer(
        self,
        strategy: Strategy | tuple[Strategy, ...] | list[Strategy] = ("prefix-aware", "requests"),
        prefix_length: int | None = 8,
        overload_threshold: float = 1.5,
    ) -> LoadBalancer:
        """Return a :class:`~torchrl_llm.modules.remote.balancer.LoadBalancer` of these replicas."""
        return LoadBalancer(self, strategy, prefix_length, overload_threshold)

    # -- sampling and scoring -----------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Tensor],
        params: SamplingParams,
        *,
        version: int | None = None,
        replica: int | None = None,
        timeout_s: float | None = None,
    ) -> list[list[Completion]]:
        """See :meth:`Backend.generate`.

        Args:
            prompts: see there.
            params: see there.
            version: sample only with weights of this version.
            replica: run on this replica only.
            timeout_s: most seconds of the call.

        Raises:
            WorkerError: no replica is left, or, with ``on_failure="error"``, none answered in time.
            BackendError: the request broke the engine of every replica that tried it.
        """
        self.check_prompts(prompts)
        if not prompts:
            return []
        prompts = [prompt.cpu() for prompt in prompts]
        number = 1 if params.seed is not None or replica is not None else self.num_replicas
        seed = params.seed
        if seed is None and not params.greedy:
            # Below 2^62, so that the seeds of the parts stay below 2^63.
            seed = int(torch.randint(2**62, ()))
        versions = self._wanted(version)
        parts = []
        for rows in _blocks(len(prompts), number):
            drawn = params if seed is None else replace(params, seed=seed + len(parts))
            part = prompts[rows]
            args = (RaggedColumn.of(part), drawn, versions)
            parts.append(Part("generate", args, len(part), part[0], replica))
        self._run(parts, timeout_s, must=self._on_failure == "error")
        aborted = Completion(torch.zeros(0, dtype=torch.int64), torch.zeros(0), FinishReason.ABORT)
        groups = []
        for part in parts:
            if isinstance(part.result, PackedCompletions):
                groups += part.result.groups()
            else:
                groups += [[aborted] * params.num_samples for _ in range(part.num_rows)]
        return groups

    def token_scores(
        self,
        sequences: Sequence[Tensor],
        select: Sequence[Tensor],
        *,
        temperature: float | Tensor = 1.0,
        entropy: bool = False,
        extras: ScoreExtras | None = None,
    ) -> TokenScores:
        """See :meth:`TokenScorer.token_scores`; without gradient.

        Raises:
            WorkerError: no replica answered in time; a failed row cannot be marked in scores.
        """
        self.check_scoring(sequences, select)
        if not sequences:
            return TokenScores(torch.zeros(0), torch.zeros(0) if entropy else None)
        sequences = [ids.cpu() for ids in sequences]
        versions, parts = self._wanted(None), []
        plain = extras is None or extras == ScoreExtras()
        for rows in _blocks(len(sequences), self.num_replicas if plain else 1):
            at = temperature[rows].tolist() if isinstance(temperature, Tensor) else temperature
            at = at if isinstance(at, list) else float(at)
            ids = RaggedColumn.of(sequences[rows])
            masks = RaggedColumn.of([mask.cpu() for mask in select[rows]])
            args = (ids, masks, at, entropy, extras, versions)
            parts.append(Part("token_scores", args, len(ids), sequences[rows][0]))
        self._run(parts, None, must=True)
        if len(parts) == 1:
            return parts[0].result
        return TokenScores.join([part.result for part in parts], entropy=entropy)

    def logits(self, sequences: Sequence[Tensor]) -> Tensor:
        """See :meth:`Backend.logits`; all from one replica."""
        self.check_ids(sequences)
        rows = [ids.cpu() for ids in sequences]
        part = Part("run", ("logits", len(rows), self._wanted(None), rows), len(rows), None)
        self._run([part], None, must=True)
        return part.result

    def _wanted(self, version: int | None) -> Versions:
        current = max(self._minimum, self._started()[0].recent().version)
        if version is not None and version < current:
            raise ConfigError(f"version {version} of the weights was replaced by version {current}")
        return Versions(current, version)

    # -- weights ------------------------------------------------------------------------------

    def update_weights(
        self, source: WeightSource, *, version: int, timeout_s: float | None = None
    ) -> list[WeightReceipt]:
        """See :meth:`Backend.update_weights`; returns a receipt per serving replica.

        In-memory weights are sent through the object store, once to each machine. A replica that
        does not get the same weights as the others is rebuilt. If no replica gets them, the old
        weights stay.

        Args:
            source: source of the weights.
            version: their number, not below the current one.
            timeout_s: most seconds for each replica; the limit of its calls by default.
        """
        supervisor = self._started()[0].supervisor
        limit = self.spec.options.timeout_s if timeout_s is None else timeout_s
        kind, reusable = source.kind, source.reusable
        sent: Any = source
        if type(source) is TensorSource and kind == "full":
            sent = ObjectStoreSource.put(dict(source.receive()), digest=source.digest)
        elif isinstance(source, TensorSource):
            sent = require_ray(self.spec.what).put(source)
        receipts = supervisor.call(
            "update_weights", sent, kind, reusable, version, limit, timeout_s=2 * limit + 10
        )
        self._minimum = version
        return receipts

    def abort(self) -> None:
        """See :meth:`Backend.abort`; affects all callers, including those in other processes."""
        self.on_every_replica("abort")

    def on_every_replica(
        self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a method of the backend of every serving replica, at the same time.

        Replicas that are rebuilt later do not receive the call.

        Args:
            method: its name.
            args: its positional arguments.
            timeout_s: most seconds for all replicas; the limit of their calls by default.
            kwargs: its keyword arguments.

        Returns:
            The results by index of the replica.

        Raises:
            WorkerError: a replica died or did not answer in time, or none serves.
            Exception: an exception of the method.
        """
        serving = self._started()[0].serving()
        if not serving:
            raise WorkerError(f"{self.spec.what}: no replica serves at the moment")
        limit = self.spec.options.timeout_s if timeout_s is None else timeout_s
        refs = [
            remote.submit("apply", method, args, kwargs, lane="change")
            for remote in serving.values()
        ]
        return get(refs, timeout_s=limit, what=f"{method} on the replicas of {self.spec.what}")

    def _run(self, parts: list[Part], timeout_s: float | None, *, must: bool) -> None:
        limit = self._timeout_s if timeout_s is None else timeout_s
        self._started()[0].run(parts, timeout_s=limit)
        unanswered = [part for part in parts if part.result is None]
        if must and unanswered:
            rows = sum(part.num_rows for part in unanswered)
            causes = [failure for part in unanswered for failure in part.failures]
            raise WorkerError(
                f"{self.spec.what}: {rows} rows got no answer within {limit:g} s; "
                f"{causes[-1] if causes else 'no replica failed, and none was done'}"
            )


def _blocks(num_rows: int, number: int) -> list[slice]:
    """Split rows into at most this many blocks of nearly equal numbers of rows."""
    number = min(number, num_rows)
    bounds = [num_rows * k // number for k in range(number + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]


def _free(place: str, done: threading.Event) -> None:
    try:
        free_place(place)
    finally:
        done.set()
