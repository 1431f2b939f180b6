"""Running code that a model wrote: one interface, and what came of a run as data.

A :class:`Sandbox` never runs anything in the trainer's process, and never raises for what the code
does: a crash, a limit that was hit or a process that was killed is a :class:`SandboxResult`.

Next: :func:`torchrl_llm.sandbox.make_sandbox` chooses the strongest that a machine has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from torchrl_llm._checked import Ge, Gt, checked

MEMORY_BYTES = 512 << 20
"""Address space of a process of a run, where nobody says otherwise."""

Seconds = Annotated[float, Gt(0, finite=True)]
Status = Literal["ok", "error", "timeout", "cpu", "memory", "output", "killed", "sandbox_error"]


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a run may use.

    Attributes:
        wall_s: seconds of wall-clock time, start of the interpreter included.
        cpu_s: seconds of CPU time of a process; ``None`` for ``wall_s`` rounded up.
        memory_bytes: address space of a process.
        file_bytes: size of a file that it writes, and of everything in its folder where the
            sandbox can hold that.
        output_bytes: kept of standard output, and of standard error; the rest is thrown away while
            the run goes on, and a run that writes more than 64 times as much is ended.
        num_processes: processes and threads at a time, where the sandbox can hold that.
        num_files: open files of a process.

    Raises:
        ConfigError: a time is not above 0 and finite, or another limit no whole number above 0.
    """

    wall_s: Seconds = 10.0
    cpu_s: Seconds | None = None
    memory_bytes: Annotated[int, Ge(1)] = MEMORY_BYTES
    file_bytes: Annotated[int, Ge(1)] = 16 << 20
    output_bytes: Annotated[int, Ge(1)] = 64 << 10
    num_processes: Annotated[int, Ge(1)] = 32
    num_files: Annotated[int, Ge(1)] = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """What came of a run.

    Attributes:
        status: ``ok`` (exit code 0); ``error`` (another exit code); ``timeout``, ``cpu``,
            ``memory``, ``output`` (the limit that ended it); ``killed`` (by a signal for another
            reason); ``sandbox_error`` (the sandbox itself failed: it says nothing about the code).
        stdout: what it wrote, UTF-8 with replacements, cut at ``output_bytes``.
        stderr: as above.
        exit_code: exit status; negative for the signal that ended it; ``None`` where unknown.
        seconds: wall-clock time.
        stdout_truncated: whether ``stdout`` was cut.
        stderr_truncated: whether ``stderr`` was cut.
    """

    status: Status
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    seconds: float = 0.0
    stdout_truncated: bool = False
    stderr_truncated: bool = False

    @property
    def ok(self) -> bool:
        """Whether the run ended by itself with exit code 0."""
        return self.status == "ok"


class SandboxSession(ABC):
    """A Python interpreter in a sandbox that keeps its names from one piece of code to the next."""

    @abstractmethod
    def run(self, code: str, *, wall_s: float | None = None) -> SandboxResult:
        """Run a piece of code; after a limit was hit the session is over.

        Args:
            code: Python source.
            wall_s: seconds for this piece; the limits' if not given.

        Raises:
            ConfigError: ``wall_s`` is not above 0 and finite.
        """

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it can run more; where not, :meth:`run` gives ``sandbox_error``."""

    @abstractmethod
    def close(self) -> None:
        """End the interpreter and every process that it started; may be called twice."""


class Sandbox(ABC):
    """A way of running code apart from everything else.

    Args:
        limits: of each run; ``None`` for the defaults.

    Attributes:
        python: the interpreter, as it is called inside the sandbox.
        missing: what this sandbox does not contain, a phrase each (``"the network"``); empty for
            none.
    """

    python: str
    missing: tuple[str, ...] = ()

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = Limits() if limits is None else limits

    @abstractmethod
    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits | None = None,
    ) -> SandboxResult:
        """Run a program in a fresh, empty folder of its own.

        Thread-safe.

        Args:
            argv: program and arguments, as they are called inside the sandbox.
            stdin: its standard input.
            files: relative path to contents, put into its folder beforehand.
            limits: instead of the sandbox's own.

        Returns:
            What came of it; nothing that the program does raises.
        """

    @abstractmethod
    def open_session(self, limits: Limits | None = None) -> SandboxSession:
        """Start an interpreter that keeps its names.

        Args:
            limits: instead of the sandbox's own; ``cpu_s`` counts for the whole session.
        """

    def run_python(
        self,
        code: str,
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits | None = None,
    ) -> SandboxResult:
        """Run Python source in a fresh interpreter.

        It lies in the run's folder as ``main.py``, so that tracebacks show its lines and it can
        import the modules among ``files``.

        Args:
            code: Python source.
            stdin: its standard input.
            files: see :meth:`run`.
            limits: see :meth:`run`.
        """
        files = {**(files or {}), "main.py": code}
        return self.run(
            [self.python, "-E", "-s", "-B", "main.py"], stdin=stdin, files=files, limits=limits
        )

    def close(self) -> None:
        """Let go of what was kept between runs; may be called twice."""
