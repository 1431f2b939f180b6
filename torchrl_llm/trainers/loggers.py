"""Loggers of a run by name: TorchRL's, and those that other packages register."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path

from torchrl.record.loggers import Logger

from torchrl_llm._imports import require
from torchrl_llm._registry import find, names, register
from torchrl_llm.errors import ConfigError


@register("loggers", "csv")
def no_logger(*, run_dir: str, experiment_name: str) -> None:
    """Nothing beside ``metrics.csv``, which every run writes."""


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
    knows = [maker for maker in makers if "project" in inspect.signature(maker).parameters]
    if project is not None and not knows:
        able = [n for n in names("loggers") if "project" in _keywords(find("loggers", n))]
        raise ConfigError(
            f"logging.project has no effect without {' or '.join(able)} in logging.backend"
        )
    given = {"run_dir": str(run_dir), "experiment_name": experiment_name}
    made = [maker(**given, **({"project": project} if maker in knows else {})) for maker in makers]
    return [logger for logger in made if logger is not None]


def _keywords(maker: object) -> Sequence[str]:
    return list(inspect.signature(maker).parameters)
