"""Answers as plain data, and pass@k."""

import itertools
import json

import pytest
from evaluation.test_evaluate import Exact, number_in

from torchrl_llm.envs import TaskEnv
from torchrl_llm.evaluation import answer_record, evaluate, pass_at_k
from torchrl_llm.modules import FakeWrapper

ROWS = [
    {"query": f"number {n}", "answer": str(n), "task_id": f"T/{n}", "notes": [n]} for n in range(5)
]


class Numbers(TaskEnv):
    def make_reward(self):
        return Exact()


@pytest.fixture
def records(tokenizer):
    def make(answer, num_prompts=5, **kwargs):
        found = []
        env = Numbers(dataset=ROWS, shuffle=False, num_envs=2, **kwargs)
        policy = FakeWrapper(answer, tokenizer=tokenizer)
        evaluate(
            env,
            policy,
            num_prompts=num_prompts,
            max_turns=3,
            on_answer=lambda row, outcome: found.append(answer_record(row, outcome)),
        )
        return found

    return make


def test_there_is_one_record_a_prompt_in_their_order(records):
    found = records(lambda prompt: str(number_in(prompt)))
    assert [record["query"] for record in found] == [row["query"] for row in ROWS]
    assert [record["task_id"] for record in found] == [row["task_id"] for row in ROWS]
    assert all(record["success"] and record["valid"] and not record["cut"] for record in found)


def test_a_record_is_json_without_what_only_the_environment_needs(records):
    first = json.loads(json.dumps(records(lambda prompt: str(number_in(prompt)))[0]))
    assert first["messages"] == [
        {"role": "user", "content": "number 0"},
        {"role": "assistant", "content": "0"},
    ]
    assert first["reward"] == 1.0
    assert first["answer"] == "0"
    expected = {"query", "answer", "task_id", "messages", "reward", "valid", "success"}
    assert set(first) == expected | {"length", "cut"}


def test_an_invalid_reward_is_no_number_and_says_why(records):
    found = records(lambda prompt: "crash", num_prompts=1)[0]
    assert (found["reward"], found["valid"], found["success"]) == (None, False, False)
    assert found["error"] == "ValueError: no number"


def test_a_conversation_of_several_turns_is_whole_and_ends_with_its_own_last_turn(records):
    # "number 1" is answered at once, "number 0" only in its second turn.
    turns = itertools.count()

    def answer(prompt):
        number = number_in(prompt)
        return "wait" if number == 0 and next(turns) == 0 else str(number)

    first, second = records(answer, num_prompts=2, max_steps=2)
    assert [m["content"] for m in first["messages"]] == ["number 0", "wait", "0"]
    assert [m["content"] for m in second["messages"]] == ["number 1", "1"]


def test_pass_at_k_equals_a_count_of_all_draws():
    # 5 samples of which 2 are right: of the 10 pairs, 3 hold none that is right.
    assert pass_at_k(2, 5, 2) == pytest.approx(0.7)
    for right in range(5):
        for k in range(1, 5):
            samples = [True] * right + [False] * (4 - right)
            draws = [any(draw) for draw in itertools.combinations(samples, k)]
            assert pass_at_k(right, 4, k) == pytest.approx(sum(draws) / len(draws))


@pytest.mark.parametrize("wrong", [(2, 1, 1), (-1, 2, 1), (1, 2, 3), (1, 2, 0)])
def test_impossible_counts_are_refused(wrong):
    with pytest.raises(ValueError, match="expected 0 <= num_right"):
        pass_at_k(*wrong)
