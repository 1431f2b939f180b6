"""The channel in a Ray actor: the contract of channels, over processes, and what may die."""

from __future__ import annotations

import pickle
import queue
import time

import pytest
from collectors.channel_helper import ResettableServer, write
from conformance.channels import PATIENCE_S, ChannelConformance, delivery, ids_of

from torchrl_llm.collectors.transport import ray_channel as ray_transport
from torchrl_llm.collectors.transport.ray_channel import RayChannel
from torchrl_llm.errors import WorkerError

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


@pytest.fixture(scope="module")
def fresh(cluster):
    """Empty channels, one after the other in one actor."""
    patch = pytest.MonkeyPatch()
    patch.setattr(ray_transport, "_Server", ResettableServer)
    # Bytes do not keep an actor alive; the handle has to stay.
    kept = RayChannel(1)
    first = pickle.dumps(kept)
    patch.undo()

    def factory(max_size):
        kept._call("reset", max_size)
        return pickle.loads(first)

    yield factory
    kept.shutdown()


class TestRayChannel(ChannelConformance):
    @pytest.fixture
    def channel_factory(self, fresh):
        return fresh


def test_processes_write_and_the_learner_reads(fresh):
    channel = fresh(2)
    writers = [ray.remote(num_cpus=0)(write).remote(channel, name, 5) for name in ("a", "b")]
    got = [channel.get(timeout_s=120) for _ in range(10)]
    assert ray.get(writers, timeout=120) == [5, 5]
    for name in ("a", "b"):
        assert [ids_of(d)[0] for d in got if d.worker == name] == [[i] for i in range(5)]


def test_an_answer_that_the_reader_never_got_is_given_again(fresh):
    channel = fresh(4)
    for i in range(3):
        channel.put(delivery(sequence=i), timeout_s=PATIENCE_S)
    restarted = pickle.loads(pickle.dumps(channel))
    assert channel.get(timeout_s=PATIENCE_S).sequence == 0
    assert channel.get(timeout_s=PATIENCE_S).sequence == 1
    # The reader that comes back cannot know whether it had number 1; the accounts can.
    assert [restarted.get(timeout_s=PATIENCE_S).sequence for _ in range(2)] == [1, 2]
    with pytest.raises(queue.Empty):
        restarted.get(timeout_s=0)


def test_a_channel_that_is_gone_is_an_error_within_its_limit():
    channel = RayChannel(1, timeout_s=5)
    channel.shutdown()
    start = time.monotonic()
    with pytest.raises(WorkerError, match="RayChannel"):
        channel.get(timeout_s=1)
    with pytest.raises(WorkerError, match="RayChannel"):
        channel.put(delivery(), timeout_s=1)
    with pytest.raises(WorkerError, match="RayChannel"):
        channel.claim("a", 1, timeout_s=1)
    assert time.monotonic() - start < 30
