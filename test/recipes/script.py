"""Running a recipe's script in this process, which saves seconds of imports each time."""

from __future__ import annotations

import csv
import runpy
import sys
from pathlib import Path

from recipes.glossary import unknown


def run_main(monkeypatch, script, folder, *overrides):
    """Run a script with overrides as a user would type them; the rows of its metrics.csv."""
    run_alone(monkeypatch, script, folder, *overrides)
    return read_metrics(folder)


def run_alone(monkeypatch, script, folder, *overrides):
    """Run a script with overrides as a user would type them."""
    quiet = ["hydra/job_logging=disabled", "hydra/hydra_logging=disabled"]
    arguments = [f"hydra.run.dir={folder}", *overrides, *quiet]
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setenv("TORCHRL_LLM_TRACEBACK", "1")
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    monkeypatch.syspath_prepend(str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def read_metrics(folder):
    """The rows of metrics.csv, every column of which the glossary explains."""
    with (Path(folder) / "metrics.csv").open(newline="") as file:
        reader = csv.DictReader(file)
        assert not unknown(reader.fieldnames), "docs/source/reference/metrics.yaml lacks these"
        return list(reader)
