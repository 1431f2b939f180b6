"""Compare two ways of doing the same work: interleaved pairs, CPU seconds, medians, ratios.

A benchmark file defines its sides as callables and calls :func:`compare`, or, where peak memory is
the figure, :func:`peak_memory`, which runs each side in a process of its own.

    python test/benchmarks/bench_templates.py
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Ratio", "compare", "peak_memory", "report"]


@dataclass(frozen=True)
class Ratio:
    """Median CPU seconds of two sides and the median of their pairwise ratios ours / other."""

    name: str
    ours_s: float
    other_s: float
    ratio: float
    aim: str

    def __str__(self) -> str:
        return (
            f"{self.name:<58} ours {self.ours_s * 1e3:9.2f} ms   other {self.other_s * 1e3:9.2f} ms"
            f"   ours/other {self.ratio:6.3f}   other/ours {1 / self.ratio:6.2f}   aim {self.aim}"
        )


def _cpu_seconds(work: Callable[[], object], repeats: int) -> float:
    gc.collect()
    start = time.process_time()
    for _ in range(repeats):
        work()
    return (time.process_time() - start) / repeats


def compare(
    name: str,
    ours: Callable[[], object],
    other: Callable[[], object],
    *,
    aim: str,
    pairs: int = 7,
    repeats: int = 1,
    warmup: int = 1,
) -> Ratio:
    """Time both sides in turn, ``pairs`` times, and return medians of CPU seconds.

    Args:
        name: what is compared; heads the row.
        ours: our side, called with nothing.
        other: the other side, called with nothing.
        aim: the figure that was promised, shown beside the result.
        pairs: how many interleaved pairs are counted.
        repeats: calls per measurement (for work of less than some milliseconds).
        warmup: uncounted calls of each side first.
    """
    for _ in range(warmup):
        ours()
        other()
    times = [(_cpu_seconds(ours, repeats), _cpu_seconds(other, repeats)) for _ in range(pairs)]
    return Ratio(
        name,
        statistics.median(a for a, _ in times),
        statistics.median(b for _, b in times),
        statistics.median(a / b for a, b in times),
        aim,
    )


def _child(work: Callable[[], Callable[[], object]], pipe) -> None:
    run = work()
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = _peak_kib()
    start = time.process_time()
    run()
    seconds = time.process_time() - start
    pipe.send((_peak_kib() - before, seconds))


def _peak_kib() -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def peak_memory(setup: Callable[[], Callable[[], object]]) -> tuple[float, float]:
    """Peak memory that a piece of work adds to its process, in MiB, and its CPU seconds.

    Args:
        setup: runs in a new process, prepares (imports, model, inputs, gradients) and returns the
            work; only the work is measured. Must be importable at module level.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(False)
    process = context.Process(target=_child, args=(setup, sender))
    process.start()
    sender.close()
    kib, seconds = receiver.recv()
    process.join()
    return kib / 1024, seconds


def report(rows: list[Ratio]) -> None:
    """Print the rows under one heading."""
    print(f"median CPU seconds, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for row in rows:
        print(row)
