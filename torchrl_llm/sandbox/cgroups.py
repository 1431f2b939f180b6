"""Linux control groups, which limit the memory of all processes of a run together.

The kernel counts the memory, including kernel memory (pipes, sockets, files in memory) and
short-lived processes. :mod:`.process_watch` may miss short-lived processes, because it polls ten
times per second. Root, or a user to whom a part of the tree was delegated, can create a group.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

OVERHEAD_BYTES = 32 << 20
"""Additional memory for bubblewrap and its shell, or for the guard of a plain process."""

_PREFIX = "torchrl-llm"
_GRACE_S = 1.5
_turns = itertools.count()
_left: set[Path] = set()


class _Place(NamedTuple):
    """A place where groups can be created.

    Attributes:
        folder: parent folder of all groups.
        enter: file to which a process writes 0 to join the group.
        events: file with the number of processes that were killed for their memory.
        second: whether the groups are cgroup v2.
    """

    folder: Path
    enter: str
    events: str
    second: bool


class ControlGroup:
    """A group of processes with a common memory limit.

    Args:
        place: where to create the group.
        num_bytes: the limit in bytes; above it the kernel kills a process of the group.

    Raises:
        OSError: when this process lacks the permission.
    """

    def __init__(self, place: _Place, num_bytes: int) -> None:
        self._place = place
        self.folder = place.folder / f"{_PREFIX}-{_owner()}-{next(_turns)}"
        self.folder.mkdir()
        most = str(num_bytes)
        try:
            if place.second:
                (self.folder / "memory.max").write_text(most)
                self._perhaps("memory.swap.max", "0")
            else:
                (self.folder / "memory.limit_in_bytes").write_text(most)
                self._perhaps("memory.memsw.limit_in_bytes", most)
        except OSError:
            self.close()
            raise

    def _perhaps(self, name: str, text: str) -> None:
        if (self.folder / name).exists():  # the file is missing in a kernel without swap
            (self.folder / name).write_text(text)

    @property
    def argv(self) -> list[str]:
        """Arguments before a program that must start in the group."""
        enter = 'echo 0 > "$0" && exec "$@"'
        return ["/bin/sh", "-c", enter, str(self.folder / self._place.enter)]

    @property
    def exceeded(self) -> bool:
        """Whether the kernel has killed a process for the memory limit."""
        with contextlib.suppress(OSError):
            for line in (self.folder / self._place.events).read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value) > 0
        return False

    def close(self) -> None:
        """Kill the rest, and remove the group now or later; may be called twice."""
        patience = time.monotonic() + _GRACE_S
        with contextlib.suppress(OSError):
            # The memory limit may have killed the process that should end the other processes.
            while pids := (self.folder / "cgroup.procs").read_text().split():
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                if time.monotonic() > patience:
                    break
                time.sleep(0.001)
        _left.add(self.folder)
        for folder in list(_left):
            with contextlib.suppress(OSError):
                if folder.exists():
                    folder.rmdir()
                _left.discard(folder)


def control_group(memory_bytes: int, file_bytes: int) -> ControlGroup | None:
    """Create a group for a run; return ``None`` if that is not possible.

    Args:
        memory_bytes: memory for the processes of the run.
        file_bytes: memory for files in each of the run's two memory folders.
    """
    place = _working_place()
    if place is None:
        return None
    with contextlib.suppress(OSError):
        return ControlGroup(place, memory_bytes + 2 * file_bytes + OVERHEAD_BYTES)
    return None


def groups_work() -> bool:
    """Whether this process can create groups."""
    return _working_place() is not None


@functools.cache
def _owner() -> str:
    """Return a name of this process that is unique on the machine, also in the future."""
    began = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return f"{os.stat('/proc/self/ns/pid').st_ino}-{os.getpid()}-{began}"


os.register_at_fork(after_in_child=_owner.cache_clear)


@functools.cache
def _working_place() -> _Place | None:
    for place in _places():
        try:
            group = ControlGroup(place, 1 << 30)
        except OSError:
            continue
        done = subprocess.run([*group.argv, "/bin/sh", "-c", "exit 7"], capture_output=True)
        group.close()
        if done.returncode == 7:
            _sweep(place.folder)
            return place
    return None


def _places() -> Iterator[_Place]:
    """Return places where this process might create groups: next to its own group or below it."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        own = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    paths = {}
    for line in own:
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    for line in mounts:
        words, _, rest = line.partition(" - ")
        root, point = words.split()[3:5]
        kind, _, options = rest.split(" ", 2)
        name = {"cgroup": "memory", "cgroup2": ""}.get(kind)
        if name is None or name not in paths or name not in ("", *options.split(",")):
            continue
        # A container may see its own group as the root.
        path = os.path.relpath(paths[name], root)
        here = Path(os.path.normpath(f"{point}/{path}"))
        here = here if ".." not in path and here.is_dir() else Path(point)
        if kind == "cgroup":
            yield _Place(here, "tasks", "memory.oom_control", False)
            continue
        for folder in (here, *here.parents):
            with contextlib.suppress(OSError):
                if "memory" in (folder / "cgroup.subtree_control").read_text().split():
                    yield _Place(folder, "cgroup.procs", "memory.events", True)


def _sweep(place: Path) -> None:
    """Remove the groups of processes that were killed."""
    namespace = _owner().partition("-")[0]
    for folder in place.glob(f"{_PREFIX}-{namespace}-*-*-*"):
        pid, began = folder.name.split("-")[-3:-1]
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{pid}/stat")
            if not stat.exists() or stat.read_text().rpartition(")")[2].split()[19] != began:
                folder.rmdir()
