"""The expert-iteration recipe as a user runs it: the real script, the embedded model."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from recipes.script import run_main

from torchrl_llm.errors import ConfigError
from torchrl_llm.modules import AdapterDisabled
from torchrl_llm.recipes.builders import make_policy, make_reference

FOLDER = Path(__file__).parents[2] / "sota-implementations" / "expert-iteration"
SCRIPT = FOLDER / "expert-iteration.py"
SMALL = ["train.prompts_per_batch=8", "eval.num_prompts=16", "logging.progress=false"]


@pytest.fixture
def run(monkeypatch):
    return lambda folder, *overrides: run_main(monkeypatch, SCRIPT, folder, *SMALL, *overrides)


@pytest.fixture
def utils(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("ei_utils")


def column(table, name):
    return [float(row[name]) for row in table if row[name]]


def test_a_short_run_gets_better_at_what_it_imitates(run, tmp_path):
    table = run(tmp_path, "train.max_steps=8", "optimizer.warmup_steps=2")
    rewards = column(table, "train/reward")
    assert len(rewards) == 8
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1
    # Never more than 4 of 16 answers to a prompt, and only right ones.
    assert all(0 < share <= 0.25 for share in column(table, "train/selected"))
    spent = [
        sum(float(row[f"train/tokens_{fate}"]) for fate in ("trained", "filtered", "truncated"))
        for row in table[1:]
    ]
    assert spent == column(table, "train/tokens_generated")
    assert (tmp_path / "checkpoints" / "step_000008" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "overrides",
    [
        ("loss.function=minor_sft", "loss.beta=0.5"),
        ("train.kl_to_ref_coeff=0.1", "loss.reduction=token_mean", "train_model.lora.enabled=true"),
    ],
)
def test_references_are_scored_with_the_answers_that_are_kept(run, tmp_path, overrides):
    table = run(tmp_path, "train.max_steps=2", "optimizer.warmup_steps=0", *overrides)
    assert len(column(table, "train/loss_sft")) == 2
    if "kl" in overrides[0]:
        # Before the first update the policy is its own reference.
        assert column(table, "train/kl_to_ref")[0] < 0.02


def test_a_step_whose_prompts_teach_nothing_trains_nothing(run, tmp_path):
    table = run(
        tmp_path, "train.max_steps=12", "train.prompts_per_batch=1", "env.repeats=2",
        "select.topk_size=1", "optimizer.lr=0",
    )  # fmt: skip
    shares = column(table, "train/selected")
    assert len(shares) == 12
    for row, share in zip(table[1:], shares, strict=True):
        assert bool(row["train/loss_sft"]) == (share > 0)
    assert 0 in shares
    assert any(shares)


def test_a_run_resumed_is_the_run_uninterrupted(run, tmp_path):
    small = ["train.prompts_per_batch=4", "optimizer.scheduler=constant", "eval.num_prompts=0"]
    small.append("optimizer.warmup_steps=2")
    whole = run(tmp_path / "whole", "train.max_steps=3", *small)
    run(tmp_path / "halves", "train.max_steps=1", "checkpoint.resume=auto", *small)
    halves = run(tmp_path / "halves", "train.max_steps=3", "checkpoint.resume=auto", *small)
    assert column(whole, "train/reward") == column(halves, "train/reward")
    assert column(whole, "train/loss_sft") == column(halves, "train/loss_sft")


def test_with_adapters_the_reference_is_the_policy_without_them(utils):
    config = utils.load_config({"train_model": {"lora": {"enabled": True}}})
    policy = make_policy(config)
    assert isinstance(make_reference(config, policy), AdapterDisabled)
    config = utils.load_config({})
    reference = make_reference(config, make_policy(config))
    assert not any(p.requires_grad for p in reference.model.parameters())


def test_an_unknown_key_names_the_nearest_one(run, tmp_path):
    with pytest.raises(ConfigError, match=r"select\.topk_size"):
        run(tmp_path, "select.topksize=3")
