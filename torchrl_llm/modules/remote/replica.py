"""One engine of a pool: a backend, the version of its weights, and counts of its requests.

The module does not depend on Ray; :class:`~torchrl_llm.modules.remote.pool.EnginePool` runs a
replica in an actor.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from torchrl_llm._ray import get
from torchrl_llm._threads import PauseGate
from torchrl_llm.data.ragged import RaggedColumn
from torchrl_llm.data.scoring import ScoreExtras, TokenScores
from torchrl_llm.errors import WeightUpdateError, WorkerError
from torchrl_llm.modules.backends.backend_port import Backend, SamplingParams
from torchrl_llm.modules.remote.pool_wire import PackedCompletions
from torchrl_llm.weights.weight_source import WeightReceipt, WeightSource, open_source


class VersionMismatch(WorkerError):
    """A replica does not have the weights that a request needs; a different replica may."""


class Versions(NamedTuple):
    """Which weights a request accepts.

    Attributes:
        minimum: the lowest version.
        exactly: the only version; ``None`` for any from the minimum on.
    """

    minimum: int = 0
    exactly: int | None = None

    def accepts(self, version: int) -> bool:
        """Whether weights of this version are accepted."""
        if self.exactly is not None:
            return version == self.exactly
        return version >= self.minimum


class ReplicaFacts(NamedTuple):
    """Constant properties of a backend, see :class:`~torchrl_llm.modules.backends.Backend`."""

    vocab_size: int
    max_length: int | None
    eos_token_ids: tuple[int, ...]
    native_arguments: frozenset[str]
    records_support: bool
    num_copies: int


class ReplicaStatus(NamedTuple):
    """The current state of a replica.

    Attributes:
        version: version of its weights.
        requests: prompts that it currently samples or scores.
        completed: prompts that it has answered.
        idle_s: seconds since its last progress; 0 while it has no requests.
        cache_usage: share of its key-value cache in use; ``None`` if it is unknown.
        broken: the reason why its engine cannot answer further requests; ``None`` if it can.
    """

    version: int
    requests: int
    completed: int
    idle_s: float
    cache_usage: float | None
    broken: str | None = None


class Replica:
    """A backend that serves many callers, each in its own thread.

    Weights change between two requests, unless the backend itself can change them during a request
    (see ``Backend.counts_versions`` and ``Backend.begins_to_count``).

    Args:
        factory: makes the backend.
        timeout_s: most seconds that a request waits for new weights, and that new weights wait for
            requests.

    Example:
        >>> from functools import partial
        >>> from torchrl_llm.modules.backends import FakeBackend
        >>> replica = Replica(partial(FakeBackend, vocab_size=16, eos_token_ids=(2,)))
        >>> replica.status().version, replica.facts().vocab_size
        (0, 16)
    """

    def __init__(self, factory: Callable[[], Backend], *, timeout_s: float = 300.0) -> None:
        self.backend = factory()
        self._gate, self._timeout_s = PauseGate(), timeout_s
        self._version = 0
        # Until a version is set, samplers count versions by themselves.
        self._told = False
        self._lock = threading.Lock()
        self._requests = 0
        self._completed = 0
        self._steps = 0
        self._progress = time.monotonic()

    def facts(self) -> ReplicaFacts:
        """Constant properties of the backend."""
        facts = ReplicaFacts(*(getattr(self.backend, name) for name in ReplicaFacts._fields))
        return facts._replace(
            eos_token_ids=tuple(facts.eos_token_ids),
            native_arguments=frozenset(facts.native_arguments),
        )

    def status(self) -> ReplicaStatus:
        """Return the current state of the replica."""
        engine = self.backend.status()
        with self._lock:
            if engine.steps != self._steps or not self._requests:
                self._steps, self._progress = engine.steps, time.monotonic()
            return ReplicaStatus(
                self._version,
                self._requests,
                self._completed,
                time.monotonic() - self._progress,
                engine.cache_usage,
                engine.broken,
            )

    def generate(
        self, prompts: RaggedColumn, params: SamplingParams, versions: Versions
    ) -> PackedCompletions:
        """Sample, see :meth:`~torchrl_llm.modules.backends.Backend.generate`.

        Raises:
            VersionMismatch: the request needs different weights than the replica has, or had when
                it sampled.
        """
        with self._serving(len(prompts), versions):
            version = self._version if self._told else None
            groups = self.backend.generate(list(prompts.split()), params)
            packed = PackedCompletions.of(groups, version=version)
        exactly, found = versions.exactly, packed.columns.get("versions")
        if exactly is not None and found is not None and (found.values != exactly).any():
            raise VersionMismatch(f"version {versions.exactly} was replaced within the request")
        return packed

    def token_scores(
        self,
        sequences: RaggedColumn,
        select: RaggedColumn,
        temperature: float | Sequence[float],
        entropy: bool,
        extras: ScoreExtras | None,
        versions: Versions,
    ) -> TokenScores:
        """Score without gradient, see :meth:`~torchrl_llm.data.scoring.TokenScorer.token_scores`.

        Raises:
            VersionMismatch: the replica does not have the weights that the request needs.
        """
        if not isinstance(temperature, float):
            temperature = torch.tensor(temperature, dtype=torch.float32)
        with self._serving(len(sequences), versions), torch.no_grad():
            scores = self.backend.token_scores(
                list(sequences.split()),
                list(select.split()),
                temperature=temperature,
                entropy=entropy,
                extras=extras,
            )
        return scores._replace(
            log_probs=scores.log_probs.cpu(),
            entropy=None if scores.entropy is None else scores.entropy.cpu(),
        )

    def run(self, method: str, num_rows: int, versions: Versions, *args: Any) -> Any:
        """Answer a request with a method of the backend that is not part of the port.

        Raises:
            VersionMismatch: it does not have the weights that the request needs.
        """
        with self._serving(num_rows, versions), torch.no_grad():
            return getattr(self.backend, method)(*args)

    def apply(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the backend that is not a request."""
        return getattr(self.backend, method)(*args, **kwargs)

    def update_weights(
        self, source: WeightSource | Any, version: int, timeout_s: float
    ) -> list[WeightReceipt]:
        """Load new weights, see :meth:`~torchrl_llm.modules.backends.Backend.update_weights`.

        Args:
            source: their source, or a reference to it in Ray's object store.
            version: their version number.
            timeout_s: most seconds to wait for the source and for running requests.

        Raises:
            WeightUpdateError: the weights did not arrive, or requests ran for too long.
        """
        if not isinstance(source, WeightSource):
            source = get(source, timeout_s=timeout_s, what="the source of weights")
        # Requests continue until the weights have arrived.
        incoming = open_source(source, version=version)
        gate = nullcontext(True) if self._changes_within else self._gate.pause(timeout_s=timeout_s)
        with gate as is_alone:
            if not is_alone:
                raise WeightUpdateError(
                    f"{self._gate.num_working} requests ran on for {timeout_s:g} s while new "
                    "weights waited; the old ones stay"
                )
            receipts = self.backend.update_weights(incoming, version=version)
            self._version, self._told = version, True
        return receipts

    @contextmanager
    def _serving(self, num_prompts: int, versions: Versions) -> Iterator[None]:
        limit = self._timeout_s
        with self._lock:
            if not self._requests:
                self._progress = time.monotonic()
            self._requests += num_prompts
        try:
            gate = nullcontext(True) if self._changes_within else self._gate.work(timeout_s=limit)
            with gate as enters:
                if not enters:
                    raise WorkerError(f"an update of weights went on for {limit:g} s")
                if not versions.accepts(self._version):
                    raise VersionMismatch(
                        f"the replica holds version {self._version} of the weights; the request "
                        f"asks for {versions}"
                    )
                yield
        finally:
            with self._lock:
                self._requests -= num_prompts
                self._completed += num_prompts
                self._progress = time.monotonic()

    @property
    def _changes_within(self) -> bool:
        return self.backend.counts_versions or self.backend.begins_to_count
