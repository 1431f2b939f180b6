"""Losses and sampling on a device that is no CPU: results, and that nothing waits for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from objectives.every_loss import LOSSES

WORKER = Path(__file__).with_name("waits_worker.py")
# transformers looks whether rows are packed, unless it is given a mask, as packed rows are.
THEIRS = "find_packed_sequence_indices"


@pytest.fixture(scope="module")
def found():
    tests, root = WORKER.parents[1], WORKER.parents[2]
    path = os.pathsep.join(map(str, (tests, root)))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    # -P: the conftest that it imports is that of all tests.
    command = [sys.executable, "-P", str(WORKER)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])  # above it stands what was logged


@pytest.mark.parametrize("layout", ["padded", "shared"])
@pytest.mark.parametrize("name", LOSSES)
def test_forward_and_backward_of_a_loss_never_wait_for_the_device(found, name, layout):
    result = found[f"{name} {layout}"]
    assert "error" not in result, result
    assert result["device"] == pytest.approx(result["cpu"], rel=1e-4)
    ours = [wait for wait in result["waits"] if THEIRS not in wait]
    assert ours == []
    assert (layout == "padded") == bool(result["waits"])


@pytest.mark.parametrize("name", ["update", "greedy", "native", "penalty", "draws", "cut draws"])
def test_updates_and_sampling_never_mix_devices(found, name):
    result = found[name]
    assert "error" not in result, result
    assert result["device"] == pytest.approx(result["cpu"], rel=1e-3, abs=1e-4)


def test_a_policy_that_has_diverged_is_refused_at_the_end_of_the_update(found):
    """On the CPU the loss refuses it at once; here that would wait in every micro-batch."""
    assert found["diverged"]["error"].startswith("DataError: loss and gradients are NaN")
