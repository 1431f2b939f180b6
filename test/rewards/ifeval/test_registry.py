"""What a row can get wrong about an instruction is an error, never a verdict."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchrl_llm.errors import MissingExtraError, RewardError
from torchrl_llm.rewards.ifeval import INSTRUCTIONS, check, instruction, language

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


def test_a_letter_is_one_character_and_a_language_one_that_can_be_detected():
    row = {"letter": "ab", "let_frequency": 1, "let_relation": "at least"}
    with pytest.raises(RewardError, match="one character, got 'ab'"):
        check("keywords:letter_frequency", "ab", row)
    with pytest.raises(RewardError, match="'tlh' cannot be detected"):
        check("language:response_language", "nuqneH", {"language": "tlh"})
    assert check("language:response_language", "你好,今天的天气很好", {"language": "zh"})


def test_two_instructions_cannot_have_one_name():
    with pytest.raises(ValueError, match="'keywords:existence' already"):
        instruction("keywords:existence")(lambda response: True)
    assert len(INSTRUCTIONS) == 25


def test_the_language_of_a_text_is_always_the_same_whatever_others_have_seeded():
    from langdetect import DetectorFactory

    text = "hello world"  # English to the detector in 4 of 7 tries
    before = DetectorFactory.seed
    language._detect.cache_clear()
    first = language.detect_language(text)
    language._detect.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(language._detect.__wrapped__, [text] * 16)) == {first}
    assert DetectorFactory.seed is before


def test_without_the_package_the_error_says_which_extra_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "langdetect.detector_factory", None)
    monkeypatch.setitem(sys.modules, "langdetect", None)
    language._detectors.cache_clear()
    language._detect.cache_clear()
    try:
        with pytest.raises(MissingExtraError, match=r"torchrl_llm\[ifeval\]"):
            check("language:response_language", "Bonjour", {"language": "fr"})
    finally:
        language._detectors.cache_clear()
