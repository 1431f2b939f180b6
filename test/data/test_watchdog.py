"""Calls that may never return: ended, or told of, and none that returns in time is touched."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from torchrl_llm.data.watchdog import watching, with_limit


def forever():
    while True:
        pass


def test_a_call_that_does_not_return_is_ended_in_any_thread():
    begun, found = time.monotonic(), []

    def ended():
        with pytest.raises(TimeoutError, match=r"after 0\.3 s"):
            with_limit(forever, 0.3)
        found.append(True)

    ended()
    thread = threading.Thread(target=ended)
    thread.start()
    thread.join(60)
    assert found == [True, True]
    assert time.monotonic() - begun > 0.6


def test_what_returns_or_raises_about_when_it_would_be_ended_does_either():
    """Nothing is raised later, at another place."""
    results = []
    for number in range(12):
        pause = 0.2 + 0.01 * number  # the watch looks four times a second
        try:
            results.append(with_limit(lambda pause=pause: time.sleep(pause) or "whole", 0.24))
        except TimeoutError:
            results.append("ended")
    time.sleep(0.6)
    assert set(results) <= {"whole", "ended"}
    with pytest.raises(KeyError):
        with_limit(lambda: {}["a"], 10.0)


def test_a_call_that_swallows_every_error_is_ended_all_the_same():
    def stubborn():
        while True:
            with contextlib.suppress(Exception):
                forever()

    with pytest.raises(TimeoutError):
        with_limit(stubborn, 0.3)


def test_a_block_that_takes_long_is_told_of_as_often_as_wanted_and_a_short_one_never():
    told, done = [], threading.Event()

    def act():
        told.append(len(told))
        if len(told) == 3:
            done.set()
        return 0.1 if len(told) < 3 else None

    with watching(0.1, act):
        assert done.wait(60)
        time.sleep(0.6)
    assert told == [0, 1, 2]
    with watching(60.0, act):
        pass
    time.sleep(0.3)
    assert told == [0, 1, 2]
