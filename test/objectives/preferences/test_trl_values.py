"""What TRL's trainers compute, under a Python that has TRL (``TORCHRL_LLM_TRL_PYTHON``)."""

import json
import os
import subprocess
from pathlib import Path

import pytest

PYTHON = os.environ.get("TORCHRL_LLM_TRL_PYTHON")
ROOT = Path(__file__).parents[3]


@pytest.mark.full
@pytest.mark.skipif(PYTHON is None, reason="TORCHRL_LLM_TRL_PYTHON names no Python with TRL")
@pytest.mark.timeout(600)
def test_values_and_gradients_are_those_of_trl():
    script = str(Path(__file__).with_name("trl_values.py"))
    done = subprocess.run(
        [PYTHON, script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 10
    for case in found:
        assert case["ours"] == pytest.approx(case["theirs"], rel=2e-6), case
        assert case["gradient"] < 2e-6, case
