"""Which text of a critic's answer is for which agent."""

from __future__ import annotations

import gc
import json
import random
import re
import time

import pytest

from torchrl_llm.langmarl.credit_reader import parse_credit_response, thirds_of

TWO = ["agent_1", "agent_2"]
TEAM = ["agent_1", "agent_2", "agent_10"]
PISTONS = [f"piston_{place}" for place in range(7)]
ROLES = ["Planner", "sous_chef", "chef"]
TEXTS = {"agent_1": 'Say "{x}" less.', "agent_2": "Keep [it] short:\n- one\n- two", "agent_10": "é"}


# -- well-formed answers --------------------------------------------------------------------------


@pytest.mark.parametrize("credit_format", [None, "json", "markers", "thirds"])
@pytest.mark.parametrize(
    "frame",
    [
        "{}",
        "```json\n{}\n```",
        "Thinking {{about}} it:\n```\n{}\n```\nThat is all {{!}}",
        "a {} b {{",
    ],
)
def test_json_is_read_exactly_fenced_or_bare_with_prose_around(frame, credit_format):
    for indent in (None, 2):
        response = frame.format(json.dumps(TEXTS, indent=indent))
        assert parse_credit_response(response, TEAM, credit_format=credit_format) == TEXTS


@pytest.mark.parametrize("credit_format", [None, "json", "markers"])
@pytest.mark.parametrize(
    "marker",
    [
        "[AGENT {} EVALUATION]",
        "[agent_{} evaluation]",
        "## **[Agent-{} Evaluation]**:",
        "[Agent{}EVALUATION]:",
    ],
)
def test_markers_are_read_exactly(marker, credit_format):
    parts = [f"{marker.format(name[6:])}\n{text}\n" for name, text in TEXTS.items()]
    response = "What I found:\n\n" + "\n".join(parts)
    assert parse_credit_response(response, TEAM, credit_format=credit_format) == TEXTS


@pytest.mark.parametrize(
    "marker", ["[PISTON_{} EVALUATION]", "[piston {} evaluation]", "[Piston{} Evaluation]"]
)
def test_markers_of_pistons_are_read_exactly(marker):
    texts = {name: f"Rise in cycle {place}." for place, name in enumerate(PISTONS)}
    response = " ".join(f"{marker.format(name[7:])} {text}" for name, text in texts.items())
    assert parse_credit_response(response, PISTONS) == texts


@pytest.mark.parametrize("credit_format", [None, "thirds"])
@pytest.mark.parametrize(
    "heading",
    [
        "[{} THIRD EVALUATION]\n",
        "## {} third (pistons 0-2)\n",
        "**{} pistons:** ",
        "{}: ",
        "- **{} side**\n",
    ],
)
def test_thirds_are_read_exactly(heading, credit_format):
    texts = ["Rise early.", "Right is where the ball is.\nWait.", "Middle ground: stay."]
    response = "\n\n".join(
        heading.format(side) + text
        for side, text in zip(("Left", "Middle", "Right"), texts, strict=True)
    )
    # 7 pistons: place * 3 // 7 is 0 0 0 1 1 2 2
    expected = [texts[third] for third in (0, 0, 0, 1, 1, 2, 2)]
    found = parse_credit_response(response, PISTONS, credit_format=credit_format)
    assert found == dict(zip(PISTONS, expected, strict=True))


@pytest.mark.parametrize("names", [TEAM, PISTONS, ROLES])
def test_a_text_that_names_nobody_is_for_everyone(names):
    response = "Good: {all of it}, left and right [overall]."
    assert parse_credit_response(response, names) == dict.fromkeys(names, response)


def test_a_text_that_names_some_is_for_those_alone():
    response = "Agent 10 was slow, and AGENT-1's plan was good."
    expected = {"agent_1": response, "agent_2": "", "agent_10": response}
    assert parse_credit_response(response, TEAM) == expected


# -- whom a name is for ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", ["agent_1", "Agent 1", "AGENT-1", "agent1", "Agent\u20111", "agent_1 evaluation"]
)
def test_case_and_separators_do_not_matter_in_a_key(key):
    assert parse_credit_response(json.dumps({key: "a"}), TEAM) == {
        "agent_1": "a", "agent_2": "", "agent_10": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    "response", ["agent_3 was bad", '{"agent_0": "x"}', "[AGENT 12 EVALUATION] x"]
)
def test_what_is_for_a_stranger_reaches_nobody(response):
    assert parse_credit_response(response, TEAM) == dict.fromkeys(TEAM, "")


def test_an_index_is_never_shifted():
    response = "[AGENT 0 EVALUATION] zero\n[AGENT 1 EVALUATION] one"
    assert parse_credit_response(response, TWO) == {"agent_1": "one", "agent_2": ""}
    assert parse_credit_response(response, ["agent_0", "agent_1"]) == {
        "agent_0": "zero",
        "agent_1": "one",
    }
    assert parse_credit_response(response, ["0", "1"]) == {"0": "zero", "1": "one"}


def test_names_that_contain_each_other_are_told_apart():
    assert parse_credit_response("The Sous Chef burnt it.", ROLES) == {
        "Planner": "", "sous_chef": "The Sous Chef burnt it.", "chef": "",
    }  # fmt: skip
    names = ["a_1_1", "a_11"]
    assert parse_credit_response('{"a 11": "x"}', names) == {"a_1_1": "", "a_11": "x"}
    assert parse_credit_response("A 1 1 is late", names) == {"a_1_1": "A 1 1 is late", "a_11": ""}


def test_two_names_that_differ_by_separators_are_told_apart_where_written_exactly():
    assert parse_credit_response('{"a_b": "x", "ab": "y"}', ["a_b", "ab"]) == {
        "a_b": "x",
        "ab": "y",
    }


def test_an_agent_that_is_not_addressed_while_another_is_gets_nothing():
    assert parse_credit_response('{"agent_1": "ask agent_2"}', TWO) == {
        "agent_1": "ask agent_2",
        "agent_2": "",
    }
    assert parse_credit_response("[AGENT 2 EVALUATION] x", TWO) == {"agent_1": "", "agent_2": "x"}


def test_the_text_of_a_broken_marker_does_not_run_into_the_agent_before_it():
    response = "[AGENT 1 EVALUATION]\nx\n[AGNT 2 EVALUATION]\ny\n[AGENT 10 EVALUATION]\nz"
    assert parse_credit_response(response, TEAM) == {"agent_1": "x", "agent_2": "", "agent_10": "z"}


def test_a_heading_of_one_third_is_not_mistaken_for_a_sentence():
    response = "piston_3 was slow.\nRight: it should rise."
    found = parse_credit_response(response, PISTONS)
    assert found == {name: response if name == "piston_3" else "" for name in PISTONS}
    found = parse_credit_response("**Left third:** rise", PISTONS)
    assert found == {name: "rise" if place < 3 else "" for place, name in enumerate(PISTONS)}


def test_only_rows_of_three_pistons_have_thirds():
    assert thirds_of(["piston_0", "piston_1"]) is None
    assert thirds_of(["piston_1", "piston_2", "piston_3"]) is None
    assert (
        list(thirds_of([f"piston_{k}" for k in range(20)]).values()) == [0] * 7 + [1] * 7 + [2] * 6
    )


# -- what values become ---------------------------------------------------------------------------


def test_nested_values_become_lines_that_can_be_read():
    value = {"worked": True, "improve": ["be brief", {"how": 2.5}], "none": None, "why": {"a": "b"}}
    found = parse_credit_response(json.dumps({"evaluations": [{"agent_1": value}]}), TWO)
    lines = "worked: true\nimprove:\n  - be brief\n  -\n    how: 2.5\nnone:\nwhy:\n  a: b"
    assert found == {"agent_1": lines, "agent_2": ""}


def test_the_last_of_several_objects_counts():
    draft, final = '{"agent_1": "...", "agent_2": "..."}', '{"agent_1": "x", "agent_2": "y"}'
    assert parse_credit_response(f"{draft}\n{final}", TWO) == {"agent_1": "x", "agent_2": "y"}


def test_the_hint_decides_between_two_formats():
    response = '[AGENT 1 EVALUATION] it sent {"agent_2": "hi"}'
    marked = parse_credit_response(response, TWO, credit_format="markers")
    assert marked == {"agent_1": 'it sent {"agent_2": "hi"}', "agent_2": ""}
    assert parse_credit_response(response, TWO) == {"agent_1": "", "agent_2": "hi"}


@pytest.mark.parametrize(
    "response", [None, 5, 10**4000, b"agent_1", {"agent_1": 1}, object(), "", " \n"]
)
def test_what_is_no_text_says_nothing(response):
    assert parse_credit_response(response, TWO) == {"agent_1": "", "agent_2": ""}


def test_without_agents_there_is_nothing():
    assert parse_credit_response('{"agent_1": "x"}', []) == {}


# -- adversarial input ----------------------------------------------------------------------------

PIECES = (
    "{",
    '{"',
    '{"a":',
    '{"a":"',
    '{"agent_1": [',
    "[",
    "[a",
    "[ evaluation]",
    "\n[agent_1 evaluation]",
)
PIECES += (
    "agent",
    "agent ",
    "agent_1 ",
    "**[",
    "#",
    "# ",
    " ",
    "left\n",
    "left third ",
    "left((((",
    "\ud800",
)
PIECES += ("a1", "1", '"{"', "\\", '{"x": "\\', '{"agent_1": 1}')


@pytest.mark.parametrize("piece", PIECES)
def test_time_grows_with_the_length_alone(piece):
    """Four times the text takes at most eight times as long, but for a constant."""
    gc.collect()
    gc.disable()  # the heap of a long test session is not what is measured
    try:
        # Once more where the machine was busy.
        assert any(_grows_as_the_text(piece) for _ in range(2))
    finally:
        gc.enable()


def _grows_as_the_text(piece):
    small, large = (_seconds(piece * (n // len(piece))) for n in (25_000, 100_000))
    return large < 8 * small + 0.1


def _seconds(text):
    begun = time.process_time()
    for names in (TEAM, PISTONS):
        assert list(parse_credit_response(text, names)) == names
    return time.process_time() - begun


def test_deep_nesting_is_no_error():
    for depth in (15, 500, 100_000):
        text = '{"agent_1": ' + '{"k": ' * depth + '"x"' + "}" * (depth + 1)
        assert list(parse_credit_response(text, TWO)) == TWO
    assert parse_credit_response('{"agent_1": {"k": {"j": "x"}}}', TWO)["agent_1"] == "k:\n  j: x"


# -- fuzz -----------------------------------------------------------------------------------------

TEAMS = (TWO, TEAM, PISTONS, ["agent_0", "agent_1"], [f"agent_{k}" for k in range(1, 13)])
WORDS = (
    "The plan",
    "was late",
    "{so}",
    "be brief",
    "[note]",
    "a: b",
    "100%",
    "\n",
    "é",
    '"x"',
    "- one",
)

JUNK = ("agent_1", "Agent 2", "piston 3", "[", '{"', "\ud800", "\x00", "EVALUATION]", "left:")
JUNK += ("\nright third:\n",)


def _spelling(name, rng):
    stem, number = name.split("_")
    stem = rng.choice((stem, stem.upper(), stem.title()))
    return f"{stem}{rng.choice(('_', ' ', '-', ''))}{number}"


def _answer(names, rng):
    """A well-formed answer and what it says to whom; each text has a secret of its own."""
    addressed = rng.sample(names, rng.randint(1, len(names)))
    texts = {
        name: f"secret{rng.randrange(10**9)} {' '.join(rng.choices(WORDS[:-1], k=3))} end."
        for name in addressed
    }
    kinds = ["json", "markers", "whole"] + ["thirds"] * (thirds_of(names) is not None)
    kind = rng.choice(kinds)
    prose = [
        rng.choice(("", "Here it is {well}:\n", "I thought about [all].\n")),
        rng.choice(("", "\nDone.")),
    ]
    if kind == "json":
        data = {_spelling(name, rng): text for name, text in texts.items()}
        for wrap in rng.sample(("evaluations", "result"), rng.randint(0, 2)):
            data = {wrap: data, "note": "none"}
        body = json.dumps(data, indent=rng.choice((None, 2)), ensure_ascii=rng.random() < 0.5)
        body = rng.choice(("{}", "```json\n{}\n```")).replace("{}", body)
        return prose[0] + body + prose[1], texts
    if kind == "markers":
        parts = [f"[{_spelling(name, rng)} EVALUATION]\n{text}" for name, text in texts.items()]
        return prose[0] + "\n".join(parts), texts
    if kind == "thirds":
        sides = [f"secret{rng.randrange(10**9)} for them" for _ in range(3)]
        parts = zip(("LEFT", "MIDDLE", "RIGHT"), sides, strict=True)
        body = "\n".join(f"[{side} THIRD EVALUATION]\n{text}" for side, text in parts)
        return prose[0] + body, {name: sides[third] for name, third in thirds_of(names).items()}
    body = " ".join(f"{_spelling(name, rng)}: {text}" for name, text in texts.items())
    return body, dict.fromkeys(texts, body)


def _mutated(text, rng):
    """The text with some of it cut, doubled, moved, replaced or spoilt."""
    for _ in range(rng.randint(1, 6)):
        a, b = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        b = min(b, a + rng.choice((1, 1, 1, 5, 50)))
        own = ("", "", text[a:b] * 2, text[a:b][::-1], text[a:b].upper())
        piece = rng.choice((*own, *JUNK, rng.choice('{}[]":,\\_ \n019')))
        text = text[:a] + piece + text[b:]
    return text


def _named(text, names):
    """Who is named, by another rule than the reader's: the stem, separators, the number."""
    sides = {
        third
        for third, side in enumerate(("left", "middle|center|centre", "right"))
        if re.search(side, text, re.I)
    }
    thirds = thirds_of(names) or {}
    numbers = {
        (stem.lower(), number)
        for stem, number in re.findall(
            r"(?<![^\W_])(agent|piston)[ _-]*(\d+)(?=evaluation|[\W_]|$)", text, re.I
        )
    }
    plain = {name for name in names if tuple(name.split("_")) in numbers}
    return plain, {name for name in names if thirds.get(name) in sides}


def test_exact_for_four_thousand_well_formed_answers():
    rng = random.Random(17)
    for _ in range(4_000):
        names = rng.choice(TEAMS)
        response, texts = _answer(names, rng)
        expected = {name: texts.get(name, "").strip() for name in names}
        assert parse_credit_response(response, names) == expected, response


def test_of_ten_thousand_mutated_answers_nothing_raises_and_no_text_reaches_who_is_not_named():
    rng = random.Random(18)
    reached = silent = 0
    for _ in range(10_000):
        names = rng.choice(TEAMS)
        response = _mutated(_answer(names, rng)[0], rng)
        hint = rng.choice((None, "json", "markers", "thirds", "nonsense"))
        found = parse_credit_response(response, names, credit_format=hint)
        assert list(found) == names
        assert all(isinstance(text, str) for text in found.values())
        plain, by_side = _named(response, names)
        got = {name for name, text in found.items() if text}
        if plain:
            assert got <= plain | by_side, (response, found)
        reached += bool(got)
        silent += len(got) < len(names)
    # The law is not kept by giving nobody anything, nor by giving all to everyone.
    assert reached > 9_000
    assert silent > 3_000


def test_of_mutated_answers_no_secret_reaches_another_agent_while_its_own_section_is_whole():
    """Sections are moved, dropped, doubled and put beside those of strangers."""
    rng = random.Random(19)
    for _ in range(2_000):
        names = rng.choice((TWO, TEAM, PISTONS))
        stem = names[0].split("_")[0]
        sections = {name: f"secret{rng.randrange(10**9)}" for name in [*names, f"{stem}_77"]}
        chosen = rng.choices(list(sections), k=rng.randint(1, 6))
        if rng.random() < 0.5:
            text = "\n".join(
                f"[{_spelling(name, rng)} EVALUATION] {sections[name]}" for name in chosen
            )
        else:
            text = " and ".join(
                json.dumps({_spelling(name, rng): sections[name]}) for name in chosen
            )
        found = parse_credit_response(text, names)
        for name in names:
            secrets = set(re.findall(r"secret\d+", found[name]))
            assert secrets == ({sections[name]} if name in chosen else set()), text
