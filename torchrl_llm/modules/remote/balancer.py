"""Chooses the replica for the next request, by pure functions of the known loads.

This module does not depend on Ray. The pool calls it for each request, and the simulation of a
thousand replicas (``test/benchmarks/sim_replicas.py``) calls the same code.
"""

from __future__ import annotations

import random
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from torchrl_llm._checked import Ge, checked
from torchrl_llm.errors import ConfigError, WorkerError

Strategy = Literal["requests", "kv-cache", "prefix-aware", "round-robin"]
"""The criterion of a choice."""


class LoadSnapshot(NamedTuple):
    """The load of one replica, as last known.

    Attributes:
        index: index of the replica.
        requests: prompts that it runs or queues.
        cache_usage: share of its key-value cache in use, 0 to 1; ``None`` if it is unknown.
        serving: whether the replica accepts requests.
    """

    index: int
    requests: int
    cache_usage: float | None = None
    serving: bool = True


class LoadBook:
    """The loads that one client knows: the last report, plus its own later requests.

    Example:
        >>> book = LoadBook()
        >>> book.told([LoadSnapshot(0, 3), LoadSnapshot(1, 5)])
        >>> book.count(0, 2)
        >>> book.count(1, -1)
        >>> [load.requests for load in book.loads()]
        [5, 4]
    """

    def __init__(self) -> None:
        self._own: Counter[int] = Counter()
        self._loads: list[LoadSnapshot] = []

    def told(self, loads: Sequence[LoadSnapshot]) -> None:
        """Store a report on all replicas, which includes this client's earlier requests."""
        # The count is at least the client's own requests, because the report may be older than some
        # of them.
        own = self._own
        self._loads = [
            load if load.requests >= own[load.index] else load._replace(requests=own[load.index])
            for load in loads
        ]

    def count(self, index: int, rows: int) -> None:
        """Count requests sent to a replica (or, with a negative number, answered by it)."""
        self._own[index] += rows
        if index < len(self._loads):
            load = self._loads[index]
            requests = max(load.requests + rows, self._own[index], 0)
            self._loads[index] = load._replace(requests=requests)

    def lost(self, index: int) -> None:
        """Record that a replica died."""
        if index < len(self._loads):
            self._loads[index] = self._loads[index]._replace(serving=False)

    def loads(self) -> list[LoadSnapshot]:
        """Return one snapshot per replica, with the current loads."""
        return list(self._loads)


class ReportsLoads(Protocol):
    """Any object that reports the loads of replicas; its snapshots are ordered by index."""

    def loads(self) -> Sequence[LoadSnapshot]:
        """Return one snapshot per replica."""


class LoadBalancer:
    """Chooses replicas by one strategy, with further strategies as fallback.

    - ``"requests"``: the replica with the fewest requests; the first of equal ones.
    - ``"kv-cache"``: the replica with the least used cache; of equal ones, the one with the fewest
      requests. It cannot choose if no replica reports its cache use.
    - ``"prefix-aware"``: prompts with the same beginning go to the same replica, which then has the
      beginning in its prefix cache. It cannot choose without a prompt, or if that replica has more
      than ``overload_threshold`` times the mean number of requests.
    - ``"round-robin"``: one replica after the other.

    If a strategy cannot choose, the next strategy is tried, and ``"requests"`` after the last one.

    Args:
        actors: object that reports loads (a pool, an :class:`~torchrl_llm.modules.AsyncVLLM`), or a
            function that returns the loads.
        strategy: one strategy, or several to try in turn.
        prefix_length: prompts with the same first ``prefix_length`` tokens (or characters) count as
            equal; ``None`` compares whole prompts.
        overload_threshold: see ``"prefix-aware"``; at least 1.
        sample_size: compare only this many randomly drawn replicas instead of all. Many clients
            with slightly old loads would all choose the same least loaded replica; drawing two
            replicas avoids this (Mitzenmacher, "The power of two choices").
        seed: seed of a separate generator for these draws.

    Raises:
        ConfigError: for an unknown strategy or a value outside its range.

    Example:
        >>> loads = [LoadSnapshot(0, 4), LoadSnapshot(1, 1), LoadSnapshot(2, 0, serving=False)]
        >>> balancer = LoadBalancer(lambda: loads, "requests")
        >>> balancer.select_actor_index(), balancer.select_actor_index(exclude={1})
        (1, 0)
    """

    @checked
    def __init__(
        self,
        actors: ReportsLoads | Callable[[], Sequence[LoadSnapshot]],
        strategy: Strategy | tuple[Strategy, ...] | list[Strategy] = ("prefix-aware", "requests"),
        prefix_length: Annotated[int, Ge(1)] | None = 8,
        overload_threshold: Annotated[float, Ge(1)] = 1.5,
        *,
        sample_size: Annotated[int, Ge(1)] | None = None,
        seed: int = 0,
    ) -> None:
        self.strategies = (strategy,) if isinstance(strategy, str) else tuple(strategy)
        rules = {
            "requests": self._fewest_requests,
            "kv-cache": self._least_cache,
            "prefix-aware": self._same_prefix,
            "round-robin": self._next_in_turn,
        }
        unknown = [name for name in self.strategies if name not in rules]
        if unknown or not self.strategies:
            raise ConfigError(f"strategy must be of {sorted(rules)}, got {strategy!r}")
        self._loads = actors if callable(actors) else actors.loads
        self._rules = [(name, rules[name]) for name in (*self.strategies, "requests")]
        self._prefix_length = prefix_length
        self._overload_threshold = overload_threshold
        self._sample_size = sample_size
        self._random = random.Random(seed)
        self._turn = -1
        self._chosen_by: Counter[str] = Counter()
        self._chosen: Counter[int] = Counter()
        self._lock = threading.Lock()

    def select_actor_index(
        self,
        prompt: str | Sequence[int] | Tensor | None = None,
        *,
        exclude: Collection[int] = (),
        loads: Sequence[LoadSnapshot] | None = None,
    ) -> int:
        """Choose a replica for one request.

        Args:
            prompt: text or token ids of the prompt, for ``"prefix-aware"``.
            exclude: replicas to choose only if no other replica serves.
            loads: the loads, if the caller already has them.

        Returns:
            The index of the replica.

        Raises:
            WorkerError: no replica serves.
        """
        everyone = self._loads() if loads is None else loads
        serving = [load for load in everyone if load.serving]
        if not serving:
            raise WorkerError(f"none of {len(everyone)} replicas serves at the moment")
        allowed = [load for load in serving if load.index not in exclude] if exclude else serving
        with self._lock:
            for name, rule in self._rules:
                chosen = rule(allowed or serving, prompt)
                if chosen is not None:
                    self._chosen_by[name] += 1
                    self._chosen[chosen.index] += 1
                    return chosen.index
        raise AssertionError("the last rule always chooses")

    def select_actor(
        self,
        prompt: str | Sequence[int] | Tensor | None = None,
        request_context: Mapping[str, Any] | None = None,
    ) -> int:
        """Choose a replica: :meth:`select_actor_index` under TorchRL's name.

        Args:
            prompt: see there.
            request_context: without effect, as in TorchRL.
        """
        return self.select_actor_index(prompt)

    def get_stats(self) -> dict[str, dict[str | int, int]]:
        """Count choices by each strategy (``"strategies"``) and of each replica (``"actors"``)."""
        with self._lock:
            return {"strategies": dict(self._chosen_by), "actors": dict(self._chosen)}

    # -- rules: a choice, or None if it is impossible ---------------------------------------

    def _drawn(self, loads: list[LoadSnapshot]) -> list[LoadSnapshot]:
        if self._sample_size is None or self._sample_size >= len(loads):
            return loads
        return self._random.sample(loads, self._sample_size)

    def _fewest_requests(self, loads: list[LoadSnapshot], prompt: object) -> LoadSnapshot:
        return min(self._drawn(loads), key=lambda load: load.requests)

    def _least_cache(self, loads: list[LoadSnapshot], prompt: object) -> LoadSnapshot | None:
        known = [load for load in loads if load.cache_usage is not None]
        if not known:
            return None
        return min(self._drawn(known), key=lambda load: (load.cache_usage, load.requests))

    def _same_prefix(
        self, loads: list[LoadSnapshot], prompt: str | Sequence[int] | Tensor | None
    ) -> LoadSnapshot | None:
        if prompt is None or len(prompt) == 0:
            return None
        # This uses all indices, serving or not, so that a rebuilt replica gets the same prompts as
        # before.
        slots = loads[-1].index + 1
        home = _hash(prompt[: self._prefix_length]) % slots
        chosen = min(loads, key=lambda load: (load.index - home) % slots)
        mean = sum(load.requests for load in loads) / len(loads)
        # One request more than the mean is never an overload. Otherwise an idle pool would
        # distribute prompts with the same beginning over replicas.
        limit = max(self._overload_threshold * mean, mean + 1)
        return chosen if chosen.requests < limit else None

    def _next_in_turn(self, loads: list[LoadSnapshot], prompt: object) -> LoadSnapshot:
        later = [load for load in loads if load.index > self._turn]
        chosen = (later or loads)[0]
        self._turn = chosen.index
        return chosen


def _hash(prefix: str | Sequence[int] | Tensor) -> int:
    """Hash a value; unlike with ``hash``, the result is equal in every process."""
    if not isinstance(prefix, str):
        prefix = ",".join(map(str, torch.as_tensor(prefix).tolist()))
    return zlib.crc32(prefix.encode())
