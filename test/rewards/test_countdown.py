"""The expressions of Countdown: the rules, exactly, and nothing that runs what a model wrote."""

from __future__ import annotations

import re
import time
from fractions import Fraction
from itertools import product

import pytest
from cases import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_llm.errors import RewardError
from torchrl_llm.rewards.number_rewards import CountdownRewardParser, evaluate_expression

CASES = cases(__file__)

PROBLEM = "target=24, numbers=2,3,4,9"


def test_expressions_have_their_exact_value():
    for expression, value in CASES["values"]:
        found = evaluate_expression(expression, [2, 3, 4, 9])
        assert found == (None if value is None else Fraction(value))


def test_what_breaks_the_rules_has_no_value():
    for expression in CASES["what_breaks_the_rules_has_no_value"]:
        assert evaluate_expression(expression, [2, 3, 4, 9]) is None


def test_a_number_that_is_given_twice_may_be_used_twice():
    assert evaluate_expression("7 + 7", [7, 7, 1]) == 14
    assert evaluate_expression("7 + 7 + 7", [7, 7, 1]) is None
    assert evaluate_expression("007", [7]) == 7


def test_defect_11_hostile_expressions_are_refused_at_once():
    for expression in (
        ["99**98**97", "99**98**97**96", "9" * 900, "(" * 500 + "9" + ")" * 499, "-" * 900 + "9"]
        + ["\\frac{" * 160 + "9" + "}{9}" * 160, "\\boxed{" * 140 + "}" * 10]
        + ["(" * 10_000_000, "9*" * 5_000_000, "1" * 10_000_000, "9 = " + "1" * 10_000_000]
    ):
        start = time.process_time()
        assert not CountdownRewardParser.validate_expression(expression, 1, [97, 98, 99])
        assert (
            time.process_time() - start < 2
        )  # of the trainer's own CPU; a power would take minutes


def test_parentheses_may_be_deep():
    assert evaluate_expression("(" * 400 + "9" + ")" * 400, [9]) == 9


def expressions(numbers):
    """All expressions over all the numbers in this order, with every sign, to the left."""
    for signs in product("+-*/", repeat=len(numbers) - 1):
        text = str(numbers[0])
        for sign, number in zip(signs, numbers[1:], strict=True):
            text = f"({text} {sign} {number})"
        yield text


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 100), min_size=2, max_size=4))
def test_values_agree_with_python_on_fractions(numbers):
    for text in expressions(numbers):
        assert evaluate_expression(text, numbers) == on_fractions(text)


def on_fractions(text):
    """Python's own value, with whole numbers as fractions; leading zeros are an error in Python."""
    words = re.findall(r"\d+|.", text.strip())
    return eval("".join(f"Fraction({int(w)})" if w.isdigit() else w for w in words))


@settings(max_examples=300, deadline=None)
@given(st.text("0123456789+-*/() .=", max_size=40))
def test_no_text_raises_and_what_has_a_value_has_pythons(text):
    value = evaluate_expression(text, [int(word) for word in re.findall(r"\d+", text)])
    if value is not None and "=" not in text:
        assert value == on_fractions(text)


def test_the_reward_is_one_for_right_a_tenth_for_a_block_zero_for_none():
    parser = CountdownRewardParser()
    right = parser.score("<think>t</think><answer>2 * 3 * 4</answer>", PROBLEM)
    assert right == (1.0, True, True, True)
    assert parser.score("<answer>4 * 6</answer>", PROBLEM) == (0.1, False, True, False)
    assert parser.score("<answer></answer>", PROBLEM) == (0.0, False, False, False)
    assert parser.score("2 * 3 * 4", PROBLEM) == (0.0, False, False, False)
    assert parser.score("<think><answer>2*3*4</answer></think>", PROBLEM).reward == 0.0


@pytest.mark.parametrize("answer", ["24", "", "target=x, numbers=1", "target=24, numbers=", None])
def test_a_row_whose_own_answer_is_no_problem_is_an_error(answer):
    with pytest.raises(RewardError, match="must look like"):
        CountdownRewardParser().score("<answer>1</answer>", answer)


def test_the_statics_agree_with_the_score():
    assert CountdownRewardParser.normalize_answer(PROBLEM) == (24, (2, 3, 4, 9))
    assert CountdownRewardParser.answers_match("4 * (9 - 3)", PROBLEM)
    assert not CountdownRewardParser.answers_match("4 * (9 - 3)", "24")
    assert CountdownRewardParser.extract_tags("<answer>1</answer>") == ("", "1")
