"""Broadcast to real processes: values, versions, and what happens when somebody dies."""

from __future__ import annotations

import copy
import signal
import threading
import time

import pytest
import torch
from torchrl_llm.weights.broadcast_source import BroadcastSource
from torchrl_llm.weights.process_group import (
    free_port,
    open_store,
    stateless_init_process_group,
    stateless_init_process_group_async,
)
from weights.processes import (
    Child,
    ChildBackend,
    Learner,
    Listener,
    answer,
    fake,
    trained_fake,
    transformers_sampler,
)

from torchrl_llm.errors import ConfigError, ResourceError, WeightUpdateError, WorkerError
from torchrl_llm.modules import TransformersBackend
from torchrl_llm.weights import BroadcastReceiver, BroadcastSender, BroadcastWeights


@pytest.fixture
def children():
    started = []

    def start(make, *arguments):
        started.append(Child(make, *arguments))
        return started[-1]

    yield start
    for child in started:
        child.kill()


# -- pushed by a call ------------------------------------------------------------------------------


def test_two_engines_elsewhere_get_every_version(children):
    engines = [ChildBackend(children(fake)) for _ in range(2)]
    updater = BroadcastWeights(*engines, device="cpu", timeout_s=30)
    for version in (1, 2, 3):
        updater.push_weights(trained_fake(version))
        assert [receipt.version for receipt in updater.receipts] == [version, version]
        expected = answer(fake(version))
        assert [answer(engine) for engine in engines] == [expected, expected]
    assert answer(fake(3)) != answer(fake(2))


def test_a_group_serves_update_after_update(children, monkeypatch):
    formed = []
    real = BroadcastSender._form
    monkeypatch.setattr(
        BroadcastSender, "_form", lambda self, *a: formed.append(1) or real(self, *a)
    )
    updater = BroadcastWeights(ChildBackend(children(fake)), device="cpu", timeout_s=30)
    for version in range(4):
        updater.push_weights(trained_fake(version))
    assert len(formed) == 1


def test_an_engine_that_was_started_again_gets_the_next_update_in_a_new_group(children):
    first = children(fake)
    engine = ChildBackend(first)
    updater = BroadcastWeights(engine, device="cpu", timeout_s=20)
    updater.push_weights(trained_fake(1))
    first.kill()
    engine.child = children(fake)
    updater.push_weights(trained_fake(2))
    assert answer(engine) == answer(fake(2))
    assert updater.version == 2


def test_an_engine_that_died_fails_the_push_within_its_limit(children):
    alive, dead = ChildBackend(children(fake)), ChildBackend(children(fake))
    updater = BroadcastWeights(alive, dead, device="cpu", timeout_s=60)
    updater.push_weights(trained_fake(1))
    dead.child.kill()
    started = time.monotonic()
    with pytest.raises((WeightUpdateError, WorkerError, OSError)):
        updater.push_weights(trained_fake(2))
    assert time.monotonic() - started < 20
    # The other one has what it had, and serves.
    assert answer(alive) in (answer(fake(1)), answer(fake(2)))


def test_an_engine_of_another_shape_says_so_and_keeps_its_weights(children):
    engine = ChildBackend(children(fake))
    updater = BroadcastWeights(engine, device="cpu", timeout_s=20)
    weights = {**trained_fake(1).state_dict(), "head": torch.zeros(3, 3)}
    with pytest.raises(WeightUpdateError, match=r"head.*\(3, 3\)"):
        updater.push_weights(weights)
    assert answer(engine) == answer(fake())
    # That was no fault of the group's; the next push is fine.
    updater.push_weights(trained_fake(1))
    assert answer(engine) == answer(fake(1))


def test_weights_may_travel_in_many_buffers_and_in_another_type(children):
    engine = ChildBackend(children(fake))
    trained = trained_fake(1)
    metadata = {
        "embedding": (torch.float32, trained.embedding.shape),
        "head": (torch.bfloat16, trained.head.shape),
    }
    updater = BroadcastWeights(
        engine, device="cpu", timeout_s=20, bucket_bytes=100, metadata=metadata
    )
    updater.push_weights(trained)
    assert updater.receipts[0].num_bytes == 64 * 8 * 4 + 64 * 8 * 2
    rounded = fake(1)
    with torch.no_grad():
        rounded.module.head.copy_(trained.head.bfloat16().float())
    assert answer(engine) == answer(rounded)


def test_weights_that_were_not_announced_are_refused():
    updater = BroadcastWeights(
        fake(), device="cpu", metadata={"head": (torch.float32, torch.Size([64, 8]))}
    )
    with pytest.raises(ConfigError, match="embedding"):
        updater.push_weights(trained_fake(1))


def test_a_real_model_elsewhere_scores_as_the_trainer_does_after_each_step(tiny_model, children):
    trained = copy.deepcopy(tiny_model)
    engine = ChildBackend(children(transformers_sampler, copy.deepcopy(tiny_model)))
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    updater = BroadcastWeights(engine, device="cpu", timeout_s=30)
    ids = torch.arange(5, 17)
    select = torch.ones(12, dtype=torch.bool)
    select[0] = False
    seen = []
    for _ in range(3):
        trained(input_ids=ids[None], labels=ids[None]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        updater.push_weights(trained)
        with torch.no_grad():
            mine = TransformersBackend(trained).token_scores([ids], [select]).log_probs
            theirs = engine.token_scores([ids], [select]).log_probs
        torch.testing.assert_close(theirs, mine, atol=1e-5, rtol=1e-5)
        seen.append(float(mine.sum()))
    assert seen[0] < seen[1] < seen[2]


# -- found by receivers that listen ---------------------------------------------------------------


def test_receivers_that_poll_get_every_version_and_are_heard(children):
    sender = BroadcastSender(device="cpu", timeout_s=30)
    listeners = [children(Listener, sender.port) for _ in range(2)]
    for version in (1, 2):
        for listener in listeners:
            listener.send("poll", 30)
        receipts = sender.publish(
            dict(trained_fake(version).state_dict()), version=version, num_receivers=2
        )
        assert [receipt.version for receipt in receipts] == [version, version]
        assert [listener.result() for listener in listeners] == [(True, version)] * 2
        assert listeners[0].call("answer") == answer(fake(version))
    # Nothing new: no update, in time.
    started = time.monotonic()
    assert listeners[0].call("poll", 0.5) == (False, 2)
    assert time.monotonic() - started < 5


def test_a_receiver_listens_in_a_thread_and_serves_meanwhile(children):
    sender = BroadcastSender(device="cpu", timeout_s=30)
    listener = children(Listener, sender.port)
    listener.call("listen")
    sender.publish(dict(trained_fake(1).state_dict()), version=1, num_receivers=1)
    sender.publish(dict(trained_fake(2).state_dict()), version=7, num_receivers=1)
    assert listener.call("state") == (7, "None")
    assert listener.call("answer") == answer(fake(2))
    listener.call("stop")


def test_a_receiver_that_was_started_again_joins(children):
    sender = BroadcastSender(device="cpu", timeout_s=20)
    first = children(Listener, sender.port)
    first.call("listen")
    sender.publish(dict(trained_fake(1).state_dict()), version=1, num_receivers=1)
    first.kill()
    second = children(Listener, sender.port)
    second.call("listen")
    sender.publish(dict(trained_fake(2).state_dict()), version=2, num_receivers=1)
    assert second.call("answer") == answer(fake(2))


def test_a_publication_that_nobody_takes_says_how_many_came(children):
    sender = BroadcastSender(device="cpu", timeout_s=1.5)
    listener = children(Listener, sender.port, 2.0)
    listener.send("poll", 20)
    started = time.monotonic()
    with pytest.raises(WeightUpdateError, match=r"1 of 2 receivers joined .* version 1"):
        sender.publish(dict(trained_fake(1).state_dict()), version=1, num_receivers=2)
    assert time.monotonic() - started < 6
    with pytest.raises(WeightUpdateError, match="version 1 of the weights did not arrive"):
        listener.result()
    assert listener.call("answer") == answer(fake())


def test_a_listener_that_refuses_is_heard(children):
    sender = BroadcastSender(device="cpu", timeout_s=20)
    listener = children(Listener, sender.port)
    listener.call("listen")
    started = time.monotonic()
    with pytest.raises(WeightUpdateError, match=r"a receiver refused.*head"):
        sender.publish({"head": torch.zeros(3, 3)}, version=1, num_receivers=1)
    assert time.monotonic() - started < 10


# -- the learner dies -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="frozen", marks=pytest.mark.full),
    ],
)
def test_a_learner_lost_in_a_broadcast_leaves_old_weights_and_a_new_one_is_found(children, how):
    port = free_port()
    learner = children(Learner, port)
    listener = children(Listener, port, 3.0)
    listener.send("poll", 30)
    assert learner.call("publish", 1, 1) == [1]
    assert listener.result() == (True, 1)

    listener.send("poll", 30)
    started = time.monotonic()
    learner.send("publish_half", how)
    with pytest.raises(WeightUpdateError, match="version 99 of the weights did not arrive"):
        listener.result()
    assert time.monotonic() - started < 12
    # The sampler has its weights and its version, and serves.
    assert listener.call("answer") == answer(fake(1))
    assert listener.call("state")[0] == 1

    learner.kill()
    assert listener.call("poll", 0.3) == (False, 1)
    successor = children(Learner, port)
    listener.send("poll", 30)
    assert successor.call("publish", 2, 2) == [2]
    assert listener.result() == (True, 2)
    assert listener.call("answer") == answer(fake(2))


@pytest.mark.full
def test_receivers_without_any_learner_wait_no_longer_than_they_are_told():
    receiver = BroadcastReceiver(fake(), port=free_port())
    started = time.monotonic()
    assert receiver.poll_and_apply(timeout=0.3) is False
    assert time.monotonic() - started < 5


@pytest.mark.full
def test_the_source_of_a_dead_sender_fails_in_time():
    sender = BroadcastSender(device="cpu", timeout_s=5)
    update = sender._announce({"head": torch.zeros(2)}, 1, "full", 1)
    port = sender.port
    sender.close()
    del sender
    source = BroadcastSource("127.0.0.1", port, "gone", update, timeout_s=2)
    started = time.monotonic()
    with pytest.raises(WeightUpdateError, match="did not arrive"):
        list(source.receive())
    assert time.monotonic() - started < 8


# -- groups ---------------------------------------------------------------------------------------


def test_a_group_of_ones_own_broadcasts_beside_any_other():
    # An engine of an earlier test may have made a global group in this process.
    world = torch.distributed.group.WORLD
    port = free_port()
    results = {}

    def member(rank):
        group = stateless_init_process_group("127.0.0.1", port, rank, 2, "cpu", timeout_s=20)
        results[rank] = group.broadcast(torch.full((3,), float(rank)), src=1, timeout_s=20)

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results[0].tolist() == results[1].tolist() == [1.0, 1.0, 1.0]
    assert torch.distributed.group.WORLD is world


def test_the_asynchronous_form_does_not_hold_the_loop_up():
    import asyncio

    async def both():
        port = free_port()
        groups = await asyncio.gather(
            *(
                stateless_init_process_group_async(None, port, rank, 2, "cpu", timeout_s=20)
                for rank in range(2)
            )
        )
        return [group.rank for group in groups]

    assert asyncio.run(both()) == [0, 1]


@pytest.mark.full
def test_a_group_that_is_not_complete_fails_in_time():
    started = time.monotonic()
    with pytest.raises(WorkerError, match="member 0 of 2"):
        stateless_init_process_group(None, 0, 0, 2, "cpu", timeout_s=1)
    with pytest.raises(WorkerError, match=r"no answer|sender of weights"):
        stateless_init_process_group(None, free_port(), 1, 2, "cpu", timeout_s=1)
    assert time.monotonic() - started < 10


def test_whoever_waits_for_a_member_that_leaves_is_told_at_once():
    port, seen = free_port(), []

    def member():
        group = stateless_init_process_group(None, port, 1, 2, "cpu", timeout_s=30)
        started = time.monotonic()
        try:
            group.broadcast(torch.zeros(4), timeout_s=25)
        except WorkerError as error:
            seen.append((str(error), time.monotonic() - started))

    thread = threading.Thread(target=member)
    thread.start()
    group = stateless_init_process_group(None, port, 0, 2, "cpu", timeout_s=30)
    time.sleep(0.2)
    group.close()
    thread.join(30)
    [(error, seconds)] = seen
    assert "Connection closed by peer" in error
    assert seconds < 10
    with pytest.raises(WorkerError, match="was left"):
        group.broadcast(torch.zeros(4))


def test_bad_groups_are_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="rank must be in"):
        stateless_init_process_group(None, 0, 2, 2)
    with pytest.raises(ConfigError, match="master_port"):
        stateless_init_process_group(None, None, 0, 2)
    with pytest.raises(ConfigError, match="timeout_s"):
        BroadcastSender(timeout_s=0)
    with pytest.raises(ConfigError, match="no receiver"):
        BroadcastSender(device="cpu").publish({}, version=1, num_receivers=0)


def test_a_port_that_is_taken_is_named():
    store = open_store("127.0.0.1", 0, host=True)
    with pytest.raises(ResourceError, match=str(store.port)):
        open_store("127.0.0.1", store.port, host=True, timeout_s=2)
