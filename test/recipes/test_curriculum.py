"""Prompts in an order that follows results, in the GRPO recipe as a user runs it."""

from __future__ import annotations

import json

import pytest
import torch
from recipes.grpo_helper import column, run_script, weights

from torchrl_llm.data.row_order import BandOrder, QueueOrder, WeightedOrder
from torchrl_llm.recipes import load_config


@pytest.fixture
def sums(tmp_path):
    """A file of 20 sums, of which the last 8 are held out."""
    path = tmp_path / "sums.jsonl"
    pairs = [(20 + n, 41 + n) for n in range(20)]
    lines = [{"query": f"What is {a}+{b}?", "answer": str(a + b)} for a, b in pairs]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_queue_ends_the_run_which_is_evaluated_and_saved(tmp_path, sums, monkeypatch):
    settings = [f"env.data_files={sums}", "curriculum.order=queue", "curriculum.visits=1"]
    settings += ["train.max_steps=9"]
    table = run_script(monkeypatch, tmp_path / "a", *settings)
    assert [row["train/step"] for row in table] == ["0", "1", "2", "3"]  # 12 prompts, 4 a step
    assert len(column(table, "eval/accuracy")) == 2
    assert column(table, "train/curriculum_seen") == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert column(table, "train/curriculum_active") == pytest.approx([2 / 3, 1 / 3, 0.0])
    said = (tmp_path / "a" / "run.log").read_text()
    assert "ended with step 3: the queue is empty: of 12 prompts" in said
    assert "to go on" not in said
    assert weights(tmp_path / "a", 3)
    again = run_script(monkeypatch, tmp_path / "a", *settings, "checkpoint.resume=auto")
    assert again == table


@pytest.mark.parametrize("order", ["band", "spo"])
def test_a_run_that_goes_on_in_the_middle_of_a_pass_draws_what_it_would_have(
    tmp_path, sums, monkeypatch, order
):
    settings = [f"env.data_files={sums}", f"curriculum.order={order}", "eval.num_prompts=8"]
    settings += ["train.prompts_per_batch=5", "env.repeats=2", "inference_model.max_tokens=6"]
    settings += ["advantage=spo"] if order == "spo" else ["curriculum.revisit=1"]
    whole = run_script(monkeypatch, tmp_path / "whole", *settings, "train.max_steps=6")
    run_script(monkeypatch, tmp_path / "cut", *settings, "train.max_steps=2")
    more = ("train.max_steps=6", "checkpoint.resume=auto")
    resumed = run_script(monkeypatch, tmp_path / "cut", *settings, *more)
    assert column(whole, "train/curriculum_seen")[-1] > 0.8
    assert min(column(whole, "train/curriculum_active")) < 1
    # What was evaluated where the first part ended is in its table alone.
    trained = [{n: v for n, v in row.items() if n.startswith("train/")} for row in whole]
    assert [{n: v for n, v in row.items() if n.startswith("train/")} for row in resumed] == trained
    first, second = weights(tmp_path / "whole", 6), weights(tmp_path / "cut", 6)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("values", "kind"), [
    ({}, type(None)),
    ({"order": "file"}, type(None)),
    ({"order": "band", "band": [0.2, 0.8], "revisit": 2}, BandOrder),
    ({"order": "queue", "visits": 3, "solved": 0.5}, QueueOrder),
    ({"order": "spo", "floor": 0.1}, WeightedOrder),
])  # fmt: skip
def test_an_order_is_made_of_its_keys(values, kind):
    made = load_config({"curriculum": values}).curriculum
    assert type(made.build()) is kind
    argument = "order" if made.follows_results else "shuffle"
    assert list(made.arguments) == ([argument] if values else [])
