"""Gates that are closed for a moment."""

import threading

import pytest
from waiting import wait_until

from torchrl_llm._threads import PauseGate


def test_a_pause_that_is_interrupted_while_it_waits_leaves_the_gate_open(monkeypatch):
    gate, entered, leave = PauseGate(), threading.Event(), threading.Event()

    def work():
        with gate.work():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(10)

    def interrupted(timeout=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gate._changed, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt), gate.pause():
            pass
    leave.set()
    thread.join(10)
    stop, found = threading.Event(), []
    stop.set()  # do not wait for ever where the gate stayed closed

    def again():
        with gate.work(stop) as enters:
            found.append(enters)

    other = threading.Thread(target=again)
    other.start()
    other.join(10)
    assert found == [True]


def test_work_that_comes_after_who_waits_to_be_alone_waits_too():
    gate, entered, leave, was_alone = PauseGate(), threading.Event(), threading.Event(), []

    def work():
        with gate.work():
            entered.set()
            leave.wait(10)

    def pause():
        with gate.pause() as is_alone:
            was_alone.append(is_alone)

    threads = [threading.Thread(target=each) for each in (work, pause)]
    threads[0].start()
    assert entered.wait(10)
    threads[1].start()
    wait_until(lambda: gate._pausers)
    with gate.work(timeout_s=0.1) as enters:
        assert not enters
    leave.set()
    for thread in threads:
        thread.join(10)
    assert was_alone == [True]
    with gate.work(timeout_s=0.1) as enters:
        assert enters


def test_a_pause_within_a_pause_lets_nobody_in_when_it_ends():
    gate, found = PauseGate(), []

    def others():
        with gate.pause(timeout_s=0.1) as is_alone:
            found.append(is_alone)
        with gate.work(timeout_s=0.1) as enters:
            found.append(enters)

    with gate.pause():
        with gate.pause() as is_alone, gate.work() as enters:
            assert (is_alone, enters) == (True, True)
        thread = threading.Thread(target=others)
        thread.start()
        thread.join(10)
    assert found == [False, False]
    others()
    assert found[2:] == [True, True]
