"""GSM8K as plain texts."""

from __future__ import annotations

import json

import pytest

from torchrl_llm.compat.llm_env import LLMEnv
from torchrl_llm.data.column import Column
from torchrl_llm.envs import GSM8KPrepareQuestion, make_gsm8k_env
from torchrl_llm.errors import ConfigError, DataError

ROWS = [{"question": f"What is {n} + 1?", "answer": f"One more.\n#### {n + 1}"} for n in range(4)]


def test_the_prompt_ends_inside_the_reasoning_and_the_answer_is_scored():
    env = make_gsm8k_env(ROWS, num_envs=4, seed=0)
    td = env.reset()
    assert all(text.endswith("?\nAssistant: <think>") for text in td["text"])
    pairs = zip(td["query"], td["text"], strict=True)
    assert all(f"User: {question}\n" in text for question, text in pairs)
    right, wrong = td["answer"][0], "99"
    td["text_response"] = Column.of(
        [
            f"one more</think> <answer>{right}</answer>",
            f"</think><answer>{wrong}</answer>",
            "no idea",
            f"<answer>{td['answer'][3]}</answer> I think",
        ]
    )
    td = env.step(td)["next"]
    assert td["reward"].flatten()[:3].tolist() == [1.0, pytest.approx(0.1), 0.0]
    assert td["success"].flatten()[:3].tolist() == [True, False, False]
    assert td["done"].all()


def test_the_end_of_sequence_is_taken_off(tokenizer):
    env = make_gsm8k_env(ROWS[:1], tokenizer=tokenizer)
    td = env.reset()
    td["text_response"] = Column.of([f"</think><answer>1</answer>{tokenizer.eos_token}"])
    assert env.step(td)["next", "reward"].item() == 1.0


def test_repeats_of_a_question_start_together_and_a_seed_gives_an_order():
    env = make_gsm8k_env(ROWS, num_envs=2, repeats=3, group_repeats=True, seed=1, batch_size_dl=2)
    queries = list(env.reset()["query"])
    assert len(queries) == 6
    assert len(set(queries[:3])) == len(set(queries[3:])) == 1
    again = make_gsm8k_env(ROWS, num_envs=2, repeats=3, group_repeats=True, seed=1)
    assert list(again.reset()["query"]) == queries


def test_questions_come_from_files_too(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert list(make_gsm8k_env(data_files=path, num_envs=4).reset()["query"])
    with pytest.raises(DataError, match="lacks the column 'answer'"):
        make_gsm8k_env([{"question": "?"}])


def test_prompts_can_go_beside_the_questions():
    env = LLMEnv.from_dataloader([{"text": "What?"}])
    env = env.insert_transform(0, GSM8KPrepareQuestion(out_keys=["prompt"]))
    td = env.reset()
    assert td["text"][0] == "What?"
    with pytest.raises(ConfigError, match="differ in number"):
        GSM8KPrepareQuestion(["a", "b"], ["c"])


def test_a_row_that_starts_again_gets_a_new_prompt_and_the_others_keep_theirs():
    env = make_gsm8k_env(ROWS, num_envs=2, seed=0)

    def policy(td):
        return td.set("text_response", Column.of(["</think>", "</think>"]))

    rollout = env.rollout(3, policy, break_when_any_done=False)
    for step in range(3):
        assert all(text.count("<think>") == 2 for text in rollout[:, step]["text"])
