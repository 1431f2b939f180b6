"""What a run's processes use together, read from ``/proc``.

Limits of the kernel hold for one process each; a run that starts many is held by this count. One
reading of the table serves every run that asks within a tenth of a second, so 64 runs at once cost
no more than one.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["ProcessTable", "Use"]

_PAGE = os.sysconf("SC_PAGE_SIZE")


class _Entry(NamedTuple):
    parent: int
    threads: int
    pages: int


class Use(NamedTuple):
    """What a process and everything below it use.

    Attributes:
        threads: processes and threads.
        resident_bytes: memory, where pages that two of them share count twice.
        pids: the processes.
    """

    threads: int
    resident_bytes: int
    pids: tuple[int, ...]


def _entry(pid: str) -> _Entry | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    # The name of the program stands in parentheses and may itself hold anything.
    fields = text[text.rfind(b")") + 2 :].split()
    return _Entry(int(fields[1]), int(fields[17]), int(fields[21]))


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
            sum(entries[p].pages for p in pids) * _PAGE,
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


def proportional_bytes(pids: tuple[int, ...]) -> int | None:
    """Memory of some processes, each shared page counted once; ``None`` where it cannot be read.

    Args:
        pids: the processes; those that are gone count nothing.
    """
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
                rows = file.read().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError:
            return None
        total += sum(int(row.split()[1]) << 10 for row in rows if row.startswith(b"Pss:"))
    return total
