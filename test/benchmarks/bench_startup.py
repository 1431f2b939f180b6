"""Time until a command answers that needs no model: CPU seconds of the whole process.

    python test/benchmarks/bench_startup.py [RUNS]

Each command is a process of its own, user and system time together, median of five. The floor is an
interpreter that does nothing, which is in every figure.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = ["-m", "torchrl_llm"]
# What is started, the CPU seconds that it may take, and its exit status.
SIDES = {
    "python -c pass (the floor)": (["-c", "pass"], None, 0),
    "import torchrl_llm": (["-c", "import torchrl_llm"], 0.1, 0),
    "torchrl-llm --help": ([*COMMAND, "--help"], 1.0, 0),
    "torchrl-llm train grpo --help": ([*COMMAND, "train", "grpo", "--help"], 2.0, 0),
    "torchrl-llm train grpo optimizer.lrr=1": (
        [*COMMAND, "train", "grpo", "optimizer.lrr=1"],
        1.0,
        1,
    ),
}


def cpu_seconds(arguments: list[str], status: int) -> float:
    """User and system seconds of a Python process.

    Args:
        arguments: of the interpreter.
        status: that it must end with.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, ended, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(ended)
    if process.returncode != status:
        raise SystemExit(f"{arguments} ended with {process.returncode}, not {status}")
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    found: dict[str, list[float]] = {name: [] for name in SIDES}
    for arguments, _, status in SIDES.values():
        cpu_seconds(arguments, status)  # writes the bytecode, which a user's second command finds
    for _ in range(runs):
        for name, (arguments, _, status) in SIDES.items():
            found[name].append(cpu_seconds(arguments, status))
    print(f"median CPU seconds of {runs}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for name, (_, aim, _) in SIDES.items():
        limit = "" if aim is None else f"   aim {aim}"
        print(f"{name:<42} {statistics.median(found[name]):6.3f} s{limit}")


if __name__ == "__main__":
    main()
