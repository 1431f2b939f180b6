"""Rewards over rows: in order, in threads, with limits; whatever happens is an outcome."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from contextlib import suppress

import pytest
from sandbox.workers.remote_functions import behave

from torchrl_llm.errors import ConfigError
from torchrl_llm.rewards import reward_runner
from torchrl_llm.rewards.reward_runner import (
    Outcome,
    RemoteRewardError,
    call_reward,
    run_rows,
)
from torchrl_llm.sandbox.workers import WorkerPool


def halve(number):
    if number is None:
        raise SystemExit("no number")
    return number / 2


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_outcomes_are_in_row_order_and_errors_stay_in_their_row(num_threads):
    rows = [(number,) for number in (1, None, "x", 4)]
    outcomes = run_rows(halve, rows, num_threads=num_threads)
    assert [outcome.value for outcome in outcomes] == [0.5, None, None, 2.0]
    assert [outcome.error for outcome in outcomes] == ["", "SystemExit", "TypeError", ""]
    assert outcomes[1].message == "no number"
    assert all(outcome.seconds >= 0 for outcome in outcomes)


def test_no_rows_give_no_outcomes():
    assert run_rows(halve, []) == run_rows(halve, [], num_threads=2) == []


def test_rows_that_overstay_give_their_thread_up_and_every_other_row_runs():
    never = threading.Event()
    begun = []

    def work(row):
        begun.append(row)
        if row % 2:
            never.wait()
        return row

    start = time.monotonic()
    outcomes = run_rows(work, [(row,) for row in range(6)], num_threads=2, timeout=0.3)
    seconds = time.monotonic() - start
    never.set()
    assert [outcome.value for outcome in outcomes] == [0, None, 2, None, 4, None]
    assert [outcome.error for outcome in outcomes][1::2] == ["RewardTimeoutError"] * 3
    assert sorted(begun) == list(range(6))
    assert seconds < 3 * 0.3 + 2  # never longer than the limits, one after another, plus two


def test_the_limit_of_a_row_begins_with_the_row_not_with_the_batch():
    outcomes = run_rows(lambda _: time.sleep(0.05), [(0,)] * 30, num_threads=1, timeout=1.0)
    assert not any(outcome.error for outcome in outcomes)


def test_a_late_value_changes_nothing():
    gate = threading.Event()
    finished = threading.Event()

    def work():
        gate.wait()
        finished.set()
        return 1.0

    outcomes = run_rows(work, [()], num_threads=1, timeout=0.05)
    gate.set()
    assert finished.wait(20)
    assert outcomes[0].value is None


def test_threads_run_rows_at_the_same_time():
    barrier = threading.Barrier(4, timeout=20)
    outcomes = run_rows(barrier.wait, [()] * 4, num_threads=4)
    assert sorted(outcome.value for outcome in outcomes) == [0, 1, 2, 3]


def test_an_exception_without_a_text_and_one_of_another_process_are_named():
    class Mute(Exception):
        def __str__(self):
            raise ValueError

    class Leaves(Exception):
        def __str__(self):
            raise SystemExit

    assert Outcome.failed(Mute()).error == "Mute"

    def leave():
        raise Leaves

    for num_threads in (0, 1):
        (outcome,) = run_rows(leave, [()], num_threads=num_threads)
        assert (outcome.error, outcome.message) == ("Leaves", "")
    frames = [("reward.py", 1, "f")]
    remote = Outcome.failed(RemoteRewardError("ZeroDivisionError", "by zero", frames))
    assert remote.failure[:3] == ("ZeroDivisionError", "by zero", "reward.py:1, in f")
    assert remote.failure.traceback == (
        'Traceback (most recent call last):\n  File "reward.py", line 1, in f\n'
        "ZeroDivisionError: by zero"
    )


def test_what_an_exception_says_is_kept_short_and_can_be_stored():
    assert Outcome.failed(ValueError("x" * 10_000_000)).message == "x" * 1997 + "..."
    assert Outcome.failed(OSError("no file \udcff")).message == "no file ?"
    assert Outcome.failed(OSError("no file \udcff")).failure.traceback == "OSError: no file ?"
    told = Outcome.failed(ValueError("x" * 10_000_000)).failure.traceback
    assert told == f"ValueError: {'x' * 1985}..."


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"timeout": 1.0}, "needs threads or processes"),
        ({"timeout": 0, "num_threads": 1}, "above 0 seconds, got 0"),
        ({"num_threads": -1}, "must not be negative"),
    ],
)
def test_impossible_limits_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        run_rows(halve, [(1,)], **settings)


NOT_EXCEPTIONS = [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError]


def raise_it(kind):
    raise kind("given up")


@pytest.mark.parametrize("num_threads", [0, 2])
def test_whatever_a_score_raises_is_data_in_this_thread_and_in_others(num_threads):
    rows = [(kind,) for kind in NOT_EXCEPTIONS]
    outcomes = run_rows(raise_it, rows, num_threads=num_threads)
    assert [outcome.error for outcome in outcomes] == [kind.__name__ for kind in NOT_EXCEPTIONS]
    assert {outcome.message for outcome in outcomes} == {"given up"}


def test_whatever_a_score_raises_in_a_process_is_data():
    pool = WorkerPool(behave, num_workers=1)
    rows = [(pool, "raise_this", kind) for kind in NOT_EXCEPTIONS]
    try:
        outcomes = run_rows(call_reward, rows, num_threads=1)
    finally:
        pool.close()
    assert [outcome.error for outcome in outcomes] == [kind.__name__ for kind in NOT_EXCEPTIONS]


def swallows_everything():
    with suppress(BaseException):
        signal.raise_signal(signal.SIGINT)
    return 1.0


@pytest.mark.parametrize("score", [lambda: signal.raise_signal(signal.SIGINT), swallows_everything])
def test_ctrl_c_ends_the_rows_also_where_a_score_swallows_it(score):
    handler, begun = signal.getsignal(signal.SIGINT), []

    def counted():
        begun.append(True)
        return score()

    with pytest.raises(KeyboardInterrupt):
        run_rows(counted, [()] * 3)
    assert len(begun) == 1
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_signal_that_only_asks_for_a_stop_disturbs_no_row():
    asked = []
    before = signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    try:
        outcomes = run_rows(lambda: signal.raise_signal(signal.SIGTERM), [()] * 2)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not any(outcome.error for outcome in outcomes)
    assert len(asked) == 2


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_reward_that_does_not_return_is_told_of_once_and_a_fast_one_never(
    num_threads, monkeypatch
):
    said, release = [], threading.Event()

    def warning(text):
        said.append(text)
        release.set()

    def waits(number):
        if number == 3:
            release.wait(60)
            time.sleep(0.6)
        return number

    monkeypatch.setattr(reward_runner, "SLOW_S", 0.2)
    monkeypatch.setattr(reward_runner.logger, "warning", warning)
    outcomes = run_rows(waits, [(n,) for n in range(5)], num_threads=num_threads)
    assert [outcome.value for outcome in outcomes] == list(range(5))
    assert len(said) == 1
    assert "waits has been at answer 3 of its batch for 0.2 s, and has no time limit" in said[0]
    assert "reward.components.NAME.timeout" in said[0]
    # Many answers that take less each, and together more.
    run_rows(lambda number: time.sleep(0.05), [(n,) for n in range(12)], num_threads=num_threads)
    assert len(said) == 1
