"""The order of CUDA calls around a recording, and what is left after one that fails; no GPU."""

from __future__ import annotations

import gc
from contextlib import contextmanager

import pytest
import torch

from torchrl_llm.modules.backends import cuda_graph
from torchrl_llm.modules.backends.cuda_graph import GraphRecorder


class FakeCuda:
    """Writes down the calls; with ``fails`` a capture that was begun cannot be ended."""

    def __init__(self):
        self.log, self.current, self.fails = [], "outside", False
        self.state = "own"

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, "side"
        try:
            yield
        finally:
            self.current = before

    def graphsafe_get_state(self):
        return self.state

    def graphsafe_set_state(self, state):
        self.state = "own" if state == "own" else "another"

    def end_allocation(self, index, pool):
        assert (index, pool) == (0, "pool")
        if not self.fails:
            raise RuntimeError("not currently recording to mempool_id")
        self.log.append("allocator told")


@pytest.fixture
def fake(monkeypatch):
    cuda = FakeCuda()

    class Stream:
        def __init__(self, name="side"):
            self.name = name

        def wait_stream(self, other):
            cuda.log.append(f"{self.name} waits for {other.name}")

    class Graph:
        def capture_begin(self, pool, capture_error_mode):
            assert (pool, capture_error_mode) == ("pool", "thread_local")
            assert (cuda.current, cuda.state, gc.isenabled()) == ("side", "another", False)
            cuda.log.append("begin")

        def capture_end(self):
            assert cuda.current == "side"
            cuda.log.append("end")
            if cuda.fails:
                raise RuntimeError("operation failed due to a previous error during capture")

        def replay(self):
            cuda.log.append(f"replay on {cuda.current}")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("outside"))
    monkeypatch.setattr(torch.cuda, "stream", cuda.stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "default_generators", (cuda,))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", cuda.end_allocation, raising=False)
    return cuda


@pytest.fixture
def recorder(fake):
    made = GraphRecorder(torch.device("cpu", 0))
    assert fake.log == ["begin", "end"]  # the graph that keeps the pool
    fake.log.clear()
    return made


def test_a_step_runs_once_is_recorded_and_is_replayed_outside(fake, recorder):
    def step():
        fake.log.append(f"step on {fake.current}, draws from {fake.state}")
        return torch.ones(1)

    replay = recorder(step)
    steps = ["step on side, draws from own"]
    assert fake.log == [
        "side waits for outside", *steps, "begin", *steps, "end", "outside waits for side"
    ]  # fmt: skip
    fake.log.clear()
    assert replay() is replay()
    assert fake.log == ["replay on outside"] * 2


@pytest.mark.parametrize("error", [RuntimeError("no"), TypeError("no"), KeyboardInterrupt()])
@pytest.mark.parametrize("fails", [True, False])
def test_after_a_step_that_fails_the_device_is_fit_for_work(fake, recorder, error, fails):
    calls = []

    def step():
        calls.append(step)
        if len(calls) == 2:
            fake.fails = fails
            raise error
        return torch.ones(1)

    with pytest.raises(type(error)):
        recorder(step)
    told = ["allocator told"] if fails else []
    assert fake.log == [
        "side waits for outside", "begin", "end", *told, "outside waits for side"
    ]  # fmt: skip
    assert (fake.current, fake.state, gc.isenabled()) == ("outside", "own", True)
    assert not cuda_graph._RECORDING.locked()


def test_a_recording_that_cannot_be_ended_fails(fake, recorder):
    calls = []

    def step():
        calls.append(step)
        fake.fails = len(calls) == 2
        return torch.ones(1)

    with pytest.raises(RuntimeError, match="previous error during capture"):
        recorder(step)
    assert fake.log[-2:] == ["allocator told", "outside waits for side"]
    assert (fake.current, fake.state, gc.isenabled()) == ("outside", "own", True)


def test_a_recording_leaves_a_disabled_collector_disabled(fake, recorder):
    gc.disable()
    try:
        recorder(lambda: torch.ones(1))
        assert not gc.isenabled()
    finally:
        gc.enable()
