"""Trains: ``torchrl-llm train grpo data=qa.csv reward=exact``; the recipe's keys follow its name.

It runs the recipe's page, as ``python sota-implementations/grpo/grpo-sync.py`` does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

from torchrl_llm._registry import did_you_mean
from torchrl_llm.cli._options import listing, summary
from torchrl_llm.errors import ConfigError
from torchrl_llm.recipes import launch

RECIPES = {
    "grpo": "grpo/grpo-sync.py",
    "grpo-async": "grpo/grpo-async.py",
    "self-play": "self-play/self-play.py",
    "sft": "sft/sft.py",
    "dpo": "preference/dpo.py",
    "reward": "preference/reward-model.py",
    "imitate": "sft/imitate.py",
    "embedded": "sft/embedded.py",
    "distillation": "distillation/distillation.py",
    "expert-iteration": "expert-iteration/expert-iteration.py",
    "langmarl": "langmarl/train.py",
    "langmarl-weights": "langmarl/both.py",
    "pipeline-rl": "pipeline-rl/pipeline-rl.py",
    "pico": "pico/train.py",
}
"""Name of a recipe to its page."""

FLAT = ("langmarl", "langmarl-weights", "pico")
"""Recipes whose settings are one flat dataclass, without YAML files."""


def main(arguments: Sequence[str]) -> int:
    """Run a recipe.

    Args:
        arguments: its name, then overrides of its keys.

    Returns:
        The exit status.

    Raises:
        ConfigError: no such recipe.
    """
    name, *overrides = arguments or ["--help"]
    if name in ("-h", "--help"):
        usage = "usage: torchrl-llm train RECIPE [KEY=VALUE ...]"
        more = "torchrl-llm train RECIPE --help shows its keys."
        sys.stdout.write(f"{usage}\n\n{listing(recipe_summaries())}\n{more}\n")
        return 0
    if name not in RECIPES:
        hint = did_you_mean(name, RECIPES) or "."
        if (launch.PAGES / "grpo" / "config" / "loss" / f"{name}.yaml").is_file():
            hint = f"; it is a loss, torchrl-llm train grpo loss={name}."
        raise ConfigError(f"there is no recipe {name!r}{hint} There are {', '.join(RECIPES)}")
    run_page(RECIPES[name], f"torchrl-llm train {name}", overrides)
    return 0


def run_page(path: str, command: str, overrides: Sequence[str]) -> None:
    """Run a page as the main program.

    Args:
        path: below the folder of recipes.
        command: the typed command, for the message on how to resume.
        overrides: overrides ``key=value`` for the page.

    Raises:
        SystemExit: it ended early or with an error.
    """
    page = launch.PAGES / path
    if not page.is_file():
        raise ConfigError(f"this installation has no recipe {path}: {launch.PAGES} lacks it")
    sys.argv = [command, *overrides]
    sys.path.insert(0, str(page.parent))
    # Like runpy, which would replace the typed command by the path of the page.
    module, before = ModuleType("__main__"), sys.modules["__main__"]
    module.__file__, module.__spec__ = str(page), None
    sys.modules["__main__"] = module
    try:
        exec(compile(page.read_bytes(), page, "exec"), vars(module))
    finally:
        sys.modules["__main__"] = before


def recipe_summaries() -> dict[str, str]:
    """Each recipe with its summary."""
    return {name: summary(launch.PAGES / path) for name, path in RECIPES.items()}
