"""A benchmark in two checkouts, interleaved: the ratio new / old of each figure it prints.

Each checkout runs its own ``test/benchmarks`` script on its own package (``PYTHONPATH``). The order
of the two changes with every round, and the figures are medians over the rounds.

    python test/benchmarks/before_after.py OLD NEW "bench_loss_cost.py 5" --rounds 5

Rows of ``harness.report`` give two ratios: that of our side's CPU seconds, and that of the quotient
ours / other, which a busy machine moves less. In any other line every number that is not the same
in all runs is a figure; lines are matched by their words.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

HARNESS_ROW = re.compile(
    r"^(?P<name>.+?)\s+ours\s+(?P<ours>[\d.]+) ms\s+other\s+[\d.]+ ms"
    r"\s+ours/other\s+(?P<quotient>[\d.]+)\s"
)
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])")
Figures = dict[tuple[str, str], float]
"""Value by (row, figure of the row)."""


def parse(output: str) -> Figures:
    """The figures of one run's output."""
    figures: Figures = {}
    seen: Counter[str] = Counter()
    for line in output.splitlines():
        found = HARNESS_ROW.match(line)
        if found:
            name = _numbered(" ".join(found["name"].split()), seen)
            figures[name, "ours, ms"] = float(found["ours"])
            figures[name, "ours/other"] = float(found["quotient"])
            continue
        line = re.sub(r"\bload [\d.]+", "load", line)
        shape = _numbered(" ".join(NUMBER.sub("#", line).split()), seen)
        for place, number in enumerate(NUMBER.findall(line), 1):
            figures[shape, f"# {place}"] = float(number.replace(",", ""))
    return figures


def _numbered(name: str, seen: Counter[str]) -> str:
    seen[name] += 1
    return name if seen[name] == 1 else f"{name} ({seen[name]})"


def run(checkout: Path, command: list[str]) -> str:
    """Run a benchmark script of a checkout and return what it prints.

    Raises:
        SystemExit: where the script fails.
    """
    script, *arguments = command
    done = subprocess.run(
        [sys.executable, str(checkout / "test" / "benchmarks" / script), *arguments],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{script} in {checkout} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def compare(old: list[Figures], new: list[Figures], limit: float) -> list[str]:
    """One line a figure: medians of both checkouts and their ratio; then what only one has."""
    lines = []
    keys = list(dict.fromkeys(key for run_ in (*old, *new) for key in run_))
    for key in keys:
        before = [run_[key] for run_ in old if key in run_]
        after = [run_[key] for run_ in new if key in run_]
        row, figure = key
        if not before or not after:
            lines.append(f"{row} | {figure}: only in {'NEW' if after else 'OLD'}")
            continue
        if figure.startswith("#") and len({*before, *after}) == 1:
            continue
        a, b = statistics.median(before), statistics.median(after)
        ratio = b / a if a else float("nan")
        mark = f"  above {limit:g}" if figure.startswith("ours") and ratio > limit else ""
        lines.append(f"{row:<62} {figure:<10} old {a:11.4g}  new {b:11.4g}  {ratio:7.3f}{mark}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="the checkout before")
    parser.add_argument("new", type=Path, help="the checkout after")
    parser.add_argument("command", help='script and arguments, "bench_x.py 5"')
    parser.add_argument("--rounds", type=int, default=3, help="runs in each checkout")
    parser.add_argument("--limit", type=float, default=1.03, help="mark ratios above this")
    options = parser.parse_args()
    command = shlex.split(options.command)
    results: dict[Path, list[Figures]] = {options.old.resolve(): [], options.new.resolve(): []}
    if len(results) != 2:
        parser.error("OLD and NEW are the same folder")
    for round_ in range(options.rounds):
        order = list(results) if round_ % 2 == 0 else list(results)[::-1]
        for checkout in order:
            results[checkout].append(parse(run(checkout, command)))
        print(f"round {round_ + 1} of {options.rounds}", file=sys.stderr, flush=True)
    print(f"{options.command}: medians of {options.rounds} rounds, ratio new / old")
    print(*compare(*results.values(), options.limit), sep="\n")


if __name__ == "__main__":
    main()
