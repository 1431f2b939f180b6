"""What the sandboxes share that start a process on this machine: running it and watching it.

A subclass of :class:`ProcessSandbox` says how a process is started apart from everything else, and
gives back a :class:`Contained` that can end it with all that it started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from torchrl_llm.errors import ConfigError
from torchrl_llm.sandbox.contained_process import GRACE_S, Contained
from torchrl_llm.sandbox.interface import Limits, Sandbox, SandboxResult, SandboxSession
from torchrl_llm.sandbox.process_watch import Feed, classify, cpu_seconds, pump
from torchrl_llm.sandbox.sandbox_session import INTERPRETER, PipeSession

__all__ = ["GRACE_S", "Contained", "ProcessSandbox", "data_fd", "encode", "relative_parts"]

ENVIRONMENT = {
    "LANG": "C.UTF-8",
    # A thread of malloc's takes 64 MB of addresses, and a thread of OpenBLAS as much again.
    "MALLOC_ARENA_MAX": "2",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""Variables that every sandboxed process gets, and nothing of the trainer's."""


def encode(text: str | bytes) -> bytes:
    """UTF-8 bytes; lone surrogates are written as they are, for the program to stumble over."""
    return text if isinstance(text, bytes) else text.encode("utf-8", errors="surrogatepass")


def relative_parts(name: str) -> PurePosixPath:
    """A path inside a run's folder.

    Args:
        name: as the caller gave it.

    Raises:
        ConfigError: absolute, empty, or leaving the folder.
    """
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ConfigError(
            f"files must be named by paths inside the run's folder, such as 'data/input.txt'; "
            f"got {name!r}"
        )
    return path


def data_fd(data: bytes) -> int:
    """An open, unnamed file with some bytes, at its beginning.

    Args:
        data: its contents.
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
    """A sandbox whose runs are processes that this one watches."""

    @abstractmethod
    def _spawn(
        self,
        argv: Sequence[str],
        *,
        limits: Limits,
        files: Mapping[PurePosixPath, bytes],
        stdin: int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Contained:
        """Start a program apart from everything else, in a folder with these files."""

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
            ConfigError: a file's name would leave the folder or is that of another one's folder, or
                ``argv`` is no sequence of strings.
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
        start = time.monotonic()
        with contextlib.ExitStack() as stack:
            stdin_fd, feed = _input(encode(stdin))
            if feed is not None:
                stack.callback(feed.close)
            try:
                contained = self._spawn(argv, limits=limits, files=contents, stdin=stdin_fd)
            except (OSError, ValueError) as error:
                return SandboxResult(
                    status="sandbox_error",
                    stderr=f"{argv[0]!r} cannot be started: {error}",
                    seconds=time.monotonic() - start,
                )
            finally:
                if stdin_fd is not None:
                    os.close(stdin_fd)
            stack.enter_context(contained)
            ended = pump(
                contained.process,
                contained.outputs,
                deadline=start + limits.wall_s,
                tree=contained.tree,
                feed=feed,
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
            program = [self.python, "-E", "-s", "-B", "-c", INTERPRETER.read_text()]
            return self._spawn(
                [*program, str(code_fd), str(answers_fd)],
                limits=limits,
                files={},
                pass_fds=(code_fd, answers_fd),
            )

        return PipeSession(start, limits)


def _input(data: bytes) -> tuple[int | None, Feed | None]:
    """The reading end of a pipe with some bytes, and those that did not go into it yet.

    A pipe, since what was read from it is gone: an open file could be read once more by whoever
    finds a descriptor of it in ``/proc``.
    """
    if not data:
        return None, None
    read, write = os.pipe()
    feed = Feed(write, data, last=True)
    feed.write()
    return read, feed
