"""The reward of letter counting: exact counts, and nothing for what merely looks like them."""

from __future__ import annotations

import pytest

from torchrl_llm.errors import RewardError
from torchrl_llm.rewards.word_rewards import LetterCountingRewardParser, score_counts


def test_one_letter_is_right_or_wrong():
    for response, reward in [
        ("<answer>3</answer>", 1.0),
        ("r, r, r: <answer> 3 </answer>.", 1.0),
        ("<think><answer>2</answer> or 3?</think><answer>3</answer>", 1.0),
        ("<answer>2</answer>", 0.1),
        ("3", 0.0),
        ("", 0.0),
        ("<answer></answer>", 0.0),
        ("<answer>3</answer><answer>3</answer>", 0.0),
        ("<think><answer>3</answer></think>", 0.0),
        ("<answer>three</answer>", 0.0),
        ("<answer>-3</answer>", 0.0),
        ("<answer>+3</answer>", 0.0),
        ("<answer>3.0</answer>", 0.0),
        ("<answer>1_0</answer>", 0.0),
        ("<answer>٣</answer>", 0.0),
        ('<answer>{"r": 3}</answer>', 0.0),
        ("<answer>3</answer", 0.0),
        ("<answer>" + "9" * 5000 + "</answer>", 0.0),
    ]:
        assert score_counts(response, {"r": 3}) == reward


def test_several_letters_are_worth_their_share():
    for answer, reward in [
        ('{"r": 3, "s": 1}', 1.0),
        ('{"s": 1, "r": 3}', 1.0),
        ('{"r": 3, "s": 2}', 0.55),  # 0.1 + 0.9 / 2
        ('{"r": 0, "s": 0}', 0.1),
        ('{"r": 3}', 0.1),
        ('{"r": 3, "s": 1, "t": 0}', 0.1),
        ("{}", 0.1),
        ('{"r": 3, "s": true}', 0.0),  # true == 1, and is no number
        ('{"r": 3, "s": -1}', 0.0),
        ('{"r": 3.0, "s": 1}', 0.0),
        ("[3, 1]", 0.0),
        ("3", 0.0),
        ("{r: 3}", 0.0),
        ('{"r": 3, "s": ' + "9" * 5000 + "}", 0.0),
        ("[" * 100_000, 0.0),
    ]:
        given = f"<answer>{answer}</answer>"
        assert score_counts(given, {"r": 3, "s": 1}) == pytest.approx(reward)


def test_the_parser_reads_the_counts_of_its_row():
    parser = LetterCountingRewardParser()
    right = parser.score("<think>t</think><answer>3</answer>", '{"r": 3}')
    assert right == (1.0, True, True, True)
    assert parser.score("<answer>4</answer>", '{"r": 3}') == (0.1, False, True, False)
    assert parser.score("3", '{"r": 3}') == (0.0, False, False, False)
    half = parser.score('<answer>{"r": 3, "s": 2}</answer>', '{"r": 3, "s": 1}')
    assert half == (pytest.approx(0.55), False, True, False)


@pytest.mark.parametrize("answer", ["", "3", "[]", "{}", '{"r": "3"}', "r", None, 3])
def test_a_row_without_counts_of_its_own_is_an_error(answer):
    with pytest.raises(RewardError, match="must be a JSON object"):
        LetterCountingRewardParser().score("<answer>3</answer>", answer)
