"""Shows a run: ``torchrl-llm view RUN``; one HTML page of its curves and rollouts, offline."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchrl_llm.errors import ConfigError

_MOST_ROWS = 2000
_SHOWN = ("model.name", "env.dataset", "loss.type", "advantage.type", "optimizer.lr", "seed")


def main(arguments: Sequence[str]) -> int:
    """Write the page of a run, or print one of its rollouts.

    Args:
        arguments: folder of the run, and options.

    Returns:
        The exit status.

    Raises:
        ConfigError: the page cannot be written.
        DataError: there is no run, or what it wrote cannot be read.
    """
    given = _parser().parse_args(arguments)
    raise NotImplementedError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrl-llm view",
        description="write one HTML page of a run, which any browser opens offline: its curves, "
        "and its rollouts token by token",
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="the page; default: view.html in the run"
    )
    return parser
