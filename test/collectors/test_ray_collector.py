"""RayLLMCollector in real actors: same batches, weights, and what becomes of the killed."""

from __future__ import annotations

import os
import queue
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import pytest
import torch
from collectors.ray_helper import (
    failing_policy,
    make_env,
    model_policy,
    slow_policy,
)
from waiting import wait_until

from torchrl_llm.collectors import ChannelCollector, LLMCollector, RayLLMCollector
from torchrl_llm.collectors.staleness import Pacer, StalenessRule
from torchrl_llm.collectors.transport import RayChannel
from torchrl_llm.data.replay_buffers import ReplayBuffer
from torchrl_llm.data.rollouts import sampled_tokens, split_rollout
from torchrl_llm.errors import ConfigError, ResourceError, WeightUpdateError, WorkerError
from torchrl_llm.modules.remote import ObjectStoreSource
from torchrl_llm.weights import engine_weights
from torchrl_llm.weights.fingerprint import weights_digest
from torchrl_llm.weights.weight_source import TensorSource

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.usefixtures("cluster")]

CPUS = 0.25
PATIENCE_S = 280.0


def _in_steps(**options):
    return RayLLMCollector(
        partial(make_env, 2),
        policy_factory=model_policy,
        dialog_turns_per_batch=6,
        num_cpus=CPUS,
        **options,
    )


@pytest.fixture(scope="module")
def collector(cluster):
    """One for the tests that only iterate: to start an actor takes seconds."""
    with _in_steps(total_dialog_turns=10_000) as collector:
        yield collector


@pytest.fixture
def model():
    return model_policy().model


def _alike(batch, other):
    """Same conversations, step by step (sampled tokens differ: each process draws its own)."""
    assert batch.batch_size == other.batch_size
    for row, twin in zip(
        split_rollout(batch).unbind(0), split_rollout(other).unbind(0), strict=True
    ):
        assert set(row.keys(True)) == set(twin.keys(True))
        assert row["query"] == twin["query"]
        for key in ("turn", ("next", "done"), ("next", "reward")):
            assert torch.equal(row[key], twin[key])
        assert torch.equal(row["log_probs", "full"] != 0, row["trace", "source"] == 3)


def test_batches_are_those_of_a_collector_here(collector):
    local = LLMCollector(make_env(2), policy=model_policy(), dialog_turns_per_batch=6)
    theirs, ours = iter(collector), iter(local)
    for _ in range(2):
        batch, other = next(theirs), next(ours)
        assert batch.batch_size == (2, 3)
        _alike(batch, other)
    assert collector.dialog_turns == 12
    assert (collector.dialog_turns_per_batch, collector.total_dialog_turns) == (6, 10_000)


def test_ids_are_those_of_no_other_process(collector):
    local = LLMCollector(make_env(2), policy=model_policy(), dialog_turns_per_batch=6)
    for key in ("group_id", "traj_id"):
        ours = set(next(iter(local))[key].flatten().tolist())
        assert not ours & set(collector.next()[key].flatten().tolist())


def test_weights_arrive_under_their_version_and_act(collector, model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    before = collector.policy_version
    collector.update_policy_weights_(model)
    (receipt,) = collector.receipts
    assert receipt.version == collector.policy_version == before + 1
    assert receipt.digest == weights_digest(engine_weights(model))
    batch = split_rollout(collector.next())
    scorer = model_policy()
    scorer.model.load_state_dict(model.state_dict())
    for row in batch.unbind(0):
        sampled = row["trace", "source"] == 3
        # Turns before this one were sampled by the version before.
        own = sampled & (row["trace", "policy_version"] == before + 1)
        assert own.any()
        ids = row["tokens", "full"]
        scores = scorer.backend.token_scores([ids], [own]).log_probs
        torch.testing.assert_close(scores, row["log_probs", "full"][own], atol=1e-5, rtol=1e-5)
    collector.load_weights(TensorSource(engine_weights(model)), version=50)
    assert collector.get_policy_version() == 50
    collector.increment_version()
    assert split_rollout(collector.next())[-1]["trace", "policy_version"].max() == 51


def test_weights_that_do_not_arrive_as_sent_are_an_error(collector, model):
    wrong = TensorSource(engine_weights(model), digest="0" * 32)
    before = collector.policy_version
    with pytest.raises(WeightUpdateError, match="was sent as"):
        collector.load_weights(wrong, version=before + 1)
    with pytest.raises(WeightUpdateError, match="not sent"):
        collector.load_weights(TensorSource({}), version=before + 1)
    # What it samples with is what it was before, and so is its name.
    assert collector.policy_version == before
    last = split_rollout(collector.next())[-1]
    assert last["trace", "policy_version"].max() == before


def test_it_continues_where_its_state_was_taken(collector):
    state = collector.state_dict()
    first = collector.next()
    collector.load_state_dict(state)
    again = collector.next()
    _alike(first, again)
    assert torch.equal(first["traj_id"], again["traj_id"])
    assert collector.policy_version == state["version"]


def test_the_next_batch_is_collected_while_the_last_is_worked_on(collector):
    before = collector.dialog_turns
    collector.next()
    time.sleep(0.5)
    assert collector.dialog_turns == before + 6
    collector.sync_iter = False
    collector.next()
    wait_until(lambda: collector.dialog_turns == before + 18, PATIENCE_S)
    collector.sync_iter = True
    collector.next()  # that very batch
    assert collector.dialog_turns == before + 18


def test_a_local_buffer_is_filled_from_over_there():
    buffer = ReplayBuffer()
    with _in_steps(replay_buffer=buffer, total_dialog_turns=12) as collector:
        assert collector.next() is None
        assert len(buffer) == 6
        collector.start()
        wait_until(lambda: not collector.is_running, PATIENCE_S)
        assert len(buffer) == 12
        with pytest.raises(ConfigError, match="by itself"):
            collector.next()


# -- a channel, and the killed --------------------------------------------------------------------


def _worker(channel, name, **options):
    options.setdefault("policy_factory", partial(slow_policy, 0, 0.05))
    return RayLLMCollector(
        partial(make_env, 2),
        yield_completed_trajectories=True,
        dialog_turns_per_batch=2,
        queue=channel,
        name=name,
        num_cpus=CPUS,
        **options,
    )


def _side_by_side(*builders):
    with ThreadPoolExecutor(len(builders)) as threads:
        return [future.result() for future in [threads.submit(build) for build in builders]]


def test_the_learner_goes_on_when_a_collector_is_killed_and_the_count_closes():
    channel = RayChannel(4)
    build = partial(_worker, channel, policy_factory=model_policy, wait_for_updates=False)
    kept, killed = members = _side_by_side(
        partial(build, "kept"), partial(build, "killed", max_restarts=1)
    )
    weights, seen = engine_weights(model_policy().model), {}

    def publish(_, version):
        source = ObjectStoreSource.put(weights)
        for member in members:
            member.load_weights(source, version=version)
        return source.digest

    learner = ChannelCollector(
        channel,
        batch_rows=4,
        pacer=Pacer(StalenessRule(max_policy_age=4), batch_rows=4),
        publish=publish,
        check=lambda delivery: seen.setdefault(delivery.worker, []).append(delivery),
        timeout_s=PATIENCE_S,
        version=3,
    )
    learner.publish()
    for member in members:
        member.start()
    first = killed.worker_name
    tokens = 0
    deadline = time.monotonic() + 3 * PATIENCE_S
    # It is killed in the middle, and comes back under another name.
    while len(seen) < 3:
        assert time.monotonic() < deadline
        tokens += sum(map(sampled_tokens, learner.collect().tensordicts))
        learner.update_policy_weights_()
        if first in seen and killed.worker_name == first and not killed.restarts:
            version_then = learner.policy_version
            with suppress(WorkerError):  # it may be dying already
                os.kill(killed.pid(), signal.SIGKILL)
    assert killed.restarts == 1
    assert kept.restarts == 0
    assert killed.policy_version == learner.policy_version > version_then
    # What it samples with is what is trained now, and not what it was built with.
    assert set(seen) == {kept.worker_name, first, killed.worker_name}
    assert all(min(d.digests) >= version_then for d in seen[killed.worker_name])
    assert all(d.digests for d in seen[first])
    dead = channel.forgotten()[first]
    assert dead.generated >= seen[first][-1].generated
    # The end: all that was sampled has come, waits here, or is lost.
    for member in members:
        member.shutdown()
    while len(channel):
        tokens += sum(map(sampled_tokens, learner.receive(timeout_s=PATIENCE_S)))
    waits = sum(sampled_tokens(row) for held in learner._held for row in held.rows)
    lost = learner.take_lost()
    generated = sum(counts.generated for counts in channel.forgotten().values())
    assert generated == tokens + waits + lost
    assert lost >= dead.in_flight
    channel.shutdown()


def test_a_collector_that_hangs_or_fails_gives_its_claims_back_and_says_why():
    """One of them begins with a full channel: that holds it back, and is no fault."""
    channel = RayChannel(1)
    hangs, fails = _side_by_side(
        partial(
            _worker,
            channel,
            "hangs",
            policy_factory=partial(slow_policy, 9, 10_000.0),
            worker_timeout_s=8.0,
        ),
        partial(_worker, channel, "fails", policy_factory=partial(failing_policy, 1)),
    )
    channel.grant(100)
    hangs.start()
    wait_until(lambda: len(channel) == 1, PATIENCE_S)
    time.sleep(10.0)  # longer than a worker may be silent
    assert len(channel) == 1
    assert hangs.is_running
    assert [channel.get(timeout_s=PATIENCE_S).sequence for _ in range(3)] == [0, 1, 2]
    fails.start()
    while hangs.is_running or fails.is_running:
        try:
            channel.get(timeout_s=1.0)
        except queue.Empty:
            continue
    with pytest.raises(ValueError, match="the policy is broken"):
        fails.check()
    with pytest.raises(ValueError, match="the policy is broken"):
        fails.update_policy_weights_()
    with pytest.raises(WorkerError, match="no heartbeat for 8 s"):
        hangs.check()
    assert channel.forgotten()[hangs.worker_name].claimed == 2
    assert channel.forgotten()[fails.worker_name].claimed == 2
    assert channel.workers() == {}
    for member in (hangs, fails):
        member.shutdown(raise_on_error=False)
    # What they had claimed is there for others.
    left = 100 - 2 * sum(counts.delivered for counts in channel.forgotten().values())
    assert channel.claim("another", left, timeout_s=0)
    assert not channel.claim("another", 1, timeout_s=0)
    channel.shutdown()


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"num_cpus": 64}, ResourceError, "64 CPU"),
        ({"num_gpus": 1}, ResourceError, "1 GPU"),
        ({"queue": queue.Queue()}, ConfigError, "belongs to this process"),
        ({"remote_config": {"cpus": 1}}, ConfigError, "remote_config has 'cpus'"),
        ({"claim_rows": 2}, ConfigError, "claim_rows"),
        ({"policy": print}, ConfigError, "exactly one"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_hangs(options, error, match):
    arguments = {"policy_factory": model_policy, "num_cpus": CPUS, "dialog_turns_per_batch": 2}
    with pytest.raises(error, match=match):
        RayLLMCollector(partial(make_env, 2), **{**arguments, **options})


def test_starting_needs_somewhere_to_write(collector):
    with pytest.raises(ConfigError, match="replay_buffer, a queue or a channel"):
        collector.start()
