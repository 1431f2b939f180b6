"""Rejection sampling as the docs have it: sample, export, fine-tune; three commands."""

import json
from pathlib import Path

import pytest
from recipes.script import run_alone

from torchrl_llm.cli import main
from torchrl_llm.data.row_files import load_rows
from torchrl_llm.errors import ConfigError

RECIPES = Path(__file__).parents[2] / "sota-implementations"
EVALUATE = RECIPES / "evaluate" / "evaluate.py"
TASK = ["tasks=[arithmetic]", "inference_model.max_tokens=6"]
SAMPLED = ["inference_model.temperature=1", "eval.repeats=8", "eval.split=train"]


@pytest.fixture
def evaluate(monkeypatch):
    def run(folder, *overrides):
        run_alone(monkeypatch, EVALUATE, folder, *TASK, *overrides)
        return json.loads((folder / "metrics.json").read_text())["arithmetic"]["accuracy"]

    return run


def questions(path):
    return {row["query"] for row in load_rows(path)}


def test_the_prompts_to_learn_from_are_not_those_that_are_held_out(evaluate, tmp_path):
    evaluate(tmp_path / "train", *SAMPLED, "eval.num_prompts=8")
    evaluate(tmp_path / "test", "eval.num_prompts=512")
    files = [tmp_path / name / "answers_arithmetic.jsonl" for name in ("train", "test")]
    assert not set.intersection(*map(questions, files))


def test_a_split_of_rows_of_files_is_refused(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match=r"eval\.split has no effect"):
        run_alone(
            monkeypatch, EVALUATE, tmp_path, "tasks=[gsm8k]", "data_files.gsm8k=x", "eval.split=x"
        )


@pytest.mark.full
def test_three_commands_raise_the_held_out_accuracy(evaluate, monkeypatch, tmp_path):
    before = evaluate(tmp_path / "before")
    evaluate(tmp_path / "sampled", *SAMPLED, "eval.num_prompts=256", "eval.batch_size=256")
    chats = tmp_path / "chats.jsonl"
    main(["export", str(tmp_path / "sampled"), "--min-reward", "1", "-o", str(chats)])
    sft = ["logging.progress=false", "train.max_epochs=2"]
    run_alone(monkeypatch, RECIPES / "sft" / "sft.py", tmp_path / "sft", f"data={chats}", *sft)
    after = evaluate(tmp_path / "after", f"model.name={tmp_path / 'sft'}")
    assert after >= before + 0.15
