"""Rewards for the form and the length of a response."""

from __future__ import annotations

import time

import pytest
from cases import cases

from torchrl_llm.errors import ConfigError, RewardError
from torchrl_llm.rewards import FormatReward, LengthReward, Sample

CASES = cases(__file__)


@pytest.mark.parametrize(
    "text",
    [
        "<think>a</think><answer>b</answer>",
        " <think>a</think>\n\n<answer>b</answer>\n",
        "<think>a < b > c</think><answer>1 <2</answer>",
    ],
)
def test_a_response_of_the_blocks_alone_is_worth_one(text):
    assert FormatReward().score(Sample(text)) == 1.0


def test_another_form_is_worth_its_part_and_no_more():
    for text, there in CASES["another_form_is_worth_its_part_and_no_more"]:
        assert FormatReward().score(Sample(text)) == 0.0
        assert FormatReward(partial=0.5).score(Sample(text)) == 0.25 * there


def test_a_block_that_the_prompt_opened_is_begun():
    reward = FormatReward(opened_by_prompt=True)
    assert reward.score(Sample("a</think><answer>b</answer>")) == 1.0
    assert reward.score(Sample("<think>a</think><answer>b</answer>")) == 0.0


def test_blocks_can_be_chosen():
    reward = FormatReward(("plan", "code", "answer"))
    assert reward.score(Sample("<plan>a</plan><code>b</code><answer>c</answer>")) == 1.0


def test_time_is_linear():
    start = time.process_time()
    assert FormatReward().score(Sample("<think>" * 300_000)) == 0.0
    assert time.process_time() - start < 5


@pytest.mark.parametrize("blocks", [(), "think"])
def test_impossible_forms_are_refused(blocks):
    with pytest.raises(ConfigError, match="names of tags"):
        FormatReward(blocks)


@pytest.mark.parametrize(
    ("tokens", "value"),
    [
        (0, 0.0),
        (5, 0.0),
        (6, 0.2),
        (10, 1.0),
        (15, 1.0),
        (20, 1.0),
        (21, 0.8),
        (25, 0.0),
        (99, 0.0),
    ],
)
def test_lengths_fall_in_a_line_beside_the_limits(tokens, value):
    reward = LengthReward(20, shortest=10, cushion=5)
    assert reward.score(Sample("x", num_tokens=tokens)) == pytest.approx(value)


def test_without_a_cushion_the_limits_are_sharp():
    reward = LengthReward(2, shortest=1, unit="words")
    assert [reward.score(Sample(text)) for text in ("", "a", "a  b\n", "a b c")] == [0, 1, 1, 0]


def test_characters_and_words_are_counted_where_there_are_no_tokens():
    assert LengthReward(3, unit="characters").score(Sample("äöü")) == 1.0
    assert LengthReward(3, unit="characters").score(Sample("äöüß")) == 0.0
    with pytest.raises(RewardError, match="set unit='words'"):
        LengthReward(3).score(Sample("a"))


def test_limits_that_leave_no_length_are_refused():
    with pytest.raises(ConfigError, match="shortest <= longest"):
        LengthReward(1, shortest=2)
