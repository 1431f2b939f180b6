"""Objects in Ray actors that are rebuilt when they die, and brought up to date before use.

A replica of a pool and a remote collector are both a :class:`RevivedActor`. :class:`SentWeights`
holds the weights that bring it up to date.

Ray's own restarts are not enough. They run the constructor again under the same handle, so callers
would use an object without the weights that were sent after its construction.
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
"""In state ``waiting``, the object is built, but its weights arrive only with the next update."""


@dataclass(frozen=True, eq=False)
class Sent:
    """Weights as they were sent.

    Attributes:
        source: their source, or a reference to it in Ray's object store; ``None`` for a source that
            can be opened only once, and for a version without weights.
        version: their version number.
        kind: kind of the source; ``number`` for a version without weights.
    """

    source: Any
    version: int
    kind: str

    def open(self, timeout_s: float) -> WeightSource:
        """The source itself.

        Raises:
            WorkerError: the source did not arrive in time.
        """
        if isinstance(self.source, WeightSource):
            return self.source
        return get(self.source, timeout_s=timeout_s, what="the source of weights")


class SentWeights:
    """The sent weights that a new object needs to be up to date.

    Attributes:
        needed: these weights, in order; the list is replaced, never changed.
        lock: acquired while weights are sent to serving objects, and while a new object starts to
            serve, so that each object gets all weights.

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
        """Record sent weights, and keep at most a few times their size.

        Args:
            sent: the newest weights.
            timeout_s: most seconds to wait for a source, if several are merged.
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
    """One life of an object: its number, counted from 1, and its actor."""

    number: int
    remote: RemoteObject


class RevivedActor:
    """An object in an actor that is rebuilt when it dies.

    Args:
        build: function that makes the object in a new actor.
        what: description of the object, the start of error messages.
        bring: function that sends one of the needed updates to a new object.
        weights: weights that the object needs before it serves.
        max_restarts: most failures in a row before the object is abandoned; see :attr:`failures`.
        on_dead: called after the end of each life.

    Attributes:
        state: its current state.
        current: its last life; ``None`` before the first.
        failures: number of lives that ended or could not start. A caller may reset it to 0 after
            the object has worked.
        failure: error of the last failure.
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
        """Build the object for the first time, and raise errors of the build."""
        self._admit(self._build(), "serving")

    @property
    def is_up(self) -> bool:
        """Whether the object is built, and not known to be dead."""
        return self.state in ("serving", "waiting")

    @property
    def restarts(self) -> int:
        """Number of restarts."""
        return 0 if self.current is None else self.current.number - 1

    @property
    def remote(self) -> RemoteObject:
        """The object.

        Raises:
            ConfigError: it was shut down.
            WorkerError: it is being restarted.
            Exception: its failure, if it was abandoned.
        """
        self.check()
        if self.state == "ended":
            raise ConfigError(f"{self.what} was shut down")
        if not self.is_up:
            raise WorkerError(f"{self.what} is being restarted")
        return self.current.remote

    def check(self) -> None:
        """Raise its failure, if it was abandoned."""
        if self.state == "failed":
            raise self.failure

    def lose(self, failure: Exception, life: int | None = None) -> bool:
        """End a life whose actor is dead or unusable; call :meth:`revive` next.

        Args:
            failure: cause of the end.
            life: number of the life; the current one by default.

        Returns:
            ``False`` if that life had already ended.
        """
        with self._lock:
            if not self.is_up or life not in (None, self.current.number):
                return False
            self.state, self.failure = "starting", failure
            self.failures += 1
            self.current.remote.shutdown()  # a hanging actor would keep its resources
        self._on_dead()
        return True

    def serve(self) -> None:
        """Report that the awaited weights have arrived."""
        with self._lock:
            if self.state == "waiting":
                self.state = "serving"

    def revive(self) -> None:
        """Rebuild the object, with retries up to the limit; it serves when it is up to date."""
        while self.failures <= self.max_restarts and not self._ended.is_set():
            remote = None
            try:
                remote = self._build()
                self._bring_up_to_date(remote)
                return
            except Exception as error:  # any exception: a failed start is tried again
                if remote is not None:
                    remote.shutdown()
                self.failures, self.failure = self.failures + 1, error
            self._ended.wait(_BACKOFF_S * 2**self.failures)
        self._give_up()

    def fail(self, failure: Exception) -> None:
        """End the object permanently with an error.

        Args:
            failure: the error to raise from now on.
        """
        if self.lose(failure):
            self._give_up()

    def end(self) -> None:
        """End the object permanently; no effect if it has already ended."""
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
