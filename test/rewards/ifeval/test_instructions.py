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
TABLE = [
    (
        "keywords:existence",
        {"keywords": ["river", "Boats"]},
        ["A RIVER with two boats.", "riverbank and boatswain boats"],
        ["river and boat", "boats only"],
    ),
    (
        "keywords:existence",
        {"keywords": ["c++", "gr.y"]},
        ["C++ is gray", "ccc GREY", "c+ grXy"],
        ["c gry"],
    ),
    (
        "keywords:forbidden_words",
        {"forbidden_words": ["rock", "c++"]},
        ["rocket and bedrock", "rock_s"],
        ["A Rock.", "I like C++.", "I like CC.", "hard-rock"],
    ),
    (
        "keywords:frequency",
        {"keyword": " sto.y ", "frequency": 2, "relation": "at least"},
        ["Story and history", "stody story"],
        ["one story", "sto\ny story"],
    ),
    (
        "keywords:frequency",
        {"keyword": "aa", "frequency": 2, "relation": "less than"},
        ["aaa", "b"],
        ["aaaa", "AAaa"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "I", "let_frequency": 2, "let_relation": "at least"},
        ["I in", "İ i"],
        ["ı ı", "i"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "e", "let_frequency": 2, "let_relation": "less than"},
        ["one", "é e", "none"],
        ["eE"],
    ),
    (
        "language:response_language",
        {"language": "de"},
        [
            "Das ist ein ganz gewöhnlicher Satz.",
            "12345",
            "... !",
            "http://de.de/das-ist-ein-satz",
            "DAS IST EIN GANZ NORMALER SATZ.",
        ],
        ["This is a rather ordinary sentence."],
    ),
    (
        "language:response_language",
        {"language": "hi"},
        ["नमस्ते, आप कैसे हैं? मैं ठीक हूँ।", "यह वाक्य है। Hello there.", "नमस्ते"],
        ["hello there my friend", "मी घरी जात आहे आणि तो शाळेत जात आहे"],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "at least"},
        [
            "One. Two! Three?",
            "One. Two. and three",
            "1. Buy bread. 2. Eat it.",
            '"So?" she said. "Yes." It was.',
            "He works at Apple Inc. They pay well. Good.",
            "See e.g. this. And i.e. that. End.",
        ],
        [
            "Mr. J. Smith met Dr. No. They left.",
            "Wow!!! Nice.",
            "Wait... What? Yes.",
            "No end\n\nNone here\n\nNor here",
        ],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "less than"},
        ["Only one.", "no stop at all", "At 5 p.m. we left."],
        ["One. Two.", "1. First item", "A.m. or p.m.? 5 p.m. The end."],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a***b", "***\na\n***\nb\n***", "a****b"],
        ["a\n*** ***\nb", "a\n******\nb", "a\n* * *\nb"],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 4, "relation": "at least"},
        ["one two three four", "it's well-known", "1.5 2,5", "é ü ß ñ"],
        ["don't a_b", "* - . !"],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Weekend"},
        ["a b\n\nWEEKEND plans", "a\n\n'\"weekend.", "a\n\n\n weekend"],
        [
            'a\n\n"\'weekend," he said',
            "a\n\n\n\nweekend",
            "\n\na\n\nweekend",
            "a\n\n**weekend** b",
            "a\n\nweekend-trip",
            "a\n\nb\n\nweekend",
            "a\n \nweekend",
        ],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[name] [address]", "[] [ ]", "]a[ [b] [c]"],
        ["[[a] b]", "[a\nb] [c]", "[a][b"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Bye.\n\nP.S. I wait.", "tip.s. here", "p. s. x", "P.P.S. x", "P. P. S. x"],
        ["PS x"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.P.S"},
        ["P.P.S I wait", "p. p. super", "P.P. S"],
        ["P.S. x", "PPS x"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "N.B"},
        ["n.b.: x", "nobody", "N B"],
        ["nb"],
    ),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        [
            "* one\n* two",
            "- one\n---",
            "*one\n\t-two",
            "*so* it is\n- b",
            "**a**\n* b\n* c",
            "*\n* b\n- c",
            "* a\n\n\n  * b",
            "• a\n* b\n* c",
            "+ a\n- b\n-c",
        ],
        ["*\n"],
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["My answer is yes.", "I doubt that My answer is no.", "**My answer is maybe.**"],
        ["my answer is yes.", "My answer is maybe", "MY ANSWER IS NO."],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*one* and *two*", "***a***", "**a** b **c**"],
        ["**one**", "*one*", "** ** **a**", "* a\n* b", "*a\nb* *c*", "* a * b"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1\na\nSection 2\nb", "Subsections: Section1 Section2"],
        [
            "section 1 section 2",
            "Section  1 Section  2",
            "Section 1 2 3",
            "Section I Section II",
            "Subsection 1 Subsection\n2",
        ],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "(Part|Day)", "num_sections": 2},
        ["Part 1", "Day 1 Part 2"],
        ["Part One"],
    ),
    (
        "detectable_format:json_format",
        {},
        [
            '{"a": [1, null]}',
            '```json\n{"a": 1}\n```',
            "NaN",
            "-Infinity",
            "```JSON\n[]",
            "[]\n```",
            "12",
            "```Json {}```",
        ],
        ["'a'", "```json\n```\n1", "```js\n1\n```", "Here: {}", '{"a": 1,}', '"a\tb"'],
    ),
    (
        "detectable_format:title",
        {},
        ["<<A title>>\ntext", "# <<One>> <<Two>>", "<< <<a>>", "<<>> x >>"],
        ["<<>>", "<< >>", "<<>>>", "<<<<a", "<<a\nb>>", ">>a<<", "<a>", "<<a>"],
    ),
    (
        "combination:two_responses",
        {},
        ["one\n******\ntwo", "******\none******two\n******", "a ******* b"],
        ["a******a ", "a************b", "a*****b", "******a", "a******b******c", "one", ""],
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": " Write a song. Use no commas!"},
        ["Write a song. Use no commas!\n\nLa la", "  WRITE A SONG. USE NO COMMAS! La"],
        [
            "Sure! Write a song. Use no commas!",
            "Write a song. Use no commas",
            '"Write a song. Use no commas!"',
        ],
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Die Straße"},
        ["die straße x", "DIE STRAẞE"],
        ["DIE STRASSE"],
    ),
    (
        "startend:end_checker",
        {"end_phrase": "Any other questions? "},
        ["Done. ANY OTHER QUESTIONS?", '""any other questions?""\n'],
        [
            'Any other questions? "',
            "Any other questions?'",
            "Any other questions? Bye.",
            "**Any other questions?**",
        ],
    ),
    (
        "startend:quotation",
        {},
        ['"All of it."', ' "two\nlines"\n', '""'],
        ['"', "“curly”", "'single'", '"a" b', '"Half of it', "", "All"],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["DON'T", "U.S. ARMY", "A, B", "ÄH **OH**", "WE'LL go", "CANNOT", "NASA... NASA"],
        ["COVID-19 was", "WELL-KNOWN", "One Two", "I/O", "A1 b2"],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 3, "capital_relation": "less than"},
        ["ONE two"],
        ["ONE (TWO) [THREE]", "GONNA NOT", "I. B. M."],
    ),
    (
        "change_case:english_capital",
        {},
        ["THE RIVER WAS CALM THAT EVENING AND THE BOATS CAME HOME.", "Ⅷ"],
        ["THE river", "YES", "A 1", "1 2 3", "DAS WAR EIN TAG"],
    ),
    (
        "change_case:english_lowercase",
        {},
        ["the river was calm that evening and the boats came home"],
        [
            "yes.",
            "The river",
            "das war gestern ein ganz gewöhnlicher tag",
            "a",
            "1 2 3",
            "no\nmaybe, it is so",
            "½ x",
        ],
    ),
    (
        "punctuation:no_comma",
        {},
        ["None here; none there.", "一，二", "واحد، اثنان", "犬、猫"],
        ["One, two", "1,000"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "q", "let_frequency": 3, "let_relation": "at least"},
        ["Quick quiet queen", "qqq"],
        ["quick quiet", "", "ooo"],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 3},
        ["a\n***\nb\n***\nc", "***\na***b***c\n***", "a\n\n***\n\nb\n\n***\n\nc\n"],
        ["a\n***\nb", "a***b***c***d", "a******b***c", "a\n\nb\n\nc", "", "***"],
    ),
]


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
