"""Serves many threads with one engine: continuous batching without a separate thread.

Every caller submits requests and waits for its own answers. The first caller becomes the leader and
steps the engine for all callers. When its own requests are done, it appoints the next leader. So a
program with one thread is as deterministic as the engine, and the engine runs only while a caller
waits.

Weight updates and sleep happen between two steps (:meth:`EngineLoop.exclusive`).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torchrl_llm._checked import check
from torchrl_llm.errors import BackendError, ConfigError, TorchRLLLMError, WorkerError
from torchrl_llm.modules.backends.backend_port import Cancelled

InFlight = Literal["wait", "keep", "abort"]


class EngineRequest(NamedTuple):
    """One sequence to sample or score.

    Attributes:
        prompt: prompt for the engine's ``add_request``.
        params: vLLM's own sampling parameters.
    """

    prompt: Any
    params: Any


@dataclass(eq=False)
class _Ticket:
    """A caller that waits for answers or, without requests, for exclusive access."""

    requests: Sequence[EngineRequest] = ()
    cancelled: Cancelled = ()
    names: list[str] = field(default_factory=list)
    outputs: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None
    wake: threading.Event = field(default_factory=threading.Event)
    finished: bool = False

    def is_cancelled(self, name: str) -> bool:
        return bool(self.cancelled) and self.cancelled[self.names.index(name)]()


class EngineLoop:
    """Runs the requests of any number of threads on one engine.

    Args:
        engine: has ``add_request(name, prompt, params, lora_request=)``, ``step()``, which returns
            finished outputs with a ``request_id``, and ``abort_request(names)``.
        aborted: function from the name of a request to its output before the abort.
        adapter: function that returns the ``LoRARequest`` for new requests, or ``None``.

    Attributes:
        steps: number of steps so far.
        closed: the reason why the engine admits no requests now; ``None`` if it does. Set it only
            with exclusive access.

    Example:
        >>> class Echo:
        ...     waiting = []
        ...     def add_request(self, name, prompt, params, lora_request=None):
        ...         self.waiting.append(name)
        ...     def step(self):
        ...         done, self.waiting = self.waiting, []
        ...         return [type("Output", (), {"request_id": n, "finished": True}) for n in done]
        >>> loop = EngineLoop(Echo())
        >>> len(loop.run([EngineRequest([1], None), EngineRequest([2], None)]))
        2
    """

    def __init__(
        self,
        engine: Any,
        *,
        aborted: Callable[[str], Any] | None = None,
        adapter: Callable[[], Any] | None = None,
    ) -> None:
        self._engine = engine
        self._aborted = aborted
        self._adapter = adapter
        self.steps = 0
        self.closed: str | None = None
        self._count = itertools.count()
        self._lock = threading.Lock()
        self._leader: _Ticket | None = None
        self._owner: int | None = None  # thread with exclusive access
        self._depth = 0
        self._incoming: list[_Ticket] = []  # not yet submitted to the engine
        self._running: dict[str, _Ticket] = {}
        self._orphans: list[str] = []  # requests whose caller stopped waiting
        self._alone: list[tuple[_Ticket, InFlight]] = []
        self._dead: str | None = None
        self._progress = time.monotonic()

    # -- requests ---------------------------------------------------------------------------------

    @property
    def dead(self) -> str | None:
        """The reason why the engine has failed; ``None`` while it works."""
        return self._dead

    @property
    def num_unfinished(self) -> int:
        """Number of waiting and running requests."""
        with self._lock:
            waiting = sum(len(ticket.requests) for ticket in self._incoming)
            return waiting + len(self._running)

    def run(
        self,
        requests: Sequence[EngineRequest],
        *,
        cancelled: Cancelled = (),
        timeout_s: float = 600.0,
    ) -> list[Any]:
        """Answer requests; other threads may call it at the same time.

        Args:
            requests: any number.
            cancelled: one function per request, which returns whether to abort it; or an empty
                sequence. The functions are called between two steps.
            timeout_s: most seconds to wait while the engine makes no progress.

        Returns:
            The engine's final output of each request, in order.

        Raises:
            BackendError: the engine failed, now or earlier, or rejected a request.
            WorkerError: the engine made no progress for ``timeout_s`` seconds.
        """
        if not requests:
            return []
        ticket = _Ticket(requests, cancelled)
        if self._owner == threading.get_ident():
            self._run_alone(ticket)
        else:
            with self._lock:
                self._check_alive()
                self._incoming.append(ticket)
                lead = self._leader is None
                if lead:
                    self._leader = ticket
                    self._progress = time.monotonic()
            self._follow(ticket, lead, timeout_s)
        if ticket.error is not None:
            raise ticket.error
        return [ticket.outputs[name] for name in ticket.names]

    def _run_alone(self, ticket: _Ticket) -> None:
        """Run requests of the thread with exclusive access; other requests wait."""
        self._check_alive()
        try:
            self._admit(ticket)
            while not ticket.finished:
                self._step()
        except BaseException as error:
            self._die(error)
            raise

    def _follow(self, ticket: _Ticket, lead: bool, timeout_s: float) -> None:
        while not ticket.finished:
            if not lead:
                self._wait(ticket, timeout_s)
                if ticket.finished:
                    return
            lead = False
            try:
                self._lead(ticket)
            except BaseException as error:
                # The engine's state is unknown, and the other callers must not wait for it.
                self._die(error)
                raise

    def _wait(self, ticket: _Ticket, timeout_s: float) -> None:
        """Wait until the ticket is finished or becomes the leader."""
        try:
            while not ticket.wake.wait(min(timeout_s, 5.0)):
                idle = time.monotonic() - self._progress
                if idle > timeout_s:
                    raise WorkerError(
                        f"the engine made no step for {idle:.0f} s (limit {timeout_s:g} s); "
                        f"{len(self._running)} requests are running"
                    )
            ticket.wake.clear()
        except BaseException:
            self._forget(ticket)
            raise

    def _forget(self, ticket: _Ticket) -> None:
        """Remove the ticket of an interrupted caller, so that it cannot become the leader."""
        with self._lock:
            self._incoming = [other for other in self._incoming if other is not ticket]
            self._alone = [entry for entry in self._alone if entry[0] is not ticket]
            for name in ticket.names:
                if self._running.pop(name, None) is not None:
                    self._orphans.append(name)
            ticket.finished = True
            if self._leader is ticket:
                self._appoint()

    def _lead(self, ticket: _Ticket) -> None:
        """Step until the own requests end or a caller needs exclusive access; then appoint."""
        while not ticket.finished:
            with self._lock:
                mode = self._alone[0][1] if self._alone else None
                arrived = []
                # New requests must not delay a caller that waits for an empty engine.
                if mode is None:
                    arrived, self._incoming = self._incoming, []
                orphans, self._orphans = self._orphans, []
                cancelled = [
                    name for name, each in self._running.items() if each.is_cancelled(name)
                ]
            if orphans:
                self._engine.abort_request(orphans)
            self._abort(list(self._running) if mode == "abort" else cancelled)
            if mode == "keep" or (mode is not None and not self._running):
                break
            for other in arrived:
                self._admit(other)
            if self._running:
                self._step()
        with self._lock:
            self._appoint()

    def _admit(self, ticket: _Ticket) -> None:
        """Submit a caller's requests to the engine; a rejection raises only for this caller."""
        try:
            if self.closed is not None:
                raise BackendError(self.closed)
            adapter = None if self._adapter is None else self._adapter()
            for request in ticket.requests:
                name = f"r{next(self._count)}"
                self._engine.add_request(name, request.prompt, request.params, lora_request=adapter)
                ticket.names.append(name)
                self._running[name] = ticket
        except TorchRLLLMError as error:
            ticket.error = error
        except Exception as error:
            ticket.error = ConfigError(f"vLLM rejected a request: {error}")
        if ticket.error is not None:
            self._engine.abort_request(ticket.names)
            for name in ticket.names:
                self._running.pop(name, None)
            self._finish(ticket)

    def _step(self) -> None:
        self.steps += 1
        for output in self._engine.step():
            if output.finished:
                self._hand_out(output.request_id, output)
        self._progress = time.monotonic()

    def _hand_out(self, name: str, output: Any) -> None:
        ticket = self._running.pop(name, None)
        if ticket is None:
            return
        ticket.outputs[name] = output
        if len(ticket.outputs) == len(ticket.requests):
            self._finish(ticket)

    @staticmethod
    def _finish(ticket: _Ticket) -> None:
        ticket.finished = True
        ticket.wake.set()

    def _abort(self, names: Sequence[str]) -> None:
        for name in names:
            output = self._aborted(name)
            self._engine.abort_request([name])
            self._hand_out(name, output)

    def _appoint(self) -> None:
        """Choose the next leader; the caller holds the lock."""
        self._leader = None
        if self._alone and (self._alone[0][1] == "keep" or not self._running):
            self._leader = self._alone.pop(0)[0]
        else:
            waiting = [*self._running.values(), *self._incoming]
            self._leader = next((ticket for ticket in waiting if not ticket.finished), None)
        self._progress = time.monotonic()
        if self._leader is not None:
            self._leader.wake.set()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise BackendError(f"the engine stopped earlier and must be restarted: {self._dead}")

    def _die(self, error: BaseException) -> None:
        with self._lock:
            self._dead = f"{type(error).__name__}: {error}"
            left = {*self._running.values(), *self._incoming, *(t for t, _ in self._alone)}
            self._running, self._incoming, self._alone, self._leader = {}, [], [], None
            for ticket in left:
                if not ticket.finished:
                    ticket.error = BackendError(f"the engine stopped: {self._dead}")
                    self._finish(ticket)

    # -- exclusive access -------------------------------------------------------------------------

    @contextmanager
    def exclusive(
        self, in_flight: InFlight = "wait", *, timeout_s: float = 600.0
    ) -> Iterator[None]:
        """A context in which no other thread steps the engine; reentrant.

        Args:
            in_flight: what happens to running requests. ``"wait"`` lets them finish and holds back
                new requests, ``"keep"`` suspends them, ``"abort"`` ends them.
            timeout_s: most seconds to wait without progress of the engine.

        Raises:
            ConfigError: for an unknown mode.
            BackendError: the engine failed.
            WorkerError: it made no progress for ``timeout_s`` seconds.
        """
        check("in_flight", in_flight, InFlight)
        if self._owner == threading.get_ident():
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
            return
        ticket = _Ticket()
        with self._lock:
            self._check_alive()
            free = self._leader is None
            if free:
                self._leader = ticket
            else:
                self._alone.append((ticket, in_flight))
        if not free:
            self._wait(ticket, timeout_s)
            if ticket.error is not None:
                raise ticket.error
        self._owner = threading.get_ident()
        try:
            yield
        finally:
            self._owner = None
            with self._lock:
                self._appoint()
