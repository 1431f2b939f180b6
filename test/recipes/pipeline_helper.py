"""Actors and learners of pipeline-rl as processes of their own, forked from one that has imported.

Each is started from a clean process that holds the imports already, which saves ten seconds each.
"""

from __future__ import annotations

import contextlib
import csv
import os
import runpy
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from fork_server import fork_server

FOLDER = Path(__file__).parents[2] / "sota-implementations" / "pipeline-rl"
SMALL = [
    "train.prompts_per_batch=4",
    "env.repeats=4",
    "redis.prompts_per_claim=2",
    "eval.num_prompts=8",
    "optimizer.scheduler=constant",
    "optimizer.warmup_steps=0",
]
QUIET = ["hydra/job_logging=disabled", "hydra/hydra_logging=disabled", "logging.progress=false"]


def _main(script: str, log: str, arguments: list[str], environ: dict[str, str]) -> None:
    os.environ.update(environ)
    with open(log, "a", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.argv = [str(FOLDER / script), *arguments]
        sys.path.insert(0, str(FOLDER))
        runpy.run_path(sys.argv[0], run_name="__main__")


class Processes:
    """Starts scripts of the recipe; none outlives the block."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._started = Path(folder), []

    def start(
        self, script: str, log: str, *arguments: str, environ: dict[str, str] | None = None
    ) -> BaseProcess:
        given = (script, str(self.folder / log), [*arguments, *QUIET], environ or {})
        process = fork_server().Process(target=_main, args=given, daemon=True)
        process.start()
        self._started.append(process)
        return process

    def output(self, log: str) -> str:
        return (self.folder / log).read_text()

    def wait_for_steps(self, learner, folder: Path, steps: int, *, limit_s: float) -> int:
        """Until the learner has recorded so many steps; returns how many it has."""
        deadline = time.monotonic() + limit_s
        while (done := len(metrics(folder))) < steps:
            assert learner.is_alive(), self.output("learner.log")
            assert time.monotonic() < deadline, f"{done} of {steps} steps in {limit_s} s"
            time.sleep(0.05)
        return done

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error) -> None:
        for process in self._started:
            process.kill()
            process.join()


def metrics(folder: Path) -> list[dict[str, str]]:
    """The training steps of metrics.csv so far."""
    with contextlib.suppress(FileNotFoundError), (Path(folder) / "metrics.csv").open() as file:
        return [row for row in csv.DictReader(file) if row.get("train/tokens_generated")]
    return []
