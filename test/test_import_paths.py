"""Every import path of the release before the rooms were drawn again still works."""

from __future__ import annotations

import importlib
from pathlib import Path

LINES = (Path(__file__).parent / "import_paths.txt").read_text().splitlines()
# Helpers of a policy that took it as their first argument are its methods now.
METHODS = {"score_rows", "whole_distribution", "whole_log_probs"}


def test_a_path_that_worked_still_works():
    lost = []
    for line in LINES:
        module, _, names = line.partition(":")
        found = importlib.import_module(module)
        lost += [f"{module}.{name}" for name in names.split() if not hasattr(found, name)]
    lost = [path for path in lost if path.rpartition(".")[2] not in METHODS]
    assert not lost


def test_an_old_path_gives_the_same_module_and_not_a_second_one():
    old = importlib.import_module("torchrl_llm.envs.reward.ifeval.content")
    new = importlib.import_module("torchrl_llm.rewards.ifeval.paper_instructions")
    assert old is new
    assert new.__spec__.name == new.__name__ == "torchrl_llm.rewards.ifeval.paper_instructions"
