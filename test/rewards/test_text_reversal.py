"""The reward of text reversal, and the common subsequence that it counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_llm.errors import ConfigError, RewardError
from torchrl_llm.rewards.answer_block import extract_blocks, split_response
from torchrl_llm.rewards.word_rewards import TextReversalRewardParser, common_subsequence


def naive(first, second):
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            table[i + 1][j + 1] = (
                table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
            )
    return table[-1][-1]


@given(st.text(alphabet="abcé", max_size=90), st.text(alphabet="abcé", max_size=90))
def test_the_common_subsequence_is_that_of_the_table(first, second):
    assert common_subsequence(first, second) == naive(first, second)
    assert common_subsequence(second, first) == common_subsequence(first, second)


def test_the_reward():
    for response, reward in [
        ("<answer>olleh</answer>", 1.0),
        ("<answer>\nolleh\n</answer>", 1.0),
        ("<think><answer>x</answer></think><answer>olleh</answer>", 1.0),
        ("<answer>oleh</answer>", 0.1 + 0.4 * 8 / 9),
        ("<answer>Olleh</answer>", 0.1 + 0.4 * 8 / 10),
        ("<answer>o l l e h</answer>", 0.1 + 0.4 * 10 / 14),
        ("<answer>xyz</answer>", 0.1),
        ("<answer></answer>", 0.1),
        ("<answer>" + "olleh" * 3 + "</answer>", 0.1),  # more than twice as long
        ("<answer>olleh</answer><answer>olleh</answer>", 0.0),
        ("olleh", 0.0),
        ("<answer>olleh", 0.0),
        ("", 0.0),
    ]:
        score = TextReversalRewardParser().score(response, "olleh")
        assert score.reward == pytest.approx(reward)
        assert score.success == (reward == 1.0)


def test_an_endless_answer_costs_no_time():
    response = "<answer>" + "o" * 1_000_000 + "</answer>"
    assert TextReversalRewardParser().score(response, "olleh").reward == pytest.approx(0.1)


def test_the_rewards_can_be_chosen_and_the_right_answer_stays_the_best():
    parser = TextReversalRewardParser(format_reward=0.0, partial_reward=0.9)
    assert parser.score("<answer>oleh</answer>", "olleh").reward == pytest.approx(0.8)
    for wrong in ({"partial_reward": 0.9}, {"format_reward": -0.1}, {"partial_reward": -0.1}):
        with pytest.raises(ConfigError, match="below 1 together"):
            TextReversalRewardParser(**wrong)


@pytest.mark.parametrize("answer", [None, "", "  ", 3])
def test_a_row_without_a_text_of_its_own_is_an_error(answer):
    with pytest.raises(RewardError, match="must be a text"):
        TextReversalRewardParser().score("<answer>a</answer>", answer)


def test_blocks_of_a_response():
    assert extract_blocks("a <x>1</x> <x> 2 </x></x>", "x") == ["1", "2"]
    assert extract_blocks("<x>1", "x") == extract_blocks("1</x>", "x") == []
    assert split_response("<think>a</think>b<think>c</think> d ") == (["a", "c"], [], "d")
    assert split_response("a</think><answer>1</answer><answer>2</answer>")[:2] == (
        ["a"],
        ["1", "2"],
    )
    assert split_response("<think>a <answer>1</answer>") == (
        [],
        ["1"],
        "<think>a <answer>1</answer>",
    )
    for tag in ("<answer>", "</answer>", "<think>", "</think>"):
        split_response(tag * 100_000)
