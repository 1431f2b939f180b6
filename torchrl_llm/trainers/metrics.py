"""Metrics of a run: one wide ``metrics.csv``, and further loggers.

Names have a prefix: ``train/`` for a training step, ``eval/`` for held-out prompts, ``perf/`` for
time and memory. The CSV is the record of the run: it is written row by row, survives a killed
process, and is cut back to the checkpoint when a run resumes.

Loggers are found by name: TorchRL's, and those that other packages register.

Next: :mod:`torchrl_llm.trainers.curves` draws them, :mod:`torchrl_llm.trainers.run_folder` reads
them again.
"""

from __future__ import annotations

import csv
import inspect
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torchrl._utils import logger as log
from torchrl.record.loggers import Logger

from torchrl_llm._imports import require
from torchrl_llm._registry import find, names, register
from torchrl_llm.errors import ConfigError
from torchrl_llm.objectives.token_loss import LLMLossOutput
from torchrl_llm.trainers.run_folder import STEP, read_rows


class MetricsTable:
    """The rows of ``metrics.csv``, one a training step, passed on to TorchRL's loggers.

    Args:
        path: the CSV file; its folder must exist.
        loggers: TorchRL loggers that get every number too. One that raises is warned of once and
            asked again at the next step: the run, and the other loggers, go on.
        columns: columns that the header holds from the start, so that a metric which appears
            later (an evaluation) does not force the file to be written again.

    Attributes:
        failures: class name of a logger to how often it raised, once a step at most.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "metrics.csv"
        >>> table = MetricsTable(path)
        >>> table.write(1, {"train/reward": 0.25})
        >>> path.read_text().splitlines()
        ['train/step,train/reward', '1,0.25']
    """

    def __init__(
        self, path: str | Path, loggers: Sequence[Logger] = (), columns: Sequence[str] = ()
    ) -> None:
        self.path = Path(path)
        self.loggers = list(loggers)
        self.failures: dict[str, int] = {}
        self._columns = [STEP, *columns]
        # The rows are in the file only: in memory a long run's would be tens of megabytes.
        self._last: int | None = None
        self._written = False

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append the metrics of a step.

        Args:
            step: the training step, 1 for the first; 0 is what was measured before training.
            metrics: prefixed name to number or one-element tensor.

        Raises:
            ValueError: a name without one of the prefixes, or a step that does not go on.
            OSError: the file cannot be written.
        """
        if self._last is not None and step <= self._last:
            raise ValueError(f"step {step} follows step {self._last} in {self.path}")
        numbers = {name: _number(value) for name, value in metrics.items()}
        for name in numbers:
            if name.partition("/")[0] not in ("train", "eval", "perf"):
                raise ValueError(f"metric {name!r} must begin with train/, eval/ or perf/")
        row = {STEP: str(step), **{name: repr(value) for name, value in numbers.items()}}
        fresh = [name for name in row if name not in self._columns]
        if fresh or not self._written:
            rows = [*self._rows(), row]
            self._columns.extend(fresh)
            self._rewrite(rows)
        else:
            with self.path.open("a", newline="") as file:
                csv.writer(file, lineterminator="\n").writerow(
                    [row.get(name, "") for name in self._columns]
                )
        self._last = step
        for logger in self.loggers:
            self._pass_on(logger, numbers, step)

    def _pass_on(self, logger: Logger, numbers: Mapping[str, float | int], step: int) -> None:
        with self._forgiving(logger, f"the metrics of step {step}"):
            for metric, value in numbers.items():
                logger.log_scalar(metric, value, step=step)

    @contextmanager
    def _forgiving(self, logger: Logger, what: str) -> Iterator[None]:
        name = type(logger).__name__
        try:
            yield
        except Exception as error:  # a server that is down, a full disk: not worth a run
            self.failures[name] = self.failures.get(name, 0) + 1
            if self.failures[name] == 1:
                log.warning(
                    f"{name} did not take {what}: {type(error).__name__}: {error}; the run goes "
                    f"on and {self.path} has all metrics (said once)"
                )

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Tell the loggers the configuration of the run.

        Args:
            config: flat, dotted key to value. A list is given as its text, which every logger can
                hold.
        """
        plain = (str, bool, int, float, type(None))
        flat = {key: v if isinstance(v, plain) else str(v) for key, v in config.items()}
        for logger in self.loggers:
            if isinstance(logger, Logger):
                with self._forgiving(logger, "the configuration"):
                    logger.log_hparams(flat)

    def read(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one metric, where it has a value.

        Args:
            name: the metric, as ``"train/reward"``.

        Returns:
            Two lists of the same length.
        """
        rows = [row for row in self._rows() if row.get(name)]
        return [int(row[STEP]) for row in rows], [float(row[name]) for row in rows]

    def _rows(self) -> list[dict[str, str]]:
        """What was written so far."""
        found = self._read_rows(self.path, sys.maxsize) if self._written else None
        return [] if found is None else found[1]

    def save(self, path: Path) -> None:
        """Write the rows so far to the disk, and a copy next to a checkpoint.

        Args:
            path: of the copy.
        """
        if self._written:
            with self.path.open("rb") as file:
                os.fsync(file.fileno())
        self._write(path, self._rows())

    def resume(self, step: int, copy: Path | None = None) -> str | None:
        """Continue the file of an earlier run after ``step``, dropping the rows behind it.

        Args:
            step: the last step that counts.
            copy: what :meth:`save` wrote at that step; the file is mended from it.

        Returns:
            What was wrong with the file, ``None`` if nothing was.
        """
        found = self._read_rows(self.path, step)
        saved = None if copy is None else self._read_rows(copy, step)
        columns, rows = saved or found or ([], [])
        self._columns.extend(name for name in columns if name not in self._columns)
        last = int(found[1][-1][STEP]) if found and found[1] else None
        if found is None:
            wrong = "is broken" if self.path.exists() else "was missing"
        elif last != step:
            wrong = "holds no step" if last is None else f"ended at step {last}"
        elif saved is not None and found[1] != saved[1]:
            wrong = "was altered"
        else:
            wrong = None
        self._rewrite(rows)
        self._last = int(rows[-1][STEP]) if rows else None
        return wrong and f"{self.path} {wrong}"

    @staticmethod
    def _read_rows(path: Path, step: int) -> tuple[list[str], list[dict[str, str]]] | None:
        """Columns and rows up to a step; ``None`` where the file is absent or no such table."""
        try:
            columns, rows = read_rows(path)
        except (OSError, ValueError):
            return None
        return columns, [row for row in rows if int(row[STEP]) <= step]

    def _rewrite(self, rows: Sequence[Mapping[str, str]]) -> None:
        temporary = self.path.with_suffix(".csv.tmp")
        self._write(temporary, rows)
        os.replace(temporary, self.path)
        self._written = True

    def _write(self, path: Path, rows: Sequence[Mapping[str, str]]) -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(self._columns)
            writer.writerows([row.get(name, "") for name in self._columns] for row in rows)


class LossMeter:
    """Loss outputs of one training step as metrics.

    Outputs of micro-batches add up to that of their batch, so they are summed, and the metrics are
    those of the sum (an effective sample size is no sum); the batches of a step (mini-batches,
    epochs) are averaged.

    Example:
        >>> meter = LossMeter()
        >>> meter.add({"loss_objective": torch.tensor(1.0)})
        >>> meter.add({"loss_objective": torch.tensor(2.0)})
        >>> meter.close(grad_norm=0.5)
        >>> meter.metrics()
        {'train/loss_objective': 3.0, 'train/grad_norm': 0.5}
    """

    def __init__(self) -> None:
        self._open: Any = None
        self._sums: dict[str, float] = {}
        self._batches = 0

    def add(self, output: LLMLossOutput | Mapping[str, torch.Tensor]) -> None:
        """Add the output of a micro-batch.

        Args:
            output: the output of a loss, or a mapping of names to scalars.
        """
        if isinstance(output, Mapping):
            before = self._open or {}
            parts = {name: value.detach() for name, value in output.items()}
            self._open = before | {n: before[n] + v if n in before else v for n, v in parts.items()}
        else:
            part = output.detach()
            self._open = part if self._open is None else self._open + part

    def close(self, **values: torch.Tensor | float) -> None:
        """End a batch, at its optimizer step.

        Args:
            values: further numbers of this batch, such as the norm of its gradient.
        """
        metrics = {} if self._open is None else self._open
        if not isinstance(metrics, Mapping):
            metrics = metrics.metrics()
        for name, value in {**metrics, **values}.items():
            self._sums[name] = self._sums.get(name, 0.0) + _number(value)
        self._open = None
        self._batches += 1

    def metrics(self) -> dict[str, float]:
        """Means over the batches, named ``train/<name>``; none before the first batch."""
        return {f"train/{name}": total / self._batches for name, total in self._sums.items()}


def _number(value: Any) -> float | int:
    value = value.item() if isinstance(value, torch.Tensor) else value
    return value if isinstance(value, int) else float(value)


def memory_metrics() -> dict[str, float]:
    """Memory of this process, in MiB (2**20 bytes).

    Returns:
        ``perf/rss_mb``, what it holds now, and where it uses GPUs ``perf/gpu_mem_alloc_mb``, the
        most that tensors on all of them have taken so far.
    """
    metrics = {"perf/rss_mb": _resident_bytes() / 2**20}
    if torch.cuda.is_initialized():
        most = map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count()))
        metrics["perf/gpu_mem_alloc_mb"] = sum(most) / 2**20
    return metrics


def _resident_bytes() -> int:
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:  # no Linux: the most it has held, in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(pages) * resource.getpagesize()


@register("loggers", "csv")
def no_logger(*, run_dir: str, experiment_name: str) -> None:
    """Nothing besides ``metrics.csv``, which every run writes."""


@register("loggers", "tensorboard")
def tensorboard_logger(*, run_dir: str, experiment_name: str) -> Logger:
    """TensorBoard's events in ``<run_dir>/<experiment_name>``."""
    from torchrl.record.loggers.tensorboard import TensorboardLogger

    return TensorboardLogger(exp_name=experiment_name, log_dir=run_dir)


@register("loggers", "wandb")
def wandb_logger(*, run_dir: str, experiment_name: str, project: str | None = None) -> Logger:
    """Weights & Biases, in a project of its own or the given one."""
    require("wandb", extra="wandb", feature="logging.backend=[wandb]")
    from torchrl.record.loggers.wandb import WandbLogger

    return WandbLogger(exp_name=experiment_name, save_dir=run_dir, project=project)


def make_loggers(
    backends: Sequence[str],
    *,
    run_dir: str | Path,
    experiment_name: str,
    project: str | None = None,
) -> list[Logger]:
    """The loggers of these names, without one for ``csv``, which every run writes itself.

    Args:
        backends: names of loggers, see ``python -m torchrl_llm list loggers``, or ``"module:name"``
            of a function (a class) that makes a ``torchrl.record.loggers.Logger`` of the keywords
            ``run_dir`` and ``experiment_name``, and ``project`` if it has one.
        run_dir: folder of the run.
        experiment_name: name of the run.
        project: for loggers that know projects.

    Raises:
        ConfigError: an unknown name, or a ``project`` that none of them takes.
        MissingExtraError: a logger's package is not installed.

    Example:
        >>> make_loggers(["csv"], run_dir="runs", experiment_name="mine")
        []
    """
    makers = []
    for name in dict.fromkeys(backends):
        try:
            makers.append(find("loggers", name))
        except ConfigError as error:
            raise ConfigError(f"logging.backend: {error}") from error
    knows = [maker for maker in makers if _knows_projects(maker)]
    if project is not None and not knows:
        able = [name for name in names("loggers") if _knows_projects(find("loggers", name))]
        raise ConfigError(
            f"logging.project has no effect without {' or '.join(able)} in logging.backend"
        )
    given = {"run_dir": str(run_dir), "experiment_name": experiment_name}
    made = [maker(**given, **({"project": project} if maker in knows else {})) for maker in makers]
    return [logger for logger in made if logger is not None]


def _knows_projects(maker: Callable[..., Logger | None]) -> bool:
    return "project" in inspect.signature(maker).parameters
