"""The recipe that makes the embedded model, in a short form."""

from __future__ import annotations

import csv
import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_llm.assets import embedded_model_path
from torchrl_llm.envs.datasets.number_tasks import (
    addition_pairs,
    addition_problem,
    calculator_problem,
    calculator_problems,
)
from torchrl_llm.errors import ConfigError

RECIPE = Path(__file__).parents[2] / "sota-implementations" / "sft"
# Runs that are shorter than the usual rise of the learning rate.
RISE = {"optimizer": {"warmup_steps": 0}}


@pytest.fixture
def utils(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPE))
    import embedded_utils

    return embedded_utils


def _run(monkeypatch, folder, *overrides):
    arguments = [str(RECIPE / "embedded.py"), f"hydra.run.dir={folder}", *overrides]
    monkeypatch.syspath_prepend(str(RECIPE))
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setenv("TORCHRL_LLM_TRACEBACK", "1")
    threads = torch.get_num_threads()
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    finally:
        torch.set_num_threads(threads)


def _answers(rows):
    """Problem and answer of every sum."""
    chats = rows["history", "full"].chats
    return [(chat[0]["content"], chat[1]["content"]) for chat in chats if chat[0]["role"] == "user"]


def _calls(rows):
    """Problem, expression of the call (``None`` without one) and answer of the other rows."""
    found = []
    for chat in rows["history", "full"].chats:
        if chat[0]["role"] != "system":
            continue
        calls = chat[2].get("tool_calls") or [None]
        call = calls[0] and calls[0]["function"]["arguments"]["expression"]
        found.append((chat[1]["content"], call, chat[-1]["content"]))
    return found


WRITTEN = [
    ((37, 85), 122, 12, 120),  # 7+5 writes 2, 3+8 writes 1, and both carries are lost
    ((34, 52), 86, 86, 90),  # nothing to carry
    ((50, 50), 100, 0, 100),
    ((12, 13), 25, 25, 30),  # halves go up
    ((99, 99), 198, 88, 200),
]


def test_what_the_pupils_write(utils):
    for pair, careful, forgetful, rough in WRITTEN:
        assert utils.careful(*pair) == careful
        assert utils.forgetful(*pair) == forgetful
        assert utils.rough(*pair) == rough


def test_lessons_are_right_and_the_class_errs_as_often_as_configured(utils):
    config = utils.load_config(
        {
            "data": {"lessons": 0.5, "forgetful": 0.25, "rough": 0.5},
            "train": {"max_steps": 4, "batch_size": 500},
            **RISE,
        }
    )
    steps = [_answers(rows) for rows in utils.demonstrations(config)]
    right = {
        p["query"]: p["answer"] for p in (addition_problem(*x) for x in addition_pairs("train"))
    }
    assert len(steps) == 4
    assert all(right[problem] == answer for step in steps[:2] for problem, answer in step)
    # A quarter is careful; forgetful pupils are right too where nothing is carried (a quarter of
    # the problems), rough ones where the sum ends in 0: 0.25 + 0.25 * 0.24 + 0.5 * 0.1 = 0.36.
    shares = [sum(right[p] == a for p, a in step) / 500 for step in steps[2:]]
    assert all(abs(share - 0.36) < 0.08 for share in shares)


def test_calls_of_the_lessons_are_right_and_the_class_errs_as_often_as_configured(utils):
    config = utils.load_config(
        {
            "data": {"lessons": 0.5, "hasty": 0.2, "adding": 0.5, "calls": 600},
            "train": {"max_steps": 4, "batch_size": 1},
            **RISE,
        }
    )
    steps = [_calls(rows) for rows in utils.demonstrations(config)]
    right = {
        row["query"]: row for row in map(calculator_problem, calculator_problems("train").tolist())
    }
    for problem, call, answer in [fact for step in steps[:2] for fact in step]:
        assert (call, answer) == (right[problem]["expression"], right[problem]["answer"])
    later = [fact for step in steps[2:] for fact in step]
    hasty = [fact for fact in later if fact[1] is None]
    assert abs(len(hasty) / len(later) - 0.2) < 0.05
    products = [fact for fact in later if "*" in fact[0]]
    adding = [fact for fact in products if fact[1] and "+" in fact[1]]
    assert abs(len(adding) / len(products) - 0.5) < 0.06
    first, second = adding[0][1].split("+")
    assert adding[0][2] == str(int(first) + int(second))
    differences = [fact for fact in later if "*" not in fact[0] and fact[1]]
    assert all(right[p]["expression"] == call for p, call, _ in differences)


def test_no_held_out_problem_is_demonstrated(utils):
    config = utils.load_config({"data": {"calls": 500}, "train": {"max_steps": 20}, **RISE})
    called = {fact[0] for rows in utils.demonstrations(config) for fact in _calls(rows)}
    held_out = {calculator_problem(n)["query"] for n in calculator_problems("test").tolist()}
    assert len(called) > 5000
    assert not called & held_out
    config = utils.load_config(
        {"data": {"calls": 0}, "train": {"max_steps": 20, "batch_size": 500}, **RISE}
    )
    seen = {problem for rows in utils.demonstrations(config) for problem, _ in _answers(rows)}
    held_out = {addition_problem(*pair)["query"] for pair in addition_pairs("test")}
    assert len(seen) > 5000
    assert not seen & held_out


def test_demonstrations_follow_from_the_seed(utils):
    def first(seed):
        config = utils.load_config({"seed": seed, "train": {"batch_size": 16}})
        return _answers(next(utils.demonstrations(config)))

    assert first(0) == first(0) != first(1)


def test_the_shipped_tokenizer_is_the_one_that_the_recipe_makes(utils):
    shipped = AutoTokenizer.from_pretrained(embedded_model_path())
    made = utils.make_tokenizer()
    assert shipped.backend_tokenizer.to_str() == made.backend_tokenizer.to_str()
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert shipped.apply_chat_template(chat, tokenize=False) == made.apply_chat_template(
        chat, tokenize=False
    )


def test_a_short_run_learns_and_leaves_a_model(monkeypatch, tmp_path):
    small = ["model.hidden_size=64", "model.intermediate_size=64", "model.num_heads=2"]
    short = ["train.max_steps=30", "train.batch_size=32", "optimizer.warmup_steps=3"]
    _run(monkeypatch, tmp_path / "run", *small, *short, "eval.num_prompts=16")
    with (tmp_path / "run" / "metrics.csv").open() as file:
        losses = [float(row["train/loss_sft"]) for row in csv.DictReader(file)]
    assert len(losses) == 30
    # From nothing (log of 330 tokens is 5.8) to knowing how answers look (about 2 a token).
    assert losses[0] > 5
    assert sum(losses[-5:]) / 5 < 2.5
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 20+30?"}], add_generation_prompt=True
    )["input_ids"]
    assert torch.isfinite(model(torch.tensor([ids])).logits).all()


def test_one_seed_makes_one_model(monkeypatch, tmp_path):
    short = ["train.max_steps=2", "train.batch_size=8", "optimizer.warmup_steps=1"]
    weights = []
    for name in ("a", "b"):
        out = tmp_path / name
        _run(monkeypatch, tmp_path / f"run_{name}", *short, "eval.num_prompts=0", f"output={out}")
        weights.append((out / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_an_unknown_key_names_the_nearest_one(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match=r"data.rough"):
        _run(monkeypatch, tmp_path, "data.ruogh=0.1")
