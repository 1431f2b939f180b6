"""The base class of the sandboxes that start a process on this machine.

A subclass of :class:`ProcessSandbox` defines how to start an isolated process, and returns a
:class:`~torchrl_llm.sandbox.contained_process.Contained` that can end it with all its children. The
module also finds the interpreter of a sandbox and the folders that the interpreter needs, and sets
the limits of one process.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from torchrl_llm.errors import ConfigError, ResourceError
from torchrl_llm.sandbox.contained_process import GRACE_S as GRACE_S
from torchrl_llm.sandbox.contained_process import Contained, PipeSession, Program, interpreter_argv
from torchrl_llm.sandbox.interface import Limits, Sandbox, SandboxResult, SandboxSession
from torchrl_llm.sandbox.process_watch import Feed, classify, cpu_seconds, pump

ENVIRONMENT = {
    "LANG": "C.UTF-8",
    # malloc reserves 64 MB of addresses per thread, and OpenBLAS another 64 MB.
    "MALLOC_ARENA_MAX": "2",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""The only variables of a sandboxed process; the trainer's variables are not passed on."""

ROOT_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""Folders of the system next to ``/usr``; on most distributions they are links into ``/usr``."""

STACK_BYTES = 8 << 20
_SYSTEM_PYTHON = "/usr/bin/python3"
# The range of ids that systemd reserves for users who exist only while a service runs.
_UIDS = (61184, 65519)
_turns = itertools.count()


def encode(text: str | bytes) -> bytes:
    """Encode as UTF-8; lone surrogates are kept, so that the program gets an error for them."""
    return text if isinstance(text, bytes) else text.encode("utf-8", errors="surrogatepass")


def relative_parts(name: str) -> PurePosixPath:
    """Return the parts of a path inside a run's folder.

    Args:
        name: path given by the caller.

    Raises:
        ConfigError: when the path is absolute, empty, or leaves the folder.
    """
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ConfigError(
            f"files must be named by paths inside the run's folder, such as 'data/input.txt'; "
            f"got {name!r}"
        )
    return path


def data_fd(data: bytes) -> int:
    """Return the descriptor of an unnamed file with the data, positioned at the start.

    Args:
        data: contents of the file.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("data", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


class ProcessSandbox(Sandbox):
    """A sandbox whose runs are processes that this process watches."""

    @abstractmethod
    def _spawn(self, program: Program) -> Contained:
        """Start an isolated program in a folder with its files."""

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits | None = None,
    ) -> SandboxResult:
        """See :meth:`Sandbox.run`.

        Raises:
            ConfigError: when a file name leaves the folder or equals the folder of a different
                file, or when ``argv`` is not a sequence of strings.
        """
        limits = self.limits if limits is None else limits
        if isinstance(argv, str) or not argv or not all(isinstance(word, str) for word in argv):
            raise ConfigError(
                f"argv must be a program and its arguments, such as ['ls', '-l']; got {argv!r}"
            )
        contents = {relative_parts(name): encode(data) for name, data in (files or {}).items()}
        for path in contents:
            if not contents.keys().isdisjoint(path.parents):
                raise ConfigError(f"files: a folder of {str(path)!r} is itself among the files")
        stdin_fd, feed = _input(encode(stdin))
        program = Program(argv=argv, limits=limits, files=contents, stdin=stdin_fd)
        try:
            return self.run_program(program, feed)
        finally:
            if feed is not None:
                feed.close()

    def run_program(
        self,
        program: Program,
        feed: Feed | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> SandboxResult:
        """Run a program, and remove its processes and files.

        Args:
            program: the program; this method closes its standard input.
            feed: data for the standard input.
            is_over: function that is called ten times per second; if it returns true, the program
                is ended.

        Returns:
            The result of the run.
        """
        start, limits = time.monotonic(), program.limits
        try:
            contained = self._spawn(program)
        except (OSError, ValueError) as error:
            return SandboxResult(
                status="sandbox_error",
                stderr=f"{program.argv[0]!r} cannot be started: {error}",
                seconds=time.monotonic() - start,
            )
        finally:
            if program.stdin is not None:
                os.close(program.stdin)
        with contained:
            ended = pump(
                contained.process,
                contained.outputs,
                deadline=start + limits.wall_s,
                tree=contained.tree,
                feed=feed,
                ready=is_over,
            )
            contained.kill()
            contained.stdout.drain()
            contained.stderr.drain()
            exit_code = contained.exit_code() if ended == "exit" else -signal.SIGKILL
            return classify(
                "memory" if contained.out_of_memory else ended,
                exit_code,
                contained.stdout,
                contained.stderr,
                time.monotonic() - start,
                cpu_seconds(limits),
            )

    def open_session(self, limits: Limits | None = None) -> SandboxSession:
        """See :meth:`Sandbox.open_session`."""
        limits = self.limits if limits is None else limits

        def start(code_fd: int, answers_fd: int) -> Contained:
            argv = interpreter_argv(self.python, code_fd, answers_fd)
            return self._spawn(Program(argv=argv, limits=limits, pass_fds=(code_fd, answers_fd)))

        return PipeSession(start, limits)


def _input(data: bytes) -> tuple[int | None, Feed | None]:
    """Return the reading end of a pipe with the data, and the bytes that did not fit yet.

    A pipe can be read only once; an open file could be read again through its descriptor in
    ``/proc``.
    """
    if not data:
        return None, None
    read, write = os.pipe()
    feed = Feed(write, data, last=True)
    feed.write()
    return read, feed


def works(spawn: Callable[[Program], Contained], python: str) -> tuple[bool, str]:
    """Return whether a sandbox can run an interpreter as a non-root user, and its output.

    Args:
        spawn: function that starts a program in the sandbox.
        python: the interpreter.
    """
    code = "import os, socket; assert os.getuid(); print('works')"
    program = Program(argv=[python, "-I", "-c", code], limits=Limits(wall_s=20.0))
    try:
        with spawn(program) as contained:
            with contextlib.suppress(subprocess.TimeoutExpired):
                contained.process.wait(program.limits.wall_s)
            contained.kill()
            contained.stdout.drain()
            contained.stderr.drain()
            return contained.stdout.text() == "works\n", contained.stderr.text()
    except OSError as error:
        return False, str(error)


def find(program: str) -> str | None:
    """Return the path of a system program, ignoring the trainer's ``PATH``.

    Args:
        program: name of the program.
    """
    return shutil.which(program, path="/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/bin")


@functools.cache
def counts_processes_by_namespace() -> bool:
    """Whether a process limit counts only the user namespace (Linux 5.14 and later).

    Older kernels count all processes of the user on the machine, so the limit would forbid
    everything.
    """
    try:
        major, minor = platform.release().split(".")[:2]
        return (int(major), int("".join(itertools.takewhile(str.isdigit, minor)))) >= (5, 14)
    except ValueError:
        return False


def unused_uid() -> int:
    """Return a user id without an account; the next thousands of runs get different ids."""
    low, high = _UIDS
    return low + (os.getpid() * 67 + next(_turns)) % (high - low + 1)


def kernel_limits(limits: Limits) -> dict[str, tuple[int, int]]:
    """Return soft and hard limits of one process, by the kernel's names."""
    cpu_s = cpu_seconds(limits)
    return {
        "RLIMIT_AS": (limits.memory_bytes, limits.memory_bytes),
        # A process can ignore the signal of the soft limit, but not the signal of the hard limit.
        "RLIMIT_CPU": (cpu_s, cpu_s + 1),
        "RLIMIT_FSIZE": (limits.file_bytes, limits.file_bytes),
        "RLIMIT_NOFILE": (limits.num_files, limits.num_files),
        "RLIMIT_STACK": (STACK_BYTES, STACK_BYTES),
        "RLIMIT_CORE": (0, 0),
    }


def prlimit_argv(prlimit: str, limits: Limits, *, num_processes: int | None) -> list[str]:
    """Return arguments that, put before a program, set its limits.

    A Python function between fork and exec could also set the limits. But forking a trainer with
    many gigabytes and threads is slow and can hang; ``prlimit`` costs a millisecond.

    Args:
        prlimit: path of the program ``prlimit``.
        limits: limits of the run.
        num_processes: process limit of the user, or ``None`` for no limit.
    """
    named = kernel_limits(limits)
    if num_processes is not None:
        named["RLIMIT_NPROC"] = (num_processes, num_processes)
    return [prlimit, *limit_words("--", named), "--"]


def limit_words(before: str, named: Mapping[str, tuple[int, int]]) -> list[str]:
    """Convert limits to command-line options, such as ``--cpu=10:11``.

    Args:
        before: prefix of each option.
        named: result of :func:`kernel_limits`.
    """
    return [
        f"{before}{name.removeprefix('RLIMIT_').lower()}={soft}:{hard}"
        for name, (soft, hard) in named.items()
    ]


def own_python() -> str:
    """Return the base interpreter of the trainer's environment, or its own interpreter."""
    base = getattr(sys, "_base_executable", None)
    return base if base and os.access(base, os.X_OK) else sys.executable


def candidates(python: str | None) -> list[tuple[str, tuple[str, ...]]]:
    """Return interpreters to try, with the folders that each needs besides the system's.

    Args:
        python: the only interpreter to try; ``None`` for the trainer's interpreter, then the
            system's.

    Raises:
        ResourceError: when ``python`` is not a working interpreter.
    """
    if python is not None:
        return [(python, _folders(python))]
    own = os.path.realpath(own_python())
    pythons = [(own, _outside_usr(sys.base_prefix, os.path.dirname(own)))]
    if own != os.path.realpath(_SYSTEM_PYTHON):
        pythons.append((_SYSTEM_PYTHON, ()))
    return pythons


def _folders(python: str) -> tuple[str, ...]:
    """Return the folders that an interpreter needs.

    Raises:
        ResourceError: when it is not a working interpreter.
    """
    ask = "import sys; print(sys.prefix, sys.base_prefix, sep='\\n')"
    try:
        answer = subprocess.run(
            [python, "-I", "-c", ask], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ResourceError(f"python={python!r} is no Python that runs here: {error}") from error
    places = [os.path.dirname(python), os.path.dirname(os.path.realpath(python))]
    return _outside_usr(*answer.stdout.split("\n")[:2], *places)


def _outside_usr(*folders: str) -> tuple[str, ...]:
    """Return the folders that are not inside ``/usr``, without nested folders."""
    shown = [Path("/usr"), *map(Path, ROOT_FOLDERS)]
    kept: list[Path] = []
    for folder in sorted({Path(os.path.abspath(f)) for f in folders if f}):
        if not any(folder.is_relative_to(other) for other in (*shown, *kept)):
            kept.append(folder)
    return tuple(map(str, kept))
