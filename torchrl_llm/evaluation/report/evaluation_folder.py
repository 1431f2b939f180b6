"""Reads the folder of an evaluation for ``view``: title, tables and answers.

The recipe ``evaluate`` writes the folder; :mod:`torchrl_llm.evaluation.report.two_runs` compares
two folders.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import isnan, nan
from pathlib import Path
from typing import Any

from torchrl_llm.data.table_files import read_jsonl
from torchrl_llm.errors import DataError
from torchrl_llm.evaluation.report.page import Table
from torchrl_llm.evaluation.report.row_facts import RowFacts

LOW, HIGH = "_low", "_high"
_PREFIX = "answers_"
Figures = Mapping[str, float]
Prompt = tuple[str, Any]
Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """The content of an evaluation's folder.

    Attributes:
        folder: folder of the evaluation.
        config: maps a dotted key to its value.
        figures: maps a task to the name and value of each figure; tasks that have not ended are
            missing.
        prompts: maps the task and number of each prompt to its answers as records.
        date: local date of the newest file of answers, ``YYYY-MM-DD``.
    """

    folder: Path
    config: Mapping[str, Any]
    figures: Mapping[str, Figures]
    prompts: Mapping[Prompt, Records]
    date: str

    @property
    def tasks(self) -> dict[str, int]:
        """Maps a task to its number of prompts."""
        names = [task for task, _ in self.prompts]
        return {name: names.count(name) for name in dict.fromkeys(names)}

    @property
    def title(self) -> str:
        """Model, tasks with their prompts, temperature and date."""
        url, name = (self.config.get(key) for key in ("inference_model.url", "model.name"))
        if url is not None:
            name = f"{self.config.get('inference_model.served_model') or 'the model'} at {url}"
        tasks = ", ".join(f"{task} ({count:,} prompts)" for task, count in self.tasks.items())
        temperature = self.config.get("inference_model.temperature", "not known")
        name = name or "the package's model"
        return f"{name} on {tasks}, temperature {temperature}, {self.date}"

    def tables(self) -> list[Table]:
        """pass@k and majority@k of each task, and the other figures of all tasks."""
        found = []
        for task, figures in self.figures.items():
            names = [name for name in figure_names({task: figures}) if name.startswith("pass@")]
            # With one answer, both are the accuracy.
            pairs = [("1", "accuracy", "accuracy")]
            pairs += [(n[5:], n, n.replace("pass", "majority")) for n in names]
            rows = [[k, figure_text(a, figures), figure_text(b, figures)] for k, a, b in pairs]
            found.append(Table(f"{task}, with k answers", ["k", "pass@k", "majority@k"], rows))
        names = [n for n in figure_names(self.figures) if "@" not in n]
        rows = [[n, *(figure_text(n, each) for each in self.figures.values())] for n in names]
        return [*found, Table("Figures", ["", *self.figures], rows)] if rows else []

    def rows(self, most: int) -> list[RowFacts]:
        """Return the answers of the first prompts, up to a number of rows."""
        groups = ([({"task": task}, found)] for (task, _), found in self.prompts.items())
        return answer_rows(groups, most)


def is_evaluation(folder: Path) -> bool:
    """Whether a folder is the folder of an evaluation.

    Args:
        folder: any path.
    """
    return any(folder.glob(f"{_PREFIX}*.jsonl"))


def read_evaluation(folder: Path, config: Mapping[str, Any]) -> EvaluationRecord:
    """Read the folder of an evaluation.

    Args:
        folder: folder with ``answers_TASK.jsonl`` and ``metrics.json``.
        config: configuration of the evaluation; maps a dotted key to its value.

    Raises:
        DataError: when the folder has no answers, or a file is damaged.
    """
    prompts: dict[Prompt, list[Mapping[str, Any]]] = {}
    files = [f for f in sorted(folder.glob(f"{_PREFIX}*.jsonl")) if f.stat().st_size]
    for file in files:
        for record in read_jsonl(file):
            if not {"valid", "success", "reward"} <= set(record):
                raise DataError(
                    f"line {record.number} of {file} is no answer of an evaluation: it needs "
                    f"reward, valid and success, and has {sorted(record)}"
                )
            task = file.stem.removeprefix(_PREFIX)
            prompts.setdefault((task, record.get("prompt", record.number)), []).append(record)
    if not prompts:
        raise DataError(f"{folder} has no answers yet")
    path, figures = folder / "metrics.json", {}
    if path.is_file():
        try:
            figures = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{path} cannot be read: {error}") from error
    written = max(file.stat().st_mtime for file in files)
    date = datetime.fromtimestamp(written).date().isoformat()
    return EvaluationRecord(
        folder=folder, config=config, figures=figures, prompts=prompts, date=date
    )


def answer_rows(
    groups: Iterable[Sequence[tuple[Mapping[str, str], Records]]], most: int
) -> list[RowFacts]:
    """Return answers as rows of the page; a prompt is shown with all its answers or not at all.

    Args:
        groups: for each prompt, lists of its records; each list comes with the labels of its rows.
        most: largest number of rows.
    """
    rows: list[RowFacts] = []
    for number, group in enumerate(groups):
        found = [
            RowFacts.of_record(each, number, told) for told, several in group for each in several
        ]
        if len(rows) + len(found) > most:
            break
        rows += found
    return rows


def figure_names(results: Mapping[str, Figures]) -> list[str]:
    """Return the names of the figures of all tasks, without the ends of intervals.

    Args:
        results: maps a task to its figures.
    """
    names = dict.fromkeys(name for result in results.values() for name in result)
    return [name for name in names if name.removesuffix(LOW).removesuffix(HIGH) == name]


def figure_text(name: str, figures: Figures) -> str:
    """Format a figure with its confidence interval; empty if the task lacks the figure.

    Args:
        name: name of the figure.
        figures: figures of a task.

    Example:
        >>> figure_text("accuracy", {"accuracy": 0.5, "accuracy_low": 0.25, "accuracy_high": 0.75})
        '0.5000 (0.2500 to 0.7500)'
    """
    if name not in figures:
        return ""
    if name == "num_prompts":
        return f"{figures[name]:.0f}"
    low = figures.get(name + LOW, nan)
    known = "" if isnan(low) else f" ({low:.4f} to {figures[name + HIGH]:.4f})"
    return f"{figures[name]:.4f}{known}"
