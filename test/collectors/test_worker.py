"""The worker's loop over a channel: what it claims, reports, delivers and proves."""

from __future__ import annotations

import pickle
import queue
import threading
import time

import pytest
import torch
from collectors.collecting import Failing, Gated, make_env
from waiting import wait_until

from torchrl_llm.collectors import LLMCollector
from torchrl_llm.collectors.collecting_worker import CollectorWorker
from torchrl_llm.collectors.transport import LocalChannel
from torchrl_llm.data.rollouts import row_list, sampled_tokens
from torchrl_llm.data.wire import unpack_row_list
from torchrl_llm.errors import ConfigError, WeightUpdateError, WorkerError
from torchrl_llm.modules import FakeBackend, FakeWrapper, TransformersWrapper
from torchrl_llm.weights import CanaryCheck, engine_weights
from torchrl_llm.weights.fingerprint import weights_digest
from torchrl_llm.weights.weight_source import TensorSource

PATIENCE_S = 60.0


@pytest.fixture
def model_policy(tokenizer, make_tiny_model):
    return TransformersWrapper(
        make_tiny_model(), tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 4}
    )


def _worker(policy, channel=None, *, env=None, name="a", **options):
    claim_rows = options.pop("claim_rows", None)
    options.setdefault("dialog_turns_per_batch", 2)
    collector = LLMCollector(make_env(2, 1) if env is None else env, policy=policy, **options)
    channel = LocalChannel(8) if channel is None else channel
    return CollectorWorker(collector, channel, name=name, claim_rows=claim_rows)


def _tokens(delivery) -> int:
    return sum(map(sampled_tokens, unpack_row_list(delivery.rows)))


def _all(channel):
    got = []
    while len(channel):
        got.append(channel.get(timeout_s=0))
    return got


def _runs(worker):
    box = {}

    def run():
        try:
            box["result"] = worker.run()
        except BaseException as error:
            box["result"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result():
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        return box["result"]

    return result


def test_it_collects_only_what_it_may(policy):
    worker = _worker(policy)
    worker.channel.grant(5)
    result = _runs(worker)
    wait_until(lambda: len(worker.channel) == 2)
    time.sleep(0.2)
    worker.stop()
    assert result() == "it was stopped"
    got = _all(worker.channel)
    assert [(d.sequence, d.claimed, d.rows.num_rows) for d in got] == [(0, 2, 2), (1, 2, 2)]
    counts = worker.channel.workers()["a"]
    assert (counts.claimed, counts.delivered) == (0, 2)
    # What nobody claimed is still there.
    assert worker.channel.claim("b", 1, timeout_s=0)


def test_every_sampled_token_is_reported_and_delivered_once(policy):
    worker = _worker(policy, total_dialog_turns=6)
    worker.channel.grant(100)
    assert worker.run() == "it has collected all its turns"
    got = _all(worker.channel)
    sent = 0
    for delivery in got:
        sent += _tokens(delivery)
        assert delivery.sent == sent == delivery.generated
    assert len(got) == 3
    assert sent > 0
    assert worker.channel.workers()["a"].in_flight == 0


@pytest.mark.parametrize("last_only", [False, True])
def test_tokens_of_conversations_in_flight_are_not_yet_sent(policy, last_only):
    """Trajectories of 1, 2 and 3 turns in three rows end one after the other."""
    worker = _worker(
        policy,
        env=make_env(3),
        yield_completed_trajectories=True,
        yield_only_last_steps=last_only,
        dialog_turns_per_batch=1,
        total_dialog_turns=12,
    )
    worker.channel.grant(1000)
    worker.channel._state.max_size = 1000
    worker.run()
    got = _all(worker.channel)
    assert any(d.generated > d.sent for d in got)
    received = sum(map(_tokens, got))
    last = got[-1]
    in_flight = worker.collector.tokens_in_flight
    if last_only:  # turns before the last are sampled, and given up on purpose
        assert received < last.sent == worker.collector.sampled_tokens - in_flight
    else:
        assert received == last.sent == worker.collector.sampled_tokens - in_flight
    # Nobody can take more than there was.
    assert all(d.sent <= d.generated for d in got)


def test_every_policy_call_is_a_sign_of_life_with_the_count_of_tokens(policy):
    gated = Gated(policy)
    worker = _worker(gated, dialog_turns_per_batch=4)
    worker.channel.grant(4)
    result = _runs(worker)
    gated.permits.release()
    wait_until(
        lambda: worker.channel.workers().get("a") and worker.channel.workers()["a"].generated
    )
    counts = worker.channel.workers()["a"]
    assert counts.delivered == 0
    assert counts.in_flight == counts.generated > 0
    gated.permits.release(1)
    wait_until(lambda: len(worker.channel) == 1)
    worker.stop()
    assert result() == "it was stopped"
    assert worker.channel.get(timeout_s=0).sent > counts.generated


def test_a_full_channel_is_waited_for_and_nothing_is_lost(policy):
    worker = _worker(policy, LocalChannel(1), total_dialog_turns=6)
    worker.channel.grant(100)
    result = _runs(worker)
    wait_until(lambda: len(worker.channel) == 1)
    time.sleep(0.3)
    got = [worker.channel.get(timeout_s=PATIENCE_S) for _ in range(3)]
    assert [d.sequence for d in got] == [0, 1, 2]
    assert result() == "it has collected all its turns"


def test_a_channel_that_stays_full_ends_it(policy):
    worker = _worker(policy, LocalChannel(1))
    worker.give_up_s = 0.5
    worker.channel.grant(100)
    with pytest.raises(WorkerError, match=r"full for 0\.5 s"):
        worker.run()


def test_it_ends_with_the_channel(policy):
    worker = _worker(policy)
    result = _runs(worker)
    wait_until(lambda: "a" in worker.channel.workers())
    worker.channel.close()
    assert result() == "the channel was closed"


def test_who_was_taken_for_dead_ends(policy):
    gated = Gated(policy)
    worker = _worker(gated)
    worker.channel.grant(2)
    result = _runs(worker)
    assert gated.waiting.wait(PATIENCE_S)
    worker.channel.forget("a")
    gated.permits.release(10)
    assert isinstance(result(), WorkerError)
    with pytest.raises(queue.Empty):
        worker.channel.get(timeout_s=0)
    assert worker.channel.claim("b", 2, timeout_s=0)


def test_an_error_of_the_policy_ends_it(policy):
    worker = _worker(Failing(policy, 1))
    worker.channel.grant(10)
    with pytest.raises(ValueError, match="the policy is broken"):
        worker.run()
    assert len(worker.channel) == 1


def test_a_collector_that_writes_elsewhere_is_refused(policy):
    collector = LLMCollector(
        make_env(2, 1), policy=policy, dialog_turns_per_batch=2, queue=queue.Queue()
    )
    with pytest.raises(ConfigError, match="no queue"):
        CollectorWorker(collector, LocalChannel(), name="a")


# -- weights ----------------------------------------------------------------------------------


def _source(model, factor):
    weights = {name: value * factor for name, value in engine_weights(model).items()}
    return TensorSource(weights, digest=weights_digest(weights))


def _versions(delivery):
    found = set()
    for row in unpack_row_list(delivery.rows):
        found |= set(row["trace", "policy_version"].tolist()) - {-1}
    return found


def test_deliveries_prove_the_weights_that_sampled_them(model_policy):
    first = weights_digest(engine_weights(model_policy.model))
    worker = _worker(model_policy, total_dialog_turns=4)
    worker.channel.grant(2)
    result = _runs(worker)
    got = worker.channel.get(timeout_s=PATIENCE_S)
    assert (_versions(got), dict(got.digests)) == ({0}, {0: first})
    source = _source(model_policy.model, 1.5)
    (receipt,) = worker.load_weights(source, 5)
    assert (receipt.version, receipt.digest) == (5, source.digest)
    worker.channel.grant(2)
    got = worker.channel.get(timeout_s=PATIENCE_S)
    assert (_versions(got), dict(got.digests)) == ({5}, {5: source.digest})
    result()


def test_weights_that_do_not_arrive_leave_the_old_ones_and_their_version(model_policy):
    worker = _worker(model_policy)
    before = weights_digest(engine_weights(model_policy.model))
    source = _source(model_policy.model, 2.0)
    source.digest = "0" * 32
    with pytest.raises(WeightUpdateError, match="was sent as"):
        worker.load_weights(source, 1)
    assert weights_digest(engine_weights(model_policy.model)) == before
    assert worker.collector.policy_version == 0
    assert worker.digests == {0: before}


def _mixed(model_policy, in_flight):
    """Conversations of up to three turns, and new weights after the first call of the policy."""
    gated = Gated(model_policy)
    # What the collector needs of a policy beside the call.
    gated.backend, gated.modules = model_policy.backend, model_policy.modules
    collector = LLMCollector(
        make_env(2, 3), policy=gated, yield_completed_trajectories=True, dialog_turns_per_batch=6
    )
    collector._policy.policy = model_policy
    worker = CollectorWorker(collector, LocalChannel(4), name="a")
    worker.channel.grant(6)
    result = _runs(worker)
    gated.permits.release(1)
    wait_until(lambda: worker.channel.workers()["a"].generated > 0)
    assert gated.waiting.wait(PATIENCE_S)
    done = threading.Event()

    def load():
        worker.load_weights(_source(model_policy.model, 1.5), 1, in_flight)
        done.set()

    threading.Thread(target=load, daemon=True).start()
    assert not done.wait(0.2)  # the second call is under way
    gated.permits.release(100)
    assert done.wait(PATIENCE_S)
    delivery = worker.channel.get(timeout_s=PATIENCE_S)
    worker.stop()
    worker.channel.close()
    result()
    return delivery


def test_turns_in_flight_go_on_under_the_new_version(model_policy):
    delivery = _mixed(model_policy, "wait")
    rows = unpack_row_list(delivery.rows)
    by_turn = {}
    for row in rows:
        response = row["tokens", "response"].shape[0]
        versions = set(row["trace", "policy_version"][-response:].tolist()) - {-1}
        by_turn.setdefault(int(row["turn"]), set()).update(versions)
    assert by_turn == {0: {0}, 1: {0}, 2: {1}}
    assert set(delivery.digests) == {0, 1}
    assert delivery.generated == delivery.sent == _tokens(delivery)


def test_conversations_in_flight_can_be_dropped_instead(model_policy):
    delivery = _mixed(model_policy, "abort")
    assert _versions(delivery) == {1}
    dropped = delivery.sent - _tokens(delivery)
    # Two turns of two conversations, of up to four tokens each.
    assert 4 <= dropped <= 16
    assert delivery.generated == delivery.sent


def test_rows_that_are_given_up_while_the_policy_waits_its_turn_are_not_continued(model_policy):
    collector = LLMCollector(
        make_env(2, 3),
        policy=model_policy,
        yield_completed_trajectories=True,
        dialog_turns_per_batch=6,
    )
    gate, drops = collector._calls, []

    class Late:
        """A gate at which weights come in between the look at the flag and the call."""

        def work(self):
            drops.append(len(drops))
            if len(drops) == 3:  # the last turn of the conversations
                collector.load_weights(
                    _source(model_policy.model, 1.5), version=1, in_flight="abort"
                )
            return gate.work()

    collector._rollout.calls = Late()
    versions = {
        version
        for row in row_list(next(iter(collector)))
        for version in row["trace", "policy_version"].tolist()
    }
    assert versions - {-1} == {1}


def test_changing_weights_within_a_call_needs_a_backend_that_counts(model_policy):
    worker = _worker(model_policy)
    with pytest.raises(ConfigError, match="counts the version"):
        worker.load_weights(_source(model_policy.model, 1.0), 1, "keep")
    assert torch.equal(
        model_policy.model.lm_head.weight, model_policy.model.get_input_embeddings().weight
    )


class CountsFromItsFirstUpdate(FakeBackend):
    """As an engine does that nobody has told a version yet."""

    begins_to_count = True

    def update_weights(self, source, *, version):
        receipts = super().update_weights(source, version=version)
        self.counts_versions = True
        return receipts


def test_an_engine_that_counts_from_its_first_update_on_takes_that_one_too(tokenizer):
    policy = FakeWrapper(CountsFromItsFirstUpdate(tokenizer=tokenizer), tokenizer=tokenizer)
    worker = _worker(policy)
    for version in (1, 2):
        trained = FakeBackend(tokenizer=tokenizer, seed=version).module
        source = TensorSource(dict(trained.named_parameters()))
        [receipt] = worker.load_weights(source, version, "keep")
        assert receipt.version == worker.collector.policy_version == version
        assert worker.digests[version] == receipt.digest


def _told(seed):
    """Weights, with what they compute."""
    trained = FakeBackend(vocab_size=292, eos_token_ids=(2,), seed=seed)
    source = TensorSource(engine_weights(trained.module))
    source.canary = CanaryCheck(trained).target()
    return pickle.loads(pickle.dumps(source))


def test_a_policy_without_the_weights_that_it_was_given_delivers_nothing(policy, monkeypatch):
    worker = _worker(policy)
    worker.load_weights(_told(seed=1), 1)
    worker.channel.grant(2)
    result = _runs(worker)
    assert worker.channel.get(timeout_s=PATIENCE_S).digests.keys() == {1}

    loads = policy.backend.update_weights
    nothing = TensorSource({})
    nothing.kind = "delta"
    monkeypatch.setattr(
        policy.backend, "update_weights", lambda source, *, version: loads(nothing, version=version)
    )
    with pytest.raises(WeightUpdateError, match="does not compute with version 2 of the weights"):
        worker.load_weights(_told(seed=2), 2)
    worker.channel.grant(2)
    assert isinstance(result(), WeightUpdateError)
    assert len(worker.channel) == 0

    # Others, that are proven, are a new beginning.
    monkeypatch.undo()
    worker.load_weights(_told(seed=2), 3)
    worker.channel.grant(2)
    _runs(worker)
    assert worker.channel.get(timeout_s=PATIENCE_S).digests.keys() == {3}
    worker.stop()
