"""Scores a model: ``torchrl-llm evaluate model.name=FOLDER tasks=[gsm8k]``."""

from __future__ import annotations

from collections.abc import Sequence

from torchrl_llm.cli.train import run_page


def main(arguments: Sequence[str]) -> int:
    """Run the recipe ``evaluate``.

    Args:
        arguments: overrides of its keys.

    Returns:
        The exit status.
    """
    run_page("evaluate/evaluate.py", "torchrl-llm evaluate", arguments)
    return 0
