"""The bubblewrap sandbox: Linux namespaces for each run, without a daemon and without root.

A run can read ``/usr`` and the interpreter, and write to an empty folder in memory. It can access
nothing else of this machine: no network, no other process, no variable of the trainer. When a run
ends, its processes end and its files are deleted.

If the trainer is root, the user of the run is ``nobody``. Containers and distributions forbid
different parts of this isolation. No setting of the machine shows reliably which parts work, so the
constructor tries a real run.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any, Literal, NamedTuple

from torchrl_llm.errors import ResourceError
from torchrl_llm.sandbox import local_process
from torchrl_llm.sandbox.contained_process import GRACE_S, Contained, Program
from torchrl_llm.sandbox.interface import Limits
from torchrl_llm.sandbox.local_process import ROOT_FOLDERS, data_fd, find
from torchrl_llm.sandbox.process_watch import Capture
from torchrl_llm.sandbox.seccomp import AF_UNIX, filter_program

FOLDER = "/sandbox"
NOBODY = 65534

_DEADLY = range(1, 65)
# Files that a program with a network needs for name resolution and certificates.
_NETWORK_FILES = ("/etc/hosts", "/etc/resolv.conf", "/etc/nsswitch.conf", "/etc/ssl")


class _Layout(NamedTuple):
    """One way of using bubblewrap.

    Attributes:
        python: the interpreter. read_only: folders that the interpreter needs in addition to
            ``/usr``.
        become: where root switches to a different user: outside or inside bubblewrap. Outside, the
            run has its own user namespace. Inside, the run has no user namespace, and bubblewrap
            can show folders that only root may enter.
        lock: whether the run is forbidden to create user namespaces.
    """

    python: str
    read_only: tuple[str, ...]
    become: Literal["outside", "inside", "no"]
    lock: bool


class BubblewrapSandbox(local_process.ProcessSandbox):
    r"""Runs programs under bubblewrap (``bwrap``), the strongest sandbox without a daemon.

    Args:
        limits: limits of each run; ``None`` for the defaults.
        python: path of the interpreter on this machine. ``None`` for the base interpreter of the
            trainer's environment, without its packages; or for the system's interpreter, if the
            run's user cannot enter the interpreter's folder.
        read_only: further folders that a run may read, at the same paths.

    Raises:
        ResourceError: when bubblewrap is missing, or does not work on this machine.

    Example:
        >>> from torchrl_llm.sandbox import BubblewrapSandbox
        >>> BubblewrapSandbox().run_python("print(6 * 7)").stdout  # doctest: +SKIP
        '42\n'
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        python: str | None = None,
        read_only: Sequence[str] = (),
    ) -> None:
        super().__init__(limits)
        self._read_only = tuple(os.path.abspath(folder) for folder in read_only)
        self._layout = _working_layout(python)
        self.python = self._layout.python

    def _spawn(self, program: Program) -> Contained:
        return _spawn(self._layout, program, self._read_only)


class _Status(Capture):
    """Bubblewrap's report: the first process inside and its exit code."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, keep=4096)
        self.first_fd: int | None = None

    def take(self) -> bool:
        more = super().take()
        if self.first_fd is None:
            pid = self.report("child-pid")
            if pid is not None:
                with contextlib.suppress(OSError):  # the process has already ended
                    self.first_fd = os.pidfd_open(pid)
        return more

    def close(self) -> None:
        super().close()
        if self.first_fd is not None:
            os.close(self.first_fd)
            self.first_fd = None


class _Jailed(Contained):
    """A process under bubblewrap, killed by the first process of its namespace."""

    overhead = 2

    def __init__(self, *args: Any, status: _Status, **kwargs: Any) -> None:
        self.status = status
        self._group_is_killed = False
        super().__init__(*args, **kwargs)

    @property
    def outputs(self) -> tuple[Capture, ...]:
        return (self.stdout, self.stderr, self.status)

    def interrupt(self) -> None:
        # Bubblewrap itself continues, in order to reap the killed process.
        if (first := self.status.first_fd) is None:
            super().interrupt()
        else:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(first, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the first process of the namespace; the kernel then kills all others in it."""
        self.status.drain()
        if self.status.first_fd is None and not self._group_is_killed:
            # Bubblewrap will report it and reap it soon. Until then it is in bubblewrap's group,
            # and would wait forever for a message if bubblewrap were killed.
            self._group_is_killed = True
            patience = time.monotonic() + GRACE_S
            while self.status.first_fd is None and self.status.open:  # the report arrives in pieces
                if time.monotonic() > patience:
                    break
                _wait_for(self.status.fd, select.POLLIN)
                self.status.drain()
            if self.status.first_fd is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                self.wait()
                self.status.drain()
        if (first := self.status.first_fd) is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(first, signal.SIGKILL)
            # The first process ends after all other processes of its namespace.
            _wait_for(first, select.POLLIN)
        elif self.stdout.open:
            _wait_for(self.stdout.fd, select.POLLHUP)
        self.wait()
        if self.process.returncode is None:
            self.process.kill()
            self.wait()
        self.status.drain()

    def exit_code(self) -> int | None:
        code = self.status.report("exit-code")
        if code is not None and code - 128 in _DEADLY:
            return 128 - code
        return code


def _wait_for(fd: int, event: int) -> None:
    poll = select.poll()
    poll.register(fd, event)
    poll.poll(GRACE_S * 1000)


def _spawn(layout: _Layout, program: Program, read_only: Sequence[str] = ()) -> _Jailed:
    status_r, status_w = os.pipe()
    opened = [status_w]
    status = _Status(status_r)
    try:
        words = ["--json-status-fd", str(status_w)]
        for folder in sorted({parent for path in program.files for parent in path.parents}):
            if folder.parts:
                words += ["--perms", "0777", "--dir", f"{FOLDER}/{folder}"]
        for path, data in program.files.items():
            opened.append(data_fd(data))
            words += ["--perms", "0666", "--file", str(opened[-1]), f"{FOLDER}/{path}"]
        families = (AF_UNIX, socket.AF_INET, socket.AF_INET6) if program.network else (AF_UNIX,)
        filter_ = filter_program(families=families)
        if filter_ is not None:
            opened.append(data_fd(filter_))
            words += ["--seccomp", str(opened[-1])]
        path = f"{os.path.dirname(layout.python)}:/usr/bin:/bin"
        return _Jailed(
            program,
            _command_line(layout, program, words, read_only),
            status=status,
            env={**local_process.ENVIRONMENT, "PATH": path, "HOME": FOLDER, **program.env},
            pass_fds=opened,
        )
    except BaseException:
        status.close()
        raise
    finally:
        for fd in opened:
            os.close(fd)


def _command_line(
    layout: _Layout, program: Program, words: Sequence[str], read_only: Sequence[str]
) -> list[str]:
    """Build the command line of bubblewrap and the program."""
    bwrap, setpriv, prlimit = find("bwrap"), find("setpriv"), find("prlimit")
    spare = next(fd for fd in range(3, 10) if fd not in program.pass_fds)
    line: list[str] = []
    if layout.become == "outside":
        line += [setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    line += [bwrap, "--unshare-ipc", "--unshare-pid", "--unshare-uts"]
    if program.network:
        for file in _NETWORK_FILES:
            line += ["--ro-bind-try", file, file]
    else:
        line += ["--unshare-net"]
    line += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--hostname", "sandbox"]
    if layout.become != "inside":
        line += ["--unshare-user"]
    if layout.lock:
        line += ["--disable-userns"]
    line += ["--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for folder in ROOT_FOLDERS:
        if os.path.islink(folder):
            line += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            line += ["--ro-bind", folder, folder]
    size = ["--size", str(program.limits.file_bytes), "--perms", "1777", "--tmpfs"]
    # The first process inside has the run's pipes open, so it must not be inspectable.
    line += ["--proc", "/proc", "--perms", "0000", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1"]
    line += ["--dev", "/dev", *size, "/dev/shm", "--remount-ro", "/dev"]
    line += [*size, FOLDER, "--symlink", FOLDER[1:], "/tmp"]
    begin = () if program.folder is None else (program.folder,)
    for folder in (*layout.read_only, *read_only, *begin):
        # Bubblewrap itself would create the folders for their owner only.
        for parent in reversed(PurePosixPath(folder).parents[:-1]):
            line += ["--perms", "0755", "--dir", str(parent)]
        line += ["--ro-bind", folder, folder]
    line += [*words, "--remount-ro", "/", "--chdir", program.folder or FOLDER]
    # The first process also counts.
    num_processes: int | None = program.limits.num_processes + 1
    if layout.become == "inside":
        line += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"]
        uid = local_process.unused_uid()
        line += _first_process(spare)
        line += [setpriv, f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
        line += ["--bounding-set=-all", "--inh-caps=-all"]
    else:
        line += _first_process(spare)
        if not local_process.counts_processes_by_namespace():
            num_processes = None
    line += local_process.prlimit_argv(prlimit, program.limits, num_processes=num_processes)
    return [*line, *program.argv]


def _first_process(spare: int) -> list[str]:
    """Return arguments that make a shell the first process of its namespace.

    Bubblewrap does not wait for its own first process. Process 1 outside would have to reap that
    process, and process 1 may not be an init. But bubblewrap waits for this shell.

    Args:
        spare: an unused descriptor for the shell's own messages, so that it prints nothing about
            the program's end.
    """
    script = f'exec {spare}>&2 2> /dev/null; "$@" 2>&{spare} {spare}>&-; exit $?'
    return ["--as-pid-1", "--", "/bin/sh", "-c", script, "sh"]


@functools.lru_cache(maxsize=16)
def _working_layout(python: str | None) -> _Layout:
    """Find the first layout in which a real run works.

    Raises:
        ResourceError: when none works.
    """
    for program in ("bwrap", "prlimit", "setpriv"):
        if find(program) is None:
            raise ResourceError(
                f"BubblewrapSandbox needs the program {program!r}, which is not installed "
                "(Debian: apt-get install bubblewrap util-linux); SubprocessSandbox works without "
                "it, with less contained"
            )
    said = ""
    for layout in _layouts(python):
        worked, said = _try(layout)
        if worked:
            return layout
    raise ResourceError(
        "bubblewrap does not work on this machine: it said "
        f"{said.strip() or 'nothing'!r}. User namespaces may be forbidden (in a container: by its "
        "seccomp profile; sysctl kernel.apparmor_restrict_unprivileged_userns, "
        "user.max_user_namespaces). SubprocessSandbox works without them, with less contained"
    )


def _try(layout: _Layout) -> tuple[bool, str]:
    return local_process.works(functools.partial(_spawn, layout), layout.python)


def _layouts(python: str | None) -> Iterator[_Layout]:
    """Return the layouts to try, the strongest first."""
    pythons = local_process.candidates(python)
    root = os.geteuid() == 0
    for lock in (True, False):
        for path, folders in pythons:
            yield _Layout(path, folders, "outside" if root else "no", lock)
    if root:
        for path, folders in pythons:
            yield _Layout(path, folders, "inside", False)
