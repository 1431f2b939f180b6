"""Weights through a real redis-server: whole or not at all, and back after it lost them."""

import json
import pickle
import shutil

import pytest
import torch
from torch import nn

pytest.importorskip("redis")

from redis_server import RedisServer

from torchrl_llm.data.safe_bytes import to_bytes
from torchrl_llm.errors import WeightUpdateError, WorkerError
from torchrl_llm.modules import FakeBackend
from torchrl_llm.weights import CanaryCheck
from torchrl_llm.weights.fingerprint import weights_digest
from torchrl_llm.weights.redis_weights import RedisWeightReader, RedisWeightWriter
from torchrl_llm.weights.weight_source import load_into

pytestmark = [
    pytest.mark.redis,
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs a redis-server"),
]


@pytest.fixture
def server(tmp_path):
    with RedisServer(tmp_path) as server:
        yield server


def model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4).to(torch.bfloat16))


def same(one, two):
    pairs = zip(one.state_dict().values(), two.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def chunk_keys(writer):
    return [k for k in writer._link.client.keys() if not k.endswith(b":newest")]


@pytest.mark.parametrize("chunk_bytes", [1, 600, 1 << 20])
def test_a_version_arrives_whole_with_its_digest(server, chunk_bytes):
    writer = RedisWeightWriter(server.url, "run", chunk_bytes=chunk_bytes)
    reader = RedisWeightReader(server.url, "run")
    assert reader.newest() is None
    trained, sampler = model(0), model(1)

    told = CanaryCheck(FakeBackend(vocab_size=16, eos_token_ids=(2,))).target()
    digest = writer.publish(trained, 7, canary=told)

    version, source = reader.newest()
    source = pickle.loads(pickle.dumps(source))
    assert source.canary.to_json() == told.to_json()
    assert (version, source.version, source.digest) == (7, 7, digest)
    assert len(chunk_keys(writer)) == {1: 4, 600: 2, 1 << 20: 1}[chunk_bytes]
    receipt = load_into(sampler, source, version=7)
    assert receipt.digest == digest == weights_digest(trained.state_dict())
    assert same(sampler, trained)


def test_who_reads_a_version_while_newer_ones_come_can_finish(server):
    writer = RedisWeightWriter(server.url, "run", chunk_bytes=1, keep=3)
    reader = RedisWeightReader(server.url, "run")
    trained, sampler = model(0), model(9)
    writer.publish(trained, 1)
    _, old = reader.newest()
    stream = old.receive()
    first = next(stream)
    for version in (2, 3):
        writer.publish(model(version), version)
    assert dict([first, *stream]).keys() == dict(trained.state_dict()).keys()
    writer.publish(model(4), 4)
    with pytest.raises(WeightUpdateError, match="version 1 of the weights is no longer"):
        load_into(sampler, old, version=1)
    assert same(sampler, model(9))
    assert len(chunk_keys(writer)) == 3 * 4
    assert reader.newest()[0] == 4


def test_a_backend_takes_them_and_keeps_the_old_ones_where_they_are_damaged(server):
    trained = FakeBackend(vocab_size=16, eos_token_ids=(2,), seed=1)
    sampler = FakeBackend(vocab_size=16, eos_token_ids=(2,), seed=2)
    writer = RedisWeightWriter(server.url, "run")
    reader = RedisWeightReader(server.url, "run")
    writer.publish(trained.module, 1)
    sampler.update_weights(reader.newest()[1], version=1)
    assert torch.equal(sampler.module.head, trained.module.head)

    before = sampler.module.head.clone()
    writer.publish(FakeBackend(vocab_size=16, eos_token_ids=(2,), seed=3).module, 2)
    client = writer._link.client
    for damage in (b"garbage", to_bytes(None, {"head": torch.zeros(1)}), pickle.dumps(print)):
        for key in chunk_keys(writer):
            client.set(key, damage)
        with pytest.raises(WeightUpdateError):
            sampler.update_weights(reader.newest()[1], version=2)
        assert torch.equal(sampler.module.head, before)


@pytest.mark.parametrize(
    "named",
    [b"", b"[]", b"{}", b'{"version": "1"}', b"\xff", b"null", b"[" * 100_000]
    + [
        json.dumps({"version": version, "digest": "", "upload": "", "chunks": chunks}).encode()
        for version, chunks in [(-1, 1), (1 << 60, 1), (1, -1), (1, 1 << 40), (1.0, 1)]
    ],
    ids=lambda named: repr(named[:30]),
)
def test_a_name_that_names_nothing_is_refused(server, named):
    reader = RedisWeightReader(server.url, "run")
    reader._link.client.set("{run}:weights:newest", named)
    with pytest.raises(WeightUpdateError, match="malformed"):
        reader.newest()


def test_keys_of_another_type_count_as_missing_and_the_writer_puts_its_own(server):
    writer = RedisWeightWriter(server.url, "run")
    reader = RedisWeightReader(server.url, "run")
    client = writer._link.client
    client.rpush("{run}:weights:newest", "banana")
    assert reader.newest() is None
    writer.publish(model(0), 1)
    _, source = reader.newest()
    for key in chunk_keys(writer):
        client.delete(key)
        client.hset(key, "banana", 1)
    with pytest.raises(WeightUpdateError, match="no longer in the Redis"):
        load_into(model(1), source, version=1)


def test_what_a_restarted_server_has_lost_is_put_there_again(server):
    writer = RedisWeightWriter(server.url, "run", chunk_bytes=1)
    reader = RedisWeightReader(server.url, "run")
    writer.refresh()  # nothing was published yet, and nothing is
    trained, sampler = model(0), model(1)
    writer.publish(trained, 5)
    server.restart()
    assert reader.newest() is None
    writer.refresh()
    load_into(sampler, reader.newest()[1], version=5)
    assert same(sampler, trained)
    writer._link.client.delete(chunk_keys(writer)[0])
    writer.refresh()
    assert len(chunk_keys(writer)) == 4


def test_limits_and_ends(server):
    writer = RedisWeightWriter(server.url, "run", reconnect_s=0.2)
    writer.publish(model(0), 1)
    client = writer._link.client
    writer.close()
    assert all(0 < client.ttl(key) <= 3600 for key in client.keys())
    server.kill()
    with pytest.raises(WorkerError, match="has not answered"):
        writer.publish(model(0), 2)
