"""Rows through a real redis-server: the contract of channels, restarts, and bytes of strangers."""

from __future__ import annotations

import shutil

import pytest

pytest.importorskip("redis")

from conformance.channels import ChannelConformance
from redis_server import RedisServer

from torchrl_llm.collectors.transport.redis import (
    RedisChannel,
)

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
