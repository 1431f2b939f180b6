"""Compares two runs: the figures of both, and the prompts whose answers changed.

:mod:`torchrl_llm.evaluation.report.evaluation_folder` reads an evaluation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from torchrl_llm.evaluation.report.evaluation_folder import (
    EvaluationRecord,
    Records,
    answer_rows,
    figure_names,
    figure_text,
)
from torchrl_llm.evaluation.report.page import Series, Table, ordered_metrics
from torchrl_llm.evaluation.report.row_facts import RowFacts, prompt_of

_ONE = ("A right, B wrong", "A wrong, B right", "both wrong", "both right")
_SEVERAL = ("A more often right", "B more often right", "equally often right")


class Pair(NamedTuple):
    """The answers of two evaluations to one prompt.

    Attributes:
        task: task of the prompt.
        a: answers of A, as records.
        b: answers of B.
        change: which of the two evaluations is correct; an answer without a valid reward is wrong.
    """

    task: str
    a: Records
    b: Records
    change: str


def pair_answers(a: EvaluationRecord, b: EvaluationRecord) -> tuple[list[Pair], list[str]]:
    """Pair prompts that both evaluations answered, changed prompts first; also return notices.

    Prompts are the same if their task and text are.

    Args:
        a: the first evaluation.
        b: the second.
    """
    known, other = _by_text(a), _by_text(b)
    shared = [(key[0], known[key], other[key]) for key in known if key in other]
    several = any(len(answers) > 1 for _, *both in shared for answers in both)
    pairs = [Pair(*each, _change(*each[1:], several)) for each in shared]
    notices = []
    for name, own, found in (("A", known, other), ("B", other, known)):
        for task, count in sorted(Counter(key[0] for key in own.keys() - found.keys()).items()):
            told = f"Only {name} answered {count:,} of the prompts of {task}"
            notices.append(f"{told}; they are not compared.")
    return sorted(pairs, key=lambda pair: (*_ONE, *_SEVERAL).index(pair.change)), notices


def _by_text(record: EvaluationRecord) -> dict[tuple[str, str, int], Records]:
    """Return answers by task, text of the prompt, and how often the text occurred before."""
    found: dict[tuple[str, str, int], Records] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for (task, number), answers in record.prompts.items():
        text = (task, prompt_of(answers[0]) or str(number))
        found[(*text, seen[text])] = answers
        seen[text] += 1
    return found


def _change(a: Records, b: Records, several: bool) -> str:
    first, second = (fmean(bool(r["success"] and r["valid"]) for r in each) for each in (a, b))
    if several:
        return _SEVERAL[0 if first > second else 1 if first < second else 2]
    return _ONE[[(1, 0), (0, 1), (0, 0), (1, 1)].index((first, second))]


def change_table(pairs: Sequence[Pair]) -> Table:
    """Count the prompts that changed in each task, with the probability by chance.

    Args:
        pairs: at least one.
    """
    tasks = list(dict.fromkeys(pair.task for pair in pairs))
    names, test = (_ONE, "McNemar") if pairs[0].change in _ONE else (_SEVERAL, "sign")
    counts = [
        [sum(pair[::3] == (task, name) for pair in pairs) for task in tasks] for name in names
    ]
    rows = [[name, *map(str, line)] for name, line in zip(names, counts, strict=True)]
    chance = [f"{mcnemar_p(*each):.3g}" for each in zip(*counts[:2], strict=True)]
    rows.append([f"p, exact {test} test", *chance])
    return Table("Answers to the same prompts", ["prompts", *tasks], rows)


def mcnemar_p(a_only: int, b_only: int) -> float:
    """Compute the two-sided p-value of the exact McNemar test (the sign test).

    It is the probability that fair coins divide the changed prompts at least as unevenly.

    Args:
        a_only: number of prompts on which only A is right.
        b_only: number of prompts on which only B is right.

    Example:
        >>> mcnemar_p(0, 5), mcnemar_p(1, 9), mcnemar_p(3, 3)
        (0.0625, 0.021484375, 1.0)
    """
    count = a_only + b_only
    tail = sum(math.comb(count, k) for k in range(min(a_only, b_only) + 1))
    return min(1.0, 2 * tail / 2**count)


def paired_rows(pairs: Sequence[Pair], runs: Sequence[str], most: int) -> list[RowFacts]:
    """Return the answers of both evaluations, prompt by prompt.

    Args:
        pairs: result of :func:`pair_answers`.
        runs: labels of A and B on the page.
        most: largest number of rows; prompts are never split.
    """
    groups = (
        [
            ({"run": run, "change": pair.change, "task": pair.task}, records)
            for run, records in zip(runs, (pair.a, pair.b), strict=True)
        ]
        for pair in pairs
    )
    return answer_rows(groups, most)


def figure_table(a: EvaluationRecord, b: EvaluationRecord) -> Table:
    """Make a table of the figures of both evaluations, for the tasks that both have.

    Args:
        a: the first evaluation.
        b: the second.
    """
    rows = []
    tasks = [task for task in a.figures if task in b.figures]
    for task in tasks:
        both = (a.figures[task], b.figures[task])
        for name in figure_names({"A": both[0], "B": both[1]}):
            texts = [figure_text(name, each) or "-" for each in both]
            more = both[1].get(name, math.nan) - both[0].get(name, math.nan)
            told = f"{task} {name}" if len(tasks) > 1 else name
            rows.append([told, *texts, _number(more, "+")])
    return Table("Figures", ["", "A", "B", "B \u2212 A"], rows)


def metric_table(a: Mapping[str, Series], b: Mapping[str, Series]) -> Table:
    """Make a table of the last finite value of each metric in both runs.

    Args:
        a: metrics of the first run.
        b: metrics of the second run.
    """
    rows = []
    for name in ordered_metrics((a, b)):
        first, second = (_last(each.get(name, ((), ()))) for each in (a, b))
        rows.append([name, _number(first), _number(second), _number(second - first, "+")])
    ends = [max(series[0][-1] for series in each.values()) for each in (a, b)]
    heads = [f"{name}, step {end}" for name, end in zip("AB", ends, strict=True)]
    return Table("Metrics at the end", ["", *heads, "B \u2212 A"], rows)


def _last(series: Series) -> float:
    return next((v for v in reversed(series[1]) if math.isfinite(v)), math.nan)


def _number(value: float, sign: str = "") -> str:
    return f"{value:{sign}.4g}" if math.isfinite(value) else "-"
