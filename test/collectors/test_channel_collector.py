"""The learner's end of a channel: batches, pace, refusals, dead workers, accounts, resume."""

import threading
import time

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import BaseCollector

from torchrl_llm.collectors import ChannelCollector
from torchrl_llm.collectors.staleness import Pacer, StalenessRule
from torchrl_llm.collectors.transport import Delivery, LocalChannel, WorkerCounts
from torchrl_llm.collectors.transport.channel import TokenAccounts
from torchrl_llm.data import Source
from torchrl_llm.data.wire import pack_rows
from torchrl_llm.errors import ConfigError, WeightUpdateError, WorkerError
from torchrl_llm.modules import FakeBackend
from torchrl_llm.weights import CanaryCheck, WeightUpdater

WAIT_S = 20.0


def row(value=0, tokens=3, version=0):
    """A row of one prompt token and ``tokens`` sampled ones."""
    length = tokens + 1
    source = torch.full((length,), int(Source.SAMPLED), dtype=torch.int8)
    source[0] = int(Source.PROMPT)
    versions = torch.full((length,), version, dtype=torch.int32)
    versions[0] = -1
    return TensorDict(
        value=torch.tensor(value),
        tokens=TensorDict(response=torch.arange(tokens)),
        trace=TensorDict({"source": source, "policy_version": versions}),
    )


class Worker:
    """A worker's own counts, as those of the library keep them."""

    def __init__(self, channel, name, tokens=3):
        self.channel, self.name, self.tokens = channel, name, tokens
        self.sequence = self.generated = self.sent = 0

    def claim(self, num_rows=2, timeout_s=0):
        return self.channel.claim(self.name, num_rows, timeout_s=timeout_s)

    def make(self, values, version=0, claimed=None, digests=None):
        rows = [row(value, self.tokens, version) for value in values]
        self.generated += self.tokens * len(rows)
        self.sent = self.generated
        delivery = Delivery(
            pack_rows(rows),
            self.name,
            self.sequence,
            claimed=len(rows) if claimed is None else claimed,
            generated=self.generated,
            sent=self.sent,
            digests=digests or {},
        )
        self.sequence += 1
        return delivery

    def put(self, values, **options):
        self.channel.put(self.make(values, **options), timeout_s=WAIT_S)


def pacer(max_policy_age=1, batch_rows=4, on_stale="wait"):
    rule = StalenessRule(max_policy_age=max_policy_age, on_stale=on_stale)
    return Pacer(rule, batch_rows=batch_rows)


def values(batch):
    return batch["value"].tolist()


@pytest.fixture
def channel():
    return LocalChannel(max_size=8)


# -- batches --------------------------------------------------------------------------------------


def test_a_batch_is_whole_deliveries_in_the_order_in_which_they_came(channel):
    collector = ChannelCollector(channel, batch_rows=4)
    collector.grant(10)
    one, two = Worker(channel, "one"), Worker(channel, "two")
    one.put([1, 2])
    two.put([3, 4, 5])
    one.put([6, 7, 8, 9])

    batches = iter(collector)

    assert values(next(batches)) == [1, 2, 3, 4, 5]
    assert values(next(batches)) == [6, 7, 8, 9]
    assert isinstance(collector, BaseCollector)
    assert collector.accounts.received == 9 * 3


def test_rows_keep_no_delivery_alive(channel):
    collector = ChannelCollector(channel, batch_rows=2)
    Worker(channel, "one", tokens=2000).put([1, 2])
    response = collector.collect().tensordicts[0]["tokens", "response"]
    assert response.untyped_storage().nbytes() == response.nbytes


def test_a_check_that_raises_ends_the_wait(channel):
    def check():
        raise WorkerError("the actor has ended")

    collector = ChannelCollector(channel, batch_rows=2, timeout_s=WAIT_S, checks=[check])
    with pytest.raises(WorkerError, match="the actor has ended"):
        collector.next()


def test_nothing_that_comes_is_waited_for_within_the_limit(channel):
    collector = ChannelCollector(channel, batch_rows=2, timeout_s=0.3)
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"within 0.3 s; workers: none has ever called"):
        collector.collect()
    assert time.monotonic() - started < 5


def test_the_error_names_the_workers_that_called(channel):
    collector = ChannelCollector(channel, batch_rows=2, timeout_s=0.2)
    collector.grant(2)
    Worker(channel, "slow").claim(2)
    with pytest.raises(WorkerError, match=r"slow \(0 s ago, 2 rows claimed\)"):
        collector.collect()


def test_rows_that_came_before_the_limit_are_kept_for_the_next_batch(channel):
    collector = ChannelCollector(channel, batch_rows=4, timeout_s=0.2)
    worker = Worker(channel, "one")
    worker.put([1, 2])
    with pytest.raises(WorkerError):
        collector.collect()
    worker.put([3, 4])
    assert values(collector.collect()) == [1, 2, 3, 4]


def test_impossible_arguments_are_refused(channel):
    with pytest.raises(ConfigError, match="not both"):
        ChannelCollector(channel, batch_rows=1, publish=print, weight_updater=WeightUpdater)
    with pytest.raises(ConfigError, match="no environment"):
        ChannelCollector(channel, batch_rows=1).set_seed(0)
    with pytest.raises(ConfigError, match="pacer"):
        ChannelCollector(channel, batch_rows=4, pacer=pacer()).grant(1)


def test_shutdown_ends_workers_and_may_be_called_twice(channel):
    collector = ChannelCollector(channel, batch_rows=2)
    collector.shutdown()
    collector.shutdown()
    with pytest.raises(WorkerError):
        Worker(channel, "one").claim()
    with pytest.raises(ConfigError, match="shut down"):
        collector.receive()


# -- pace -----------------------------------------------------------------------------------------


def test_rows_are_granted_up_to_the_age_that_is_allowed_and_then_with_each_update(channel):
    collector = ChannelCollector(channel, batch_rows=4, pacer=pacer(max_policy_age=1))
    worker = Worker(channel, "one")
    granted = 0
    while worker.claim(2):
        granted += 2
    assert granted == 8  # two batches: the one that is trained first, and the one after

    worker.put([1, 2])
    worker.put([3, 4])
    collector.collect()
    assert not worker.claim(2)  # trained, but not updated yet
    collector.update_policy_weights_()
    assert worker.claim(2)
    assert worker.claim(2)
    assert not worker.claim(2)


def test_claims_that_bring_no_row_are_granted_anew(channel):
    collector = ChannelCollector(channel, batch_rows=4, pacer=pacer(max_policy_age=0))
    worker = Worker(channel, "one")
    assert worker.claim(4)
    worker.put([1], claimed=4)
    assert len(collector.receive()) == 1
    assert worker.claim(3)
    assert not worker.claim(1)


def test_a_batch_waits_for_the_worker_whose_rows_would_be_too_old_for_the_next(channel):
    collector = ChannelCollector(channel, batch_rows=2, pacer=pacer(1, batch_rows=2))
    slow, fast = Worker(channel, "slow"), Worker(channel, "fast")
    assert slow.claim(2)
    assert fast.claim(2)
    fast.put([1, 2])
    assert values(collector.collect()) == [1, 2]
    collector.update_policy_weights_()  # slow is still at rows of version 0
    assert fast.claim(2)
    fast.put([3, 4], version=1)
    assert collector.stragglers() == ["slow"]

    box = []
    thread = threading.Thread(target=lambda: box.append(collector.collect()), daemon=True)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    slow.put([5, 6])
    thread.join(WAIT_S)
    assert values(box[0]) == [5, 6]  # the oldest first; what passed them by can wait
    collector.update_policy_weights_()
    assert values(collector.collect()) == [3, 4]


def test_workers_that_claim_more_than_a_batch_holds_do_not_starve(channel, monkeypatch):
    monkeypatch.setattr("torchrl_llm.collectors.channel_collector._STARVED_S", 0.1)
    monkeypatch.setattr("torchrl_llm.collectors.channel_collector._POLL_S", 0.05)
    collector = ChannelCollector(channel, batch_rows=2, pacer=pacer(0, 2), timeout_s=WAIT_S)
    worker = Worker(channel, "one")

    def work():
        assert worker.claim(3, timeout_s=WAIT_S)
        worker.put([1, 2, 3])

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert values(collector.collect()) == [1, 2, 3]
    thread.join(WAIT_S)


def test_a_step_that_takes_a_second_batch_has_its_rows_begun_at_once(channel):
    collector = ChannelCollector(channel, batch_rows=2, pacer=pacer(0, 2), timeout_s=WAIT_S)
    worker = Worker(channel, "one")
    assert worker.claim(2)
    worker.put([1, 2])
    assert values(collector.collect()) == [1, 2]
    assert not worker.claim(2)
    box = []
    thread = threading.Thread(target=lambda: box.append(collector.collect()), daemon=True)
    thread.start()
    assert worker.claim(2, timeout_s=WAIT_S)
    worker.put([3, 4])
    thread.join(WAIT_S)
    assert values(box[0]) == [3, 4]
    collector.update_policy_weights_()
    # One batch, not two: the first was made up for already.
    assert (worker.claim(2), worker.claim(1)) == (True, False)


def test_rows_that_a_checkpoint_holds_are_part_of_the_pace(channel):
    first = ChannelCollector(channel, batch_rows=2, pacer=pacer(1, 2), timeout_s=WAIT_S)
    worker = Worker(channel, "one")
    for batch in ([1, 2], [3, 4]):
        assert worker.claim(2)
        worker.put(batch)
    assert values(first.collect()) == [1, 2]
    first.update_policy_weights_()
    fresh = LocalChannel(max_size=8)
    second = ChannelCollector(fresh, batch_rows=2, pacer=pacer(1, 2), timeout_s=WAIT_S)
    second.load_state_dict(first.state_dict())
    successor = Worker(fresh, "two")
    assert (successor.claim(2), successor.claim(1)) == (True, False)
    assert values(second.collect()) == [3, 4]
    second.update_policy_weights_()
    assert (successor.claim(2), successor.claim(1)) == (True, False)


def test_nothing_is_granted_beyond_the_pace_while_workers_are_built_anew(channel, monkeypatch):
    monkeypatch.setattr("torchrl_llm.collectors.channel_collector._STARVED_S", 0.0)
    monkeypatch.setattr("torchrl_llm.collectors.channel_collector._ASKED_S", 0.05)
    monkeypatch.setattr("torchrl_llm.collectors.channel_collector._POLL_S", 0.02)
    collector = ChannelCollector(channel, batch_rows=2, pacer=pacer(0, 2), timeout_s=0.5)
    dead = Worker(channel, "one")
    assert dead.claim(2)
    channel.forget("one")
    with pytest.raises(WorkerError, match="no rows came"):
        collector.collect()
    successor = Worker(channel, "two")
    assert (successor.claim(2), successor.claim(1)) == (True, False)


# -- weights --------------------------------------------------------------------------------------


def test_with_a_canary_each_version_is_published_with_what_it_computes(channel):
    trained, told = FakeBackend(vocab_size=16, eos_token_ids=(2,)), []
    collector = ChannelCollector(
        channel, batch_rows=2, publish=lambda weights, version, canary: told.append(canary)
    )
    collector.canary = CanaryCheck(trained)
    collector.publish(trained.module)
    with torch.no_grad():
        trained.module.head.mul_(2)
    collector.update_policy_weights_(trained.module)
    assert told[0].rows == told[1].rows
    assert not torch.equal(told[0].exact, told[1].exact)


def test_weights_are_published_before_their_version_is_named(channel):
    seen = []

    def publish(weights, version):
        seen.append((weights, version, channel.version()))
        return f"digest {version}"

    collector = ChannelCollector(channel, batch_rows=2, publish=publish)
    collector.publish({"w": 0})
    collector.update_policy_weights_({"w": 1})
    assert seen == [({"w": 0}, 0, 0), ({"w": 1}, 1, 0)]
    assert channel.version() == collector.policy_version == 1


def test_weights_that_did_not_arrive_count_no_version(channel):
    def publish(weights, version):
        raise WeightUpdateError("lost on the way")

    collector = ChannelCollector(channel, batch_rows=2, publish=publish)
    with pytest.raises(WeightUpdateError):
        collector.update_policy_weights_({})
    assert channel.version() == collector.get_policy_version() == 0
    with pytest.raises(ConfigError, match="once"):
        collector.update_policy_weights_({}, weights={})


def test_a_weight_updater_pushes_for_it(channel):
    class Pushing(WeightUpdater):
        pushed = None

        def push_weights(self, policy_or_weights=None):
            self.pushed = policy_or_weights

    updater = Pushing()
    collector = ChannelCollector(channel, batch_rows=2, weight_updater=updater)
    collector.update_policy_weights_(weights={"w": 2})
    assert updater.pushed == {"w": 2}
    assert updater.collector is collector


def test_a_version_that_a_checkpoint_holds_is_not_the_number_of_other_weights(channel):
    first = ChannelCollector(channel, batch_rows=2, publish=lambda w, v: f"d{v}")
    first.publish(version=3)
    second = ChannelCollector(channel, batch_rows=2, publish=lambda w, v: w)
    second.load_state_dict(first.state_dict())
    with pytest.raises(WeightUpdateError, match="a version has one value"):
        second.publish("other", version=3)
    second.publish("d3", version=3)
    second.publish("other", version=4)
    with pytest.raises(WeightUpdateError, match="a version has one value"):
        second.publish("d3", version=4)


@pytest.mark.parametrize(
    ("version", "digests", "message"),
    [
        (0, {0: "other"}, "'other'; that version is 'good0'"),
        (2, {2: "x"}, "sampled by version 2 of the weights, and this learner is at version 1"),
        (1, {0: "good0"}, r"tokens of version 1, .* it gave \[0\]"),
    ],
)
def test_a_delivery_of_other_weights_than_it_claims_is_refused(channel, version, digests, message):
    collector = ChannelCollector(
        channel, batch_rows=2, publish=lambda weights, v: f"good{v}", timeout_s=0.2
    )
    collector.publish()
    collector.update_policy_weights_()
    worker = Worker(channel, "one")
    worker.put([1, 2], version=version, digests=digests)
    with pytest.raises(WorkerError, match=message):
        collector.collect()
    assert (collector.accounts.received, collector.take_lost(), collector.take_lost()) == (0, 6, 0)

    worker.put([3, 4], version=1, digests={1: "good1"})
    assert values(collector.collect()) == [3, 4]


def test_rows_that_were_refused_are_granted_anew(channel):
    def check(delivery):
        if delivery.sequence == 0:
            raise WeightUpdateError("not these")

    collector = ChannelCollector(channel, batch_rows=2, pacer=pacer(0, 2), check=check)
    worker = Worker(channel, "one")
    assert worker.claim(2)
    worker.put([1, 2])
    box = []
    thread = threading.Thread(target=lambda: box.append(collector.collect()), daemon=True)
    thread.start()
    assert worker.claim(2, timeout_s=WAIT_S)
    worker.put([3, 4])
    thread.join(WAIT_S)
    assert values(box[0]) == [3, 4]


# -- workers that die -----------------------------------------------------------------------------


def test_a_silent_worker_is_given_up_its_claims_go_to_others_and_its_tokens_are_lost(channel):
    collector = ChannelCollector(
        channel, batch_rows=2, pacer=pacer(0, 2), worker_timeout_s=1.0, timeout_s=WAIT_S
    )
    dead, alive = Worker(channel, "dead"), Worker(channel, "alive")
    assert dead.claim(2)
    channel.report("dead", generated=5)

    def work():
        assert alive.claim(2, timeout_s=WAIT_S)
        alive.put([1, 2])

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert values(collector.collect()) == [1, 2]
    thread.join(WAIT_S)
    assert (collector.take_lost(), collector.take_lost()) == (5, 0)
    assert set(collector.workers()) == {"alive"}


def test_what_a_dead_worker_has_put_is_trained(channel):
    collector = ChannelCollector(channel, batch_rows=2, worker_timeout_s=0.0)
    collector.grant(4)
    dead = Worker(channel, "dead")
    dead.claim(4)
    dead.put([1, 2])
    channel.report("dead", generated=10)
    assert values(collector.collect()) == [1, 2]
    collector.forget("dead")
    assert collector.accounts.received == 6
    assert collector.take_lost() == 4


def test_an_idle_worker_owes_nothing_and_is_never_given_up(channel):
    collector = ChannelCollector(channel, batch_rows=2, worker_timeout_s=0.0, timeout_s=0.2)
    worker = Worker(channel, "one")
    worker.put([1, 2], claimed=0)
    collector.collect()
    with pytest.raises(WorkerError):
        collector.collect()
    worker.put([3, 4], claimed=0)
    assert values(collector.collect()) == [3, 4]


# -- accounts and resume --------------------------------------------------------------------------


def test_a_delivery_that_never_came_is_lost_and_the_sum_closes(channel):
    collector = ChannelCollector(channel, batch_rows=2)
    worker = Worker(channel, "one")
    worker.put([1, 2])
    collector.collect()
    worker.make([3, 4, 5])  # sent, and gone on the way
    worker.put([6, 7])
    collector.collect()
    assert collector.take_lost() == 9
    assert worker.generated == collector.accounts.received + collector.accounts.lost


def test_accounts_count_a_dead_worker_once():
    accounts = TokenAccounts()
    gone = {"a": WorkerCounts(generated=7, sent=3)}
    accounts.forget(gone)
    accounts.forget(gone)
    assert (accounts.lost, accounts.take_lost(), accounts.take_lost()) == (4, 4, 0)


def test_a_learner_that_comes_back_goes_on_and_counts_what_was_given_to_the_one_before(channel):
    first = ChannelCollector(channel, batch_rows=2, publish=lambda w, v: f"d{v}", timeout_s=0.2)
    worker = Worker(channel, "one")
    worker.put([1, 2])
    first.collect()
    first.update_policy_weights_()
    worker.put([3])
    with pytest.raises(WorkerError):
        first.collect()  # half a batch is here
    state = first.state_dict()
    worker.put([4, 5])
    first.collect()  # trained, and undone: the checkpoint is from before
    first.update_policy_weights_()

    second = ChannelCollector(channel, batch_rows=2, publish=lambda w, v: f"e{v}")
    second.load_state_dict(state)
    assert channel.version() == second.policy_version == 1
    worker.put([6], version=1)
    assert values(second.collect()) == [3, 6]
    assert second.take_lost() == 6
    assert second.accounts.received == 12
    # What the dead learner's later weights sampled is refused.
    second.update_policy_weights_()
    worker.put([8, 9], version=2, digests={2: "d2"})
    second.timeout_s = 0.2
    with pytest.raises(WorkerError, match="that version is 'e2'"):
        second.collect()
