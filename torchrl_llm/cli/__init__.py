"""Command line: ``python -m torchrl_llm list [KIND]`` prints what a recipe can choose by name."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from torchrl_llm._registry import KINDS, summaries

__all__ = ["main"]

# The argument of ``sota-implementations/grpo`` that takes a name of each kind.
_KEYS = {
    "losses": "loss=",
    "advantages": "advantage=",
    "tasks": "env.dataset=",
    "rewards": "reward.components.<name>.type=",
    "tools": "env.tools=[]",
    "loggers": "logging.backend=[]",
    "weights": "weight_sync.type=",
    "backends": "inference_model.backend=",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: of the command line; those of this process by default.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m torchrl_llm")
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="print the names that a recipe can choose")
    listing.add_argument("kind", nargs="?", choices=list(KINDS), help="one kind; all by default")
    given = parser.parse_args(arguments)
    try:
        for kind in [given.kind] if given.kind else KINDS:
            print_kind(kind)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def print_kind(kind: str) -> None:
    """Print the names of a kind, a line each.

    Args:
        kind: one of :data:`~torchrl_llm._registry.KINDS`.
    """
    found = summaries(kind)
    width = max(map(len, found), default=0)
    sys.stdout.write(f"{kind}: {_KEYS[kind]}\n")
    for name, line in found.items():
        sys.stdout.write(f"  {name:{width}}  {line}\n")
