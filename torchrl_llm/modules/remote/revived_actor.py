"""Objects in Ray actors that come back: built again when they die, up to date before they are used.

A replica of a pool and a remote collector are both a :class:`RevivedActor`. What it must be given
to be up to date is in :class:`SentWeights`.

Ray's own restarts do not do it: they run a constructor again behind the same handle, so that
whoever holds it calls an object without the weights that were sent since.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torchrl_llm._ray import RemoteObject, get
from torchrl_llm.errors import ConfigError, WorkerError
from torchrl_llm.modules.remote.pool_wire import ObjectStoreSource
from torchrl_llm.weights.weight_source import WeightSource

_BACKOFF_S = 0.5
_MOST_DELTAS = 8

State = Literal["starting", "waiting", "serving", "failed", "ended"]
"""``waiting``: built, for weights that can be had only when they are sent next."""


@dataclass(frozen=True, eq=False)
class Sent:
    """Weights as they were sent.

    Attributes:
        source: where they are, or a reference to that in Ray's object store; ``None`` for what can
            be opened only once, and where a version was told without weights.
        version: their number.
        kind: that of the source; ``number`` for a version without weights.
    """

    source: Any
    version: int
    kind: str

    def open(self, timeout_s: float) -> WeightSource:
        """The source itself.

        Raises:
            WorkerError: it did not come in time.
        """
        if isinstance(self.source, WeightSource):
            return self.source
        return get(self.source, timeout_s=timeout_s, what="the source of weights")


class SentWeights:
    """What a new object must be given to hold the current weights.

    Attributes:
        needed: in this order; to be replaced as a whole.
        lock: held while weights are sent to those that serve, and when a new one begins to serve,
            so that each gets all of them.

    Example:
        >>> sent = SentWeights()
        >>> for kind in ("full", "delta", "full", "number", "number", "delta"):
        ...     sent.add(Sent(None, 1, kind), timeout_s=1.0)
        >>> [each.kind for each in sent.needed]
        ['full', 'number', 'delta']
    """

    def __init__(self) -> None:
        self.needed: tuple[Sent, ...] = ()
        self.lock = threading.RLock()

    def add(self, sent: Sent, *, timeout_s: float) -> None:
        """Note what was sent, and keep not more of it than a few times the weights.

        Args:
            sent: after all others.
            timeout_s: most seconds to wait for a source, where several are made one.
        """
        before = () if sent.kind == "full" else self.needed
        if sent.kind in ("adapter", "number"):
            before = tuple(old for old in before if old.kind != sent.kind)
        self.needed = (*before, sent)
        kinds = [old.kind for old in self.needed]
        is_whole = kinds[0] == "full" and set(kinds[1:]) == {"delta"}
        if is_whole and len(kinds) > _MOST_DELTAS and all(old.source for old in self.needed):
            weights = {}
            for old in self.needed:
                weights.update(old.open(timeout_s).receive())
            self.needed = (Sent(ObjectStoreSource.put(weights), sent.version, "full"),)


class Life(NamedTuple):
    """One of the lives of an object: the number of times that it was built, and its actor."""

    number: int
    remote: RemoteObject


class RevivedActor:
    """An object in an actor that is built again when it dies.

    Args:
        build: makes the object in another actor.
        what: it is; begins error messages.
        bring: gives a new object something of what it needs.
        weights: what it needs before it serves.
        max_restarts: so often in a row may it fail, until it is given up; see :attr:`failures`.
        on_dead: called after each of its lives.

    Attributes:
        state: what it does at the moment.
        current: its last life; ``None`` before the first.
        failures: lives that have ended, and that could not begin; whoever sees that it does its
            work may count from 0 again.
        failure: what the last of them failed of.
    """

    def __init__(
        self,
        build: Callable[[], RemoteObject],
        *,
        what: str,
        bring: Callable[[RemoteObject, Sent], object],
        weights: SentWeights,
        max_restarts: int,
        on_dead: Callable[[], object] = lambda: None,
    ) -> None:
        self.state: State = "starting"
        self.current: Life | None = None
        self.failures = 0
        self.failure: Exception | None = None
        self.max_restarts = max_restarts
        self._build, self.what, self._bring, self._weights = build, what, bring, weights
        self._on_dead = on_dead
        self._lock = threading.RLock()
        self._ended = threading.Event()

    def start(self) -> None:
        """Build it for the first time; raises what that raises."""
        self._admit(self._build(), "serving")

    @property
    def is_up(self) -> bool:
        """Whether it is built, and was not seen to die."""
        return self.state in ("serving", "waiting")

    @property
    def restarts(self) -> int:
        """How often it has come back."""
        return 0 if self.current is None else self.current.number - 1

    @property
    def remote(self) -> RemoteObject:
        """The object.

        Raises:
            ConfigError: it was shut down.
            WorkerError: it is being restarted.
            Exception: what it failed of, where it was given up.
        """
        self.check()
        if self.state == "ended":
            raise ConfigError(f"{self.what} was shut down")
        if not self.is_up:
            raise WorkerError(f"{self.what} is being restarted")
        return self.current.remote

    def check(self) -> None:
        """Raise what it failed of, where it was given up."""
        if self.state == "failed":
            raise self.failure

    def lose(self, failure: Exception, life: int | None = None) -> bool:
        """End a life of it, because it is dead or of no use; :meth:`revive` comes next.

        Args:
            failure: what it died of.
            life: number of the one that is meant; the current one by default.

        Returns:
            Whether that life has not ended before.
        """
        with self._lock:
            if not self.is_up or life not in (None, self.current.number):
                return False
            self.state, self.failure = "starting", failure
            self.failures += 1
            self.current.remote.shutdown()  # one that hangs would keep its resources
        self._on_dead()
        return True

    def serve(self) -> None:
        """Say that the weights came that it has waited for."""
        with self._lock:
            if self.state == "waiting":
                self.state = "serving"

    def revive(self) -> None:
        """Build it again, as often as it takes and is allowed; it serves when it is up to date."""
        while self.failures <= self.max_restarts and not self._ended.is_set():
            remote = None
            try:
                remote = self._build()
                self._bring_up_to_date(remote)
                return
            except Exception as error:  # the edge: a failed start is tried again
                if remote is not None:
                    remote.shutdown()
                self.failures, self.failure = self.failures + 1, error
            self._ended.wait(_BACKOFF_S * 2**self.failures)
        self._give_up()

    def fail(self, failure: Exception) -> None:
        """End it for good by an error of its own.

        Args:
            failure: to be raised from now on.
        """
        if self.lose(failure):
            self._give_up()

    def end(self) -> None:
        """End it for good; nothing to do where it ended already."""
        self._ended.set()
        with self._lock:
            was_up = self.is_up
            self.state = "failed" if self.state == "failed" else "ended"
            if was_up:
                self.current.remote.shutdown()
        if was_up:
            self._on_dead()

    def _give_up(self) -> None:
        with self._lock:
            self.state = "ended" if self._ended.is_set() else "failed"

    def _bring_up_to_date(self, remote: RemoteObject) -> None:
        done: tuple[Sent, ...] = ()
        while True:
            with self._weights.lock:
                needed = self._weights.needed
                if any(sent.source is None and sent.kind != "number" for sent in needed):
                    return self._admit(remote, "waiting")
                if needed == done or self._ended.is_set():
                    return self._admit(remote, "serving")
            rest = needed[len(done) :] if needed[: len(done)] == done else needed
            for sent in rest:
                self._bring(remote, sent)
            done = needed

    def _admit(self, remote: RemoteObject, state: State) -> None:
        with self._lock:
            if self._ended.is_set():
                remote.shutdown()
                return
            number = 1 if self.current is None else self.current.number + 1
            self.current, self.state = Life(number, remote), state
