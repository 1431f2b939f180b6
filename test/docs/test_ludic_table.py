"""The table of Ludic's features names what there is, and says of the rest why not."""

from __future__ import annotations

import csv
import importlib
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "docs" / "source" / "ludic_features.csv"
with FILE.open(newline="", encoding="utf-8") as file:
    ROWS = list(csv.DictReader(file))
# Those of the requirements that are stated, or asked for, there.
WANTED = "1 3 5 6 7 8 10 11 12 13 14 15 16 17 18 19 20 23 24 25 27 28 29 30 32 33 34 36 37 38 40 43"
WANTED += " 44 45 46 47 48 51 52 53 54 56 57 59 60 61 63 64 66 67 68 69 70 71 72 73 74"


def test_every_row_is_there_once():
    assert [row["row"] for row in ROWS] == WANTED.split()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["feature"])
def test_each_name_can_be_imported_and_what_is_nowhere_has_a_reason(row):
    for path in row["where"].split():
        module, _, name = path.rpartition(".")
        try:
            found = importlib.import_module(path)
        except ModuleNotFoundError:
            found = getattr(importlib.import_module(module), name)
        assert found is not None
    assert row["where"] or len(row["how or why not"]) > 20
