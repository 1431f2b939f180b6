"""Reads the folder of a run: its configuration, its metrics, its newest checkpoint.

This module has no heavy imports, so that commands which only read start at once.
:mod:`torchrl_llm.trainers.run` writes the files.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from torchrl_llm._files import plain_file
from torchrl_llm.errors import ConfigError, DataError

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.csv"
CHECKPOINTS = "checkpoints"
STEP = "train/step"

_CHECKPOINT = re.compile(r"step_(\d+)")
# The loader in C is ten times as fast; not every build of PyYAML has it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MOST_VALUES, _MOST_LEVELS, _MOST_DIGITS = 100_000, 32, 16


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, ascending.

    Args:
        folder: the folder of the checkpoints.
    """
    if not folder.is_dir():
        return []
    found = (_CHECKPOINT.fullmatch(entry.name) for entry in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


def checkpoint_path(folder: Path, step: int) -> Path:
    """Folder of the checkpoint of a step.

    Args:
        folder: the folder of the checkpoints.
        step: the step.
    """
    return folder / f"step_{step:06d}"


def model_folder(path: Path) -> Path:
    """Folder of the model of a run, a checkpoint or a model.

    Args:
        path: folder of a model, an adapter or a checkpoint; or of a run, for its newest checkpoint
            or its finished model.

    Raises:
        ConfigError: it holds no model, or is not a folder.

    Example:
        >>> from torchrl_llm.assets import embedded_model_path
        >>> model_folder(embedded_model_path()).name
        'embedded'
    """
    if _holds_model(path):
        return path
    for folder in (path / CHECKPOINTS, path):
        if steps := checkpoint_steps(folder):
            path = checkpoint_path(folder, steps[-1])
    if _holds_model(path):
        return path
    several = sorted(each.name for each in path.glob("*") if _holds_model(each))
    several = [name for name in several if name != "adapter"]
    if several and _CHECKPOINT.fullmatch(path.name):
        raise ConfigError(
            f"{path} holds several models, {', '.join(several)}: name the folder of one, as "
            f"{path / several[0]}"
        )
    if _holds_model(path / "model"):
        return path / "model"
    if not path.is_dir():
        raise ConfigError(f"there is no folder {path}")
    raise ConfigError(
        f"{path} holds no model (config.json), no checkpoint ({CHECKPOINTS}/step_N) and no "
        f"finished model (model); it has {_listing(path)}"
    )


def _holds_model(folder: Path) -> bool:
    """Whether it is the folder of a model, or of an adapter that names its model."""
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def run_of(model: Path) -> Path | None:
    """Folder of the run that a model comes from; ``None`` if there is none.

    Args:
        model: result of :func:`model_folder`.
    """
    for folder in (model, *model.resolve().parents[:3]):
        if (folder / METRICS_FILE).is_file() and not _CHECKPOINT.fullmatch(folder.name):
            return folder
    return None


def read_config(run: Path) -> dict[str, Any]:
    """Nested configuration of a run; empty if it was not written.

    Args:
        run: its folder. If a run of Hydra wrote none, the record of Hydra is used.

    Raises:
        DataError: the file is not a YAML mapping.
    """
    files = [run / CONFIG_FILE, run / ".hydra" / CONFIG_FILE]
    if (run / "run_meta.json").is_file():  # of language-space training
        files.append(run / "config.json")
    for file in files:
        if file.is_file():
            return read_mapping(file)
    return {}


def read_mapping(file: Path) -> dict[str, Any]:
    """Nested values of a YAML file.

    Args:
        file: the file.

    Raises:
        DataError: it is not a YAML mapping.
        OSError: it does not exist.
    """
    found = read_yaml(file)
    if not isinstance(found, dict):
        raise DataError(f"{file} is no mapping of keys to values")
    return found


def read_yaml(file: Path) -> Any:
    """Value of a YAML file, of bounded size: a few aliases may produce any number of values.

    Args:
        file: the file.

    Raises:
        DataError: it is not YAML, or has too many values or too many nested levels.
        OSError: it does not exist.
    """
    try:
        found = yaml.load(plain_file(file).read_text(encoding="utf-8"), _LOADER)
        number = _num_values(found, {})
    # ValueError: not UTF-8, or an impossible number or date.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DataError(f"{file} cannot be read: {error}") from error
    if number > _MOST_VALUES:
        raise DataError(f"{file} cannot be read: it holds more than {_MOST_VALUES:,} values")
    return found


def _num_values(value: Any, known: dict[int, int], depth: int = 0) -> int:
    """Number of values in nested lists and mappings; an aliased value counts at each place."""
    if not isinstance(value, (dict, list)):
        return 1
    if depth > _MOST_LEVELS:
        raise ValueError(f"more than {_MOST_LEVELS} groups or lists are nested")
    if id(value) not in known:
        inner = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_num_values(each, known, depth + 1) for each in inner)
    return known[id(value)]


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A flat configuration as nested groups of plain values, as in ``config.yaml``.

    Args:
        flat: dotted key to value. Values without a YAML type become their ``str``.

    Example:
        >>> nested({"seed": 0, "optimizer.lr": 0.1, "optimizer.betas": (0.9, 0.95)})
        {'seed': 0, 'optimizer': {'lr': 0.1, 'betas': [0.9, 0.95]}}
    """
    groups: dict[str, Any] = {}
    for key, value in flat.items():
        *path, name = key.split(".")
        group = groups
        for part in path:
            group = group.setdefault(part, {})
        group[name] = _plain(value)
    return groups


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, bool, int, float, type(None))) else str(value)


def set_folders_aside(run: Path) -> list[str]:
    """Rename folders that have the names of a run's files, so that the files can be written.

    Args:
        run: its folder.

    Returns:
        One line per folder.
    """
    told = []
    for name in (CONFIG_FILE, METRICS_FILE):
        if (run / name).is_dir():
            aside = run / f"damaged_{name}"
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(run / name, aside)
            told.append(f"{run / name} was a folder; it is now {aside}")
    return told


def read_rows(file: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and rows of a ``metrics.csv``, as texts, without empty cells.

    An incomplete last line, of a running or killed run, is left out.

    Args:
        file: the file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a table of metrics.
    """
    text = plain_file(file).read_text(encoding="utf-8")
    lines = text[: text.rfind("\n") + 1].splitlines()
    try:
        reader = csv.DictReader(lines)
        rows = [row for row in reader if _is_step(row.get(STEP) or "")]
    except csv.Error as error:
        raise ValueError(str(error)) from error
    columns = list(reader.fieldnames or ())
    if STEP not in columns:
        raise ValueError(f"there is no column {STEP}")
    return columns, [{k: v for k, v in row.items() if k and v} for row in rows]


def _is_step(text: str) -> bool:
    return text.isdecimal() and len(text) < _MOST_DIGITS


def read_metrics(run: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Metrics of a run: name to the steps that have a value, and the values.

    Args:
        run: its folder.

    Raises:
        DataError: there is no ``metrics.csv``, it is not a table of metrics, or it has no step.
    """
    file = run / METRICS_FILE
    if not file.is_file():
        raise DataError(f"{run} has no {METRICS_FILE}; it has {_listing(run)}")
    try:
        columns, rows = read_rows(file)
        series = {
            name: (
                [int(row[STEP]) for row in rows if name in row],
                [float(row[name]) for row in rows if name in row],
            )
            for name in columns
            if name != STEP
        }
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}") from error
    if not rows:
        raise DataError(f"{file} holds no step yet")
    return {name: pair for name, pair in series.items() if pair[0]}


def _listing(folder: Path) -> str:
    names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir())
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return shown or "nothing in it"
