"""Formats of answers: what each reads, as the reference page has it, and as the harness does."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from cases import cases

from torchrl_llm.envs import GSM8KEnv, GSM8KRewardParser
from torchrl_llm.rewards.number_rewards import last_number

CASES = cases(__file__)

REFERENCE = Path(__file__).parents[2] / "docs" / "source" / "reference"
FORMATS = ("tags", "auto", "flexible-extract", "strict-match")


def table(name):
    """Rows of a table of the reference page, its literals as they are meant."""
    with (REFERENCE / name).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [
        {key: cell.removeprefix("``").removesuffix("``") for key, cell in r.items()} for r in rows
    ]


@pytest.mark.parametrize("answer_format", FORMATS)
def test_every_row_of_the_reference_page_is_read_so(answer_format):
    parser = GSM8KRewardParser(answer_format=answer_format)
    rows = table("gsm8k_answers.csv")
    assert len(rows) >= 30
    for row in rows:
        answer = row["answer"].replace(r"\n", "\n")
        score = parser.score(answer, "#### 18")
        assert (parser.read_response(answer)[1] or "") == row[answer_format], answer
        assert score.has_answer == bool(row[answer_format]), answer
        assert score.success == (row[answer_format] in ("18", "18 eggs")), answer


def test_no_answer_is_no_answer_and_an_enumeration_is_one():
    for answer_format in FORMATS:
        parser = GSM8KRewardParser(answer_format=answer_format)
        for nothing in ("", " \n", "####", "The answer is", r"\boxed{}", "...", "$", "<answer>"):
            assert parser.score(nothing, "18") == (0.0, False, False, False)
        # Whoever lists all numbers is right for one of them.
        listed = "".join(f"<answer>{n}</answer>\n#### {n}\n" for n in range(30))
        right = [n for n in range(30) if parser.score(listed, str(n)).success]
        assert right == ([0] if answer_format == "strict-match" else [29])


# Verdicts of lm-evaluation-harness 0.4.13 (its filters, then its exact_match with the regexes of
# gsm8k.yaml): response, solution, strict-match, flexible-extract.
HARNESS = CASES["harness"]


def test_the_filters_of_the_harness_have_its_verdicts():
    for response, solution, *verdicts in HARNESS:
        for answer_format, verdict in zip(
            ("strict-match", "flexible-extract"), verdicts, strict=True
        ):
            parser = GSM8KRewardParser(answer_format=answer_format)
            for truth in (solution, solution.rpartition("####")[2].strip()):
                assert parser.score(response, truth).success is verdict, (response, answer_format)


def test_the_last_number_is_found_in_a_text_of_any_length():
    assert last_number("9 " * 50_000 + "and **18** eggs." + " so" * 50_000) == 18
    assert last_number("It is 1.2.3") is None
    assert last_number("many") is None


def test_the_prompt_asks_for_what_is_read(answer):
    rows = [{"question": "9 * 2?", "answer": "#### 18"}]
    roles = {}
    for answer_format in FORMATS:
        env = GSM8KEnv(dataset=rows, answer_format=answer_format)
        td = env.reset()
        [chat] = td["history"].prompt.chats
        roles[answer_format] = [m["content"] for m in chat if m["role"] == "system"]
        td = env.step(answer(td, "9 * 2 = 18\n#### 18"))["next"]
        assert td["success"].item() == (answer_format != "tags")
    assert "<answer>" in roles["tags"][0]
    assert "####" in roles["strict-match"][0]
    assert roles["auto"] == roles["flexible-extract"] == []
