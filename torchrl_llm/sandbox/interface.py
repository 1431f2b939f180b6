"""The interface of sandboxes, and the result of a run as data.

A :class:`Sandbox` never runs code in the trainer's process, and the code cannot make it raise an
exception. A crash, an exceeded limit or a killed process is returned as a :class:`SandboxResult`.

Next: :func:`torchrl_llm.sandbox.make_sandbox` chooses the strongest kind of a machine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from torchrl_llm._checked import Ge, Gt, checked

MEMORY_BYTES = 512 << 20
"""Default address space of a process in bytes."""

Seconds = Annotated[float, Gt(0, finite=True)]
Status = Literal["ok", "error", "timeout", "cpu", "memory", "output", "killed", "sandbox_error"]


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resource limits of a run.

    Attributes:
        wall_s: seconds of wall-clock time, including the start of the interpreter.
        cpu_s: seconds of CPU time of a process; ``None`` for ``wall_s`` rounded up.
        memory_bytes: address space of a process.
        file_bytes: size of a file, and of the run's whole folder if the sandbox can enforce that.
        output_bytes: number of bytes that are kept of standard output, and of standard error. The
            rest is discarded, and the run continues. A run that writes more than 64 times as much
            is ended.
        num_processes: largest number of processes and threads, if the sandbox can enforce that.
        num_files: largest number of open files of a process.

    Raises:
        ConfigError: when a time is not positive and finite, or a different limit is not a positive
            whole number.
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
    """Result of a run.

    Attributes:
        status: ``ok`` (exit code 0); ``error`` (a different exit code); ``timeout``, ``cpu``,
            ``memory``, ``output`` (the limit that ended it); ``killed`` (by a signal for a
            different reason); ``sandbox_error`` (the sandbox itself failed, so nothing is known
            about the code).
        stdout: standard output, UTF-8 with replacements, cut at ``output_bytes``.
        stderr: standard error, in the same form.
        exit_code: exit status; negative for a signal; ``None`` if unknown.
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
    """A Python interpreter in a sandbox that keeps its names between pieces of code."""

    @abstractmethod
    def run(self, code: str, *, wall_s: float | None = None) -> SandboxResult:
        """Run a piece of code; if a limit is exceeded, the session ends.

        Args:
            code: Python source.
            wall_s: time limit of this piece in seconds; by default the session's limit.

        Raises:
            ConfigError: when ``wall_s`` is not above 0 and finite.
        """

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether more code can be run; otherwise :meth:`run` returns ``sandbox_error``."""

    @abstractmethod
    def close(self) -> None:
        """End the interpreter and all its processes; may be called twice."""


class Sandbox(ABC):
    """Runs code in isolation.

    Args:
        limits: limits of each run; ``None`` for the defaults.

    Attributes:
        python: path of the interpreter inside the sandbox.
        missing: names of the things that this sandbox does not isolate, such as ``"the network"``.
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
        """Run a program in a fresh, empty folder.

        Thread-safe.

        Args:
            argv: program and arguments, with paths inside the sandbox.
            stdin: standard input of the program.
            files: maps a relative path to the contents. The files are written into the folder
                before the run.
            limits: limits of this run; by default the sandbox's limits.

        Returns:
            The result. The program cannot make this method raise an exception.
        """

    @abstractmethod
    def open_session(self, limits: Limits | None = None) -> SandboxSession:
        """Start an interpreter that keeps its names between pieces of code.

        Args:
            limits: limits of the session; by default the sandbox's limits. ``cpu_s`` applies to the
                whole session.
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

        The source is ``main.py`` in the run's folder, so tracebacks show its lines, and the code
        can import modules from ``files``.

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
        """Release all resources that are kept between runs; may be called twice."""
