"""Losses and sampling on a device that is no CPU: results, and that nothing waits for it."""

from __future__ import annotations

import json
from functools import cache

import pytest
from fork_server import run_program
from objectives.every_loss import LOSSES

# transformers looks whether rows are packed, unless it is given a mask, as packed rows are.
THEIRS = "find_packed_sequence_indices"


QUICK = ("GRPOLoss", "SFTLoss")
# Each takes seconds.
REST = tuple(name for name in LOSSES if name not in QUICK)


@cache
def results_of(losses):
    done = run_program("from objectives.waits_worker import main; main()", *losses)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])  # above it stands what was logged


@pytest.mark.parametrize("layout", ["padded", "shared"])
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.full) for name in REST)]
)
def test_forward_and_backward_of_a_loss_never_wait_for_the_device(name, layout):
    result = results_of(QUICK if name in QUICK else REST)[f"{name} {layout}"]
    assert "error" not in result, result
    assert result["device"] == pytest.approx(result["cpu"], rel=1e-4)
    ours = [wait for wait in result["waits"] if THEIRS not in wait]
    assert ours == []
    assert (layout == "padded") == bool(result["waits"])


@pytest.mark.parametrize("name", ["update", "greedy", "native", "penalty", "draws", "cut draws"])
def test_updates_and_sampling_never_mix_devices(name):
    result = results_of(QUICK)[name]
    assert "error" not in result, result
    assert result["device"] == pytest.approx(result["cpu"], rel=1e-3, abs=1e-4)


def test_a_policy_that_has_diverged_is_refused_at_the_end_of_the_update():
    """On the CPU the loss refuses it at once; here that would wait in every micro-batch."""
    found = results_of(QUICK)
    assert found["diverged"]["error"].startswith("DataError: loss and gradients are NaN")
