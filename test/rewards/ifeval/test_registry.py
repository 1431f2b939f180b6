"""What a row can get wrong about an instruction is an error, never a verdict."""

from __future__ import annotations

import pytest

from torchrl_llm.errors import RewardError
from torchrl_llm.rewards.ifeval import INSTRUCTIONS, check, instruction

WORDS = "length_constraints:number_words"


def test_an_unknown_instruction_names_the_nearest_one():
    with pytest.raises(RewardError, match=r"did you mean 'punctuation:no_comma'\?"):
        check("punctuation:no_commas", "a")
    with pytest.raises(RewardError, match="unknown instruction None, there are 25"):
        check(None, "a")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"takes the arguments \['num_words', 'relation'\], got \[\]"),
        (None, r"got \[\]"),
        ({"num_words": 3}, r"got \['num_words'\]"),
        ({"num_words": 3, "relation": None}, r"got \['num_words'\]"),
        ({"num_words": 3, "relation": "at least", "letter": "a"}, "'letter'"),
        ({"num_words": "3", "relation": "at least"}, "num_words must be a whole number"),
        ({"num_words": True, "relation": "at least"}, "num_words must be a whole number"),
        ({"num_words": 2.5, "relation": "at least"}, r"got 2\.5"),
        ({"num_words": float("nan"), "relation": "at least"}, "got nan"),
        ({"num_words": float("inf"), "relation": "at least"}, "got inf"),
        ({"num_words": -1, "relation": "at least"}, "at least 0, got -1"),
        ({"num_words": 3, "relation": "at most"}, "'at least' or 'less than', got 'at most'"),
        ({"num_words": 3, "relation": ["at least"]}, "'at least' or 'less than'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(RewardError, match=message):
        check(WORDS, "one two three", arguments)


@pytest.mark.parametrize("keywords", ["river", [], [1], [""], {"a": 1}, 3])
def test_a_list_of_words_must_be_one(keywords):
    with pytest.raises(RewardError, match="keywords must be a"):
        check("keywords:existence", "river", {"keywords": keywords})


def test_arguments_are_checked_even_where_the_response_is_empty():
    with pytest.raises(RewardError, match="takes the arguments"):
        check(WORDS, "", {})


def test_the_table_of_the_hub_has_a_column_for_every_argument():
    # Missing values are None there, and whole numbers may come as floats.
    row = {"num_words": 3.0, "relation": "at least", "letter": None, "keywords": None}
    assert check(WORDS, "one two three", row)
    assert check("punctuation:no_comma", "a", dict.fromkeys(row))


def test_two_instructions_cannot_have_one_name():
    with pytest.raises(ValueError, match="'keywords:existence' already"):
        instruction("keywords:existence")(lambda response: True)
    assert len(INSTRUCTIONS) == 25
