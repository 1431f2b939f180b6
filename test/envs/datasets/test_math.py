"""MATHEnv: rows of MATH and of MATH-500, in three input modes."""

from __future__ import annotations

import json

import pytest
from envs.fake_policy import AnsweringPolicy
from torchrl.envs.utils import check_env_specs

from torchrl_llm.envs.datasets.hub_tasks import MATHEnv
from torchrl_llm.errors import DataError

pytest.importorskip("math_verify")

# in the form of the two data sets, with problems of our own
MATH = {
    "problem": "What is half of a third?",
    "solution": r"Half of $\frac{1}{3}$ is $\boxed{\frac{1}{6}}$.",
    "level": "Level 1",
    "type": "Prealgebra",
}
MATH_500 = {
    "problem": "Which $x$ has $x + 2 = 9$?",
    "solution": r"Subtract $2$: $x = \boxed{7}$.",
    "answer": "7",
    "subject": "Algebra",
    "level": 2,
    "unique_id": "test/algebra/1.json",
}


def test_rows_of_both_forms_become_query_answer_and_the_rest():
    td = MATHEnv(dataset=[MATH, MATH_500], shuffle=False, num_envs=2).reset()
    assert list(td["query"]) == [MATH["problem"], MATH_500["problem"]]
    assert list(td["answer"]) == [r"\frac{1}{6}", "7"]
    assert list(td["solution"]) == [MATH["solution"], MATH_500["solution"]]
    assert list(td["level"]) == ["Level 1", "2"]
    assert list(td["subject"]) == ["Prealgebra", "Algebra"]


def test_files_are_read_and_bad_rows_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(MATH) + "\n" + json.dumps({"problem": "?", "answer": 3}) + "\n")
    td = MATHEnv(data_files=path, shuffle=False, num_envs=2).reset()
    assert list(td["answer"]) == [r"\frac{1}{6}", "3"]
    path.write_text('{"question": "?"}\n')
    with pytest.raises(DataError, match="lacks the column 'problem'"):
        MATHEnv(data_files=path)
    with pytest.raises(DataError, match="needs an answer"):
        MATHEnv(dataset=[{"problem": "?", "solution": "It is 5."}])
    with pytest.raises(DataError, match="must be strings"):
        MATHEnv(dataset=[{"problem": 5, "answer": "5"}])


def test_without_files_the_hub_is_asked(monkeypatch):
    import sys

    asked = []

    class Hub:
        @staticmethod
        def load_dataset(source, name):
            asked.append((source, name))
            return {"train": [MATH], "test": [MATH_500]}

    monkeypatch.setitem(sys.modules, "datasets", Hub)
    assert MATHEnv(split="test").reset()["answer"][0] == "7"
    assert asked == [("DigitalLearningGmbH/MATH-lighteval", "default")]


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_answers_are_scored_in_every_mode(mode, tokenizer):
    texts = iter(["<think>1/3/2</think><answer>1/6</answer>", "<answer>8</answer>", "7", "1/6"])
    env = MATHEnv(
        dataset=[MATH, MATH_500] * 2,
        shuffle=False,
        num_envs=4,
        input_mode=mode,
        tokenizer=tokenizer,
    )
    td = env.step(AnsweringPolicy(mode, lambda prompt: next(texts), tokenizer)(env.reset()))["next"]
    assert td["reward"].flatten().tolist() == pytest.approx([1.0, 0.1, 0.0, 0.0])
    assert td["success"].flatten().tolist() == [True, False, False, False]
    assert td["done"].all()


def test_the_specs_hold():
    check_env_specs(MATHEnv(dataset=[MATH, MATH_500], num_envs=2))
