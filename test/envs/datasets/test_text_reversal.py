"""Text reversal: rows by index, scored by what is right of them."""

from __future__ import annotations

import pickle

import pytest
from torchrl.envs.utils import check_env_specs

from torchrl_llm.envs.datasets.word_tasks import TextReversalEnv, reversal_problem, word_list
from torchrl_llm.errors import ConfigError


def text_of(row):
    return row["query"].split(": ", 1)[1].split("\n")[0]


def test_the_answer_is_the_text_backwards():
    for index in range(50):
        row = reversal_problem(index, max_words=4)
        words = text_of(row).split(" ")
        assert 1 <= len(words) <= 4
        assert set(words) <= set(word_list("train"))
        assert row["answer"] == "".join(reversed(text_of(row)))
    assert {len(text_of(reversal_problem(i)).split()) for i in range(50)} == {1, 2, 3}


def test_rows_are_the_same_everywhere_and_the_splits_share_no_word():
    rows = TextReversalEnv.default_dataset("train")
    assert pickle.loads(pickle.dumps(rows))[3] == rows[3] == reversal_problem(3)
    assert len(rows) == 100_000
    test = TextReversalEnv.default_dataset("test")
    assert len(test) == 1_000
    assert {w for row in test[:200] for w in text_of(row).split()} <= set(word_list("test"))


def test_a_group_is_about_one_text(answer):
    env = TextReversalEnv(num_envs=4, repeats=2, seed=0, max_words=2)
    td = env.reset()
    first, same, other, _ = td["answer"]
    assert first == same != other
    td = env.step(answer(td, f"<answer>{first}</answer>", "?", f"<answer>{other}</answer>", ""))
    assert td["next", "reward"].flatten().tolist() == [1, 0, 1, 0]
    assert td["next", "success"].flatten().tolist() == [True, False, True, False]


def test_settings_that_cannot_be_met_are_refused():
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        TextReversalEnv(max_words=0)
    with pytest.raises(ConfigError, match="max_words=2 has no effect"):
        TextReversalEnv(max_words=2, dataset=[{"query": "a", "answer": "a"}])
    with pytest.raises(ConfigError, match="got 'dev'"):
        TextReversalEnv(split="dev")


def test_the_specs_hold():
    check_env_specs(TextReversalEnv(num_envs=2))
