"""The GSM8K reward: which number an answer states, and what it is worth."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from cases import cases

from torchrl_llm.envs import GSM8KRewardParser
from torchrl_llm.errors import RewardError
from torchrl_llm.rewards.number_rewards import parse_number


def test_defect_10_common_ways_of_writing_a_number_are_understood():
    for text in (
        ["72 dollars", "**72**", r"\boxed{72}", "x = 72"]
        + ["72.", "$72", "72%", "= 72", "$72.00", "40 + 32 = 72", r"\(72\)", "$$72$$", "`72`"]
        + [r"\text{72}", r"$\boxed{72}$", "72 m2", "72km", "72 (72)", "#72", "072", r"\$72"]
        + [r"\boxed{\text{72 dollars}}", "The answer is 72", "+72", "144/2", r"\frac{144}{2}"]
        + ["72 cm^2", r"72\text{ ft}^{2}", r"72 \mathrm{cm}^3 of water", r"\tfrac{144}{2}"]
    ):
        assert parse_number(text) == 72
        assert GSM8KRewardParser.answers_match(text, "#### 72")
        assert not GSM8KRewardParser.answers_match(text, "#### 73")


def test_signs_separators_decimals_and_fractions_are_exact():
    for text, value in cases(__file__)["values"]:
        assert parse_number(text) == Fraction(value)


def test_an_answer_without_one_number_states_none():
    for text in [
        "",
        "seventy",
        "70 or 72",
        "70-72",
        "16-3",
        "1,2",
        "1.2.3",
        "1e1000",
        "2^10",
        "5/0",
        "x2",
        "72 =",
        "1 2",
    ] + ["9" * 5000, "1/" + "9" * 5000, "72 5/4", "7 million or 8", "x^2", r"7\,2"]:
        assert parse_number(text) is None


def test_a_hostile_answer_costs_the_trainer_nothing():
    # each box was unwrapped by a pass over all the others
    for text in ("\\boxed{" * 20_000 + "}" * 20_000, "-" * 1_000_000, " " * 1_000_000 + "5"):
        start = time.process_time()
        assert parse_number(text) is None
        assert time.process_time() - start < 1


def test_the_reward_is_one_for_right_a_tenth_for_a_block_zero_for_none():
    parser = GSM8KRewardParser()
    right = parser.score("<think>t</think><answer>72 dollars</answer>", "#### 72")
    assert right == (1.0, True, True, True)
    assert parser.score("<answer>73</answer>", "72") == (0.1, False, True, False)
    assert parser.score("<answer></answer>", "72") == (0.0, False, False, False)
    assert parser.score("72", "72") == (0.0, False, False, False)
    assert parser.score("<answer>72", "72") == (0.0, False, False, False)
    assert parser.score("", "72") == (0.0, False, False, False)


def test_the_last_block_counts_and_none_inside_the_reasoning():
    parser = GSM8KRewardParser()
    assert parser.score("<answer>1</answer>, no <answer>72</answer>", "72").reward == 1.0
    assert parser.score("<answer>72</answer>, no <answer>1</answer>", "72").reward == 0.1
    assert parser.score("<think><answer>72</answer></think> hm", "72").reward == 0.0


def test_the_rewards_can_be_chosen():
    parser = GSM8KRewardParser(format_reward=0.0, correct_reward=2.0)
    assert parser.score("<answer>72</answer>", "72").reward == 2.0
    assert parser.score("<answer>73</answer>", "72").reward == 0.0


def test_a_row_whose_own_answer_is_no_number_is_an_error():
    with pytest.raises(RewardError, match="not a number"):
        GSM8KRewardParser().score("<answer>72</answer>", "#### unknown")
