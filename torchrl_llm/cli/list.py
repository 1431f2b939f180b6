"""Prints what a recipe can choose by name: ``torchrl-llm list [losses|tasks|rewards|...]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torchrl_llm._registry import KINDS, summaries

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
# Another word for a kind.
_ALSO = {"estimators": "advantages"}


def main(arguments: Sequence[str]) -> int:
    """Print the names of one kind, or of all.

    Args:
        arguments: the kind, or nothing.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(
        prog="torchrl-llm list", description="print the names that a recipe can choose"
    )
    parser.add_argument(
        "kind", nargs="?", choices=[*KINDS, *_ALSO], help="one kind; all by default"
    )
    given = parser.parse_args(arguments).kind
    for kind in KINDS if given is None else [_ALSO.get(given, given)]:
        print_kind(kind)
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
