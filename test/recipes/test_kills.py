"""A run that is killed at any moment, and goes on, is the run that was left alone, bit for bit."""

from __future__ import annotations

import pytest
from recipes.kill_helper import SMALL, assert_same_run, run_killed, run_to_the_end

LONG = ["train.max_steps=16", "checkpoint.interval=1", "checkpoint.max_shard_size=500KB"]
SHORT = ["train.max_steps=4", "checkpoint.interval=1"]


def check(folder, settings, **how):
    overrides = [*SMALL, *settings]
    seconds = run_to_the_end(folder / "whole", overrides)
    places = run_killed(folder / "cut", overrides, seconds=seconds, **how)
    assert_same_run(folder / "whole", folder / "cut")
    return places


@pytest.mark.full
@pytest.mark.timeout(900)
def test_twenty_kills_at_random(tmp_path):
    places = check(tmp_path, LONG, kills=20, seed=15)
    assert any(saving for _, saving in places), places
    assert len({step for step, _ in places}) > 4, places


def test_two_kills(tmp_path):
    check(tmp_path, SHORT, kills=2, seed=1)
