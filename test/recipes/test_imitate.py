"""Imitation of a scripted player: a real run, and what it refuses."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from recipes.grpo_helper import column, run_script
from recipes.script import run_main
from transformers import AutoModelForCausalLM

from torchrl_llm.envs.games import TicTacToe, play
from torchrl_llm.recipes.command_keys import KeyTable
from torchrl_llm.recipes.strict_config import valid_keys

SCRIPT = Path(__file__).parents[2] / "sota-implementations" / "sft" / "imitate.py"
SMALL = ["train.batch_size=4", "eval.num_prompts=4"]


@pytest.fixture
def utils(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("imitate_utils")


def test_a_model_that_imitated_games_goes_on_by_playing(tmp_path, monkeypatch):
    table = run_main(
        monkeypatch,
        SCRIPT,
        tmp_path / "imitate",
        *SMALL,
        "train.max_steps=8",
        "optimizer.warmup_steps=0",
        "optimizer.lr=0.003",
    )
    losses = column(table, "train/loss_sft")
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 1
    player = tmp_path / "imitate" / "checkpoints" / "step_000008"
    changed = AutoModelForCausalLM.from_pretrained(player)
    assert changed.lm_head.weight.isfinite().all()
    table = run_script(
        monkeypatch,
        tmp_path / "grpo",
        "env=tic_tac_toe",
        f"model.name={player}",
        "env.options.actions=bare",
        "env.system_prompt=Play tic-tac-toe.",
        "env.max_steps=2",
        "inference_model.max_tokens=4",
        "train.max_steps=1",
    )
    assert float(table[1]["train/tokens_trained"]) > 0


def test_a_game_is_that_of_its_seed_whenever_it_is_read(utils):
    games = utils.games(utils.load_config({"env": {"options": {"actions": "bare"}}}))
    some = [games[index]["messages"] for index in range(6)]
    assert [games[index]["messages"] for index in reversed(range(6))] == some[::-1]
    assert len({str(each) for each in some}) > 3
    assert {message["role"] for message in some[0]} >= {"user", "assistant"}


def test_a_careful_player_never_loses_and_a_careless_one_does(utils):
    def lost(careless):
        agent = utils.player(utils.PlayerConfig(careless=careless), seed=0)
        ends = [play(TicTacToe(), agent, seed)[-1].outcome.reward for seed in range(100)]
        return sum(reward < 0 for reward in ends)

    assert lost(0.0) == 0
    assert lost(1.0) > 20


def test_the_files_have_the_keys_of_the_dataclasses(utils):
    files = KeyTable.read(SCRIPT.parent / "config", "imitate")
    classes = set(valid_keys(utils.ImitateConfig))
    assert classes - set(files.plain) == {"logging.samples", "logging.rollouts"}
    assert set(files.plain) - classes == {"env.options.actions"}  # the game's own
