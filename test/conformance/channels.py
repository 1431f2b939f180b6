"""What every channel of rows must do, whatever carries it: a mixin to subclass.

A test module gives a fixture ``channel_factory``: ``channel_factory(max_size) -> RowChannel``, a
new and empty channel each time, and mixes this class in::

    class TestMyChannel(ChannelConformance):
        pass
"""

from __future__ import annotations

import queue
import threading
import time

import pytest
import torch
from tensordict import TensorDict

from torchrl_llm.collectors.transport import ChannelClosedError, Delivery, RowChannel
from torchrl_llm.data.ragged import ragged_rows, read_rows
from torchrl_llm.data.wire import pack_rows
from torchrl_llm.errors import WorkerError

PATIENCE_S = 20.0
"""Longer than any answer takes on a busy machine."""
SHORT_S = 0.3


def delivery(worker="a", sequence=0, *, values=(1, 2), **fields) -> Delivery:
    """A delivery of one row with the tokens ``values`` and a text, and one that is empty."""
    ids = [torch.tensor(values, dtype=torch.int64), torch.tensor([], dtype=torch.int64)]
    rows = ragged_rows({"ids": ids})
    for row, name in zip(rows.tensordicts, ("héllo", ""), strict=True):
        row.set("inner", TensorDict(flag=torch.tensor([True]), weight=torch.tensor(0.1)))
        row.set_non_tensor("text", name)
    return Delivery(pack_rows(rows), worker, sequence, **fields)


def ids_of(got: Delivery) -> list[list[int]]:
    """The tokens of the rows that arrived."""
    return [ids.tolist() for ids in read_rows(got.rows.unpack(), "ids")]


def in_thread(function, *args, **kwargs):
    """Run in a thread; returns a function that waits for the result or error."""
    box = {}

    def run():
        try:
            box["value"] = function(*args, **kwargs)
        except BaseException as error:
            box["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result():
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the call did not return"
        if "error" in box:
            raise box["error"]
        return box["value"]

    return result


class ChannelConformance:
    """Mixin; needs the fixture ``channel_factory``."""

    @pytest.fixture
    def channel(self, channel_factory) -> RowChannel:
        return channel_factory(4)

    # -- deliveries ---------------------------------------------------------------------------

    def test_a_delivery_arrives_as_it_was_put(self, channel):
        sent = delivery(
            values=(3, 1, 4), claimed=2, generated=9, sent=3, digests={7: "abc", 8: "d"}
        )
        channel.put(sent, timeout_s=PATIENCE_S)
        assert len(channel) == 1
        got = channel.get(timeout_s=PATIENCE_S)
        assert len(channel) == 0
        assert (got.worker, got.sequence, got.claimed) == ("a", 0, 2)
        assert (got.generated, got.sent, dict(got.digests)) == (9, 3, {7: "abc", 8: "d"})
        assert ids_of(got) == [[3, 1, 4], []]
        first, second = got.rows.unpack().unbind(0)
        assert (first["text"], second["text"]) == ("héllo", "")
        assert first["inner", "flag"].tolist() == [True]
        assert first["inner", "weight"].item() == torch.tensor(0.1).item()
        assert first["ids"].dtype == torch.int64

    def test_deliveries_keep_their_order(self, channel):
        for i in range(4):
            channel.put(delivery(sequence=i, values=(i,)), timeout_s=PATIENCE_S)
        assert [channel.get(timeout_s=PATIENCE_S).sequence for _ in range(4)] == [0, 1, 2, 3]

    def test_an_empty_channel_says_so_in_time(self, channel):
        start = time.monotonic()
        with pytest.raises(queue.Empty):
            channel.get(timeout_s=SHORT_S)
        assert SHORT_S * 0.5 < time.monotonic() - start < PATIENCE_S
        with pytest.raises(queue.Empty):
            channel.get(timeout_s=0)

    def test_a_full_channel_says_so_in_time_and_takes_nothing(self, channel_factory):
        channel = channel_factory(2)
        for i in range(2):
            channel.put(delivery(sequence=i), timeout_s=PATIENCE_S)
        start = time.monotonic()
        with pytest.raises(queue.Full):
            channel.put(delivery(sequence=2), timeout_s=SHORT_S)
        assert SHORT_S * 0.5 < time.monotonic() - start < PATIENCE_S
        assert len(channel) == 2
        assert channel.workers()["a"].delivered == 2
        channel.get(timeout_s=PATIENCE_S)
        channel.put(delivery(sequence=2), timeout_s=PATIENCE_S)
        assert [channel.get(timeout_s=PATIENCE_S).sequence for _ in range(2)] == [1, 2]

    def test_who_waits_for_room_goes_on_when_there_is_some(self, channel_factory):
        channel = channel_factory(1)
        channel.put(delivery(sequence=0), timeout_s=PATIENCE_S)
        waiting = in_thread(channel.put, delivery(sequence=1), timeout_s=PATIENCE_S)
        time.sleep(SHORT_S)
        assert channel.get(timeout_s=PATIENCE_S).sequence == 0
        waiting()
        assert channel.get(timeout_s=PATIENCE_S).sequence == 1

    def test_who_waits_for_a_delivery_gets_the_next_one(self, channel):
        waiting = in_thread(channel.get, timeout_s=PATIENCE_S)
        time.sleep(SHORT_S)
        channel.put(delivery(values=(5,)), timeout_s=PATIENCE_S)
        assert ids_of(waiting()) == [[5], []]

    def test_a_delivery_that_is_put_again_is_taken_once(self, channel):
        for _ in range(2):
            channel.put(delivery(sent=2, generated=2, claimed=0), timeout_s=PATIENCE_S)
        assert len(channel) == 1
        counts = channel.workers()["a"]
        assert (counts.delivered, counts.sent) == (1, 2)

    def test_many_writers_and_one_reader_lose_nothing(self, channel_factory):
        channel = channel_factory(3)
        names, each = ["a", "b", "c", "d"], 6

        def write(name):
            for i in range(each):
                channel.put(delivery(name, i, values=(i,), sent=i + 1), timeout_s=PATIENCE_S)

        writers = [in_thread(write, name) for name in names]
        got = [channel.get(timeout_s=PATIENCE_S) for _ in range(each * len(names))]
        for writer in writers:
            writer()
        for name in names:
            assert [d.sequence for d in got if d.worker == name] == list(range(each))
        assert all(ids_of(d)[0] == [d.sequence] for d in got)
        assert len(channel) == 0

    # -- claims -------------------------------------------------------------------------------

    def test_claims_are_granted_wholly_or_not_at_all(self, channel):
        assert not channel.claim("a", 1, timeout_s=0)
        channel.grant(5)
        assert channel.claim("a", 3, timeout_s=0)
        assert not channel.claim("b", 3, timeout_s=0)
        assert channel.claim("b", 2, timeout_s=0)
        assert not channel.claim("b", 1, timeout_s=0)
        claimed = {name: counts.claimed for name, counts in channel.workers().items()}
        assert claimed == {"a": 3, "b": 2}

    def test_a_claim_that_is_refused_returns_in_time(self, channel):
        start = time.monotonic()
        assert not channel.claim("a", 1, timeout_s=SHORT_S)
        assert SHORT_S * 0.5 < time.monotonic() - start < PATIENCE_S

    def test_who_waits_for_a_claim_goes_on_when_rows_are_granted(self, channel):
        waiting = in_thread(channel.claim, "a", 2, timeout_s=PATIENCE_S)
        time.sleep(SHORT_S)
        channel.grant(1)
        channel.grant(1)
        assert waiting() is True

    def test_what_nobody_claimed_can_be_taken_back(self, channel):
        channel.grant(4)
        assert channel.claim("a", 1, timeout_s=0)
        channel.grant(-2)
        assert not channel.claim("a", 2, timeout_s=0)
        channel.grant(-100)
        assert not channel.claim("a", 1, timeout_s=0)
        channel.grant(1)
        assert channel.claim("a", 1, timeout_s=0)

    def test_claims_are_never_granted_twice(self, channel):
        channel.grant(20)
        workers = [in_thread(channel.claim, f"w{i}", 3, timeout_s=SHORT_S) for i in range(12)]
        assert sum(worker() for worker in workers) == 6
        assert sum(counts.claimed for counts in channel.workers().values()) == 18

    def test_a_delivery_uses_its_claim_up(self, channel):
        channel.grant(4)
        assert channel.claim("a", 4, timeout_s=0)
        channel.put(delivery(claimed=3), timeout_s=PATIENCE_S)
        assert channel.workers()["a"].claimed == 1

    # -- counts and signs of life ---------------------------------------------------------------

    def test_counts_of_tokens_only_rise(self, channel):
        channel.report("a", generated=10)
        channel.report("a", generated=4)
        assert channel.workers()["a"].generated == 10
        channel.put(delivery(generated=12, sent=5), timeout_s=PATIENCE_S)
        counts = channel.workers()["a"]
        assert (counts.generated, counts.sent, counts.in_flight) == (12, 5, 7)

    def test_every_call_of_a_worker_is_a_sign_of_life(self, channel):
        calls = [
            lambda: channel.report("a", generated=0),
            lambda: channel.claim("a", 1, timeout_s=0),
            lambda: channel.put(delivery(), timeout_s=PATIENCE_S),
        ]
        seen = 0.0
        for call in calls:
            call()
            now = channel.workers()["a"].seen_s
            assert now > seen
            assert abs(now - time.time()) < PATIENCE_S
            seen = now
            time.sleep(0.02)

    def test_what_is_read_of_workers_is_a_copy(self, channel):
        channel.report("a", generated=1)
        channel.workers()["a"].generated = 100
        assert channel.workers()["a"].generated == 1

    # -- the dead -------------------------------------------------------------------------------

    def test_the_claims_of_a_dead_worker_go_to_others_and_its_tokens_are_lost(self, channel):
        channel.grant(4)
        assert channel.claim("a", 4, timeout_s=0)
        channel.put(delivery(claimed=1, generated=5, sent=3), timeout_s=PATIENCE_S)
        channel.report("a", generated=9)
        counts = channel.forget("a")
        assert (counts.claimed, counts.generated, counts.delivered) == (3, 9, 1)
        assert "a" not in channel.workers()
        assert channel.claim("b", 3, timeout_s=0)
        assert not channel.claim("b", 1, timeout_s=0)
        # What it had put before is still worth having.
        assert channel.get(timeout_s=PATIENCE_S).sent == 3
        assert channel.forgotten()["a"].in_flight == 6
        # Forgotten twice, its claims come back once.
        assert channel.forget("a").in_flight == 6
        assert not channel.claim("b", 1, timeout_s=0)

    def test_who_waits_for_a_claim_gets_that_of_the_dead(self, channel):
        channel.grant(2)
        assert channel.claim("a", 2, timeout_s=0)
        waiting = in_thread(channel.claim, "b", 2, timeout_s=PATIENCE_S)
        time.sleep(SHORT_S)
        channel.forget("a")
        assert waiting() is True

    def test_who_was_forgotten_is_refused(self, channel):
        channel.report("a", generated=3)
        channel.forget("a")
        channel.grant(4)
        with pytest.raises(WorkerError, match="forgotten"):
            channel.put(delivery(), timeout_s=PATIENCE_S)
        with pytest.raises(WorkerError, match="forgotten"):
            channel.claim("a", 1, timeout_s=PATIENCE_S)
        with pytest.raises(WorkerError, match="forgotten"):
            channel.report("a", generated=4)
        assert channel.workers() == {}
        assert len(channel) == 0

    def test_who_waits_while_it_is_forgotten_is_refused(self, channel):
        waiting = in_thread(channel.claim, "a", 1, timeout_s=PATIENCE_S)
        time.sleep(SHORT_S)
        channel.forget("a")
        with pytest.raises(WorkerError, match="forgotten"):
            waiting()

    def test_nothing_is_known_of_who_never_called(self, channel):
        counts = channel.forget("nobody")
        assert (counts.claimed, counts.generated) == (0, 0)
        assert [c.in_flight for c in channel.forgotten().values()] == [0]

    # -- version and end ------------------------------------------------------------------------

    def test_workers_read_the_version_that_the_learner_set(self, channel):
        assert channel.version() == 0
        channel.set_version(3)
        assert channel.version() == 3

    def test_a_closed_channel_refuses_workers_and_gives_what_waits(self, channel):
        channel.put(delivery(values=(6,)), timeout_s=PATIENCE_S)
        channel.grant(4)
        channel.close()
        with pytest.raises(ChannelClosedError, match="closed"):
            channel.put(delivery(sequence=1), timeout_s=PATIENCE_S)
        with pytest.raises(ChannelClosedError, match="closed"):
            channel.claim("a", 1, timeout_s=PATIENCE_S)
        with pytest.raises(ChannelClosedError, match="closed"):
            channel.report("a", generated=1)
        assert ids_of(channel.get(timeout_s=PATIENCE_S)) == [[6], []]
        with pytest.raises(queue.Empty):
            channel.get(timeout_s=0)

    def test_who_waits_when_it_is_closed_is_refused(self, channel_factory):
        channel = channel_factory(1)
        channel.put(delivery(sequence=0), timeout_s=PATIENCE_S)
        waiting = [
            in_thread(channel.put, delivery(sequence=1), timeout_s=PATIENCE_S),
            in_thread(channel.claim, "a", 1, timeout_s=PATIENCE_S),
        ]
        time.sleep(SHORT_S)
        channel.close()
        for result in waiting:
            with pytest.raises(ChannelClosedError, match="closed"):
                result()
