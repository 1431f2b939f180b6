"""Every instruction of IFEval: recorded verdicts, and equal ones where that program is installed.

``TABLE`` holds what lm_eval 0.4.13 says, ``langdetect`` seeded by 0, with nltk 3.10.
"""

from __future__ import annotations

import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from torchrl_llm.errors import MissingExtraError, RewardError
from torchrl_llm.rewards.ifeval import INSTRUCTIONS, check, paper_instructions, verify

DATA = Path(__file__).parents[4] / "shared" / "data" / "ifeval" / "input_data.jsonl"
# The published program draws another letter at random where "!" and "#" are asked for.
DRAWN = {1122, 1129}

# Instruction, arguments, answers that follow, answers that do not.
with Path(__file__).with_name("verdicts.jsonl").open(encoding="utf-8") as _file:
    TABLE = [json.loads(line) for line in _file]


@pytest.mark.parametrize(("name", "arguments", "yes", "no"), TABLE)
def test_verdicts_are_those_of_the_published_program(name, arguments, yes, no):
    verdict = {text: check(name, text, arguments) for text in yes + no}
    assert [text for text, follows in verdict.items() if follows is not (text in yes)] == []


def test_every_instruction_has_at_least_four_answers_and_both_kinds():
    assert {name for name, *_ in TABLE} == set(INSTRUCTIONS)
    assert len(INSTRUCTIONS) == 25
    for name in INSTRUCTIONS:
        rows = [row for row in TABLE if row[0] == name]
        yes, no = (sum(len(row[kind]) for row in rows) for kind in (2, 3))
        assert min(yes, no) > 0, name
        assert yes + no >= 4, name


def test_a_character_that_is_no_letter_is_counted_as_it_is():
    arguments = {"letter": "!", "let_frequency": 2, "let_relation": "less than"}
    verdicts = [
        check("keywords:letter_frequency", text, arguments)
        for text in ("No!", "Nothing", "No! No!", "!!")
    ]
    assert verdicts == [True, True, False, False]


def test_a_response_that_nobody_can_see_follows_nothing():
    arguments = {name: row for name, row, *_ in TABLE}
    for response in ("", " ", "\n\t\n", "\u2003"):
        assert [name for name in INSTRUCTIONS if check(name, response, arguments[name])] == []


PIECES = ["a", "*", "**", "<", "<<", "[", "[a", ".", ". ", "1. ", "```", "\n", " ", '"', "***"]
PIECES += ["A. ", "\n \n", "@", "etc. the ", "p. ", "ж", "ａ", "- ", "#", "``` "]


@pytest.mark.parametrize("name", sorted(INSTRUCTIONS))
def test_a_huge_response_takes_linear_time(name):
    # A pattern that backtracks would need hours for these; the limit of the suite ends the test.
    arguments = next(row[1] for row in TABLE if row[0] == name)
    for piece in PIECES:
        check(name, "x" + piece * (200_000 // len(piece)) + "x", arguments)


def test_a_response_of_any_length_has_a_verdict():
    text, row = "word, " * 20_000, [{}]
    assert verify(text + ".", ["punctuation:no_comma"], row).strict == (False,)
    assert verify(text.replace(",", ""), ["punctuation:no_comma"], row).strict[0]


def test_only_what_the_detector_reads_of_a_long_text_counts_addresses_aside():
    mails = "someone@example.com " * 1_000  # 20,000 characters that it leaves out
    german = "das ist ein ganz gew\u00f6hnlicher Satz aus einem Buch. " * 200
    english = "this is a rather ordinary sentence from a book. " * 200
    args = {"language": "de"}
    assert check("language:response_language", mails + german, args)
    assert check("language:response_language", german + english, args)
    assert not check("language:response_language", english + german, args)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("keywords:existence", {"keywords": ["("]}, "regular expressions, and '[(]' is none"),
        ("language:response_language", {"language": "zh"}, "one of .*'zh-cn'.*, got 'zh'"),
        ("length_constraints:number_words", {"num_words": 3}, "takes the arguments"),
        (
            "keywords:letter_frequency",
            {"letter": "ab", "let_frequency": 1, "let_relation": "at least"},
            "one character, got 'ab'",
        ),
    ],
)
def test_what_the_published_program_would_draw_or_break_on_is_an_error(name, arguments, message):
    with pytest.raises(RewardError, match=message):
        check(name, "text", arguments)


def test_what_is_nested_too_deeply_for_python_is_no_json():
    assert not check("detectable_format:json_format", "[" * 100_000, {})


def test_the_language_of_a_text_is_always_the_same_whatever_others_have_seeded():
    from langdetect import DetectorFactory

    text = "hello world"  # English to the detector in 4 of 7 tries
    before, detect = DetectorFactory.seed, paper_instructions._detect
    detect.cache_clear()
    first = paper_instructions._language(text)
    detect.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(detect.__wrapped__, [text] * 16)) == {first}
    assert DetectorFactory.seed is before


SENTENCES = ("length_constraints:number_sentences", {"num_sentences": 1, "relation": "at least"})
FRENCH = ("language:response_language", {"language": "fr"})


@pytest.mark.parametrize(
    ("package", "name", "arguments"),
    [
        ("nltk.tokenize.punkt", *SENTENCES),
        ("punkt", *SENTENCES),
        ("langdetect.detector_factory", *FRENCH),
    ],
)
def test_without_a_package_the_error_says_which_extra_brings_it(
    monkeypatch, package, name, arguments
):
    monkeypatch.setitem(sys.modules, package, None)
    forget = (paper_instructions._splitter, paper_instructions._detectors)
    for cached in forget:
        cached.cache_clear()
    with pytest.raises(MissingExtraError, match=r"torchrl_llm\[ifeval\]"):
        check(name, "Bonjour.", arguments)


MARKS = ["*", "* ", "- ", "***", "******", "**so**", "[name]", "<<a>>", "```", "{}", '"', "P.S. x"]
MARKS += ["My answer is yes.", "Mr. J. Poe left at 5 p.m. Then", "NASA DON'T", "What?!", "1. ", ""]
MARKS += ["Das ist ein Satz.", "Wow!!!", "e.g. this", "It is a sentence, and a long one."]


def _answer(row, draw):
    words = [str(value) for each in row["kwargs"] for value in each.values()]
    words += [word for each in row["kwargs"] for word in each.get("keywords") or ()]
    pieces = draw.choices(MARKS + 3 * words, k=draw.choice([1, 3, 10, 30]))
    text = "".join(piece + draw.choice([" ", "\n", "\n\n"]) for piece in pieces)
    return draw.choice([text, text, text.upper(), text.lower(), f'"{text.strip()}"'])


@pytest.mark.skipif(not DATA.exists(), reason="the prompts of IFEval are not here")
def test_verdicts_on_the_real_prompts_are_those_of_the_program_that_is_installed():
    nltk = pytest.importorskip("nltk")
    try:
        nltk.data.find("tokenizers/punkt_tab")  # else lm_eval would download it
    except LookupError:
        pytest.skip("nltk's own punkt_tab is not installed")
    theirs = pytest.importorskip("lm_eval.tasks.ifeval.utils", exc_type=ImportError)
    langdetect = pytest.importorskip("langdetect")
    seed, langdetect.DetectorFactory.seed = langdetect.DetectorFactory.seed, 0
    draw, other = random.Random(0), []
    try:
        for row in map(json.loads, DATA.read_text().splitlines()):
            ids, text = row["instruction_id_list"], _answer(row, draw)
            example = theirs.InputExample(row["key"], ids, row["prompt"], row["kwargs"])
            strict = theirs.test_instruction_following_strict(example, text)
            loose = theirs.test_instruction_following_loose(example, text)
            ours = verify(text, ids, row["kwargs"])
            same = list(map(list, ours)) == [o.follow_instruction_list for o in (strict, loose)]
            if not same and row["key"] not in DRAWN:
                other.append((row["key"], text))
    finally:
        langdetect.DetectorFactory.seed = seed
    assert other == []
