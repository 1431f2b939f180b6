"""Letter counting: ten tiers, one problem a row, the same everywhere."""

from __future__ import annotations

import json
import pickle
import random

import pytest
import torch
from envs.fake_policy import AnsweringPolicy
from torchrl.envs.utils import check_env_specs

from torchrl_llm.envs.datasets.word_tasks import TIERS, LetterCountingEnv, letter_problem, word_list
from torchrl_llm.errors import ConfigError, DataError


@pytest.mark.parametrize("difficulty", range(1, 11))
def test_problems_keep_to_their_tier(difficulty):
    (shortest, longest), several, (fewest, most) = TIERS[difficulty - 1]
    numbers = []
    for seed in range(40):
        problem = letter_problem(random.Random(seed), difficulty)
        assert shortest <= len(problem.text) <= longest
        assert {letter: problem.text.count(letter) for letter in problem.counts} == problem.counts
        assert problem.question.startswith(f"Count {', '.join(problem.counts)} in {problem.text}.")
        numbers.append(len(problem.counts))
        assert all(n == 1 or max(2, fewest) <= n <= most for n in numbers)
    if several == 1.0:
        assert min(numbers) > 1
    else:
        assert min(numbers) == 1


def test_the_tiers_do_not_move():
    # lengths, and letters to count, of which there are at most 26
    assert [tier.lengths for tier in TIERS] == [
        (3, 8), (5, 12), (8, 18), (10, 25), (15, 35),
        (40, 80), (80, 150), (150, 250), (250, 400), (400, 500),
    ]  # fmt: skip
    assert [tier.several for tier in TIERS] == [0, 0.5, 0.6, 0.8, 0.9, 1, 1, 1, 1, 1]
    assert [tier.letters[1] for tier in TIERS] == [1, 2, 3, 5, 8, 12, 20, 26, 26, 26]
    assert letter_problem(random.Random(1), 2).question == (
        "Count e in river. Say <answer>n</answer>."
    )


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("difficulty", range(1, 6))
def test_a_tier_of_words_has_many_texts(difficulty, split):
    # only one word of the list is as long as the fifth tier wants it
    words = word_list(split)
    problems = [letter_problem(random.Random(seed), difficulty, words) for seed in range(400)]
    texts = {problem.text for problem in problems}
    assert len(texts) >= 20
    if difficulty == 5:
        assert len(texts) > 390
        assert max(map(len, texts)) > 30


def test_asked_letters_are_in_the_word_or_not():
    counts = [letter_problem(random.Random(seed)).counts for seed in range(400)]
    present = sum(next(iter(count.values())) > 0 for count in counts)
    # The bias is uniform in (0.3, 0.9), so its mean is 0.6.
    assert 0.5 < present / 400 < 0.7


@pytest.mark.parametrize("difficulty", [0, 11, -1])
def test_another_difficulty_is_refused(difficulty):
    with pytest.raises(ConfigError, match=f"between 1 and 10, got {difficulty}"):
        LetterCountingEnv(difficulty=difficulty)


def test_a_setting_without_effect_and_an_unknown_split_are_refused():
    rows = [{"query": "Count r in car.", "answer": '{"r": 1}'}]
    with pytest.raises(ConfigError, match="difficulty=2 has no effect"):
        LetterCountingEnv(difficulty=2, dataset=rows)
    with pytest.raises(ConfigError, match="'train' or 'test', got 'dev'"):
        LetterCountingEnv(split="dev")
    with pytest.raises(DataError, match="lacks the column 'answer'"):
        LetterCountingEnv(dataset=[{"query": "?"}])
    assert list(LetterCountingEnv(dataset=rows).reset()["answer"]) == ['{"r": 1}']


@pytest.mark.parametrize("difficulty", [1, 4, 7])
def test_a_group_is_about_one_problem_and_the_splits_share_none(difficulty):
    env = LetterCountingEnv(difficulty=difficulty, num_envs=8, repeats=4, seed=0)
    queries = list(env.reset()["query"])
    assert len(set(queries[:4])) == len(set(queries[4:])) == 1
    assert queries[0] != queries[4]
    again = LetterCountingEnv(difficulty=difficulty, num_envs=8, repeats=4, seed=0)
    assert list(again.reset()["query"]) == queries
    train, test = (LetterCountingEnv.default_dataset(split) for split in ("train", "test"))
    assert len(train), len(test) == (100_000, 1_000)
    texts = [{row["query"].split(" in ")[1] for row in rows[:1000]} for rows in (train, test)]
    assert not texts[0] & texts[1]


def test_rows_and_environments_leave_the_global_generators_alone_and_travel():
    states = random.getstate(), torch.get_rng_state()
    rows = LetterCountingEnv.default_dataset("train")
    assert pickle.loads(pickle.dumps(rows))[7] == rows[7]
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_answers_are_scored_through_the_environment(mode, tokenizer):
    env = LetterCountingEnv(
        difficulty=6, num_envs=3, input_mode=mode, tokenizer=tokenizer, split="test"
    )
    td = env.reset()
    counts = [json.loads(answer) for answer in td["answer"]]
    letter = next(iter(counts[1]))
    counts[1][letter] += 1
    replies = iter([*(f"<answer>{json.dumps(c)}</answer>" for c in counts[:2]), "many"])
    after = env.step(AnsweringPolicy(mode, lambda prompt: next(replies), tokenizer)(td))["next"]
    share = 0.1 + 0.9 * (len(counts[1]) - 1) / len(counts[1])
    assert after["reward"].flatten().tolist() == pytest.approx([1.0, share, 0.0])
    assert after["success"].flatten().tolist() == [True, False, False]
    assert after["done"].all()


def test_the_specs_hold():
    check_env_specs(LetterCountingEnv(num_envs=2, difficulty=3))


def test_words_are_short_lower_case_and_different():
    train, test = word_list("train"), word_list("test")
    words = [*train, *test]
    assert len(words) == len(set(words)) == 630
    assert all(word.isascii() and word.isalpha() and word.islower() for word in words)
    with pytest.raises(ConfigError, match="got 'dev'"):
        word_list("dev")
