"""A sandbox of plain processes with limits, for machines without bubblewrap.

Each run has a guard process (``run_supervisor``). The guard sets the limits, drops all rights that
can be dropped without privileges, and kills all processes that the run leaves behind.
:attr:`SubprocessSandbox.missing` lists the remaining gaps. The gaps depend on the kernel
(Landlock), and on whether the trainer is root: root gives each run its own user.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import stat
import tempfile
import threading
import uuid
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from torchrl_llm.errors import ResourceError
from torchrl_llm.sandbox import local_process, run_supervisor
from torchrl_llm.sandbox.contained_process import Contained, Program
from torchrl_llm.sandbox.interface import Limits
from torchrl_llm.sandbox.local_process import ENVIRONMENT, ROOT_FOLDERS, data_fd
from torchrl_llm.sandbox.process_watch import Capture
from torchrl_llm.sandbox.seccomp import filter_program

_MARK = "TORCHRL_LLM_RUN"
_READ = ("/usr", *ROOT_FOLDERS, "/proc")
_READ_FILES = ("/etc/ld.so.cache", "/dev/random", "/dev/urandom", "/etc/localtime")
_WRITE = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")


class SubprocessSandbox(local_process.ProcessSandbox):
    """Runs programs as plain processes with limits, and warns about the remaining gaps.

    A run has no sockets and cannot change the mode, owner or times of a file by path. If the
    trainer is an ordinary user, a run keeps the rights of this user that the kernel cannot
    restrict.

    Args:
        limits: limits of each run; ``None`` for the defaults.
        python: path of the interpreter. ``None`` for the base interpreter of the trainer's
            environment, without its packages; or for the system's interpreter, if the run's user
            cannot enter the interpreter's folder.
        read_only: further folders that a run may read; no effect if the kernel cannot forbid
            reading other folders.

    Raises:
        ResourceError: when the run's user cannot start an interpreter.
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
        self.python, self._folders = _working_python(python)
        self.missing = _missing(run_supervisor.landlock_version(), os.geteuid() == 0)
        warnings.warn(
            "SubprocessSandbox runs code of the model as a plain process. Not contained: "
            + "; ".join(self.missing)
            + ". Install bubblewrap, or use a container, for code that you do not trust",
            RuntimeWarning,
            stacklevel=3,
        )

    def _spawn(self, program: Program) -> Contained:
        return _spawn(program, self.python, (*self._folders, *self._read_only))


def _missing(landlock: int, root: bool) -> tuple[str, ...]:
    who = "every user" if root else "the trainer's user"
    missing = [
        "the size of all files in its folder together",
        "the list of processes with their command lines",
        # Landlock forbids open and list, but not stat.
        "sizes, owners, modes and times of files outside its folder",
    ]
    if landlock < 1:
        missing += [f"files that {who} may read", f"folders that {who} may write to"]
        if not root:
            missing += ["the memory and open files of the trainer"]
    if landlock < 6 and not root:
        missing += ["the trainer and other processes of its user, which it can kill"]
    if filter_program() is None:
        missing += ["the network", "shared memory"]
    return tuple(missing)


class _Supervised(Contained):
    """A process under a supervisor, and its folder."""

    overhead = 1

    def __init__(self, *args: Any, folder: str, mark: str, report: Capture, **kwargs: Any) -> None:
        self.folder, self.mark, self.report = folder, mark, report
        super().__init__(*args, **kwargs)

    @property
    def outputs(self) -> tuple[Capture, ...]:
        return (self.stdout, self.stderr, self.report)

    def kill(self) -> None:
        """Let the supervisor kill all processes; if the supervisor was killed, search for them."""
        if self.process.poll() is None:
            self.process.terminate()
            self.wait()
        self.report.drain()
        if self.process.returncode is None or self.report.report("exit_code") is None:
            self.process.kill()
            self.wait()
            run_supervisor.stop_and_kill(lambda: _marked(self.mark))

    def exit_code(self) -> int | None:
        failed = self.report.report("failed") is not None  # the program had not begun
        return None if failed else self.report.report("exit_code")

    def close(self) -> None:
        super().close()
        _remove(self.folder)


def _spawn(program: Program, python: str, read_only: Sequence[str]) -> _Supervised:
    uid = local_process.unused_uid() if os.geteuid() == 0 else None
    folder = tempfile.mkdtemp(prefix="sandbox-")
    report_r, report_w = os.pipe()
    report = Capture(report_r, 4096)
    opened = [report_w]
    mark = uuid.uuid4().hex
    try:
        _write_files(Path(folder), program.files, uid)
        orders = {
            "argv": list(program.argv),
            "env": {
                **ENVIRONMENT,
                "PATH": f"{os.path.dirname(python)}:/usr/bin:/bin",
                "HOME": folder,
                "TMPDIR": folder,
                _MARK: mark,
            },
            "folder": folder,
            "uid": uid,
            "limits": local_process.kernel_limits(program.limits),
            "num_processes": program.limits.num_processes,
            "landlock": True,
            "filters": [_filter(sessions).hex() for sessions in ("ask", "refuse")],
            "read": [*_READ, *_READ_FILES, *read_only],
            "write": list(_WRITE),
            "close": list(program.pass_fds),
            "parent": os.getpid(),
        }
        opened.append(data_fd(json.dumps(orders).encode()))
        guard = [local_process.own_python(), "-I", "-S", "-B", run_supervisor.__file__]
        return _Supervised(
            program,
            [*guard, str(opened[1]), str(report_w)],
            folder=folder,
            mark=mark,
            report=report,
            env=ENVIRONMENT,
            pass_fds=opened,
        )
    except BaseException:
        report.close()
        _remove(folder)
        raise
    finally:
        for fd in opened:
            os.close(fd)


def _filter(sessions: Literal["ask", "refuse"]) -> bytes:
    program = filter_program(families=(), attributes=False, others=False, sessions=sessions)
    return program or b""


def _write_files(folder: Path, files: Mapping[PurePosixPath, bytes], uid: int | None) -> None:
    for path, data in files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    if uid is not None:
        for place in (folder, *folder.rglob("*")):
            os.chown(place, uid, uid)


def _marked(mark: str) -> set[int]:
    """Processes that still have the run's mark in their initial environment."""
    needle, found = f"{_MARK}={mark}".encode(), set()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and needle in Path(f"/proc/{name}/environ").read_bytes():
                found.add(int(name))
    return found


def _remove(folder: str) -> None:
    """Remove a folder in any state; a slow removal continues in the background."""
    work = threading.Thread(target=_remove_all, args=(folder,), daemon=True)
    work.start()
    work.join(1.0)


def _remove_all(folder: str) -> None:
    # Folders are moved up before removal, because a run can nest them deeper than the longest path,
    # deeper than Python's recursion limit, and so deep that rm takes ten seconds.
    mark = uuid.uuid4().hex
    waiting = [folder]
    moved = itertools.count()
    with contextlib.suppress(OSError):
        while waiting:
            place = waiting.pop()
            os.chmod(place, stat.S_IRWXU)
            with os.scandir(place) as entries:
                for entry in list(entries):
                    if not entry.is_dir(follow_symlinks=False):
                        os.unlink(entry.path)
                    elif place == folder:
                        waiting.append(entry.path)
                    else:
                        os.chmod(entry.path, stat.S_IRWXU)
                        waiting.append(os.path.join(folder, f"{mark}-{next(moved)}"))
                        os.rename(entry.path, waiting[-1])
            if place != folder:
                os.rmdir(place)
        os.rmdir(folder)


@functools.lru_cache(maxsize=16)
def _working_python(python: str | None) -> tuple[str, tuple[str, ...]]:
    """Return the first interpreter that a run's user can start, and its folders.

    Raises:
        ResourceError: when none works.
    """
    said = ""
    for path, folders in local_process.candidates(python):
        spawn = functools.partial(_spawn, python=path, read_only=folders)
        worked, said = local_process.works(spawn, path)
        if worked:
            return path, folders
    raise ResourceError(
        f"no interpreter can be started as the user of a run: {said.strip()!r}; install Python "
        "where every user can read it (Debian: apt-get install python3), or pass python=..."
    )
