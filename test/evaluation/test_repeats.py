"""pass@k and majority@k of several samples a prompt."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean

import pytest

from torchrl_llm.evaluation import answer_vote, figures_at_k, majority_at_k, sample_sizes


def sample(answer, success, valid=True):
    return {"text": f"#### {answer}", "success": success, "valid": valid}


@pytest.mark.parametrize(
    ("samples", "expected"), [(1, []), (2, [2]), (3, [2, 3]), (8, [2, 4, 8]), (12, [2, 4, 8, 12])]
)
def test_figures_are_those_of_powers_of_two_and_of_all(samples, expected):
    assert sample_sizes(samples) == expected


def test_figures_by_hand():
    # Of four samples of the first prompt one is right, of the second three.
    groups = [
        [sample(7, True), sample(8, False), sample(8, False), sample(9, False)],
        [sample(7, True), sample(7, True), sample(5, False), sample(7, True)],
    ]
    found = figures_at_k(groups)
    # pass@2: 1 - C(3, 2) / C(4, 2) = 1/2, and 1 - 0; majority@2: of pairs (7 8), (8 9) half of the
    # first are right (a tie), and (7 7), (5 7): 1 and 1/2.
    assert found == {
        "pass@2": [0.5, 1.0],
        "majority@2": [0.25, 0.75],
        "pass@4": [1.0, 1.0],
        "majority@4": [0.0, 1.0],
    }


def test_pass_at_k_is_the_share_of_all_subsets_with_a_right_sample():
    right = [True, False, False, True, False, False, False, False]
    group = [sample(n, each) for n, each in enumerate(right)]
    for k in (2, 4, 8):
        subsets = fmean(any(each) for each in combinations(right, k))
        assert figures_at_k([group])[f"pass@{k}"] == [pytest.approx(subsets)]


def test_a_sample_without_a_valid_reward_is_not_right():
    found = figures_at_k([[sample(7, True, valid=False), sample(7, False)]])
    assert found == {"pass@2": [0.0], "majority@2": [0.0]}


def test_the_majority_of_one_is_the_mean_and_who_says_nothing_has_no_vote():
    votes, right = ["1", "2", None, "1"], [True, False, False, True]
    assert majority_at_k(votes, right, 1) == 0.5
    assert majority_at_k(votes, right, 4) == 1.0
    assert majority_at_k([None, None], [False, False], 2) == 0.0
    # 3 of 5: one run of three, and the two that are left are not looked at.
    assert majority_at_k(["2", "2", "1", "1", "1"], [False, False, True, True, True], 3) == 0.0


@pytest.mark.parametrize(
    ("text", "vote"),
    [
        ("<answer>1,200</answer>", "1200.0"),
        ("It is $1200.00", "1200.0"),
        ("<think>4</think> The answer is 5.", "5.0"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("<answer> The  Sea </answer>", "the sea"),
        ("<answer>", None),
        ("", None),
    ],
)
def test_votes(text, vote):
    assert answer_vote({"text": text}) == vote
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
    assert answer_vote({"messages": chat}) == vote
