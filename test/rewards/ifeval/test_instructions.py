"""Every instruction of IFEval, with responses that follow it and responses that do not."""

from __future__ import annotations

import pytest

from torchrl_llm.rewards.ifeval import INSTRUCTIONS, check

ENGLISH = "the river was calm that evening and the boats came home"

# Instruction, arguments, responses that follow, responses that do not.
TABLE = [
    (
        "keywords:existence",
        {"keywords": ["river", "Boats"]},
        ["A RIVER, two boats.", "riverbank and boatswain boats", "**river**\n\nboats"],
        ["river and boat", "", "boats", "r i v e r boats"],
    ),
    (
        "keywords:existence",
        {"keywords": ["größe", "c++ (new)"]},
        ["GRÖSSE? Groesse? No: GRÖẞE. C++ (NEW)!", "Die Größe von c++ (new)"],
        ["Grosse c++ (new)", "größe ccc new"],  # no pattern: the plus is a plus
    ),
    (
        "keywords:forbidden_words",
        {"forbidden_words": ["rock", "c++"]},
        ["rocket and bedrock", "rocks_", "c+ and c", "écrock"],
        ["A Rock.", "rock", "*rock*", "hard-rock", "“ROCK”", "I like C++.", ""],
    ),
    (
        "keywords:frequency",
        {"keyword": "story", "frequency": 2, "relation": "at least"},
        ["Story, story", "history of a Story", "STORY\nstory story"],
        ["story", "", "stories and tories"],
    ),
    (
        "keywords:frequency",
        {"keyword": "story", "frequency": 2, "relation": "less than"},
        ["one story", "none at all"],
        ["story story", "history story", "   "],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "q", "let_frequency": 3, "let_relation": "at least"},
        ["Quick quiet queen", "qqq"],
        ["quick quiet", "", "ooo"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "!", "let_frequency": 2, "let_relation": "less than"},
        ["No!", "Nothing"],
        ["No! No!", "!!"],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 5, "relation": "at least"},
        ["one two three four five", "don't stop the music", "1 2 3 4 5 6", "äh, öh, üh, ßß, ñ"],
        ["one two three four", "", "... !!! ??? *** ---", "well-known thing here"],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 4, "relation": "less than"},
        ["one two three", "* a\n* b", "नमस्ते आप कैसे"],
        ["one two three four", "it's not mine", ""],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "at least"},
        ["One. Two! Three?", "One. Two. and three", "Is it? \"It is.\" Fine.", "一。二。三。"],
        ["One. Two.", "", "Mr. J. Smith met Dr. No. They left.", "3.5 is more than 2.4. Yes."],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "less than"},
        ["Only one.", "no full stop at all", "A heading\n\nand a line", "1. First item"],
        ["One. Two.", "what? really!", ""],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 3},
        ["a\n***\nb\n***\nc", "***\na***b***c\n***", "a\n\n***\n\nb\n\n***\n\nc\n"],
        ["a\n***\nb", "a***b***c***d", "a******b***c", "a\n\nb\n\nc", "", "***"],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "weekend"},
        ["a b\n\nWeekend plans", "a\n\n\n\n\"weekend,\" he said", "\n\na\n \n**Weekend**: b\n\n"],
        ["weekend\n\na", "a\n\nweekends", "a\n\nb\n\nweekend", "a\nweekend", "", "a\n\na weekend"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[name], [address]", "[a][b][c]", "[[name]] and [Straße]"],
        ["[name]", "", "[] [ ]", "name] [address", "[a\nb] [c"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Bye.\n\nP.S. I wait.", "Bye. p.s. here", "Bye.\n**P. S.** x", "P.S.I love you"],
        ["Bye.", "", "PS I wait", "Bye.\nP.P.S. I wait.", "stop.s.x", "tips. see"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.P.S"},
        ["P.P.S I wait", "Bye.\nP.P.S. I wait.", "p. p. s. hm"],
        ["P.S. I wait", "", "P.P.Super", "PPS"],
    ),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* one\n* two", "- one\n  - two", "Title\n\n* **one**: x\n\n* two\n---\nend"],
        ["* one", "* 1\n* 2\n- 3", "1. one\n2. two", "", "*so* it is\n**that**", "*one\n*two"],
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["My answer is yes.", "my answer is MAYBE.", "Hm.\n\n**My answer is no.** Sorry."]
        + ["Well: my answer is no."],
        ["My answer is yes", "Yes.", "", "My answer is perhaps.", "My answer is: no."]
        + ["I doubt that my answer is yes.", "Is it so that **my answer is no.**"]
        + ["my answer is no.x"],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*one* and *two*", "**one**, *two*", "*a b*\n* item\n***c***", "*ü* *ö* *ä*"],
        ["*one*", "", "**one**", "* one\n* two", "** ** **  **", "*a\nb* *c\nd*", "***one***"]
        + ["* a **b**", "* a * b", "* x *one*"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1\na\nSection 2\nb", "## Section1: a\n## Section 2: b", "Section 1 2\nSection 3"],
        ["Section 1\na", "", "section 1 section 2", "Section I, Section II"]
        + ["Subsection 1 Section 2"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": [1, null]}', '```json\n{"a": "ü"}\n```', "  ```JSON [1]```  ", "```\n[]\n```"],
        ["{'a': 1}", "", 'Here: {"a": 1}', '{"a": 1}\nDone.', "```json```", "NaN", "[" * 100_000]
        + ['```{"a": 1} json```', "```jsonl\n[]\n```"],
    ),
    (
        "detectable_format:title",
        {},
        ["<<A title>>\ntext", "text <<été>>", "# <<One>> <<Two>>"],
        ["<A title>", "", "<<>>", "<< >> <<<>>>", "<<a\nb>>", ">>a<<", "<<a"]
        + ["<<a title", "<<a>", ">> <<a b"],
    ),
    (
        "language:response_language",
        {"language": "hi"},
        ["नमस्ते, आप कैसे हैं? मैं ठीक हूँ।", "यह एक छोटा सा वाक्य है।"],
        ["Namaste, how are you today?", "", "12345", "¿Cómo estás hoy, amigo mío?"],
    ),
    (
        "language:response_language",
        {"language": "de"},
        ["Guten Tag, das ist ein ganz gewöhnlicher Satz."],
        ["This is a rather ordinary sentence.", "...", "Dit is een heel gewone Nederlandse zin."],
    ),
    (
        "startend:end_checker",
        {"end_phrase": "Is there anything else I can help with?"},
        [
            "Done. Is there anything else I can help with?",
            '"is there anything else i can help with?"\n',
            "IS THERE ANYTHING ELSE I CAN HELP WITH?",
        ],
        ["Is there anything else I can help with? Bye.", "", "Is there anything else"],
    ),
    (
        "startend:quotation",
        {},
        ['"All of it."', ' "two\nlines"\n', '""'],
        ['"Half of it', "'single'", "", '"', "All", "“curly”", '"a" is b'],
    ),
    (
        "punctuation:no_comma",
        {},
        ["None here; none there.", "1.000 and 2", "…"],
        ["One, two", "1,000", "", "一，二", "واحد، اثنان", "犬、猫"],
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Write a song. Use no commas!"},
        ["Write a song. Use no commas!\n\nLa la", "  WRITE a song. Use no commas! La"]
        + ["Write a song. Use no commas!"],
        ["Sure! Write a song. Use no commas!", "", "Write a song.", "Write a song Use no commas!"],
    ),
    (
        "combination:two_responses",
        {},
        ["one\n******\ntwo", "******\none******two\n******", "a ****** b"],
        ["one", "", "a******a", "a******b******c", "a************b", "a*****b", "******a"],
    ),
    (
        "change_case:english_capital",
        {},
        ["THE RIVER WAS CALM THAT EVENING AND THE BOATS CAME HOME.", "YES, 1 TIME!", "## OK"],
        ["The river", "", "123", ENGLISH, "DAS WAR EIN GANZ GEWÖHNLICHER SATZ AUS DEUTSCHLAND."],
    ),
    (
        "change_case:english_lowercase",
        {},
        [ENGLISH, "yes.", "* no\n* maybe", "is this what you wanted? 1 2 3"],
        ["Yes.", "", "42", ENGLISH.upper(), "das war gestern ein ganz gewöhnlicher tag im sommer"],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 3, "capital_relation": "at least"},
        ["ONE TWO THREE", "I saw A UFO", "DON'T ask NASA, ÄH", "**WELL-KNOWN** U.S. LAW"],
        ["ONE TWO", "", "One Two Three", "WELL-KNOWN LAW", "1 2 3", "DON'T GO"],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "less than"},
        ["none", "ONE only", "COVID-19 was"],
        ["ONE TWO", "I and I", ""],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "yes", "no"), TABLE)
def test_responses_follow_or_do_not(name, arguments, yes, no):
    assert [text for text in yes if check(name, text, arguments) is not True] == []
    assert [text for text in no if check(name, text, arguments) is not False] == []


def test_every_instruction_of_the_paper_has_examples_of_both_kinds():
    assert {name for name, *_ in TABLE} == set(INSTRUCTIONS)
    assert len(INSTRUCTIONS) == 25
    for name in INSTRUCTIONS:
        rows = [row for row in TABLE if row[0] == name]
        assert sum(len(yes) for _, _, yes, _ in rows) >= 3, name
        assert sum(len(no) for _, _, _, no in rows) >= 3, name


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


def test_the_numbers_of_a_list_are_no_words_of_a_language():
    # Three words are too few for the detector, whatever numbers stand before them.
    listed = "1. yes 2. no 3. maybe 4. 5. 6."
    assert check("change_case:english_lowercase", listed)
    assert not check("change_case:english_lowercase", listed.replace("yes", "für"))
