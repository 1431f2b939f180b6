"""Figures of one section of the check: how a section reads its arguments, measures and reports.

A section is a file ``section_<name>.py`` next to this one. It runs as its own process and writes
each figure to its JSON file at once, so that a section that is killed keeps the figures it had::

    if __name__ == "__main__":
        run = Section.from_command_line()
        seconds, peak = run.measure(lambda: loss(rows).backward())
        run.add("ours, seconds", seconds, "s")
        run.aim("ours / bare loop, tokens a second", bare / seconds, "ratio", at_least=0.97)
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


class Section:
    """One section in its own process.

    Args:
        out: JSON file of this section.
        device: ``"cuda"`` or ``"cpu"``.
        tiny: small shapes and few repeats: the rehearsal.
        seconds: the section is killed after this time.

    Attributes:
        figures: dicts with ``name``, ``value``, ``unit`` and, where there is an aim, ``aim`` (text)
            and ``met``.
        facts: name to text or number.
        on: the card and the versions.
    """

    def __init__(self, out: Path, device: str, *, tiny: bool, seconds: float) -> None:
        self.out, self.device, self.tiny = out, torch.device(device), tiny
        self.figures: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        card = torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"
        self.on = f"{card}, torch {torch.__version__}, transformers {version('transformers')}"
        self._end = time.monotonic() + seconds

    @classmethod
    def from_command_line(cls) -> Section:
        """Read ``--out FILE --device cuda|cpu --seconds S [--tiny]``, which ``check.py`` writes."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--out", type=Path, required=True)
        parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
        parser.add_argument("--seconds", type=float, default=600.0)
        parser.add_argument("--tiny", action="store_true")
        given = parser.parse_args()
        torch.manual_seed(0)
        return cls(given.out, given.device, tiny=given.tiny, seconds=given.seconds)

    @property
    def seconds_left(self) -> float:
        """Time until the section is killed; what is optional is left out when little is left."""
        return self._end - time.monotonic()

    def fact(self, name: str, value: Any) -> None:
        """Write down a circumstance: a version, a shape, why something was not measured."""
        self.facts[name] = value
        self._write()

    def add(self, name: str, value: float | None, unit: str) -> None:
        """Write down a figure; ``None`` where this device cannot tell it."""
        self.figures.append({"name": name, "value": value, "unit": unit})
        self._write()

    def aim(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> None:
        """Write down a figure with its aim; exactly one bound is given."""
        met = value >= at_least if at_most is None else value <= at_most
        text = f">= {at_least:g}" if at_most is None else f"<= {at_most:g}"
        self.figures.append(
            {"name": name, "value": value, "unit": unit, "aim": text, "met": bool(met)}
        )
        self._write()

    def measure(
        self, work: Callable[[], object], *, repeats: int = 5, warmup: int = 2
    ) -> tuple[float, int | None]:
        """Median wall seconds of a call, and the most bytes that a call adds on the device.

        Args:
            work: what is measured; its result is dropped.
            repeats: counted calls, two in a rehearsal.
            warmup: uncounted calls before them, one in a rehearsal.

        Returns:
            Seconds with the device idle before and after, and bytes, ``None`` on a CPU.
        """
        if self.tiny:
            repeats, warmup = 2, 1
        for _ in range(warmup):
            work()
        times, peaks = [], []
        for _ in range(repeats):
            gc.collect()
            self.synchronize()
            before = self.allocated()
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            work()
            self.synchronize()
            times.append(time.perf_counter() - start)
            if self.device.type == "cuda":
                peaks.append(torch.cuda.max_memory_allocated() - before)
        return statistics.median(times), max(peaks) if peaks else None

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def allocated(self) -> int:
        """Bytes of live tensors on the device; 0 on a CPU."""
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0

    def free(self) -> None:
        """Give memory that nothing uses back to the device, between two sides of a comparison."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _write(self) -> None:
        draft = self.out.with_suffix(".draft")
        found = {"on": self.on, "facts": self.facts, "figures": self.figures}
        draft.write_text(json.dumps(found, indent=1))
        os.replace(draft, self.out)
