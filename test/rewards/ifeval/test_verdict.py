"""Strict is the response as it is; loose forgives an opening line, a closing one, and stars."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_llm.errors import RewardError
from torchrl_llm.rewards.ifeval import loose_forms, verify

LOWER, COMMA = "change_case:english_lowercase", "punctuation:no_comma"
END = "startend:end_checker"
BULLETS = "detectable_format:number_bullet_lists"


def test_the_forms_of_a_response():
    assert loose_forms("a\n*b*\nc") == [
        "a\n*b*\nc",
        "*b*\nc",
        "a\n*b*",
        "*b*",
        "a\nb\nc",
        "b\nc",
        "a\nb",
        "b",
    ]
    assert loose_forms("a") == ["a"]
    assert loose_forms("a\nb") == ["a\nb", "b", "a"]
    assert loose_forms("") == loose_forms("\n \n") == []
    assert loose_forms("**") == ["**"]


@pytest.mark.parametrize(
    ("response", "strict", "loose"),
    [
        ("this is fine", True, True),
        ("Sure:\nthis is fine", False, True),
        ("this is fine\nBye, Jim", False, True),
        ("Sure:\nthis is fine\nBye", False, True),
        ("Sure:\nThis is fine\nBye", False, False),
        ("Sure:\n\nThis is fine", False, False),
        ("Sure", False, False),
        ("", False, False),
    ],
)
def test_an_opening_and_a_closing_line_are_forgiven_loosely(response, strict, loose):
    assert verify(response, [LOWER], [{}]) == ((strict,), (loose,))


def test_stars_are_forgiven_loosely():
    row = [{"end_phrase": "the end."}]
    assert verify("It was **the end.**", [END], row) == ((False,), (True,))
    assert verify("It was *the* end.", [END], row) == ((False,), (True,))


def test_loose_is_no_stricter_than_strict_where_forms_break_it():
    # without its first line there is one bullet only
    assert verify("* a\n* b", [BULLETS], [{"num_bullets": 2}]) == ((True,), (True,))
    assert verify("* a\n* b", [BULLETS], [{"num_bullets": 1}]) == ((False,), (True,))


def test_every_instruction_has_a_flag_of_its_own_and_chooses_its_own_form():
    verdict = verify("Sure, so:\nthe end", [COMMA, LOWER, END], [{}, None, {"end_phrase": "so:"}])
    assert verdict.strict == (False, False, False)
    assert verdict.loose == (True, True, True)


@given(st.text(alphabet="aB,*\n ", max_size=30))
def test_strict_implies_loose(response):
    names = [COMMA, LOWER, "startend:quotation", BULLETS]
    verdict = verify(response, names, [{}, {}, {}, {"num_bullets": 1}])
    assert all(b or not a for a, b in zip(*verdict, strict=True))


@pytest.mark.parametrize(
    ("names", "arguments"), [([], []), ([COMMA], []), ([COMMA], [{}, {}]), ([COMMA, LOWER], [{}])]
)
def test_as_many_arguments_as_instructions_are_needed(names, arguments):
    with pytest.raises(RewardError, match="as many arguments as instructions"):
        verify("a", names, arguments)


def test_one_unknown_instruction_spoils_the_verdict():
    with pytest.raises(RewardError, match="unknown instruction 'x:y'"):
        verify("a", [COMMA, "x:y"], [{}, {}])
