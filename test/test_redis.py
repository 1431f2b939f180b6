"""Redis behind one door, without a server: what is missing or wrong is said."""

from __future__ import annotations

import sys

import pytest

from torchrl_llm._redis import RedisLink
from torchrl_llm.collectors.transport import RedisChannel
from torchrl_llm.errors import MissingExtraError
from torchrl_llm.weight_update import RedisWeightReader, RedisWeightWriter


@pytest.mark.parametrize("make", [RedisChannel, RedisWeightReader, RedisWeightWriter])
def test_without_the_package_the_extra_is_named(monkeypatch, make):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingExtraError, match=rf"{make.__name__} needs .*torchrl_llm\[redis\]"):
        make("redis://127.0.0.1:6379/0", "run")


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("rediss://user:secret@host:6379/1", "rediss://host:6379/1"),
        ("redis://:secret@host", "redis://host"),
        ("redis://host:6379/1?password=secret", "redis://host:6379/1"),
        ("unix:///tmp/redis.sock", "unix:///tmp/redis.sock"),
        ("somewhere", "somewhere"),
    ],
)
def test_a_password_is_not_shown(url, place):
    link = RedisLink.__new__(RedisLink)
    link._url = url
    assert link.place == place
