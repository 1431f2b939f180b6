"""Rollouts of programs: one session per row of an environment.

A :class:`ProgramSessions` is the engine of these sessions: calls wait here until the environment
(:mod:`torchrl_llm.gateway.program_env`) sends all waiting calls to the policy. It also owns the
server and the host processes.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tensordict import TensorDict

from torchrl_llm.data.failures import PROGRAM, Failure
from torchrl_llm.gateway.calls import RefusedCallError
from torchrl_llm.gateway.program_runner import Ended, ProgramRunner
from torchrl_llm.gateway.session import Engine, EngineLimits, Formatters, GatewaySession, Pending

_POLL_S = 0.25
# Wait for more calls, because a step with few calls costs as much as a step with many.
_SHARE = 0.2
_GONE = "this session has ended"


@dataclass(eq=False)
class Rollout:
    """A program that runs for a row.

    Args:
        number: number of its job.
        key: key of its session.
        session: its calls.

    Attributes:
        waiting: calls not yet sent to the policy, oldest first.
        asked: the call that the policy is answering.
        held: the row of the last answer, until its outcome is known.
        num_answers: number of answers so far.
        ended: how the program ended.
        own_s: seconds it has run without waiting for an answer.
        since: start of its current own work; ``None`` while it waits for an answer.
    """

    number: int
    key: str
    session: GatewaySession
    waiting: deque[Pending] = field(default_factory=deque)
    asked: Pending | None = None
    held: TensorDict | None = None
    num_answers: int = 0
    ended: Ended | None = None
    own_s: float = 0.0
    since: float | None = None

    @property
    def is_silent(self) -> bool:
        """Whether the program is running: it neither waits nor has ended."""
        return self.ended is None and not self.waiting and self.asked is None

    @property
    def is_known(self) -> bool:
        """Whether the outcome of the last answer is known: the next call, or the end."""
        return bool(self.waiting) or self.ended is not None

    def used_s(self, now: float) -> float:
        """Seconds of the program's own work."""
        return self.own_s + (0.0 if self.since is None else now - self.since)

    def pause(self, now: float) -> None:
        """Stop the clock: the program waits for an answer."""
        self.own_s, self.since = self.used_s(now), None


class ProgramSessions(Engine):
    """Runs a program for each row of an environment, and collects its calls.

    Args:
        limits: limits of calls.
        formatters: encode conversations.
        size: ``B``, rows.
        program: arguments of :class:`~torchrl_llm.gateway.program_runner.ProgramRunner`.
        timeout_s: time limit in seconds for a program's own work, without waiting for answers.
        max_calls: most calls of a session.
        patience_s: maximum number of seconds between two calls of one step: after a call has
            arrived, further calls are awaited while they arrive within this time, or within a fifth
            of the time of policy and step if that is longer.
    """

    def __init__(
        self,
        limits: EngineLimits,
        formatters: Formatters,
        size: int,
        *,
        program: Mapping[str, Any],
        timeout_s: float = 600.0,
        max_calls: int = 64,
        patience_s: float = 0.05,
    ) -> None:
        self.limits = limits
        self._formatters, self._program = formatters, dict(program)
        self._timeout_s, self._max_calls, self._patience_s = timeout_s, max_calls, patience_s
        self.rollouts: list[Rollout | None] = [None] * size
        self._by_session: dict[GatewaySession, Rollout] = {}
        self._by_key: dict[str, Rollout] = {}
        self._by_number: dict[int, Rollout] = {}
        self._changed = threading.Condition()
        self._num_events, self._num_jobs = 0, 0
        self._cycle_s, self._waited_at = 0.0, 0.0
        self._runner: ProgramRunner | None = None
        self._server: Any = None

    # -- the calls of programs, from the server's thread ------------------------------------------

    def submit(self, pending: Pending) -> None:
        """See :meth:`Engine.submit`."""
        with self._changed:
            rollout = self._by_session.get(pending.session)
            if rollout is None or rollout.ended is not None:
                raise RefusedCallError(_GONE, kind="key")
            rollout.waiting.append(pending)
            rollout.pause(time.monotonic())
            self._happened()

    def withdraw(self, pending: Pending) -> None:
        """See :meth:`Engine.withdraw`; a call that was sent to the policy stays a turn."""
        with self._changed:
            rollout = self._by_session.get(pending.session)
            if rollout is not None and pending in rollout.waiting:
                rollout.waiting.remove(pending)
                if not rollout.waiting and rollout.asked is None:
                    rollout.since = time.monotonic()

    def _ended(self, number: int, ended: Ended) -> None:
        with self._changed:
            rollout = self._by_number.get(number)
            if rollout is not None and rollout.ended is None:
                self._end(rollout, ended)

    def _end(self, rollout: Rollout, ended: Ended) -> None:
        rollout.ended = ended
        rollout.session.close(_GONE)
        while rollout.waiting:
            rollout.waiting.popleft().resolve(RefusedCallError(_GONE, kind="key"))
        self._happened()

    def _happened(self) -> None:
        self._num_events += 1
        self._changed.notify_all()

    # -- rollouts, from the thread that collects --------------------------------------------------

    def begin(self, place: int, row: Mapping[str, Any]) -> None:
        """Start the program for a row; replaces the previous one.

        Args:
            place: index of the row in the environment.
            row: input of the program.
        """
        self._open()
        self.forget(place)
        session = GatewaySession(self, self._formatters, max_calls=self._max_calls)
        self._num_jobs += 1
        rollout = Rollout(self._num_jobs, f"session-{secrets.token_urlsafe(24)}", session)
        rollout.since = time.monotonic()
        with self._changed:
            self.rollouts[place] = self._by_session[session] = rollout
            self._by_key[rollout.key] = self._by_number[rollout.number] = rollout
        self._runner.start(rollout.number, row, f"{self._server.url}/v1", rollout.key)

    def forget(self, place: int) -> None:
        """End the program of a row, and drop its calls.

        Args:
            place: index of the row.
        """
        rollout, self.rollouts[place] = self.rollouts[place], None
        if rollout is None:
            return
        with self._changed:
            runs = rollout.ended is None
            if runs:
                self._end(rollout, Ended())
            if rollout.asked is not None:
                rollout.asked.resolve(RefusedCallError(_GONE, kind="key"))
            del self._by_session[rollout.session]
            del self._by_key[rollout.key], self._by_number[rollout.number]
        if runs:
            self._runner.stop(rollout.number)

    def wait(self) -> None:
        """Wait until a program has made a call or ended, and continue while more programs do so."""
        self._wait(max(self._patience_s, self._cycle_s * _SHARE))
        self._waited_at = time.monotonic()

    def _wait(self, patience_s: float) -> None:
        with self._changed:
            while True:
                now, seen = time.monotonic(), self._num_events
                running = [each for each in self.rollouts if each is not None]
                silent = [each for each in running if each.is_silent]
                for rollout in silent:
                    if rollout.used_s(now) >= self._timeout_s:
                        self._stop(rollout)
                silent = [each for each in silent if each.ended is None]
                ready = any(each.asked is not None or each.is_known for each in running)
                if not silent:
                    return
                self._changed.wait(patience_s if ready else _POLL_S)
                if ready and seen == self._num_events:
                    return

    def _stop(self, rollout: Rollout) -> None:
        told = (
            f"the program took more than {self._timeout_s:g} s besides waiting for answers; "
            "agent.timeout_s changes that"
        )
        self._end(rollout, Ended(None, Failure.told("ProgramTimeout", told, source=PROGRAM)))
        self._runner.stop(rollout.number)

    def take(self, rollout: Rollout) -> None:
        """Take the oldest waiting call, if no other call is being answered.

        Args:
            rollout: rollout of the call.
        """
        with self._changed:
            while rollout.asked is None and rollout.waiting:
                pending = rollout.waiting.popleft()
                rollout.asked = None if pending.is_given_up else pending
            if rollout.asked is None and rollout.since is None and rollout.ended is None:
                rollout.since = time.monotonic()  # all were withdrawn

    def answered(self) -> None:
        """Record that the policy has answered."""
        self._cycle_s = time.monotonic() - self._waited_at

    def answer(self, rollout: Rollout, row: TensorDict) -> None:
        """Send an answer to the program.

        Args:
            rollout: rollout of the call.
            row: row after the policy.
        """
        with self._changed:
            pending, rollout.asked, rollout.held = rollout.asked, None, row
            rollout.num_answers += 1
            if not rollout.waiting and rollout.ended is None:
                rollout.since = time.monotonic()
        pending.resolve(row["history"].full.chats[0].record)

    # -- server and processes ---------------------------------------------------------------------

    def _open(self) -> None:
        if self._server is None:
            from torchrl_llm.gateway.app import make_app
            from torchrl_llm.gateway.server import GatewayServer

            self._server = GatewayServer(make_app(self._find))
            self._server.start()
            self._runner = ProgramRunner(self._ended, **self._program)

    def _find(self, key: str) -> GatewaySession | None:
        rollout = self._by_key.get(key)
        return None if rollout is None else rollout.session

    def close(self) -> None:
        """End all programs, and the server."""
        for place in range(len(self.rollouts)):
            self.forget(place)
        if self._runner is not None:
            self._runner.close()
            self._server.close()
            self._runner = self._server = None
