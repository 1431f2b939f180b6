"""The embedded task: its splits, its rows, its reward."""

from __future__ import annotations

from decimal import Decimal

import pytest
import torch
from cases import cases
from torchrl.envs.utils import check_env_specs

from torchrl_llm.envs import ArithmeticEnv, ArithmeticRewardParser
from torchrl_llm.envs.datasets.number_tasks import addition_pairs
from torchrl_llm.errors import ConfigError, RewardError

CASES = cases(__file__)


def test_no_held_out_problem_is_a_training_problem():
    train, test = addition_pairs("train"), addition_pairs("test")
    assert len(set(train)) == len(train) == 7588 >= 2000
    assert len(set(test)) == len(test) == 512
    assert not set(train) & set(test)
    assert {*train, *test} == {(a, b) for a in range(10, 100) for b in range(10, 100)}


def test_the_split_does_not_move():
    # Accuracies are comparable between versions only while these problems stay held out.
    assert addition_pairs("test")[:3] == ((97, 93), (66, 85), (39, 92))


def test_the_split_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    addition_pairs.__wrapped__("test")
    assert torch.equal(torch.get_rng_state(), state)


def test_an_unknown_split_is_refused():
    with pytest.raises(ConfigError, match="'train' or 'test', got 'validation'"):
        ArithmeticEnv(split="validation")


def test_rows_are_questions_with_their_sum():
    env = ArithmeticEnv(split="test", shuffle=False, num_envs=512)
    td = env.reset()
    pairs = addition_pairs("test")
    assert list(td["query"]) == [f"What is {a}+{b}?" for a, b in pairs]
    assert list(td["answer"]) == [str(a + b) for a, b in pairs]


def test_one_seed_gives_one_order():
    orders = [list(ArithmeticEnv(num_envs=8, seed=s).reset()["query"]) for s in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_the_last_number_of_the_response_is_compared():
    for response, reward in CASES["the_last_number_of_the_response_is_compared"]:
        assert ArithmeticRewardParser().score(response, "122").reward == reward


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("3.5", "5", 0.0),
        ("3.5", 3.5, 1.0),
        ("1,234", "234", 0.0),
        ("1,234", 1234, 1.0),
        ("10-5", -5, 0.0),
        ("10 - 5", "-5", 0.0),
        ("It is -5", "-5", 1.0),
        ("46", 46.0, 1.0),
        ("46.0", "46", 1.0),
        ("100000000000000000000", 1e20, 1.0),
        ("1e+20", 1e20, 1.0),
        ("1e-7", 1e-7, 1.0),
        ("1.2e-5", "1.2e-5", 1.0),
        ("1000", Decimal("1E+3"), 1.0),
        ("10 -5", -5, 0.0),
        ("(a) -5", -5, 1.0),
        ("3 1/2", 0.5, 0.0),
        ("3 1/2", 3.5, 1.0),
        ("It has 25 cm^2.", 25, 1.0),
        ("It has 25 cm².", 25, 1.0),
        ("2^10", 10, 0.0),
        ("10³", 10, 0.0),
        ("x^2", 2, 0.0),
        (r"\frac{-1}{2}", -0.5, 1.0),
    ],
)
def test_numbers_are_compared_and_not_their_last_digits(response, answer, reward):
    assert ArithmeticRewardParser().score(response, answer).reward == reward


def test_an_answer_that_is_no_number_is_an_error():
    with pytest.raises(RewardError, match="not a number: 'many'"):
        ArithmeticRewardParser().score("5", "many")


def test_a_response_is_scored_through_the_environment():
    env = ArithmeticEnv(split="test", shuffle=False, num_envs=2)
    td = env.reset()
    history = td["history"].prompt
    answers = [td["answer"][0], "no idea"]
    td["history"].full = type(history).of(
        chat + [{"role": "assistant", "content": answer}]
        for chat, answer in zip(history.chats, answers, strict=True)
    )
    after = env.step(td)["next"]
    assert after["reward"].flatten().tolist() == [1.0, 0.0]
    assert after["success"].flatten().tolist() == [True, False]
    assert after["done"].flatten().tolist() == [True, True]


def test_the_specs_hold():
    check_env_specs(ArithmeticEnv(num_envs=4, repeats=2))
