"""Running a command of the package, and folders as runs leave them, written by hand."""

from __future__ import annotations

import yaml

from torchrl_llm.cli import main


def run_command(capture, *arguments):
    """The status of a command, its standard output and standard error."""
    try:
        status = main([*map(str, arguments)])
    except SystemExit as ended:
        status = ended.code
    said = capture.readouterr()
    return status, said.out, said.err


def write_run(folder, config, series):
    """A run's folder: nested configuration, and name to one value a step (``None`` for none)."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [",".join(["train/step", *series])]
    for step, values in enumerate(zip(*series.values(), strict=True), start=1):
        lines.append(",".join([str(step), *("" if v is None else repr(v) for v in values)]))
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    return folder


def write_sweep(folder):
    """Two losses by two seeds, as ``-m loss=grpo,gspo seed=0,1`` leaves them."""
    rewards = {("grpo", 0): 0.5, ("grpo", 1): 0.7, ("gspo", 0): 0.9, ("gspo", 1): 0.9}
    for number, ((loss, seed), last) in enumerate(rewards.items()):
        # The bound follows from the loss; where a run logs does not make it another one.
        bound = {"grpo": 0.2, "gspo": 0.0004}[loss]
        config = {
            "seed": seed,
            "loss": {"type": loss, "clip_epsilon": bound},
            "logging": {"experiment_name": f"job{number}"},
        }
        series = {
            "train/reward": [0.1, 1.0, last],
            "eval/accuracy": [None, None, last / 2],
            "train/loss_objective": [3.0, -2.0, -1.0],
        }
        write_run(folder / str(number), config, series)
    return folder
