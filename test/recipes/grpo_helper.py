"""Running grpo-sync.py in this process, and reading what it leaves."""

from __future__ import annotations

from pathlib import Path

from recipes.script import read_metrics, run_main

from torchrl_llm.recipes import launch

SCRIPT = Path(__file__).parents[2] / "sota-implementations" / "grpo" / "grpo-sync.py"
SMALL = [
    "train.prompts_per_batch=4",
    "env.repeats=4",
    "eval.num_prompts=8",
    "logging.progress=false",
    "optimizer.scheduler=constant",
    "optimizer.warmup_steps=0",
]


def check_typed(*overrides, name="grpo"):
    """The overrides for Hydra, checked as those that a user types."""
    siblings = {"grpo": {"grpo-async": "grpo-async.py"}, "grpo-async": {"grpo": "grpo-sync.py"}}
    folder = SCRIPT.parent / "config"
    return launch.check_arguments([*overrides], folder, name, siblings=siblings[name])


def run_script(monkeypatch, folder, *overrides):
    """Run the script, small; the rows of metrics.csv without what a clock says."""
    run_main(monkeypatch, SCRIPT, folder, *SMALL, *overrides)
    return rows(folder)


def rows(folder):
    """The rows of metrics.csv without what a clock says."""
    return [
        {name: value for name, value in row.items() if not name.startswith("perf/")}
        for row in read_metrics(folder)
    ]


def weights(folder, step):
    """The parameters of a checkpoint's model."""
    from safetensors.torch import load_file

    return load_file(Path(folder) / "checkpoints" / f"step_{step:06d}" / "model.safetensors")


def column(table, name):
    """The values of a metric, where it has one."""
    return [float(row[name]) for row in table if row.get(name)]
