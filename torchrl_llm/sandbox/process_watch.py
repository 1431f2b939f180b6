"""Watches a process: output, time and memory; and classifies its result.

Everything runs in the calling thread, on non-blocking pipes. The kernel limits only single
processes, so this module counts the resources of all processes of a run in ``/proc``. The sandbox
isolates a process and kills it with all its children.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from torchrl_llm.sandbox.cgroups import OVERHEAD_BYTES, ControlGroup
from torchrl_llm.sandbox.interface import Limits, SandboxResult, Status

Ended = Literal["exit", "ready", "timeout", "output", "memory", "processes"]

OUTPUT_FACTOR = 64
"""A run that writes more than the kept bytes times this number is ended."""

_CHUNK = 1 << 16
# Bytes that a socket can buffer: Linux's default, which a run cannot raise.
_SOCKET_BYTES = 212_992
# Number of open descriptors below which sockets are not counted.
_FEW_FILES = 32


def cpu_seconds(limits: Limits) -> int:
    """Return the CPU seconds of a process, rounded up for the kernel."""
    return max(1, math.ceil(limits.wall_s if limits.cpu_s is None else limits.cpu_s))


class Capture:
    """The reading end of a pipe; the first ``keep`` bytes are kept.

    Args:
        fd: the reading end; the capture takes ownership.
        keep: number of bytes to keep.
    """

    def __init__(self, fd: int, keep: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.keep = keep
        self.kept = bytearray()
        self.total = 0
        self.open = True

    def take(self) -> bool:
        """Read one chunk, and return whether more may be available."""
        try:
            chunk = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            chunk = b""
        self.open = bool(chunk)
        self.total += len(chunk)
        self.kept += chunk[: self.keep - len(self.kept)]
        return self.open

    def drain(self) -> None:
        """Read everything in the pipe without waiting."""
        most = self.total + OUTPUT_FACTOR * max(self.keep, _CHUNK)
        while self.open and self.total < most and self.take():
            pass

    def text(self) -> str:
        """Return the kept bytes as text: UTF-8 with replacements."""
        return self.kept.decode("utf-8", errors="replace")

    def report(self, key: str) -> Any:
        """Read a value from the JSON objects in the output, one per line; ``None`` if missing.

        Args:
            key: key of the value.
        """
        for line in self.text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                report = json.loads(line)
                if key in report:
                    return report[key]
        return None

    @property
    def cut(self) -> bool:
        """Whether output was discarded."""
        return self.total > len(self.kept)

    def reset(self) -> None:
        """Clear the kept bytes and continue with the same pipe."""
        self.kept = bytearray()
        self.total = 0

    def close(self) -> None:
        """Close the pipe; may be called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.open = False


class Feed:
    """Writes bytes into a pipe.

    Args:
        fd: the writing end.
        data: the bytes.
        last: whether the feed owns the pipe and closes it after the bytes.
    """

    def __init__(self, fd: int, data: bytes, *, last: bool = False) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.rest = memoryview(data)
        self.last = last

    def write(self) -> bool:
        """Write as much as the pipe takes, and return whether there is more to write."""
        try:
            while self.rest:
                self.rest = self.rest[os.write(self.fd, self.rest[:_CHUNK]) :]
        except BlockingIOError:
            return True
        except OSError:  # the pipe has no reader any more
            pass
        self.close()
        return False

    def close(self) -> None:
        """Drop the remaining bytes; may be called twice."""
        self.rest = self.rest[:0]
        if self.last and self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class _Entry(NamedTuple):
    parent: int
    threads: int
    addresses: int


class Use(NamedTuple):
    """Resource use of a process and its descendants.

    Attributes:
        threads: number of processes and threads.
        address_bytes: all mapped addresses, used or not; an upper bound of the memory.
        pids: ids of the processes.
    """

    threads: int
    address_bytes: int
    pids: tuple[int, ...]


def _entry(pid: str) -> _Entry | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    # The program name is in parentheses and may contain any character.
    fields = text[text.rfind(b")") + 2 :].split()
    return _Entry(int(fields[1]), int(fields[17]), int(fields[20]))


class ProcessTable:
    """The process tree of the machine, at most ``max_age_s`` old.

    Args:
        max_age_s: seconds for which a reading is reused. If a reading is slow, it is reused longer,
            so that readings use at most a tenth of a core.

    Example:
        >>> ProcessTable().use(os.getpid()).threads >= 1
        True
    """

    def __init__(self, max_age_s: float = 0.1) -> None:
        self.max_age_s = max_age_s
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._cost_s = 0.0
        self._entries: dict[int, _Entry] = {}
        self._children: dict[int, list[int]] = {}

    def use(self, pid: int) -> Use:
        """Sum the use of a process and its descendants.

        Args:
            pid: the process; zeros if it has ended.
        """
        entries, children = self._table()
        pids = tuple(p for p in _below(pid, children) if p in entries)
        return Use(
            sum(entries[p].threads for p in pids), sum(entries[p].addresses for p in pids), pids
        )

    def _table(self) -> tuple[dict[int, _Entry], dict[int, list[int]]]:
        with self._lock:
            if time.monotonic() - self._read_at > max(self.max_age_s, 10 * self._cost_s):
                start = time.thread_time()
                self._read()
                self._cost_s = time.thread_time() - start
                self._read_at = time.monotonic()
            return self._entries, self._children

    def _read(self) -> None:
        try:
            pids = [name for name in os.listdir("/proc") if name.isdigit()]
        except OSError:  # without /proc, only the limits per process apply
            pids = []
        entries: dict[int, _Entry] = {}
        children: dict[int, list[int]] = defaultdict(list)
        for pid in pids:
            entry = _entry(pid)
            if entry is not None:
                entries[int(pid)] = entry
                children[entry.parent].append(int(pid))
        self._entries, self._children = entries, dict(children)


def _below(pid: int, children: dict[int, list[int]]) -> Iterator[int]:
    waiting = [pid]
    while waiting:
        at = waiting.pop()
        yield at
        waiting.extend(children.get(at, ()))


def socket_bytes(pids: tuple[int, ...]) -> int:
    """Return an upper bound of the socket memory of some processes; 0 if it is small.

    Args:
        pids: ids of the processes.
    """
    total = 0
    for pid in pids:
        # The size of that folder is the number of its entries (Linux 6.2 and later).
        with contextlib.suppress(OSError):
            total += max(0, os.stat(f"/proc/{pid}/fd").st_size - _FEW_FILES) * _SOCKET_BYTES
    return total


def committed_bytes(pids: tuple[int, ...]) -> int:
    """Return the memory that some processes may use without a further allocation.

    Allocated pages count even if they were never written, or were freed and can be written again. A
    page that a fork shares with its parent counts once until one of them writes to it.

    Args:
        pids: ids of the processes; processes that have ended count 0.
    """
    total = 0
    shared: dict[tuple[bytes, ...], int] = {}
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
                rows = (row.split() for row in file.read().splitlines()[1:])
            used = {row[0]: int(row[1]) << 10 for row in rows}
            with open(f"/proc/{pid}/maps", "rb") as file:
                maps = [line.split(maxsplit=5) for line in file.read().splitlines()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError:  # the process hides its data: assume that it uses all its addresses
            entry = _entry(str(pid))
            total += 0 if entry is None else entry.addresses
            continue
        private = 0
        for place, rights, _, *file in maps:
            low, high = (int(end, 16) for end in place.split(b"-"))
            if rights[1:2] == b"w" and rights[3:4] == b"s":
                key = tuple(file[:2])
                shared[key] = max(shared.get(key, 0), high - low)
            elif rights[1:2] == b"w":
                private += high - low
        total += max(0, private - used[b"Anonymous:"]) + used[b"Pss:"]
    return total + sum(shared.values())


_TABLE = ProcessTable()


class Tree:
    """Enforces limits on a process and its descendants; the kernel limits only single processes.

    Args:
        pid: the process.
        limits: limits of the run.
        overhead: processes of the sandbox itself.
        group: control group that counts the memory; without it, the processes are polled.
    """

    def __init__(
        self, pid: int, limits: Limits, *, overhead: int = 0, group: ControlGroup | None = None
    ) -> None:
        self.pid = pid
        self.group = group
        self.memory_bytes = limits.memory_bytes
        self.num_processes = limits.num_processes + overhead

    def outgrown(self) -> Literal["memory", "processes"] | None:
        """The limit that the processes exceed, if any."""
        use = _TABLE.use(self.pid)
        if use.threads > self.num_processes:
            return "processes"
        if self.group is not None:
            return "memory" if self.group.exceeded else None
        left = self.memory_bytes + OVERHEAD_BYTES - socket_bytes(use.pids)
        if use.address_bytes <= left:
            return None
        return "memory" if committed_bytes(use.pids) > left else None


def pump(
    process: subprocess.Popen,
    outputs: Sequence[Capture],
    *,
    deadline: float,
    tree: Tree,
    feed: Feed | None = None,
    ready: Callable[[], bool] = lambda: False,
) -> Ended:
    """Read a process's pipes until it exits, ``ready`` returns true, or a limit is exceeded.

    Args:
        process: the process.
        outputs: pipes of the process; they are drained when it exits.
        deadline: time on the clock ``time.monotonic``.
        tree: limits that are checked about ten times per second.
        feed: data to write to the process meanwhile.
        ready: function that is called after each piece of output.

    Returns:
        The reason for the return. The process still runs unless the reason is ``"exit"``.
    """
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        exit_fd = _exit_fd(process.pid)
        if exit_fd is not None:
            stack.callback(os.close, exit_fd)
            selector.register(exit_fd, selectors.EVENT_READ, "exit")
        for output in outputs:
            if output.open:
                selector.register(output.fd, selectors.EVENT_READ, output)
        if feed is not None and feed.rest:
            selector.register(feed.fd, selectors.EVENT_WRITE, feed)
        look_at = time.monotonic() + 0.1
        step_s = 0.1 if exit_fd is not None else 0.01
        while True:
            now = time.monotonic()
            if now >= deadline:
                return "timeout"
            if now >= look_at:
                grown = tree.outgrown()
                if grown is not None:
                    return grown
                look_at = time.monotonic() + 0.1
            exited = exit_fd is None and process.poll() is not None
            for key, _ in selector.select(min(deadline - now, step_s)):
                if key.data == "exit":
                    exited = True
                elif key.data is feed:
                    # The last write may close the pipe.
                    selector.unregister(key.fd)
                    if feed.write():
                        selector.register(key.fd, selectors.EVENT_WRITE, feed)
                else:
                    key.data.take()
                    if not key.data.open:
                        selector.unregister(key.data.fd)
            if any(o.total > OUTPUT_FACTOR * o.keep for o in outputs):
                return "output"
            if ready():
                return "ready"
            if exited:
                for output in outputs:
                    output.drain()
                return "exit"


def _exit_fd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when a process ends; ``None`` if unsupported."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def classify(
    ended: Ended,
    exit_code: int | None,
    stdout: Capture,
    stderr: Capture,
    seconds: float,
    cpu_s: int,
) -> SandboxResult:
    """Make the result of a run from its end and its output.

    Args:
        ended: the reason that :func:`pump` returned.
        exit_code: see :class:`SandboxResult`.
        stdout: standard output.
        stderr: standard error.
        seconds: wall-clock time of the run.
        cpu_s: limit of CPU time in seconds.
    """
    errors = stderr.text()
    return SandboxResult(
        status=_status(ended, exit_code, errors, seconds, cpu_s),
        stdout=stdout.text(),
        stderr=errors,
        exit_code=exit_code,
        seconds=seconds,
        stdout_truncated=stdout.cut,
        stderr_truncated=stderr.cut,
    )


def _status(ended: Ended, exit_code: int | None, stderr: str, seconds: float, cpu_s: int) -> Status:
    if ended in ("timeout", "output", "memory"):
        return ended
    if ended == "processes":
        return "killed"
    if exit_code == 0:
        return "ok"
    if exit_code is None:
        return "sandbox_error"
    if exit_code == -signal.SIGXCPU or (exit_code == -signal.SIGKILL and seconds >= cpu_s):
        return "cpu"
    last = stderr.rstrip().rpartition("\n")[2]
    if last.startswith("MemoryError") or "std::bad_alloc" in last:
        return "memory"
    return "killed" if exit_code < 0 else "error"
