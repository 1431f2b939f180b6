"""Comparison of runs: different keys, groups, curves and a table.

:mod:`torchrl_llm.trainers.run_folder` reads a run, :mod:`torchrl_llm.trainers.curves` draws.
"""

from __future__ import annotations

import difflib
import glob
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from torchrl_llm._registry import did_you_mean
from torchrl_llm._settings import dotted
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.trainers.curves import Curve
from torchrl_llm.trainers.results import text_table
from torchrl_llm.trainers.run_folder import CHECKPOINTS, METRICS_FILE, read_config, read_metrics

# Keys for the place and frequency of output do not make a run different.
_INCIDENTAL = ("logging.", "checkpoint.")
# A label with more keys is longer than the name of the run's folder.
_MOST_KEYS = 4
# Levels of folders between a given folder and its runs: recipes, dates, times and, in
# language-space training, "runs" and the name.
_DEPTH = 5


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The written configuration and metrics of a run.

    Attributes:
        folder: folder of the run.
        config: dotted key to value; empty if the run wrote none.
        metrics: name to steps and values.
    """

    folder: Path
    config: Mapping[str, Any]
    metrics: Mapping[str, Curve]


def find_runs(paths: Sequence[str]) -> tuple[list[RunRecord], list[str]]:
    """Find the runs in paths.

    Args:
        paths: folders of runs, of sweeps (whose folders ``0``, ``1``, ... are runs), or folders
            that contain them at some level; also shell patterns.

    Returns:
        Each run once, in the order of the paths, and a line for each folder that was left out.

    Raises:
        DataError: a path has no run with at least one step.
    """
    folders: dict[Path, Path] = {}
    left_out: list[str] = []
    for path in paths:
        found = sorted(map(Path, glob.glob(path)), key=_natural) or [Path(path)]
        for entry in found:
            below = _runs_below(entry)
            if not below and len(found) == 1:
                read_metrics(_folder(entry))  # its error lists the content
            if not below:
                left_out.append(f"{entry} has no {METRICS_FILE}")
            folders |= {each.resolve(): each for each in below}
    runs = []
    for folder in folders.values():
        try:
            metrics = {name: Curve(*pair) for name, pair in read_metrics(folder).items()}
        except DataError as error:
            if len(folders) == 1:
                raise
            left_out.append(str(error))
            continue
        runs.append(RunRecord(folder=folder, config=dotted(read_config(folder)), metrics=metrics))
    if not runs:
        raise DataError("; ".join(left_out))
    return runs, left_out


def _folder(path: Path) -> Path:
    if not path.exists():
        near = difflib.get_close_matches(
            path.name, [each.name for each in path.parent.glob("*") if each.is_dir()], 1
        )
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise DataError(f"there is no folder {path}{hint}")
    if path.name != METRICS_FILE and not path.is_dir():
        raise DataError(f"{path} is no folder of a run")
    return path.parent if path.name == METRICS_FILE else path


def _runs_below(path: Path, depth: int = _DEPTH) -> list[Path]:
    if path.name == METRICS_FILE:
        return [path.parent]
    if (path / METRICS_FILE).is_file():
        return [path]
    if not path.is_dir() or not depth:
        return []
    inner = sorted((e for e in path.iterdir() if e.is_dir() and e.name[0] != "."), key=_natural)
    return [run for e in inner if e.name != CHECKPOINTS for run in _runs_below(e, depth - 1)]


def _natural(path: Path) -> tuple[int, str]:
    return (int(path.name) if path.name.isdecimal() else -1, str(path))


def varying_keys(runs: Sequence[RunRecord]) -> list[str]:
    """Keys whose values differ between the runs, in the order of their configurations.

    Two kinds of keys are left out: keys that follow from a different type of a group
    (``loss.type``), and keys for the place and frequency of output.

    Args:
        runs: the runs.
    """
    keys = dict.fromkeys(key for run in runs for key in run.config)
    varying = [key for key in keys if len({repr(run.config.get(key)) for run in runs}) > 1]
    varying = [key for key in varying if not key.startswith(_INCIDENTAL)]

    def tells(key: str) -> bool:
        type_ = f"{key.rpartition('.')[0]}.type"
        if key == type_ or type_ not in varying:
            return True
        pairs = {(repr(run.config.get(type_)), repr(run.config.get(key))) for run in runs}
        return len(pairs) > len({kind for kind, _ in pairs})

    return [key for key in varying if tells(key)]


def config_differences(runs: Sequence[RunRecord]) -> list[list[str]]:
    """For each key of :func:`varying_keys`, its name and its value in each run.

    Args:
        runs: the runs.

    Example:
        >>> runs = [RunRecord(folder=Path(), config={"seed": s}, metrics={}) for s in (0, None)]
        >>> config_differences(runs)
        [['seed', '0', 'null']]
    """
    return [[k, *(_shown(run.config.get(k)) for run in runs)] for k in varying_keys(runs)]


def run_labels(runs: Sequence[RunRecord]) -> list[str]:
    """Label of each run: the differences of its configuration, or the name of its folder.

    Args:
        runs: the runs.
    """
    keys = varying_keys(runs)
    labels = [_label(keys, run) for run in runs]
    if not keys or len(keys) > _MOST_KEYS:
        labels = [run.folder.resolve().name for run in runs]
    if len(set(labels)) == len(labels):
        return labels
    pairs = zip(labels, runs, strict=True)
    return [f"{label} ({run.folder})" if labels.count(label) > 1 else label for label, run in pairs]


def _label(keys: Sequence[str], run: RunRecord) -> str:
    return ", ".join(f"{key}={_shown(run.config.get(key))}" for key in keys)


def _shown(value: Any) -> str:
    words = {None: "null", True: "true", False: "false"}
    return words.get(value, str(value)) if value is None or isinstance(value, bool) else str(value)


def group_runs(
    runs: Sequence[RunRecord], keys: Sequence[str]
) -> dict[tuple[str, ...], list[RunRecord]]:
    """Group runs by the values of some keys, in the order of the values.

    Args:
        runs: the runs.
        keys: dotted keys.

    Raises:
        ConfigError: a key that some run's configuration does not have.
    """
    for key in keys:
        lacking = [run for run in runs if key not in run.config]
        if len(lacking) == len(runs):
            known = sorted({each for run in runs for each in run.config})
            near = [each for each in known if each.endswith(f".{key}")]
            near = near or difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            differ = ", ".join(varying_keys(runs)) or "none"
            raise ConfigError(f"no run has the key {key!r}: {hint}Keys that differ: {differ}")
        if lacking:
            raise ConfigError(f"{lacking[0].folder} has no key {key!r}, and other runs have it")

    def order(run: RunRecord) -> list[tuple[bool, Any]]:
        values = [run.config[key] for key in keys]
        numbers = [isinstance(value, (int, float)) for value in values]
        return [(not n, v if n else _shown(v)) for n, v in zip(numbers, values, strict=True)]

    groups: dict[tuple[str, ...], list[RunRecord]] = {}
    for run in sorted(runs, key=order):
        groups.setdefault(tuple(_shown(run.config[key]) for key in keys), []).append(run)
    return groups


def check_metrics(runs: Sequence[RunRecord], names: Sequence[str]) -> None:
    """Reject metrics that none of the runs has.

    Args:
        runs: the runs.
        names: names of metrics.

    Raises:
        ConfigError: a name is unknown; the message lists the known ones.
    """
    known = sorted({name for run in runs for name in run.metrics})
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) or "."
            raise ConfigError(f"no run has the metric {name!r}{hint} There are {', '.join(known)}")


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Mean of several curves at each step, over the curves that have a finite value there.

    Args:
        curves: the curves.

    Returns:
        The means, with standard deviations as ``spread`` where there is more than one curve (0 if
        only one has a value).

    Example:
        >>> mean_curve([Curve([1, 2], [0.0, 1.0]), Curve([1], [2.0])])
        Curve(steps=[1, 2], values=[1.0, 1.0], spread=[1.4142135623730951, 0.0])
    """
    at: dict[int, list[float]] = {}
    for curve in curves:
        for step, value in zip(curve.steps, curve.values, strict=True):
            if math.isfinite(value):
                at.setdefault(step, []).append(value)
    steps = sorted(at)
    spread = [stdev(at[step]) if len(at[step]) > 1 else 0.0 for step in steps]
    return Curve(steps, [fmean(at[step]) for step in steps], spread if len(curves) > 1 else [])


def comparison_table(
    groups: Mapping[tuple[str, ...], Sequence[RunRecord]],
    heads: Sequence[str],
    metrics: Sequence[str],
) -> str:
    """Last and best values of metrics, one line per group.

    The best value is the highest, or the lowest for a metric with "loss" in its name. For several
    runs, the table has the mean and the standard deviation.

    Args:
        groups: identifying values of a group to its runs.
        heads: titles of the identifying values.
        metrics: names.

    Example:
        >>> curve = Curve([1, 2, 3], [0.1, 0.9, 0.5])
        >>> run = RunRecord(folder=Path("."), config={}, metrics={"train/reward": curve})
        >>> print(comparison_table({("a",): [run]}, ["run"], ["train/reward"]))
        run  runs  steps  train/reward last  highest
        a       1      3              0.500    0.900
    """
    lines, header = [], [*heads, "runs", "steps"]
    for name in metrics:
        header += [f"{name} last", "lowest" if "loss" in name else "highest"]
    for identity, runs in groups.items():
        ends = [max((c.steps[-1] for c in run.metrics.values()), default=0) for run in runs]
        steps = f"{min(ends)}" if len(set(ends)) == 1 else f"{min(ends)}-{max(ends)}"
        line = [*identity, str(len(runs)), steps]
        for name in metrics:
            finite = [
                [v for v in run.metrics[name].values if math.isfinite(v)]
                for run in runs
                if name in run.metrics
            ]
            best = min if "loss" in name else max
            line += [
                _mean_and_spread([values[-1] for values in finite if values]),
                _mean_and_spread([best(values) for values in finite if values]),
            ]
        lines.append(line)
    return text_table(lines, header=header, num_names=len(heads))


def _mean_and_spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
    return f"{fmean(values):.3f}{spread}"
