"""Evaluation during training by several samples a prompt."""

from __future__ import annotations

from functools import partial

import pytest
from recipes.grpo_helper import column, run_script

from torchrl_llm.errors import ConfigError
from torchrl_llm.recipes import load_config

SEVERAL = ("eval.repeats=4", "eval.interval=1", "eval.num_prompts=6", "eval.batch_size=10")
FIGURES = ["accuracy", "pass@2", "majority@2", "pass@4", "majority@4"]


@pytest.fixture
def run(monkeypatch):
    return partial(run_script, monkeypatch)


def figures(table):
    return [[row[f"eval/{name}"] for name in FIGURES] for row in table]


def test_equal_weights_are_evaluated_alike_and_training_goes_on_as_without(tmp_path, run, capsys):
    table = run(tmp_path / "a", *SEVERAL, "train.max_steps=2", "optimizer.lr=0")
    assert column(table, "eval/num_prompts") == [6, 6, 6]
    assert figures(table)[0] == figures(table)[1] == figures(table)[2]
    accuracy, pass2, majority2, pass4, majority4 = map(float, figures(table)[0])
    assert 0 < accuracy < pass2 < pass4 <= 1
    assert majority2 == pytest.approx(accuracy, abs=1e-6)  # of two that differ, one at random
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["k", "avg@k", "pass@k", "majority@k"] in shown
    told = [f"{value:.3f}" for value in (accuracy, pass4, majority4)]
    assert ["4", *(t for value in told for t in (value, "->", value))] in shown
    greedy = run(tmp_path / "b", *SEVERAL[1:], "train.max_steps=2", "optimizer.lr=0")
    assert column(greedy, "train/reward") == column(table, "train/reward")
    assert "eval/pass@2" not in greedy[0]


def test_a_resumed_run_has_the_figures_of_one_that_went_through(tmp_path, run):
    settings = (*SEVERAL, "eval.temperature=0.7", "checkpoint.interval=1")
    whole = run(tmp_path / "whole", *settings, "train.max_steps=2")
    run(tmp_path / "cut", *settings, "train.max_steps=1")
    cut = run(tmp_path / "cut", *settings, "train.max_steps=2", "checkpoint.resume=auto")
    assert cut == whole
    assert figures(whole)[0] != figures(whole)[2]


@pytest.mark.vllm
@pytest.mark.slow
def test_an_engine_evaluates_by_several_samples_and_trains_as_without(tmp_path, run):
    pytest.importorskip("vllm")
    keys = ("inference_model.backend=vllm", "inference_model.max_model_len=64", "optimizer.lr=0")
    table = run(tmp_path / "a", *keys, *SEVERAL, "eval.temperature=0.8", "train.max_steps=2")
    assert column(table, "eval/num_prompts") == [6, 6, 6]
    assert figures(table)[0] == figures(table)[1] == figures(table)[2]
    accuracy, pass2, _, pass4, _ = map(float, figures(table)[0])
    assert 0 < accuracy < pass2 < pass4 <= 1
    greedy = run(tmp_path / "b", *keys, *SEVERAL[1:], "train.max_steps=2")
    assert column(greedy, "train/reward") == column(table, "train/reward")


def test_keys_without_effect_are_refused():
    with pytest.raises(ConfigError, match=r"eval\.temperature has no effect with eval\.repeats=1"):
        load_config({"eval": {"temperature": 0.5}})
    game = {"env": {"dataset": "tic_tac_toe_for_two", "repeats": 8}, "eval": {"repeats": 2}}
    with pytest.raises(ConfigError, match=r"eval\.repeats=2 does not go with .* 2 players"):
        load_config(game)
