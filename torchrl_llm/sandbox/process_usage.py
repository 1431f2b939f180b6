"""What a run's processes use together, read from ``/proc``.

Limits of the kernel hold for one process each; a run that starts many is held by this count. One
reading of the table serves every run that asks within a tenth of a second, so 64 runs at once cost
no more than one.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

# What may lie in a socket until somebody reads it: Linux's default, which a run cannot raise.
_SOCKET_BYTES = 212_992
# Descriptors that any program may have open without being taken for a hoard of sockets.
_FEW_FILES = 32


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
            sum(entries[p].threads for p in pids),
            sum(entries[p].addresses for p in pids),
            pids,
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
