"""GSM8KEnv: every real problem, in three input modes."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
import torch
from envs.fake_policy import AnsweringPolicy

from torchrl_llm.data.history import History
from torchrl_llm.envs import GSM8KEnv
from torchrl_llm.errors import DataError

ROWS = [{"question": f"What is {n} + 1?", "answer": f"One more.\n#### {n + 1}"} for n in range(6)]


def gold(text):
    return text.rpartition("####")[2].strip()


def test_rows_become_query_answer_and_solution():
    td = GSM8KEnv(dataset=ROWS, shuffle=False, num_envs=2).reset()
    assert list(td["query"]) == ["What is 0 + 1?", "What is 1 + 1?"]
    assert list(td["answer"]) == ["1", "2"]
    assert list(td["solution"]) == ["One more."] * 2
    assert td["history"].prompt.role == [["system", "user"]] * 2


def test_without_files_the_hub_is_asked(monkeypatch):
    import sys

    asked = []

    class Hub:
        @staticmethod
        def load_dataset(source, name):
            asked.append((source, name))
            return {"train": ROWS, "test": ROWS[:1]}

    monkeypatch.setitem(sys.modules, "datasets", Hub)
    assert len(GSM8KEnv(split="test").primer._feed.loader.rows) == 1
    assert asked == [("openai/gsm8k", "main")]


def test_a_file_without_the_columns_or_with_wrong_values_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + '{"question": "?"}\n')
    with pytest.raises(DataError, match="line 2 lacks the column 'answer'"):
        GSM8KEnv(data_files=path)
    with pytest.raises(DataError, match=r"missing\.jsonl"):
        GSM8KEnv(data_files=[path.with_name("missing.jsonl")])
    with pytest.raises(DataError, match="must be strings"):
        GSM8KEnv(dataset=[{"question": "?", "answer": 3}])


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_defect_09_and_10_through_the_environment_in_every_mode(mode, tokenizer):
    # the system prompt itself holds an <answer> tag, and rows differ in length
    replies = iter(["<answer>x = 1</answer>", "<answer>**2 apples**</answer>", "3", "<answer>5"])
    policy = AnsweringPolicy(mode, lambda prompt: next(replies), tokenizer)
    env = GSM8KEnv(dataset=ROWS, shuffle=False, num_envs=4, input_mode=mode, tokenizer=tokenizer)
    td = env.step(policy(env.reset()))["next"]
    assert td["reward"].flatten().tolist() == [1, 1, 0, 0]
    assert td["success"].flatten().tolist() == [True, True, False, False]
    assert td["terminated"].flatten().tolist() == [True, True, False, False]
    assert td["truncated"].flatten().tolist() == [False, False, True, True]


@pytest.fixture(scope="module")
def real_rows(gsm8k_dir):
    lines = [
        line for name in ("train", "test") for line in (gsm8k_dir / f"{name}.jsonl").open("rb")
    ]
    return [json.loads(line) for line in lines]


@pytest.mark.full
def test_the_gold_value_of_every_real_problem_scores_one_and_gold_plus_one_never(
    gsm8k_dir, real_rows
):
    files = [gsm8k_dir / "train.jsonl", gsm8k_dir / "test.jsonl"]
    env = GSM8KEnv(data_files=files, shuffle=False, num_envs=len(real_rows))
    assert len(real_rows) == 8792
    td = env.reset()
    assert list(td["query"]) == [row["question"] for row in real_rows]
    texts = [gold(row["answer"]) for row in real_rows]
    wrong = [str(Fraction(text.replace(",", "")) + 1) for text in texts]
    for answers, reward in ((texts, 1.0), (wrong, 0.1)):
        turns = [[{"role": "assistant", "content": f"<answer>{t}</answer>"}] for t in answers]
        chats = td["history"].prompt.chats
        td["history"].full = History.of([a + b for a, b in zip(chats, turns, strict=True)])
        after = env.step(td.copy())["next"]
        assert after["reward_valid"].all()
        assert torch.equal(after["reward"], torch.full((8792, 1, 1), reward))
        assert after["success"].all() if reward == 1.0 else not after["success"].any()


def test_the_three_input_modes_agree_on_real_problems(real_rows, tokenizer):
    rows = real_rows[:16]
    rewards = {}
    for mode in ("history", "text", "tokens"):
        answers = iter(gold(row["answer"]) + " 0" * (i % 3 == 0) for i, row in enumerate(rows))
        policy = AnsweringPolicy(
            mode, lambda prompt, a=answers: f"<answer>{next(a)}</answer>", tokenizer
        )
        env = GSM8KEnv(
            dataset=rows, shuffle=False, num_envs=16, input_mode=mode, tokenizer=tokenizer
        )
        rewards[mode] = env.step(policy(env.reset()))["next", "reward"].flatten().tolist()
    assert rewards["history"] == rewards["text"] == rewards["tokens"]
    assert sorted({round(reward, 3) for reward in rewards["history"]}) == [0.1, 1.0]
