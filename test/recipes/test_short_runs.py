"""A run of one or two steps needs no other key than ``train.max_steps``."""

import pytest
from recipes.script import load_recipe

PAGES = [
    "grpo/grpo-sync.py",
    "expert-iteration/expert-iteration.py",
    "distillation/distillation.py",
    "self-play/self-play.py",
    "sft/imitate.py",
    "sft/embedded.py",
    "preference/dpo.py",
    "preference/reward-model.py",
]


@pytest.mark.parametrize("max_steps", [1, 2])
@pytest.mark.parametrize("page", PAGES)
def test_a_run_of_few_steps_is_accepted(page, max_steps):
    _, config = load_recipe(page, [f"train.max_steps={max_steps}"])
    assert config.train.max_steps == max_steps
    assert config.optimizer.warmup_steps < 1  # a share of the run, not a number of steps
