"""Metrics of a run: one wide ``metrics.csv``, also sent to other loggers.

Names have a prefix: ``train/`` for a training step, ``eval/`` for held-out prompts, ``perf/`` for
time and memory. The CSV is the record of the run: it is written row by row, survives a killed
process, and is cut back to the checkpoint when a run resumes.

Next: :mod:`torchrl_llm.trainers.loggers` makes the loggers, :mod:`torchrl_llm.trainers.curves`
draws the metrics, :mod:`torchrl_llm.trainers.run_folder` reads them again.
"""

from __future__ import annotations

import csv
import os
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torchrl._utils import logger as log
from torchrl.record.loggers import Logger

from torchrl_llm._files import replacing
from torchrl_llm.objectives.token_loss import LLMLossOutput
from torchrl_llm.trainers.run_folder import STEP, read_rows

_MOST_FAILURES = 3


class MetricsTable:
    """The rows of ``metrics.csv``, one per training step, also sent to TorchRL's loggers.

    Args:
        path: the CSV file; its folder must exist.
        loggers: TorchRL loggers that get every number, too. If one raises an error, a warning
            appears once, and it is tried again at the next step. After three failures in a row it
            is dropped, because a server that is down costs a timeout at each step. The run and the
            other loggers continue.
        columns: columns that the header has from the start. So the file does not have to be written
            again when a metric appears later (an evaluation).

    Attributes:
        failures: class name of a logger to the number of its failures, at most one per step.

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
        self._in_a_row: dict[int, int] = {}
        self._columns = [STEP, *columns]
        self._last: int | None = None
        # The other rows are only in the file: the rows of a long run would take tens of megabytes
        # of memory.
        self._waiting: list[dict[str, str]] = []
        self._in_file: list[str] = []

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append the metrics of a step, with ``eval/step`` if there was an evaluation.

        Args:
            step: the training step, 1 for the first; 0 for measurements before training.
            metrics: prefixed name to number or one-element tensor.

        Raises:
            ValueError: a name without one of the prefixes, or a step that is not after the last
                one.
            OSError: the file cannot be created. Later, a full disk causes a warning, and the rows
                wait for space.
        """
        if self._last is not None and step <= self._last:
            raise ValueError(f"step {step} follows step {self._last} in {self.path}")
        numbers = {name: number(value) for name, value in metrics.items()}
        for name in numbers:
            if name.partition("/")[0] not in ("train", "eval", "perf"):
                raise ValueError(f"metric {name!r} must begin with train/, eval/ or perf/")
        if any(name.startswith("eval/") for name in numbers):
            numbers.setdefault("eval/step", step)
        row = {STEP: str(step), **{name: repr(value) for name, value in numbers.items()}}
        self._columns.extend(name for name in row if name not in self._columns)
        self._waiting.append(row)
        self._last = step
        self._keep()
        for logger in list(self.loggers):
            with self._forgiving(logger, f"the metrics of step {step}"):
                if isinstance(logger, Logger):
                    logger.log_metrics(numbers, step=step)
                else:
                    for metric, value in numbers.items():
                        logger.log_scalar(metric, value, step=step)

    def _keep(self) -> None:
        """Write the last row; if the disk is full, keep it until a later row can be written."""
        waited = len(self._waiting) > 1
        try:
            if self._in_file == self._columns:
                self._append()
            else:
                self._rewrite(self._rows())
        except OSError as error:
            if not self._in_file:
                raise
            if not waited:
                log.warning(
                    f"{self.path} could not be written: {error}; the run continues, and its rows "
                    "are written when there is space again"
                )
        else:
            if waited:
                log.warning(f"{self.path} is written again, with the rows that were kept back")

    def _append(self) -> None:
        size = self.path.stat().st_size
        try:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                self._lines(file, self._waiting)
        except OSError:
            os.truncate(self.path, size)  # the file may end with half a line
            raise
        self._waiting.clear()

    @contextmanager
    def _forgiving(self, logger: Logger, what: str) -> Iterator[None]:
        name = type(logger).__name__
        try:
            yield
        except Exception as error:  # a server that is down or a full disk must not end a run
            self.failures[name] = self.failures.get(name, 0) + 1
            self._in_a_row[id(logger)] = self._in_a_row.get(id(logger), 0) + 1
            if self.failures[name] == 1:
                log.warning(
                    f"{name} did not take {what}: {type(error).__name__}: {error}; the run "
                    f"continues and {self.path} has all metrics (reported once)"
                )
            if self._in_a_row[id(logger)] == _MOST_FAILURES and logger in self.loggers:
                self.loggers.remove(logger)
                log.warning(
                    f"{name} did not take {what} either ({type(error).__name__}: {error}), "
                    f"{_MOST_FAILURES} times in a row: it is dropped for the rest of the run"
                )
        else:
            self._in_a_row[id(logger)] = 0

    def close(self) -> None:
        """Close the loggers, so that the next run of this process starts with new ones."""
        while self.loggers:
            logger = self.loggers.pop()
            if isinstance(logger, Logger):
                with self._forgiving(logger, "its end"):
                    logger.close()

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Send the configuration of the run to the loggers.

        Args:
            config: flat, dotted key to value. A list is sent as text, which every logger accepts.
        """
        plain = (str, bool, int, float, type(None))
        flat = {key: v if isinstance(v, plain) else str(v) for key, v in config.items()}
        for logger in list(self.loggers):
            if isinstance(logger, Logger):
                with self._forgiving(logger, "the configuration"):
                    logger.log_hparams(flat)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the metrics written so far."""
        return tuple(self._columns)

    def read(self, name: str) -> tuple[list[int], list[float]]:
        """Steps at which a metric has a value, and the values.

        Args:
            name: the metric, as ``"train/reward"``.

        Returns:
            Two lists of the same length.
        """
        rows = [row for row in self._rows() if row.get(name)]
        return [int(row[STEP]) for row in rows], [float(row[name]) for row in rows]

    def _rows(self) -> list[dict[str, str]]:
        found = self._read_rows(self.path, sys.maxsize) if self._in_file else None
        return [*([] if found is None else found[1]), *self._waiting]

    def save(self, path: Path) -> None:
        """Write the rows so far to the disk, and a copy next to a checkpoint.

        Args:
            path: path of the copy.

        Raises:
            OSError: one of them cannot be written.
        """
        if self._waiting:
            self._rewrite(self._rows())
        if not self._in_file:
            self._write(path, [])
            return
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
        # Not parsed: the rows take nine times the memory of the file, which a training process
        # would keep.
        shutil.copyfile(self.path, path)

    def resume(self, step: int, copy: Path | None = None, *, is_checked: bool = True) -> str | None:
        """Continue the file of an earlier run after ``step``, and drop later rows.

        Args:
            step: the last step to keep.
            copy: the copy that :meth:`save` wrote at that step; used to repair the file.
            is_checked: whether the copy is known to be whole; if not, a file that reaches as far as
                the copy is trusted.

        Returns:
            The problem of the file, ``None`` if there was none.
        """
        found = _if_sound(self._read_rows(self.path, step))
        saved = None if copy is None else _if_sound(self._read_rows(copy, step))
        last = int(found[1][-1][STEP]) if found and found[1] else None
        if saved and last is not None and not is_checked:
            saved = saved if saved[1] and int(saved[1][-1][STEP]) > last else None
        columns, rows = saved or found or ([], [])
        self._columns.extend(name for name in columns if name not in self._columns)
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
        """Columns and rows up to a step; ``None`` if the file is absent or not such a table."""
        try:
            columns, rows = read_rows(path)
        except (OSError, ValueError):
            return None
        return columns, [row for row in rows if int(row[STEP]) <= step]

    def _rewrite(self, rows: Sequence[Mapping[str, str]]) -> None:
        with replacing(self.path) as draft:
            self._write(draft, rows)
        self._waiting.clear()
        self._in_file = list(self._columns)

    def _write(self, path: Path, rows: Sequence[Mapping[str, str]]) -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            self._lines(file, [dict(zip(self._columns, self._columns, strict=True)), *rows])

    def _lines(self, file: IO[str], rows: Sequence[Mapping[str, str]]) -> None:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([row.get(name, "") for name in self._columns] for row in rows)


def _if_sound(
    table: tuple[list[str], list[dict[str, str]]] | None,
) -> tuple[list[str], list[dict[str, str]]] | None:
    """A table whose cells are numbers and whose steps ascend, or ``None``."""
    rows = table[1] if table else []
    try:
        for row in rows:
            _ = [float(cell) for cell in row.values()]
    except ValueError:
        return None
    steps = [int(row[STEP]) for row in rows]
    return table if steps == sorted(set(steps)) else None


class LossMeter:
    """Loss outputs of one training step as metrics.

    The outputs of micro-batches are summed, because they add up to the output of their batch.
    Metrics are computed from this sum (an effective sample size is not a sum), and averaged over
    the batches of a step (mini-batches, epochs).

    Example:
        >>> from torchrl_llm.objectives import SFTLossOutput
        >>> meter = LossMeter()
        >>> meter.add(SFTLossOutput(loss_sft=torch.tensor(1.0)))
        >>> meter.add(SFTLossOutput(loss_sft=torch.tensor(2.0)))
        >>> meter.close(grad_norm=0.5)
        >>> meter.metrics()
        {'train/loss_sft': 3.0, 'train/grad_norm': 0.5}
    """

    def __init__(self) -> None:
        self._open: LLMLossOutput | None = None
        self._sums: dict[str, float] = {}
        self._batches = 0

    def add(self, output: LLMLossOutput) -> None:
        """Add the output of a micro-batch.

        Args:
            output: output of a loss.
        """
        part = output.detach()
        self._open = part if self._open is None else self._open + part

    def close(self, **values: torch.Tensor | float) -> None:
        """End a batch, at its optimizer step.

        Args:
            values: further numbers of this batch, such as the norm of its gradient.
        """
        metrics = {} if self._open is None else self._open.metrics()
        for name, value in {**metrics, **values}.items():
            self._sums[name] = self._sums.get(name, 0.0) + number(value)
        self._open = None
        self._batches += 1

    def metrics(self) -> dict[str, float]:
        """Means over the batches, named ``train/<name>``; none before the first batch."""
        return {f"train/{name}": total / self._batches for name, total in self._sums.items()}


def number(value: Any) -> float | int:
    """A metric as a Python number.

    Args:
        value: a number or a tensor of one element.
    """
    value = value.item() if isinstance(value, torch.Tensor) else value
    return value if isinstance(value, int) else float(value)


def memory_metrics() -> dict[str, float]:
    """Memory of this process, in MiB (2**20 bytes).

    Returns:
        ``perf/rss_mb``, its present memory, and, if it uses GPUs, ``perf/gpu_mem_alloc_mb``, the
        peak memory of tensors on all of them so far.
    """
    metrics = {"perf/rss_mb": _resident_bytes() / 2**20}
    if torch.cuda.is_initialized():
        most = map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count()))
        metrics["perf/gpu_mem_alloc_mb"] = sum(most) / 2**20
    return metrics


def _resident_bytes() -> int:
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:  # not Linux: the peak, in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(pages) * resource.getpagesize()
