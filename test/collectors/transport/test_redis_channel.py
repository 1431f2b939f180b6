"""Rows through a real redis-server: the contract of channels, restarts, and bytes of strangers."""

import pickle
import queue
import shutil
import socket
import threading
import time
from functools import partial

import pytest
import torch

pytest.importorskip("redis")

from conformance.channels import (
    PATIENCE_S,
    SHORT_S,
    ChannelConformance,
    delivery,
    ids_of,
    in_thread,
)
from redis_server import RedisServer, free_port

from torchrl_llm.collectors.transport.channel import TokenAccounts
from torchrl_llm.collectors.transport.redis_channel import (
    KEYS,
    RedisChannel,
    delivery_from_bytes,
    delivery_to_bytes,
)
from torchrl_llm.data.wire import encode
from torchrl_llm.errors import ConfigError, DataError, ResourceError, WorkerError
from torchrl_llm.weights.redis_weights import RedisWeightWriter

pytestmark = [
    pytest.mark.redis,
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs a redis-server"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def channel_factory(server, request):
    made = []

    def make(max_size):
        made.append(RedisChannel(server.url, f"{request.node.name} {len(made)}", max_size))
        return made[-1]

    return make


class TestRedisChannel(ChannelConformance):
    pass


# -- the server goes away -------------------------------------------------------------------------


@pytest.fixture
def own_server(tmp_path):
    with RedisServer(tmp_path) as server:
        yield server


def put(channel, worker, sequence, tokens, *, claimed=2):
    """One delivery of ``tokens`` sampled tokens in all so far."""
    made = delivery(
        worker, sequence, values=(sequence,), claimed=claimed, generated=tokens, sent=tokens
    )
    channel.put(made, timeout_s=PATIENCE_S)


def out_in_all(channel):
    """Rows that are free, claimed, or waiting: what the learner believes to be out."""
    channel.workers()
    client = channel._link.client
    free = int(client.hget(channel._keys[0], "granted"))
    claimed = sum(map(int, client.hvals(channel._keys[4])))
    return free + claimed + sum(map(int, client.lrange(channel._keys[2], 0, -1)))


def test_after_a_restart_without_data_the_lost_is_counted_granted_anew_and_all_go_on(own_server):
    learner = RedisChannel(own_server.url, "run", 4, begin=True)
    worker = RedisChannel(own_server.url, "run")
    learner.set_version(3)
    learner.grant(8)
    for _ in range(3):
        assert worker.claim("a", 2, timeout_s=0)
    put(worker, "a", 0, 5)
    put(worker, "a", 1, 9)
    accounts = TokenAccounts()
    accounts.receive(learner.get(timeout_s=PATIENCE_S), 5)

    own_server.restart(away_s=0.3)

    # Number 1 is gone; the worker holds a claim of 2 rows still, 2 rows nobody had claimed.
    put(worker, "a", 2, 13)
    assert worker.version() in (0, 3)
    got = learner.get(timeout_s=PATIENCE_S)
    assert (got.sequence, ids_of(got)[0]) == (2, [2])
    accounts.receive(got, 4)
    assert (accounts.received, accounts.lost) == (9, 4)
    assert worker.version() == 3
    # 8 granted, 4 came: the 2 of the lost delivery can be claimed again, and no more than those.
    assert out_in_all(learner) == 4
    assert worker.claim("b", 4, timeout_s=0)
    assert not worker.claim("b", 1, timeout_s=0)


def test_after_a_restart_with_data_nothing_is_lost_and_nothing_comes_twice(tmp_path):
    options = ("--appendonly", "yes", "--appendfsync", "always", "--save", "")
    with RedisServer(tmp_path, *options) as server:
        learner = RedisChannel(server.url, "run", 4, begin=True)
        worker = RedisChannel(server.url, "run")
        learner.set_version(1)
        learner.grant(8)
        assert worker.claim("a", 6, timeout_s=0)
        put(worker, "a", 0, 5)
        put(worker, "a", 1, 9)
        assert learner.get(timeout_s=PATIENCE_S).sequence == 0
        server.restart()
        put(worker, "a", 1, 9)  # in doubt, and put again
        put(worker, "a", 2, 13)
        assert [learner.get(timeout_s=PATIENCE_S).sequence for _ in range(2)] == [1, 2]
        with pytest.raises(queue.Empty):
            learner.get(timeout_s=0)
        assert out_in_all(learner) == 2
        assert worker.version() == 1


def test_a_server_that_comes_back_with_old_data_gives_nothing_twice(tmp_path):
    with RedisServer(tmp_path, "--save", "", "--dbfilename", "dump.rdb") as server:
        learner = RedisChannel(server.url, "run", 4, begin=True)
        worker = RedisChannel(server.url, "run")
        learner.grant(8)
        assert worker.claim("a", 8, timeout_s=0)
        put(worker, "a", 0, 5)
        learner._link.client.save()
        assert learner.get(timeout_s=PATIENCE_S).sequence == 0
        put(worker, "a", 1, 9)
        assert learner.get(timeout_s=PATIENCE_S).sequence == 1
        server.restart()  # to the state in which number 0 waited
        put(worker, "a", 2, 13)
        assert learner.get(timeout_s=PATIENCE_S).sequence == 2
        assert out_in_all(learner) == 2
        assert worker.claim("b", 1, timeout_s=0) is False  # a still holds those 2


def test_what_else_was_lost_is_brought_back_by_who_knows(own_server):
    came = []
    learner = RedisChannel(
        own_server.url, "run", begin=True, on_return=lambda: came.append(len(came))
    )
    learner.forget("dead")
    assert came == []
    own_server.restart()
    learner.workers()
    assert came == [0]
    with pytest.raises(WorkerError, match="forgotten"):
        RedisChannel(own_server.url, "run").report("dead", generated=1)


def test_who_waits_while_the_server_is_away_gets_what_it_waits_for(own_server):
    learner = RedisChannel(own_server.url, "run", begin=True)
    worker = RedisChannel(own_server.url, "run")
    getting = in_thread(learner.get, timeout_s=PATIENCE_S)
    claiming = in_thread(worker.claim, "a", 2, timeout_s=PATIENCE_S)
    time.sleep(SHORT_S)
    own_server.restart(away_s=1.0)
    learner.grant(2)
    assert claiming() is True
    put(worker, "a", 0, 5)
    assert getting().sequence == 0


def test_a_server_that_stays_away_ends_every_call_in_time(own_server):
    channel = RedisChannel(own_server.url, "run", begin=True, reconnect_s=0.5)
    own_server.kill()
    calls = [
        lambda: channel.get(timeout_s=0.1),
        lambda: channel.grant(1),
        lambda: channel.claim("a", 1, timeout_s=0.1),
        lambda: channel.put(delivery(), timeout_s=0.1),
        lambda: channel.report("a", generated=1),
        channel.version,
        channel.workers,
        lambda: len(channel),
    ]
    for call in calls:
        started = time.monotonic()
        with pytest.raises(
            WorkerError, match=r"redis://127.0.0.1:\d+/0 has not answered for 0.5 s"
        ):
            call()
        assert time.monotonic() - started < 5


def test_all_links_to_a_server_that_stays_away_wait_for_it_once(own_server):
    channel = RedisChannel(own_server.url, "run", begin=True, reconnect_s=0.5)
    writer = RedisWeightWriter(own_server.url, "run", reconnect_s=0.5)
    own_server.kill()
    begun = time.monotonic()
    with pytest.raises(WorkerError, match=r"has not answered for 0.5 s"):
        channel.grant(1)
    first_s = time.monotonic() - begun
    # What the end of a run calls.
    for call in (channel.close, partial(writer.publish, {"w": torch.ones(1)}, 1)):
        with pytest.raises(WorkerError):
            call()
    assert time.monotonic() - begun - first_s < 0.5
    own_server.start()
    channel.grant(1)


def test_a_server_that_never_answers_ends_a_call_in_time(monkeypatch):
    monkeypatch.setattr("torchrl_llm._redis._ANSWER_S", 0.3)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        url = f"redis://127.0.0.1:{deaf.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(WorkerError, match="has not answered"):
            RedisChannel(url, "run", reconnect_s=0.5).version()
        assert time.monotonic() - started < 10


# -- learners and workers that are replaced -------------------------------------------------------


def test_a_learner_that_begins_anew_drops_what_waits_and_keeps_what_workers_hold(server):
    first = RedisChannel(server.url, "anew", 4, begin=True)
    worker = RedisChannel(server.url, "anew")
    first.set_version(7)
    first.grant(6)
    assert worker.claim("a", 4, timeout_s=0)
    put(worker, "a", 0, 5)
    del first  # killed

    second = RedisChannel(server.url, "anew", 4, begin=True)
    second.set_version(5)
    second.grant(6)
    assert len(second) == 0
    assert worker.version() == 5
    put(worker, "a", 1, 9)  # the worker's other claim of 2 rows is out, too
    assert second.get(timeout_s=PATIENCE_S).sequence == 1
    assert out_in_all(second) == 4
    assert worker.claim("b", 4, timeout_s=0)
    assert not worker.claim("b", 1, timeout_s=0)


def test_a_learner_that_joins_gets_the_answer_that_the_one_before_never_got(server):
    first = RedisChannel(server.url, "joins", 4, begin=True)
    worker = RedisChannel(server.url, "joins")
    first.set_version(2)
    first.grant(4)
    assert worker.claim("a", 4, timeout_s=0)
    put(worker, "a", 0, 5)
    put(worker, "a", 1, 9)
    assert first.get(timeout_s=PATIENCE_S).sequence == 0
    second = RedisChannel(server.url, "joins", 4)
    second.grant(3)
    assert [second.get(timeout_s=PATIENCE_S).sequence for _ in range(2)] == [0, 1]
    assert worker.version() == 2
    assert out_in_all(second) == 3


def test_handles_travel_to_other_processes(server):
    learner = RedisChannel(server.url, "pickled", 4, begin=True)
    worker = pickle.loads(pickle.dumps(RedisChannel(server.url, "pickled")))
    learner.grant(2)
    assert worker.claim("a", 2, timeout_s=0)
    put(worker, "a", 0, 5)
    moved = pickle.loads(pickle.dumps(learner))
    assert moved.get(timeout_s=PATIENCE_S).sequence == 0


def test_two_channels_of_one_server_know_nothing_of_each_other(server):
    one, two = RedisChannel(server.url, "one"), RedisChannel(server.url, "two")
    one.grant(2)
    one.set_version(4)
    assert not two.claim("a", 1, timeout_s=0)
    assert (two.version(), len(two), one.workers()) == (0, 0, {})


def test_a_closed_channel_leaves_nothing_on_the_server_for_ever(server):
    channel = RedisChannel(server.url, "ends", begin=True)
    channel.report("a", generated=1)
    channel.close()
    assert all(0 < channel._link.client.ttl(key) <= 3600 for key in channel._keys[:1])


# -- strangers ------------------------------------------------------------------------------------


def test_bytes_of_strangers_are_passed_over_and_their_rows_granted_anew(server):
    learner = RedisChannel(server.url, "garbage", 8, begin=True)
    worker = RedisChannel(server.url, "garbage")
    learner.grant(2)
    client = learner._link.client
    for data in (b"", b"garbage", pickle.dumps(print), delivery_to_bytes(delivery())[:-9]):
        client.rpush(learner._keys[1], data)
        client.rpush(learner._keys[2], 0)
    assert worker.claim("a", 2, timeout_s=0)
    put(worker, "a", 0, 5)
    assert learner.get(timeout_s=PATIENCE_S).worker == "a"
    with pytest.raises(queue.Empty):
        learner.get(timeout_s=0)


@pytest.mark.parametrize(
    "change",
    [
        {"worker": 3},
        {"sequence": -1},
        {"sequence": True},
        {"claimed": 1.5},
        {"claimed": 1 << 21},
        {"generated": None},
        {"sent": "many"},
        {"digests": {"0": "x"}},
        {"digests": [1]},
        {"more": 1},
    ],
    ids=str,
)
def test_a_message_that_does_not_say_who_sent_what_is_no_delivery(change):
    about = {"worker": "a", "sequence": 0, "claimed": 0, "generated": 0, "sent": None}
    about |= {"digests": {}}
    rows = delivery().rows
    assert delivery_from_bytes(encode(rows, about)).worker == "a"
    with pytest.raises(DataError, match="who collected them"):
        delivery_from_bytes(encode(rows, about | change))


# Each is no number that a learner or a worker writes.
NO_NUMBERS = ("banana", "", "-3", "1.5", "1e300", "nan", "inf", "0x", "9" * 400, b"\xff\x00")
HASHES = {
    "state": ("run", "version", "max_size", "granted", "taken", "led", "mended"),
    "taken": ("number", "claims", "data"),
    **dict.fromkeys(("claimed", "generated", "delivered", "sent", "seen"), ("a", "stranger")),
    "forgotten": ("ghost",),
}


def fields_of_others():
    for key, fields in HASHES.items():
        for field in fields:
            yield from ((key, "hset", (field, value)) for value in NO_NUMBERS)
    for key in ("queue", "queued"):
        yield from ((key, "rpush", (value,)) for value in NO_NUMBERS)


def keys_of_others():
    for key in KEYS:
        yield key, "set", ("banana",)
        yield key, "hset" if key in ("queue", "queued") else "rpush", ("banana", "1")


@pytest.mark.parametrize("written", [fields_of_others, keys_of_others])
def test_whatever_others_write_into_the_server_the_learner_goes_on(server, written):
    for number, (key, command, arguments) in enumerate(written()):
        name = f"{written.__name__} {number}"
        what = (key, command, arguments)
        learner = RedisChannel(server.url, name, 4, begin=True)
        worker = RedisChannel(server.url, name)
        learner.set_version(3)
        learner.grant(8)
        assert worker.claim("a", 6, timeout_s=0)
        put(worker, "a", 0, 5)

        client, place = learner._link.client, learner._keys[KEYS.index(key)]
        if command in ("set", "rpush" if key not in ("queue", "queued") else "hset"):
            client.delete(place)
        getattr(client, command)(place, *arguments)

        counts = learner.workers()
        assert all(0 <= seen.claimed <= 6 and seen.generated >= 0 for seen in counts.values()), what
        put(worker, "a", 1, 9)
        sequences = []
        while 1 not in sequences:
            sequences.append(learner.get(timeout_s=PATIENCE_S).sequence)
        # What waited is gone only where its list was taken away.
        assert sequences == [0, 1] or (key, written) == ("queue", keys_of_others), what
        assert worker.version() == 3, what
        worker.report("a", generated=9)
        learner.forget("stranger")
        learner.forgotten()
        for _ in range(2):  # the first call of each mends what it meets
            out = out_in_all(learner)
            worker.report("a", generated=9)
        # 8 rows were granted, 2 came with each delivery, and the worker holds claims of 2.
        assert out == 8 - 2 * len(set(sequences)), what
        assert not worker.claim("b", out - 1, timeout_s=0), what
        assert worker.claim("b", out - 2, timeout_s=0), what
        joined = RedisChannel(server.url, name)
        joined.grant(1)
        assert out_in_all(joined) == out + 1, what
        for channel in (learner, worker, joined):
            channel._link.close()


@pytest.fixture
def warned(monkeypatch):
    texts = []
    monkeypatch.setattr(
        "torchrl_llm.collectors.transport.redis_channel.logger.warning", texts.append
    )
    return texts


def test_what_others_wrote_is_named_once(server, warned):
    learner = RedisChannel(server.url, "named", begin=True)
    learner._link.client.rpush(learner._keys[2], "banana")
    learner.grant(1)
    learner.grant(1)
    assert len(warned) == 1
    assert "'{named}:queued' in the Redis at redis://127.0.0.1" in warned[0]
    assert "neither the learner nor a worker writes" in warned[0]


def test_a_worker_that_claims_to_come_from_the_future_is_missed_like_any_other(server):
    learner = RedisChannel(server.url, "future", begin=True)
    learner._link.client.hset(learner._keys[8], "stranger", time.time() + 1e6)
    assert learner.workers()["stranger"].seen_s < time.time() - 1e6


# -- settings -------------------------------------------------------------------------------------


def test_impossible_settings_are_refused(server):
    with pytest.raises(ConfigError, match="no URL"):
        RedisChannel("http://somewhere", "x")


def test_a_wrong_password_is_said_and_never_shown(tmp_path):
    with RedisServer(tmp_path, "--requirepass", "right", "--save", "") as server:
        url = f"redis://:secret@127.0.0.1:{server.port}/0"
        with pytest.raises(ConfigError, match="refuses us") as error:
            RedisChannel(url, "x", begin=True)
        assert "secret" not in str(error.value)


def test_a_server_without_memory_is_said(tmp_path):
    with RedisServer(tmp_path, "--maxmemory", "2mb", "--save", "") as server:
        channel = RedisChannel(server.url, "x", begin=True)

        def fill():
            for sequence in range(8):
                channel.put(delivery("a", sequence, values=range(100_000)), timeout_s=1)

        with pytest.raises(ResourceError, match="out of memory"):
            fill()


def test_nobody_at_the_address_is_said_in_time():
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"has not answered for 0.2 s"):
        RedisChannel(f"redis://127.0.0.1:{free_port()}", "x", begin=True, reconnect_s=0.2)
    assert time.monotonic() - started < 10


def test_a_thousand_workers_claim_at_once_and_nothing_is_granted_twice(server):
    channel = RedisChannel(server.url, "many", begin=True)
    channel.grant(500)
    won, threads = [], []

    def work(part):
        handle = RedisChannel(server.url, "many")
        won.extend(handle.claim(f"w{i}", 1, timeout_s=0) for i in range(part, 1000, 8))

    for part in range(8):
        threads.append(threading.Thread(target=work, args=(part,), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert (len(won), sum(won)) == (1000, 500)
    assert sum(counts.claimed for counts in channel.workers().values()) == 500


def test_workers_see_how_long_the_learner_has_been_silent(server):
    worker = RedisChannel(server.url, "silence")
    assert worker.learner_silence_s() is None
    learner = RedisChannel(server.url, "silence", begin=True)
    time.sleep(SHORT_S)
    assert SHORT_S <= worker.learner_silence_s() < PATIENCE_S
    learner.grant(1)
    assert worker.learner_silence_s() < SHORT_S
