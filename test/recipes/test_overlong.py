"""train.max_seq_len in the recipes: real scripts, the embedded model."""

from __future__ import annotations

import pytest
import torch
from recipes.grpo_helper import SCRIPT, SMALL, column, weights
from recipes.script import run_main

from torchrl_llm.data.ragged import read_rows
from torchrl_llm.errors import ConfigError, OverlongError
from torchrl_llm.recipes import load_config
from torchrl_llm.recipes.builders import longest_row
from torchrl_llm.trainers import BatchSource

RECIPES = SCRIPT.parents[1]
FATES = ("trained", "filtered", "truncated", "invalid", "surplus", "stale", "pending")
GRPO, CALCULATOR = "grpo/grpo-sync.py", [*SMALL, "env=calculator"]
# All that is there for each token: kept ids, values, a reference, rewards.
PPO = ["loss=ppo", "advantage=gae", "inference_model.top_k=50", "reward.kl_coeff=0.05"]
EI = ["train.prompts_per_batch=8", "select.truncated=keep"]
CUT, DROP = "train.on_overlong=truncate", "train.on_overlong=drop"
LATER = pytest.mark.full


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run a script with rows of a length; its metrics, and the lengths of the rows it trained."""
    lengths, fill = [], BatchSource.fill

    def remembered(self):
        found = fill(self)
        size = len(self._buffer)
        rows = self._buffer.storage.get(torch.arange(size)) if size else None
        full = [] if rows is None else read_rows(rows, ("tokens", "full"))
        lengths.extend(len(ids) for ids in full)
        return found

    monkeypatch.setattr(BatchSource, "fill", remembered)

    def run(script, *settings, folder=tmp_path):
        settings = [*settings, "logging.progress=false", "eval.num_prompts=0"]
        return run_main(monkeypatch, RECIPES / script, folder, *settings), lengths

    return run


@pytest.mark.parametrize(
    ("script", "limit", "settings"),
    [
        (GRPO, 60, [*CALCULATOR, *PPO, "reward.kl_reduction=token", CUT]),
        pytest.param(*(GRPO, 81, [*CALCULATOR, DROP, "filter.truncated=mask"]), marks=LATER),
        pytest.param(*("expert-iteration/expert-iteration.py", 19, [*EI, CUT]), marks=LATER),
        pytest.param(
            "distillation/distillation.py",
            *(19, ["train.prompts_per_batch=8", "teacher.max_steps=2", CUT]),
            marks=LATER,
        ),
    ],
)
def test_long_rows_are_taken_out_and_counted(run, script, limit, settings):
    settings = [f"train.max_seq_len={limit}", *settings, "train.max_steps=2"]
    table, lengths = run(script, *settings)
    for row in table:
        spent = sum(int(row[f"train/tokens_{fate}"]) for fate in FATES)
        assert spent == int(row["train/tokens_generated"])
        assert int(row["train/tokens_overlong"]) <= int(row["train/tokens_truncated"])
    for name in ("overlong_rows", "tokens_overlong", "tokens_trained", "grad_norm"):
        assert max(column(table, f"train/{name}")) > 0
    if CUT in settings:
        assert max(lengths) == limit
    else:
        assert max(lengths) < limit


@pytest.mark.full
def test_an_error_names_the_row_and_the_run_goes_on_as_it_says(run):
    settings = [*CALCULATOR, "checkpoint.resume=auto"]
    run(GRPO, *settings, "train.max_steps=1")
    settings += ["train.max_seq_len=60", "train.max_steps=2"]
    with pytest.raises(OverlongError, match=r"row \d+ of the batch, group_id=.*max_seq_len is 60"):
        run(GRPO, *settings)
    table, _ = run(GRPO, *settings, CUT)
    assert [row["train/step"] for row in table] == ["1", "2"]


@pytest.mark.full
def test_a_resumed_run_is_the_uninterrupted_one(run, tmp_path):
    settings = [*CALCULATOR, "train.max_seq_len=60", CUT, "checkpoint.resume=auto"]
    whole, _ = run(GRPO, *settings, "train.max_steps=4", folder=tmp_path / "whole")
    run(GRPO, *settings, "train.max_steps=2", folder=tmp_path / "parts")
    parts, _ = run(GRPO, *settings, "train.max_steps=4", folder=tmp_path / "parts")
    for one, other in zip(whole, parts, strict=True):
        assert {k: v for k, v in one.items() if not k.startswith("perf/")} == {
            k: v for k, v in other.items() if not k.startswith("perf/")
        }
    expected, found = (weights(tmp_path / name, 4) for name in ("whole", "parts"))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_limit_beyond_the_context_would_have_no_effect():
    with pytest.raises(ConfigError, match=r"train.max_seq_len=100000 is more than the \d+ tokens"):
        longest_row(load_config({"train": {"max_seq_len": 100000}}))
