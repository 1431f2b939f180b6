"""What runs inside the actor of a RayLLMCollector, here in this process."""

from __future__ import annotations

import threading

import pytest
import torch
from collectors.collecting import Failing, make_env

from torchrl_llm.collectors import LLMCollector
from torchrl_llm.collectors.ray_actor import CollectorHost, PackedBatch
from torchrl_llm.collectors.transport import LocalChannel
from torchrl_llm.data.replay_buffers import ReplayBuffer
from torchrl_llm.data.rollouts import split_rollout
from torchrl_llm.envs import ids


@pytest.fixture(autouse=True)
def _own_number(monkeypatch):
    monkeypatch.setattr(ids, "_numbers", [])


def _host(policy, channel=None, **options):
    options = {"policy": policy, "dialog_turns_per_batch": 6, **options}
    return CollectorHost(make_env(2), options, number=7, channel=channel, name="a")


@pytest.mark.parametrize("flatten", [False, True])
def test_a_batch_arrives_in_its_shape(policy, flatten):
    collector = LLMCollector(
        make_env(2), policy=policy, dialog_turns_per_batch=6, flatten_data=flatten
    )
    batch = next(iter(collector))
    packed = PackedBatch.of(batch)
    arrived = packed.unpack()
    assert arrived.batch_size == batch.batch_size == ((6,) if flatten else (2, 3))
    assert set(arrived.keys(True)) >= {("tokens", "full"), ("next", "reward"), "query"}
    assert torch.equal(arrived["turn"], batch["turn"])
    assert torch.equal(arrived["next", "done"], batch["next", "done"])
    pairs = zip(split_rollout(arrived).unbind(0), split_rollout(batch).unbind(0), strict=True)
    for row, sent in pairs:
        assert torch.equal(row["tokens", "full"], sent["tokens", "full"])
        assert row["query"] == sent["query"]
        assert row["history", "full"].content == sent["history", "full"].content


def test_it_hands_out_batches_until_its_turns_are_used_up(policy):
    host = _host(policy, total_dialog_turns=12)
    batches = [host.next() for _ in range(3)]
    assert [there for there, _ in batches] == [True, True, False]
    assert [packed.shape for _, packed in batches[:2]] == [(2, 3), (2, 3)]
    assert batches[2][1] is None
    # Its ids are those of process number 7.
    rows = batches[0][1].unpack()
    assert {i >> 47 for i in rows["traj_id"].flatten().tolist()} == {7}


def test_a_run_writes_where_it_was_told_to_and_ends(policy):
    buffer = ReplayBuffer()
    host = _host(policy, replay_buffer=buffer, total_dialog_turns=12)
    assert host.run() == "it has collected all its turns"
    assert len(buffer) == 12
    stopped = _host(policy, replay_buffer=ReplayBuffer())
    stopped.stop()
    assert stopped.run() == "it was stopped"


def test_with_a_channel_it_is_a_worker(policy):
    channel = LocalChannel()
    host = _host(policy, channel)
    channel.grant(6)
    thread = threading.Thread(target=host.run)
    thread.start()
    delivery = channel.get(timeout_s=30)
    host.load_weights(None, 4, "wait")
    host.stop()
    thread.join(30)
    assert not thread.is_alive()
    assert (delivery.worker, delivery.claimed, delivery.rows.num_rows) == ("a", 6, 6)
    assert host.collector.policy_version == 4
    host.close()
    assert host.collector.env.is_closed


def test_an_error_of_the_policy_is_that_of_the_call(policy):
    with pytest.raises(ValueError, match="the policy is broken"):
        _host(Failing(policy, 0)).next()
