"""Prints names for settings: ``torchrl-llm list [losses|tasks|rewards|tools|...]``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

from torchrl_llm._registry import summaries
from torchrl_llm._settings import Group
from torchrl_llm.cli._options import Word, listing, parse
from torchrl_llm.cli.train import recipe_summaries

RECIPES = "recipes"
HOW = {
    "losses": "loss=NAME",
    "estimators": "advantage=NAME",
    "preference_losses": "loss=NAME of torchrl-llm train dpo",
    "tasks": "env=NAME, or env=FILE.py:CLASS of your own",
    "rewards": "reward=NAME, or reward=FILE.py:FUNCTION of your own; several, with weights, by "
    "reward.components.<any name>.type=NAME",
    "tools": "env.tools=[NAME,...], or MODULE:FUNCTION of your own",
    "agents": "agent=NAME, or agent=MODULE:CLASS of your own",
    "loggers": "logging.backend=[NAME,...]",
    "weights": "weight_sync.type=NAME, with inference_model.backend=vllm",
    "backends": "inference_model.backend=NAME",
    "environments": "env=NAME of langmarl, or MODULE:CLASS of your own",
    "figures": "eval.figures=[NAME,...] of evaluate, or MODULE:FUNCTION of your own",
    RECIPES: "torchrl-llm train NAME",
}
"""Each kind, and how to choose an entry of it."""
# Names of a kind in the registry and in Python.
_ALSO = {"advantages": "estimators"}
_REGISTERED = {new: old for old, new in _ALSO.items()}


class Options(Group):
    """Print names of losses, tasks, rewards, tools and more, and the settings that use them.

    Attributes:
        kind: {kinds}; all by default.
    """

    kind: Annotated[str | None, Word("KIND"), (*HOW, *_ALSO)] = None


def main(arguments: Sequence[str]) -> int:
    """Print the names of one kind, or of all.

    Args:
        arguments: the kind, or nothing.

    Returns:
        The exit status.
    """
    given = parse(Options, "list", arguments, kinds=", ".join(HOW)).kind
    for kind in HOW if given is None else [_ALSO.get(given, given)]:
        _print_kind(kind)
    return 0


def _print_kind(kind: str) -> None:
    found = recipe_summaries() if kind == RECIPES else summaries(_REGISTERED.get(kind, kind))
    sys.stdout.write(f"{kind}: {HOW[kind]}\n{listing(found)}")
