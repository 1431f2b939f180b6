"""Watching a process: its output with a cap, its time, its memory, and what came of it.

Everything here runs in the calling thread, on pipes that never block it. Limits of the kernel hold
for one process each, so a run that starts many is held by a count over ``/proc``. Each sandbox
itself keeps a process apart, and kills it with all that it started.
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
"""A run that writes this many times what is kept is ended."""

_CHUNK = 1 << 16
# What may lie in a socket until somebody reads it: Linux's default, which a run cannot raise.
_SOCKET_BYTES = 212_992
# Descriptors that any program may have open without being taken for a hoard of sockets.
_FEW_FILES = 32


def cpu_seconds(limits: Limits) -> int:
    """CPU seconds of a process, whole as the kernel wants them."""
    return max(1, math.ceil(limits.wall_s if limits.cpu_s is None else limits.cpu_s))


class Capture:
    """The reading end of a pipe, of which the first ``keep`` bytes are kept.

    Args:
        fd: the reading end; it belongs to the capture from now on.
        keep: bytes.
    """

    def __init__(self, fd: int, keep: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.keep = keep
        self.kept = bytearray()
        self.total = 0
        self.open = True

    def take(self) -> bool:
        """Read what there is, one chunk; whether more may come at once."""
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
        """Read all that is in the pipe now, without waiting."""
        most = self.total + OUTPUT_FACTOR * max(self.keep, _CHUNK)
        while self.open and self.total < most and self.take():
            pass

    def text(self) -> str:
        """What was kept, as text: UTF-8, with replacements for invalid bytes."""
        return self.kept.decode("utf-8", errors="replace")

    def report(self, key: str) -> Any:
        """A value of the JSON objects that it holds, one per line; ``None`` if there is none yet.

        Args:
            key: of the value.
        """
        for line in self.text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                report = json.loads(line)
                if key in report:
                    return report[key]
        return None

    @property
    def cut(self) -> bool:
        """Whether something was thrown away."""
        return self.total > len(self.kept)

    def reset(self) -> None:
        """Forget what was read, and go on with the same pipe."""
        self.kept = bytearray()
        self.total = 0

    def close(self) -> None:
        """Close the pipe; may be called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.open = False


class Feed:
    """Bytes on their way into a pipe.

    Args:
        fd: the writing end.
        data: what to write.
        last: whether the pipe belongs to the feed, which closes it behind them.
    """

    def __init__(self, fd: int, data: bytes, *, last: bool = False) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.rest = memoryview(data)
        self.last = last

    def write(self) -> bool:
        """Write what the pipe takes now; whether there is more to write."""
        try:
            while self.rest:
                self.rest = self.rest[os.write(self.fd, self.rest[:_CHUNK]) :]
        except BlockingIOError:
            return True
        except OSError:  # nobody reads it any more
            pass
        self.close()
        return False

    def close(self) -> None:
        """Drop what is left; may be called twice."""
        self.rest = self.rest[:0]
        if self.last and self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class _Entry(NamedTuple):
    parent: int
    threads: int
    addresses: int


class Use(NamedTuple):
    """What a process and everything below it use.

    Attributes:
        threads: processes and threads.
        address_bytes: all that they have mapped, used or not; no less than their memory.
        pids: the processes.
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
    # The name of the program stands in parentheses and may itself hold anything.
    fields = text[text.rfind(b")") + 2 :].split()
    return _Entry(int(fields[1]), int(fields[17]), int(fields[20]))


class ProcessTable:
    """The machine's processes as a tree, at most ``max_age_s`` old.

    Args:
        max_age_s: seconds for which a reading serves; longer where a reading takes long, so that it
            never costs more than a tenth of a core.

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
        """Sum over a process and its descendants.

        Args:
            pid: the process; zeros if it is gone.
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
        except OSError:  # no /proc: nothing is seen, and the limits of each process remain
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
    """The most that the kernel may hold in sockets of some processes, if that is much.

    Args:
        pids: the processes.
    """
    total = 0
    for pid in pids:
        # The size of that folder is the number of its entries (Linux 6.2 and later).
        with contextlib.suppress(OSError):
            total += max(0, os.stat(f"/proc/{pid}/fd").st_size - _FEW_FILES) * _SOCKET_BYTES
    return total


def committed_bytes(pids: tuple[int, ...]) -> int:
    """Memory that some processes may use at any moment without asking for more.

    What was never written to counts, or was given back and can be written to again; a page that a
    fork shares with its parent counts once until one of them writes to it.

    Args:
        pids: the processes; those that are gone count nothing.
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
        except OSError:  # it hides itself: it may have all that it has addresses for
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
    """A process and all below it, held to limits that the kernel sets for one process at most.

    Args:
        pid: the process.
        limits: of the run.
        overhead: processes of the sandbox itself.
        group: that counts their memory; else they are looked at.
    """

    def __init__(
        self, pid: int, limits: Limits, *, overhead: int = 0, group: ControlGroup | None = None
    ) -> None:
        self.pid = pid
        self.group = group
        self.memory_bytes = limits.memory_bytes
        self.num_processes = limits.num_processes + overhead

    def outgrown(self) -> Literal["memory", "processes"] | None:
        """Which limit they are above now."""
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
    """Read a process's pipes until it exits, ``ready`` says so, or a limit is hit.

    Args:
        process: the process.
        outputs: its pipes; read to their present end when it exits.
        deadline: on the clock of ``time.monotonic``.
        tree: looked at about ten times a second.
        feed: what to write to the process meanwhile.
        ready: asked after each piece of output.

    Returns:
        Why it came back. The process still runs unless that is ``"exit"``.
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
                    # A write that ends it may close the pipe.
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
    """A descriptor that is readable once the process has ended; ``None`` where there is none."""
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
    """What came of a run, from how it ended and what it wrote.

    Args:
        ended: why watching it ended.
        exit_code: as in :class:`SandboxResult`.
        stdout: its output.
        stderr: its errors.
        seconds: wall-clock time that it took.
        cpu_s: CPU seconds that it had.
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
