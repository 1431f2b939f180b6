"""Runs Python for many callers: in fresh interpreters, or in one that a caller keeps.

:class:`PythonExecutorService` runs in this process or, as one service for many environments, in a
Ray actor (:class:`RayPythonExecutor`); the code itself always runs in a sandbox
(:mod:`torchrl_llm.sandbox`). What a model reads of it is the business of
:mod:`torchrl_llm.tools.python_interpreter`.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from torchrl_llm._ray import ActorOptions, RemoteObject
from torchrl_llm.errors import ConfigError
from torchrl_llm.sandbox import Limits, Sandbox, SandboxResult, SandboxSession, make_sandbox

# Of a kept interpreter, which has no end of its own; each piece of code has its time limit.
_SESSION_CPU_S = 3600.0


class PythonExecutorService:
    r"""Runs pieces of Python code in sandboxes, at most ``pool_size`` at a time.

    Args:
        pool_size: pieces that run at a time; others wait.
        timeout: seconds that a piece may take.
        sandbox: where it runs, or the name of a kind of sandbox; the strongest that the machine has
            by default.
        limits: of each run; their ``wall_s`` is ``timeout``.
        max_sessions: interpreters that are kept; beyond that the one that was used least recently
            is ended.

    Raises:
        ConfigError: an impossible number, or ``limits`` beside a sandbox that has its own.

    Example:
        >>> service = PythonExecutorService(pool_size=2)
        >>> service.execute("print(6 * 7)")["stdout"]
        '42\n'
        >>> service.close()
    """

    def __init__(
        self,
        pool_size: int = 32,
        timeout: float = 10.0,
        *,
        sandbox: Sandbox | str | None = None,
        limits: Limits | None = None,
        max_sessions: int = 256,
    ) -> None:
        if pool_size < 1 or max_sessions < 1 or timeout <= 0:
            raise ConfigError(
                "pool_size and max_sessions must be at least 1 and timeout above 0, got "
                f"{pool_size}, {max_sessions} and {timeout}"
            )
        if isinstance(sandbox, Sandbox) and limits is not None:
            raise ConfigError("limits would have no effect: the sandbox has its own")
        self.pool_size, self.timeout, self.max_sessions = pool_size, timeout, max_sessions
        self._given = sandbox if isinstance(sandbox, Sandbox) else None
        self._kind = "auto" if sandbox is None or self._given is not None else sandbox
        limits = self._given.limits if self._given is not None else limits or Limits()
        self.limits = replace(limits, wall_s=timeout)
        self._begin()

    def _begin(self) -> None:
        self._free = threading.BoundedSemaphore(self.pool_size)
        self._lock = threading.Lock()
        self._sandbox: Sandbox | None = self._given
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._crowded_out: set[Hashable] = set()

    @property
    def sandbox(self) -> Sandbox:
        """Where code runs."""
        with self._lock:
            if self._sandbox is None:
                self._sandbox = make_sandbox(self._kind, self.limits)
            return self._sandbox

    @property
    def num_sessions(self) -> int:
        """How many interpreters are kept."""
        return len(self._kept)

    def execute(self, code: str, *, session: Hashable = None) -> dict[str, Any]:
        """Run a piece of code; thread-safe.

        Args:
            code: Python source.
            session: the caller whose interpreter is kept; ``None`` for a fresh one.

        Returns:
            ``success`` (bool), ``stdout``, ``stderr``, ``returncode`` (``None`` where unknown),
            ``status`` (see :class:`~torchrl_llm.sandbox.SandboxResult`), ``seconds``,
            ``truncated`` (bool), ``restarted`` (bool: the interpreter that the caller had is gone,
            and this was a new one).
        """
        sandbox = self.sandbox
        with self._free:
            if session is None:
                return _as_dict(sandbox.run_python(code, limits=self.limits))
            kept = self._keep(session)
            with kept.lock:
                restarted = kept.open(sandbox, self.limits) or session in self._crowded_out
                self._crowded_out.discard(session)
                return _as_dict(kept.session.run(code, wall_s=self.timeout), restarted)

    def _keep(self, session: Hashable) -> _Kept:
        with self._lock:
            kept = self._kept.setdefault(session, _Kept())
            self._kept.move_to_end(session)
            crowd = list(self._kept)[: max(0, len(self._kept) - self.max_sessions)]
        for other in crowd:
            self.end_session(other)
            self._crowded_out.add(other)  # its caller must be told when it comes back
        return kept

    def end_session(self, session: Hashable) -> None:
        """End the interpreter of a caller.

        Args:
            session: as given to :meth:`execute`.
        """
        with self._lock:
            kept = self._kept.pop(session, None)
            self._crowded_out.discard(session)
        if kept is not None:
            kept.close()

    def close(self) -> None:
        """End all interpreters; may be called twice, and used again after."""
        for session in [*self._kept, *self._crowded_out]:
            self.end_session(session)
        with self._lock:
            sandbox, self._sandbox = self._sandbox, self._given
        if sandbox is not None and sandbox is not self._given:
            sandbox.close()

    def __getstate__(self) -> dict[str, Any]:
        # Interpreters stay where they run.
        rest = ("_free", "_lock", "_sandbox", "_kept", "_crowded_out")
        return {key: value for key, value in self.__dict__.items() if key not in rest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()


class _Kept:
    """The interpreter of one caller, opened when it is needed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.session: SandboxSession | None = None

    def open(self, sandbox: Sandbox, limits: Limits) -> bool:
        """Open it, again where it ended; whether one had ended."""
        if self.session is not None and self.session.alive:
            return False
        ended, self.session = self.session, None
        if ended is not None:
            ended.close()
        cpu_s = _SESSION_CPU_S if limits.cpu_s is None else limits.cpu_s
        self.session = sandbox.open_session(replace(limits, cpu_s=cpu_s))
        return ended is not None

    def close(self) -> None:
        """End it, also in the middle of a piece of code."""
        if self.session is not None:
            self.session.close()


def _as_dict(result: SandboxResult, restarted: bool = False) -> dict[str, Any]:
    return {
        "success": result.ok,
        "stdout": result.stdout,
        "stderr": result.stderr,
        "returncode": result.exit_code,
        "status": result.status,
        "seconds": result.seconds,
        "truncated": result.stdout_truncated or result.stderr_truncated,
        "restarted": restarted,
    }


class RayPythonExecutor:
    """The service in a Ray actor that all environments of a cluster share.

    The first that asks for a name starts it, the others find it; it ends with Ray, or when nobody
    holds it any more.

    Args:
        name: of the actor.
        namespace: of Ray; that of this job by default.
        pool_size: see :class:`PythonExecutorService`; of one that is found, it is as it was made.
        timeout: as above.
        num_cpus: CPUs that the actor holds.

    Raises:
        MissingExtraError: Ray is not installed.
        ResourceError: Ray is not running, or has less than what is needed.
    """

    def __init__(
        self,
        name: str = "python_executor",
        *,
        namespace: str | None = None,
        pool_size: int = 32,
        timeout: float = 10.0,
        num_cpus: float = 1.0,
    ) -> None:
        self.timeout = timeout
        self._remote = RemoteObject(
            functools.partial(PythonExecutorService, pool_size, timeout),
            ActorOptions(
                name=name, namespace=namespace, max_concurrency=4 * pool_size, num_cpus=num_cpus
            ),
            what=f"the Python executor {name!r}",
        )

    def execute(self, code: str, *, session: Hashable = None) -> dict[str, Any]:
        """See :meth:`PythonExecutorService.execute`.

        Args:
            code: Python source.
            session: the caller whose interpreter is kept.

        Raises:
            WorkerError: the actor died or did not answer.
        """
        return self._remote.call("execute", code, session=session)

    def end_session(self, session: Hashable) -> None:
        """See :meth:`PythonExecutorService.end_session`; does not wait for it.

        Args:
            session: as above.
        """
        self._remote.submit("end_session", session)

    def close(self) -> None:
        """Nothing: others may use the actor."""
