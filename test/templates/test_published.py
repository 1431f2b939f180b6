"""Every template that ``gather.py`` found: nothing goes wrong without a word.

    TORCHRL_LLM_TEMPLATES=FOLDER pytest -m published test/templates -s

prints a table by family.
"""

from __future__ import annotations

import os
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from templates.trial import Trial, family_of

pytestmark = pytest.mark.published
COLUMNS = ("steps", "continued", "forked, needed", "forked, needless", "calls", "calls read")
COLUMNS += ("thoughts", "thoughts read", "texts", "texts read")


@pytest.fixture(scope="module")
def reports():
    folder = os.environ.get("TORCHRL_LLM_TEMPLATES")
    found = sorted(Path(folder).glob("*.jinja")) if folder else []
    if not found:
        pytest.skip(
            "no templates: run test/templates/gather.py FOLDER and set TORCHRL_LLM_TEMPLATES=FOLDER"
        )
    return [Trial(path.stem, path.read_text()).run() for path in found]


def table(reports) -> str:
    """One line for each family, and one for all."""
    lines: dict[str, Counter] = defaultdict(Counter)
    for report in reports:
        for family in (family_of(report.name), "ALL"):
            line = lines[family]
            line.update(report.counts)
            line["templates"] += 1
            line["refuse chats"] += any(r.startswith("chat:") for r in report.refused)
            line["refuse tools"] += any(r.startswith("tools:") for r in report.refused)
            line["silent"] += len(report.faults)
    columns = ("templates", *COLUMNS, "refuse chats", "refuse tools", "silent")
    rows = [("family", *columns)]
    rows += [(name, *(str(line[c]) for c in columns)) for name, line in sorted(lines.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows
    )


def test_templates_of_others_are_continued_and_read(reports):
    faults = [f"{r.name}: {fault[:300]}" for r in reports for fault in r.faults]
    sys.stdout.write("\n".join(["", table(reports), *faults, ""]))
    steps = sum(r.counts["steps"] for r in reports)
    wrong = sum("continued as" in fault or "a fork that" in fault for fault in faults)
    assert wrong <= 0.005 * steps
    assert sum(r.counts["forked, needless"] for r in reports) <= 0.003 * steps
    assert not any(r.counts["forked, needless"] for r in reports if family_of(r.name) == "glm")
    for what in ("calls", "thoughts", "texts"):
        told, read = (sum(r.counts[key] for r in reports) for key in (what, f"{what} read"))
        assert read == told > 200
    assert not faults
