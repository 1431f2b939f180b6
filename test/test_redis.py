"""Redis behind one door, without a server: what is wrong is said, and no password shown."""

from __future__ import annotations

import pickle
import socket
import sys
import threading

import pytest

from torchrl_llm._redis import PASSWORD_VARIABLE, RedisLink
from torchrl_llm.collectors.transport import RedisChannel
from torchrl_llm.errors import ConfigError, MissingExtraError, WorkerError
from torchrl_llm.weights import RedisWeightReader, RedisWeightWriter


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
        ("redis://[::1]:6379/1", "redis://[::1]:6379/1"),
        # What cannot be told from a password is not shown.
        ("redis://:sec/ret@host", "redis://***"),
        ("redis://user:sec?ret@host", "redis://***"),
        ("redis://user:se@cret@host", "redis://***"),
        ("redis://user:123/secret@host", "redis://***"),
        ("redis://host:6379/1?password=se@cret", "redis://***"),
        ("redis://host:secret", "redis://***"),
        ("user:secret@host", "***"),
    ],
)
def test_a_password_is_not_shown(url, place):
    link = RedisLink.__new__(RedisLink)
    link._url = url
    assert link.place == place


def credentials(link):
    provider = link.client.connection_pool.connection_kwargs.get("credential_provider")
    return None if provider is None else provider.get_credentials()


def test_the_password_comes_from_the_url_or_from_the_environment_of_each_process(monkeypatch):
    pytest.importorskip("redis")
    in_url = RedisLink("redis://user:sec%2Fret@host", feature="x")
    assert credentials(in_url) == credentials(pickle.loads(pickle.dumps(in_url)))
    assert credentials(in_url) == ("user", "sec/ret")
    assert credentials(RedisLink("redis://host", feature="x")) is None
    with pytest.raises(ConfigError, match=f"masked; put it .* {PASSWORD_VARIABLE}"):
        RedisLink("redis://:***@host", feature="x")
    monkeypatch.setenv(PASSWORD_VARIABLE, "secret")
    for url in ("redis://user@host", "redis://user:***@host"):
        link = RedisLink(url, feature="x")
        assert credentials(link) == ("user", "secret")
        assert b"secret" not in pickle.dumps(link)
    assert credentials(in_url) == ("user", "sec/ret")


def test_neither_what_is_printed_of_a_link_nor_its_errors_hold_the_password():
    pytest.importorskip("redis")
    link = RedisLink("redis://user:secret@host/0?client_name=x", feature="x")
    for shown in (link, link.client, link.client.connection_pool):
        assert "secret" not in repr(shown)
    with pytest.raises(ConfigError, match="no URL of a Redis") as refused:
        RedisLink("redis://:secret/more@host", feature="x")
    assert "secret" not in str(refused.value)


def test_a_server_that_repeats_the_password_is_quoted_without_it():
    pytest.importorskip("redis")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def repeat():
            with server.accept()[0] as connection:
                while data := connection.recv(1000):
                    words = data.replace(b"\r\n", b" ")
                    connection.sendall(b"-ERR unknown command, beginning with " + words + b"\r\n")

        threading.Thread(target=repeat, daemon=True).start()
        url = f"redis://:secret@127.0.0.1:{server.getsockname()[1]}"
        link = RedisLink(url, feature="x", reconnect_s=0.0)
        with pytest.raises((ConfigError, WorkerError), match="unknown command") as refused:
            link.call(lambda again: link.client.ping())
    assert "***" in str(refused.value)
    assert "secret" not in str(refused.value)
