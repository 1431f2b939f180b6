"""Draws and compares runs: ``torchrl-llm plot RUN [RUN ...] --by loss.type``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from torchrl_llm._run_log import printable
from torchrl_llm._settings import Group, several
from torchrl_llm.cli._options import Word, parse
from torchrl_llm.errors import ConfigError

_METRICS = ("train/reward", "eval/accuracy")
# If there are more curves, they are only drawn in the picture.
_MOST_DRAWN = 2


class Options(Group):
    """One picture and one table of several runs, from their metrics.csv.

    Attributes:
        runs: folder of a run or of a sweep; or a pattern.
        output: the picture; default: curves.png in the run's folder, or in the current folder for
            several runs.
        metric: column of metrics.csv to draw; may be repeated; default: {metrics}.
        by: draw one line for each combination of values of these keys: the mean over its runs.
    """

    runs: Annotated[list[str], Word("RUN")]
    output: Annotated[str | None, "FILE"] = None
    metric: Annotated[list[str], "NAME"] = several()
    by: Annotated[str | None, "KEY,KEY"] = None


def main(arguments: Sequence[str]) -> int:
    """Print a table of runs and their curves, and write a picture of them.

    Args:
        arguments: folders of runs, and options.

    Returns:
        The exit status.
    """
    given = parse(Options, "plot", arguments, metrics=" and ".join(_METRICS))

    from torchrl_llm.trainers import run_comparison as comparison
    from torchrl_llm.trainers.curves import draw_panels, terminal_curve

    runs, left_out = comparison.find_runs(given.runs)
    sys.stderr.writelines(f"left out: {printable(line)}\n" for line in left_out)
    known = list(dict.fromkeys(name for run in runs for name in run.metrics))
    metrics = given.metric or [name for name in _METRICS if name in known]
    metrics = metrics or [name for name in known if name.startswith("train/loss")] or _METRICS
    comparison.check_metrics(runs, metrics)
    heads = _keys(given.by)
    if heads:
        groups = comparison.group_runs(runs, heads)
        names = [", ".join(f"{k}={v}" for k, v in zip(heads, at, strict=True)) for at in groups]
    else:
        names = comparison.run_labels(runs)
        groups = {(name,): [run] for name, run in zip(names, runs, strict=True)}
    panels = {
        metric: {
            name: comparison.mean_curve(curves)
            for name, group in zip(names, groups.values(), strict=True)
            if (curves := [run.metrics[metric] for run in group if metric in run.metrics])
        }
        for metric in metrics
    }
    picture = given.output or (runs[0].folder if len(runs) == 1 else Path()) / "curves.png"
    try:
        draw_panels(panels).savefig(picture)
    except (OSError, ValueError) as error:  # no such folder; no such format
        raise ConfigError(f"the picture {picture} cannot be written: {error}") from error
    shown = [comparison.comparison_table(groups, heads or ["run"], metrics)]
    for metric, curves in panels.items():
        for name, curve in curves.items() if len(curves) <= _MOST_DRAWN else ():
            title = f"\n{metric}, {name}"
            shown.append(terminal_curve(curve.steps, curve.values, title=title, height=6))
    sys.stdout.write(printable("\n".join([*shown, f"\npicture {picture}", ""])))
    return 0


def _keys(by: str | None) -> list[str]:
    keys = [key.strip() for key in (by or "").split(",") if key.strip()]
    if by is not None and not keys:
        raise ConfigError("--by needs a key, as in --by loss.type,seed")
    return keys
