"""README's command on the device: how long it takes, and what the model has learned by then."""

from __future__ import annotations

import csv
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results import Section

ROOT = Path(__file__).parents[2]
_SHORT = ["train.max_steps=3", "eval.num_prompts=16"]


def main() -> None:
    run = Section.from_command_line()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torchrl_llm", "train", "grpo"]
        command += [f"train.device={run.device}", f"hydra.run.dir={folder}"]
        command += _SHORT if run.tiny else []
        start = time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True)
        run.add("README's command, from the call to its end", time.perf_counter() - start, "s")
        with (Path(folder) / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
    accuracy = [float(row["eval/accuracy"]) for row in rows if row["eval/accuracy"]]
    steps = sorted(float(row["perf/step_s"]) for row in rows if row["perf/step_s"])
    run.add("held-out accuracy before", accuracy[0], "")
    if run.tiny:
        run.add("held-out accuracy after", accuracy[-1], "")
    else:
        run.aim("held-out accuracy after", accuracy[-1], "", at_least=0.95)
    run.add("a step, median", steps[len(steps) // 2], "s")


if __name__ == "__main__":
    main()
