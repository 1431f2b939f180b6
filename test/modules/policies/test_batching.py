"""Requests of several threads, run together."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
from waiting import in_threads

from torchrl_llm.errors import BackendError, ConfigError
from torchrl_llm.modules.policies.batching import RequestBatcher, make_batcher


class Recorder:
    """Doubles numbers, remembers its batches, and fails on the number 13."""

    def __init__(self, *, slow_s=0.0):
        self.batches = []
        self.slow_s = slow_s

    def __call__(self, items, key):
        self.batches.append((list(items), key))
        time.sleep(self.slow_s)
        if 13 in items:
            raise ValueError("thirteen")
        return [2 * x for x in items]


def test_requests_wait_for_company_and_run_in_one_call():
    run = Recorder()
    batcher = RequestBatcher(min_batch_size=6, timeout_s=15)
    calls = [lambda k=k: batcher.submit([k, k + 20], key="a", run=run) for k in (1, 2, 3)]
    assert in_threads(*calls) == [[2, 42], [4, 44], [6, 46]]
    assert len(run.batches) == 1


def test_defect_22_a_lone_request_runs_when_its_time_is_up():
    run = Recorder()
    batcher = RequestBatcher(min_batch_size=2, timeout_s=0.2)
    start = time.monotonic()
    assert batcher.submit([4], key="a", run=run) == [8]
    assert 0.15 < time.monotonic() - start < 5


def test_defect_23_a_failing_request_does_not_reach_others_or_later_ones():
    run = Recorder()
    batcher = RequestBatcher(min_batch_size=3, timeout_s=15)
    calls = [lambda k=k: batcher.submit([k], key="a", run=run) for k in (1, 13, 3)]
    first, failed, last = in_threads(*calls)
    assert (first, last) == ([2], [6])
    assert isinstance(failed, ValueError)
    assert batcher.state()["queued_requests"] == 0
    batcher = RequestBatcher()
    with pytest.raises(ValueError, match="thirteen"):
        batcher.submit([13], key="a", run=run)
    assert batcher.submit([5], key="a", run=run) == [10]


def test_defect_24_answers_and_settings_stay_with_their_caller():
    run = Recorder()

    def scaled(items, key):
        run.batches.append((list(items), key))
        return [key * x for x in items]

    batcher = RequestBatcher(min_batch_size=4, timeout_s=0.05)
    calls = [
        lambda k=k: [batcher.submit([k, -k], key=k % 3, run=scaled) for _ in range(20)]
        for k in range(1, 9)
    ]
    for k, results in enumerate(in_threads(*calls), start=1):
        assert results == [[k * (k % 3), -k * (k % 3)]] * 20
    assert all(len({k % 3 for k in map(abs, items)}) == 1 for items, _ in run.batches)


def test_batches_stay_below_the_maximum_unless_one_request_is_larger():
    run = Recorder()
    batcher = RequestBatcher(min_batch_size=2, max_batch_size=3, timeout_s=0.1)
    calls = [lambda k=k: batcher.submit([k, k], key="a", run=run) for k in range(4)]
    in_threads(*calls, lambda: batcher.submit([9] * 5, key="a", run=run))
    assert sorted(len(items) for items, _ in run.batches) == [2, 2, 2, 2, 5]


def test_requests_that_come_while_a_batch_runs_are_the_next_batch():
    run = Recorder(slow_s=0.2)
    batcher = RequestBatcher(timeout_s=5)
    results = in_threads(*[lambda k=k: batcher.submit([k], key="a", run=run) for k in range(6)])
    assert results == [[2 * k] for k in range(6)]
    assert len(run.batches) <= 3


def test_a_group_that_is_complete_does_not_wait_for_an_older_one():
    run = Recorder()
    batcher = RequestBatcher(min_batch_size=2, timeout_s=60)
    errors = []

    def ask():
        try:
            batcher.submit([1], key="lone", run=run)
        except BackendError as error:
            errors.append(error)

    lone = threading.Thread(target=ask)
    lone.start()
    while not batcher.state()["queued_requests"]:
        time.sleep(0.001)
    assert batcher.submit([1, 2], key="pair", run=run) == [2, 4]
    # The older one still waits for its time, and for no one's batch.
    assert run.batches == [([1, 2], "pair")]
    assert batcher.state()["queued_requests"] == 1
    batcher.cleanup()
    lone.join(20)
    assert len(errors) == 1


@pytest.mark.parametrize("flush", [True, False])
def test_cleanup_answers_or_releases_those_who_wait(flush):
    run = Recorder()
    batcher = RequestBatcher(min_batch_size=9, timeout_s=15)

    def clean():
        while batcher.state()["queued_requests"] < 2:
            time.sleep(0.01)
        batcher.cleanup(flush=flush)

    calls = [lambda k=k: batcher.submit([k], key="a", run=run) for k in (1, 2)]
    first, second, _ = in_threads(*calls, clean)
    if flush:
        assert (first, second) == ([2], [4])
    else:
        assert isinstance(first, BackendError)
        assert isinstance(second, BackendError)
    assert batcher.state()["queued_requests"] == 0


def test_an_interrupt_of_the_running_thread_releases_the_others():
    def interrupted(items, key):
        raise KeyboardInterrupt

    batcher = RequestBatcher(min_batch_size=2, timeout_s=15)
    calls = [partial(batcher.submit, [index], key="a", run=interrupted) for index in range(2)]
    assert set(map(type, in_threads(*calls))) == {KeyboardInterrupt, BackendError}


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match="below"):
        RequestBatcher(min_batch_size=4, max_batch_size=2)
    with pytest.raises(ConfigError, match="no effect"):
        make_batcher(False, 2, None, 1.0)
    assert make_batcher(None, None, None, 1.0) is None
    assert make_batcher(None, 2, None, 1.0).min_batch_size == 2
