"""A worker that fetches its weights itself, from a learner that only leaves them somewhere."""

import threading
import time

import pytest
import torch
from collectors.collecting import make_env, make_policy

from torchrl_llm.collectors import LLMCollector
from torchrl_llm.collectors.collecting_worker import CollectorWorker, WeightFollower
from torchrl_llm.collectors.transport import LocalChannel
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.errors import ConfigError, WeightUpdateError, WorkerError
from torchrl_llm.weights.fingerprint import weights_digest
from torchrl_llm.weights.weight_source import TensorSource

WAIT_S = 20.0


class Shelf:
    """Where a learner leaves weights."""

    def __init__(self, policy):
        names = dict(policy.backend.module.state_dict())
        self.seeds = {name: value.clone() for name, value in names.items()}
        self.held = self.error = None

    def leave(self, version, scale, *, digest=None):
        weights = {name: value * scale for name, value in self.seeds.items()}
        digest = weights_digest(weights) if digest is None else digest
        self.held = (version, TensorSource(weights, digest=digest))
        return weights

    def newest(self):
        if self.error is not None:
            raise self.error
        return self.held


@pytest.fixture
def parts(tokenizer):
    policy = make_policy(tokenizer)
    collector = LLMCollector(
        make_env(2, 1), policy=policy, dialog_turns_per_batch=2, yield_completed_trajectories=True
    )
    channel = LocalChannel()
    worker = CollectorWorker(collector, channel, name="a")
    shelf = Shelf(policy)
    yield policy, channel, worker, shelf
    worker.stop()
    collector.shutdown()


def versions_of(delivery):
    rows = read_rows(delivery.rows.unpack(), ("trace", "policy_version"))
    return sorted({v for row in rows for v in row.tolist() if v >= 0})


def test_each_batch_is_begun_with_the_newest_weights_and_proves_them(parts):
    policy, channel, worker, shelf = parts
    first = shelf.leave(3, 2.0)
    follower = WeightFollower(worker, shelf.newest)
    follower.wait(timeout_s=WAIT_S)
    assert follower.version == 3
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    channel.grant(2)
    one = channel.get(timeout_s=WAIT_S)
    second = shelf.leave(4, 3.0)
    channel.grant(2)
    two = channel.get(timeout_s=WAIT_S)
    worker.stop()
    thread.join(WAIT_S)
    assert (versions_of(one), dict(one.digests)) == ([3], {3: weights_digest(first)})
    assert (versions_of(two), dict(two.digests)) == ([4], {4: weights_digest(second)})
    assert torch.equal(policy.backend.module.head, second["head"])


def test_a_version_that_is_there_already_is_not_loaded_again_unless_it_is_another(parts):
    policy, _, worker, shelf = parts
    follower = WeightFollower(worker, shelf.newest)
    assert not follower.refresh()
    shelf.leave(3, 2.0)
    assert [follower.refresh(), follower.refresh()] == [True, False]
    # A learner that came back from its checkpoint makes version 3 anew.
    again = shelf.leave(3, 5.0)
    assert follower.refresh()
    assert torch.equal(policy.backend.module.head, again["head"])


def test_weights_that_do_not_arrive_leave_the_old_ones_and_are_tried_again(parts):
    policy, _, worker, shelf = parts
    follower = WeightFollower(worker, shelf.newest)
    old = shelf.leave(1, 2.0)
    follower.refresh()
    shelf.leave(2, 3.0, digest="0" * 32)
    assert not follower.refresh()
    assert (follower.version, policy.policy_version) == (1, 1)
    assert torch.equal(policy.backend.module.head, old["head"])
    shelf.error = WeightUpdateError("half of a name")
    assert not follower.refresh()
    shelf.error = None
    shelf.leave(2, 3.0)
    assert follower.refresh()
    assert (follower.version, policy.policy_version) == (2, 2)


def test_without_a_learner_the_wait_ends_in_time(parts):
    _, _, worker, shelf = parts
    follower = WeightFollower(worker, shelf.newest)
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"no learner has published weights for 0.2 s"):
        follower.wait(timeout_s=0.2)
    assert time.monotonic() - started < 5
    with pytest.raises(ConfigError, match="before each batch"):
        WeightFollower(worker, shelf.newest)


def test_a_thread_takes_weights_between_batches_where_they_may_come_in_flight(parts):
    _, _, worker, shelf = parts
    follower = WeightFollower(worker, shelf.newest, in_flight="abort")
    follower.start()
    shelf.leave(1, 2.0)
    deadline = time.monotonic() + WAIT_S
    while follower.version is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert follower.version == 1
    shelf.error = WorkerError("away")
    time.sleep(0.3)
    shelf.error = None
    shelf.leave(2, 2.5)
    while follower.version == 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    follower.shutdown()
    assert follower.version == 2
