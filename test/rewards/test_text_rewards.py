"""Rewards that compare texts: numbers among them, and answers that are no text."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import pytest
from cases import cases

from torchrl_llm.errors import RewardError
from torchrl_llm.rewards import ContainsReward, ExactReward

CASES = cases(__file__)


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    CASES["a_number_is_contained_as_a_number_of_its_own"],
)
def test_a_number_is_contained_as_a_number_of_its_own(response, answer, reward):
    assert ContainsReward().score(response, answer) == reward


@pytest.mark.parametrize(
    ("response", "answer"),
    [("46", 46), ("46", 46.0), ("46.0", 46.0), ("0.10", Decimal("0.10")), ("true", True)]
    + [("2024-05-07", dt.date(2024, 5, 7)), (str(2**70), 2**70), ("1.5", Decimal("1.50"))]
    + [("30", Decimal("30.00")), ("2024-05-07", dt.datetime(2024, 5, 7))]
    + [("2024-05-07 00:00:00", dt.datetime(2024, 5, 7)), ("100", Decimal("1E+2"))],
)
def test_answers_that_are_no_texts_are_compared_as_they_are_written(response, answer):
    assert ExactReward().score(response, answer) == ContainsReward().score(response, answer) == 1.0


def test_an_hour_of_a_day_is_not_the_day():
    assert ExactReward().score("2024-05-07", dt.datetime(2024, 5, 7, 8)) == 0.0


@pytest.mark.parametrize("reward", [ExactReward(), ContainsReward()])
@pytest.mark.parametrize("answer", [["4", "four"], {"a": 1}, b"None"])
def test_a_row_with_several_answers_has_no_reward(reward, answer):
    assert reward.score("None", None) == 0.0
    with pytest.raises(RewardError, match="must be a text, a number or a date"):
        reward.score("None", answer)
