"""Gates that are closed for a moment."""

from __future__ import annotations

import threading

import pytest

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
