"""Loggers of a run by name: loggers of TorchRL, and loggers that other packages register.

Each gets its numbers from :class:`~torchrl_llm.trainers.MetricsTable`, which always writes
``metrics.csv``.
"""

from __future__ import annotations

import inspect
import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from torchrl.record.loggers import Logger
from torchrl.record.loggers.mlflow import MLFlowLogger
from torchrl.record.loggers.trackio import TrackioLogger

from torchrl_llm._imports import require
from torchrl_llm._registry import find, names, register
from torchrl_llm._run_log import display_path, say, terminal
from torchrl_llm.errors import ConfigError, TorchRLLLMError

_PROJECT = "torchrl_llm"
# Characters that MLflow does not accept in a name.
_NOT_IN_MLFLOW = re.compile(r"[^\w\-. :/]", re.ASCII)
# MLflow's defaults are seven attempts of two minutes: an hour for three steps if the server is
# down.
_MLFLOW = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
_MLFLOW["MLFLOW_CONFIGURE_LOGGING"] = "false"  # its output is treated like other loggers' output


@register("loggers", "csv")
def no_logger(*, run_dir: str, experiment_name: str) -> None:
    """Make no logger; every run writes ``metrics.csv`` itself."""


@register("loggers", "tensorboard")
def tensorboard_logger(*, run_dir: str, experiment_name: str) -> Logger:
    """Log to TensorBoard's events in ``<run_dir>/<experiment_name>``."""
    from torchrl.record.loggers.tensorboard import TensorboardLogger

    return TensorboardLogger(exp_name=experiment_name, log_dir=run_dir)


@register("loggers", "wandb")
def wandb_logger(*, run_dir: str, experiment_name: str, project: str | None = None) -> Logger:
    """Log to Weights & Biases: the given project, or ``WANDB_PROJECT``, or a default project."""
    require("wandb", extra="wandb", feature="logging.backend=[wandb]")
    from torchrl.record.loggers.wandb import WandbLogger

    known = os.environ.keys() & {"WANDB_API_KEY", "WANDB_MODE"}
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    if known or netrc.exists() or not (sys.stdin and sys.stdin.isatty()):
        os.environ.setdefault("WANDB_SILENT", "true")  # otherwise it asks for an account
    made = WandbLogger(exp_name=experiment_name, save_dir=run_dir, project=project)
    say(f"W&B has the numbers at {made.experiment.url or display_path(made.experiment.dir)}")
    return made


@register("loggers", "mlflow")
def mlflow_logger(*, run_dir: str, experiment_name: str, project: str | None = None) -> Logger:
    """Log to MLflow at ``MLFLOW_TRACKING_URI``, or in ``<run_dir>/mlflow.db``.

    The project is MLflow's experiment, and ``experiment_name`` the name of the run in it.
    """
    for name, value in _MLFLOW.items():
        os.environ.setdefault(name, value)
    require("mlflow", extra="mlflow", feature="logging.backend=[mlflow]")
    folder = Path(run_dir).resolve()
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    return _MLflow(
        project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or _PROJECT,
        uri or f"sqlite:///{folder}/mlflow.db",
        artifact_location=None if uri else str(folder / "mlflow"),
        run_name=experiment_name,
    )


class _MLflow(MLFlowLogger):
    """TorchRL's logger, with a run name, valid metric names, and a ``shutdown``."""

    def __init__(self, exp_name: str, tracking_uri: str, *, run_name: str, **options: Any) -> None:
        import mlflow

        if mlflow.active_run() is not None:
            mlflow.end_run()  # of an earlier run of this process, which failed
        super().__init__(exp_name, tracking_uri, **options)
        mlflow.set_tag("mlflow.runName", run_name)

    def log_metrics(self, metrics: Any, step: int | None = None, **options: Any) -> dict[str, Any]:
        return super().log_metrics(_named(metrics), step, **options)

    def log_hparams(self, cfg: Any) -> None:
        super().log_hparams(_named(cfg))

    def shutdown(self, timeout: float | None = None) -> None:
        import mlflow

        mlflow.end_run()


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    return {_NOT_IN_MLFLOW.sub("_", name): value for name, value in values.items()}


@register("loggers", "trackio")
def trackio_logger(*, run_dir: str, experiment_name: str, project: str | None = None) -> Logger:
    """Log to Trackio, in the folder ``TRACKIO_DIR``; several runs may have the same name."""
    require("trackio", extra="trackio", feature="logging.backend=[trackio]")
    made = _Trackio(experiment_name, project or _PROJECT, resume="never")
    say(f"trackio show --project {shlex.quote(project or _PROJECT)} shows the numbers")
    return made


@contextmanager
def _in_logs() -> Iterator[None]:
    """Write printed output only to the logs."""
    with redirect_stdout(io.StringIO()) as said:
        yield
    terminal.log_only(said.getvalue().rstrip())


class _Trackio(TrackioLogger):
    """TorchRL's logger, with one row per step and its output only in the logs."""

    def _create_experiment(self) -> Any:
        with _in_logs():
            return super()._create_experiment()

    def log_metrics(self, metrics: Any, step: int | None = None, **options: Any) -> dict[str, Any]:
        self.experiment.log(metrics, step=step)
        return metrics

    def shutdown(self, timeout: float | None = None) -> None:
        import trackio

        with _in_logs():
            trackio.finish()  # the run's finish() would be called again at exit


def make_loggers(
    backends: Sequence[str],
    *,
    run_dir: str | Path,
    experiment_name: str,
    project: str | None = None,
) -> list[Logger]:
    """Make the loggers of these names, except ``csv``, which every run writes itself.

    Args:
        backends: names of loggers, see ``python -m torchrl_llm list loggers``, or ``"module:name"``
            of a function (a class) that makes a ``torchrl.record.loggers.Logger`` of the keywords
            ``run_dir`` and ``experiment_name``, and ``project`` if it has one.
        run_dir: folder of the run.
        experiment_name: name of the run.
        project: name of the project, for loggers that have projects.

    Raises:
        ConfigError: an unknown name, a ``project`` that none of them uses, or a logger that cannot
            be started (no account, no server).
        MissingExtraError: a logger's package is not installed.

    Example:
        >>> make_loggers(["csv"], run_dir="runs", experiment_name="mine")
        []
    """
    makers = {}
    for name in dict.fromkeys(backends):
        try:
            makers[name] = find("loggers", name)
        except ConfigError as error:
            raise ConfigError(f"logging.backend: {error}") from error
    knows = [name for name, maker in makers.items() if _knows_projects(maker)]
    if project is not None and not knows:
        able = [name for name in names("loggers") if _knows_projects(find("loggers", name))]
        raise ConfigError(
            f"logging.project has no effect without {' or '.join(able)} in logging.backend"
        )
    given = {"run_dir": str(run_dir), "experiment_name": experiment_name}
    made = []
    for name, maker in makers.items():
        try:
            made.append(maker(**given, **({"project": project} if name in knows else {})))
        except TorchRLLLMError:
            raise
        except Exception as error:  # a package may raise any error; nothing has been trained yet
            raise ConfigError(
                f"logging.backend: {name} cannot be started: {type(error).__name__}: {error}; "
                "fix this, or remove it from logging.backend"
            ) from error
    return [logger for logger in made if logger is not None]


def _knows_projects(maker: Callable[..., Logger | None]) -> bool:
    return "project" in inspect.signature(maker).parameters
