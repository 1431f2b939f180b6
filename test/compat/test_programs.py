"""What a TorchRL user's program does here: each difference is told in the documentation."""

from __future__ import annotations

import pytest
from compat import differences

# How many programs there are; grows with ``programs/``.
PROGRAMS = 743


@pytest.mark.full
def test_every_difference_from_torchrl_is_in_the_table_and_every_row_is_true(tmp_path):
    theirs, ours = differences.measure(tmp_path)
    if "absent" in theirs:
        pytest.skip(f"TorchRL's LLM parts cannot be imported: {theirs['absent']}")
    assert len(theirs["programs"]) >= PROGRAMS
    found = differences.of_programs(theirs["programs"], ours["programs"])
    found += differences.of_signatures(theirs["api"], ours["api"])
    rows = differences.table()
    undecided = [d for d in found if not any(row.explains(d) for row in rows)]
    assert not undecided, "\n".join(f"{d.kind} {d.id}: {d.told}" for d in undecided)
    stale = {f"{row.file}: {row.what}": row.stale(found) for row in rows if row.stale(found)}
    assert not stale, "rows that explain nothing: " + repr(stale)
