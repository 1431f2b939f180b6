"""Which answers of two evaluations changed, and how probable that is by chance."""

import math

import pytest
from evaluation.report.evaluations import write_evaluation

from torchrl_llm.evaluation.report.evaluation_folder import read_evaluation
from torchrl_llm.evaluation.report.two_runs import (
    change_table,
    figure_table,
    mcnemar_p,
    metric_table,
    pair_answers,
    paired_rows,
)


def evaluation(folder, answers, **options):
    return read_evaluation(write_evaluation(folder, answers, **options), {})


def test_an_exact_mcnemar_test_counts_the_ways_that_coins_fall():
    # 2 * (1 + 10 + 45) / 1024: at most 2 of 10 coins on one side, or on the other.
    assert mcnemar_p(2, 8) == mcnemar_p(8, 2) == 112 / 1024
    assert mcnemar_p(0, 0) == mcnemar_p(5, 5) == 1.0
    assert mcnemar_p(0, 3000) == pytest.approx(2.0**-2999, abs=1e-300)
    tails = [math.comb(7, k) for k in range(8) if abs(k - 3.5) >= 2.5]
    assert mcnemar_p(1, 6) == sum(tails) / 2**7


def test_prompts_that_changed_come_first_and_are_counted(tmp_path):
    a = evaluation(
        tmp_path / "a", {"p": "r", "q": "w", "r": "r", "s": "w", "t": "i", "u": "r", "v": "r"}
    )
    b = evaluation(
        tmp_path / "b", {"v": "w", "u": "i", "t": "r", "s": "w", "r": "r", "q": "r", "p": "r"}
    )
    pairs, notices = pair_answers(a, b)
    found = [(pair.a[0]["query"], pair.change) for pair in pairs]
    assert found == [
        ("u", "A right, B wrong"),
        ("v", "A right, B wrong"),
        ("q", "A wrong, B right"),
        ("t", "A wrong, B right"),
        ("s", "both wrong"),
        ("p", "both right"),
        ("r", "both right"),
    ]
    assert notices == []
    assert change_table(pairs).rows == [
        ["A right, B wrong", "2"],
        ["A wrong, B right", "2"],
        ["both wrong", "1"],
        ["both right", "2"],
        ["p, exact McNemar test", "1"],
    ]
    rows = paired_rows(pairs, ["A x", "B y"], 5)  # two whole prompts
    assert [(row.prompt, row.labels["run"], row.labels["answer is"]) for row in rows] == [
        ("u", "A x", "right"),
        ("u", "B y", "invalid"),
        ("v", "A x", "right"),
        ("v", "B y", "wrong"),
    ]
    assert math.isnan(rows[1].reward)
    assert rows[1].errors == ["TimeoutError: too slow"]


def test_of_several_answers_the_share_of_right_ones_is_compared(tmp_path):
    a = evaluation(tmp_path / "a", {"p": "rrww", "q": "wwww", "r": "rr"})
    b = evaluation(tmp_path / "b", {"p": "wr", "q": "wwwr", "r": "wr"})  # 2 of 4 are 1 of 2
    pairs, _ = pair_answers(a, b)
    assert [(pair.a[0]["query"], pair.change) for pair in pairs] == [
        ("r", "A more often right"),
        ("q", "B more often right"),
        ("p", "equally often right"),
    ]
    assert change_table(pairs).rows[-1] == ["p, exact sign test", "1"]


def test_what_only_one_has_is_left_out_with_a_notice(tmp_path):
    write_evaluation(tmp_path / "a", {"p": "r", "q": "w"}, figures=lambda _: {"accuracy": 0.5})
    a = evaluation(tmp_path / "a", {"x": "r"}, task="codes")
    b = evaluation(
        tmp_path / "b",
        {"q": "r", "z": "r", "y": "w"},
        figures=lambda _: {"accuracy": 0.75, "accuracy_low": 0.5, "accuracy_high": 1.0},
    )
    pairs, notices = pair_answers(a, b)
    assert [pair.change for pair in pairs] == ["A wrong, B right"]
    assert notices == [
        "Only A answered 1 of the prompts of codes; they are not compared.",
        "Only A answered 1 of the prompts of sums; they are not compared.",
        "Only B answered 2 of the prompts of sums; they are not compared.",
    ]
    assert figure_table(a, b).rows == [["accuracy", "0.5000", "0.7500 (0.5000 to 1.0000)", "+0.25"]]


def test_a_prompt_that_occurs_twice_is_paired_in_order(tmp_path):
    records = [write_evaluation(tmp_path / name, {}) for name in "ab"]
    for folder, letters in zip(records, ("rw", "wr"), strict=True):
        parts = [write_evaluation(tmp_path / "one", {"p": letter}) for letter in letters]
        text = ""
        for number, letter in enumerate(letters):
            write_evaluation(parts[0], {"p": letter})
            line = (parts[0] / "answers_sums.jsonl").read_text()
            text += line.replace('"prompt": 0', f'"prompt": {number}')
        (folder / "answers_sums.jsonl").write_text(text)
    pairs, _ = pair_answers(*(read_evaluation(folder, {}) for folder in records))
    assert [pair.change for pair in pairs] == ["A right, B wrong", "A wrong, B right"]


def test_metrics_at_the_end_are_the_last_finite_ones():
    a = {"train/reward": ([1, 2, 3], [0.25, 0.5, math.nan]), "perf/s": ([1], [2.0])}
    b = {"train/reward": ([1, 2], [0.25, 0.75]), "eval/accuracy": ([2], [1.0])}
    table = metric_table(a, b)
    assert table.header == ["", "A, step 3", "B, step 2", "B \u2212 A"]
    assert table.rows == [
        ["train/reward", "0.5", "0.75", "+0.25"],
        ["eval/accuracy", "-", "1", "-"],
        ["perf/s", "2", "-", "-"],
    ]
