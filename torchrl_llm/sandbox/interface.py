"""Interface of sandboxes, and the result of a run as data.

A :class:`Sandbox` never runs code in the trainer's process, and never raises because of the code: a
crash, an exceeded limit and a killed process are a :class:`SandboxResult`.

Next: :func:`torchrl_llm.sandbox.make_sandbox` chooses the strongest kind of a machine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from torchrl_llm._checked import Ge, Gt, checked

MEMORY_BYTES = 512 << 20
"""Default address space of a process."""

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
        file_bytes: size of a file, and of its whole folder if the sandbox can enforce that.
        output_bytes: bytes kept of standard output, and of standard error. The rest is discarded
            while the run continues; a run that writes more than 64 times as much is ended.
        num_processes: most processes and threads, if the sandbox can enforce that.
        num_files: most open files of a process.

    Raises:
        ConfigError: a time is not positive and finite, or a different limit is not a positive whole
            number.
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
        stderr: standard error, likewise.
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
        """Run a piece of code; after an exceeded limit the session has ended.

        Args:
            code: Python source.
            wall_s: seconds for this piece; by default the session's limit.

        Raises:
            ConfigError: ``wall_s`` is not above 0 and finite.
        """

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it can run more code; otherwise :meth:`run` returns ``sandbox_error``."""

    @abstractmethod
    def close(self) -> None:
        """End the interpreter and all its processes; may be called twice."""


class Sandbox(ABC):
    """Runs code in isolation.

    Args:
        limits: of each run; ``None`` for the defaults.

    Attributes:
        python: path of the interpreter inside the sandbox.
        missing: what this sandbox does not isolate, one phrase each (``"the network"``).
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
            stdin: its standard input.
            files: relative path to contents, written into its folder first.
            limits: replaces the sandbox's own limits.

        Returns:
            The result; nothing that the program does raises.
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

        The source is ``main.py`` in the run's folder, so tracebacks show its lines and it can
        import modules from ``files``.

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
        """Release everything kept between runs; may be called twice."""
