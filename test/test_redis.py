"""Redis behind one door, without a server: what is wrong is said, and no password shown."""

from __future__ import annotations

import pickle
import socket
import sys
import threading
import time

import pytest

from torchrl_llm._redis import PASSWORD_VARIABLE, RedisLink, masked
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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://user:secret@host:6379/0", "redis://user:***@host:6379/0"),
        ("redis.url='rediss://:se:cr/et?@host'", "redis.url='rediss://:***@host'"),
        ("redis://user:123/secret@host", "redis://user:***@host"),
        ("redis://host/1?password=secret&db=2", "redis://host/1?password=***&db=2"),
        ("redis://user:secret", "redis://user:***"),
        ("https://user:secret@example.org/x", "https://user:***@example.org/x"),
        ("unix://user:secret@/tmp/x", "unix://user:***@/tmp/x"),
        ("redis://host:6379", "redis://host:6379"),
        ("http://host:8080/x@y", "http://host:8080/x@y"),
        ("redis://:${oc.env:PASSWORD}@host", "redis://:${oc.env:PASSWORD}@host"),
        ("redis://:***@host", "redis://:***@host"),
        ("base_url=http://user:secret@host:8000/v1", "base_url=http://user:***@host:8000/v1"),
        ("https://secret@host/x", "https://***@host/x"),
        ("no folder https:/user:secret@host/x", "no folder https:/user:***@host/x"),
        ("https://host/x?api-key=secret", "https://host/x?api-key=***"),
        ("https://host/x?v=1&sig=secret&w=2", "https://host/x?v=1&sig=***&w=2"),
        ("push --token=secret x", "push --token=*** x"),
        ("headers={Authorization: 'Bearer secret'}", "headers={Authorization: 'Bearer ***'}"),
        ("headers={X-Api-Key: secret, a: b}", "headers={X-Api-Key: ***, a: b}"),
        ('{"password": "secret"}', '{"password": "***"}'),
        ("-H Authorization: Bearer 0123456789ab", "-H Authorization: Bearer ***"),
        ("wrong API key: sk-0123456789abcdef.", "wrong API key: sk-***."),
        ("{pad_token: <pad>, max_tokens: 5}", "{pad_token: <pad>, max_tokens: 5}"),
        ("http://host/v1?api_key=secret&a=1", "http://host/v1?api_key=***&a=1"),
        ("http://host/v1?token=secret", "http://host/v1?token=***"),
        ("+env.options.token=secret", "+env.options.token=***"),
        ("env.options.api_key=secret", "env.options.api_key=***"),
        ("reward.kl_reduction=token", "reward.kl_reduction=token"),
        ("every token=1 of max_tokens=5", "every token=1 of max_tokens=5"),
        ("a@b.org wrote to http://host/a", "a@b.org wrote to http://host/a"),
    ],
)
def test_what_is_shown_or_saved_holds_no_password(text, shown):
    assert masked(text) == masked(shown) == shown
    assert masked({"a": [text, 1, None]}) == {"a": [shown, 1, None]}


def test_values_of_keys_that_are_called_a_secret_are_not_shown():
    keys = ["api_key", "apikey", "API-Key", "token", "env.options.token", "HF_TOKEN", "password"]
    keys += ["redis_password", "client_secret", "Authorization", "access_token", "auth_token"]
    keys += ["X-Goog-Api-Key", "Ocp-Apim-Subscription-Key", "X-Auth-Token", "Cookie", "passwd"]
    keys += ["GITHUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "github_token", "secret_key"]
    assert masked({"a": [dict.fromkeys(keys, "s")]}) == {"a": [dict.fromkeys(keys, "***")]}
    others = dict.fromkeys(["pad_token", "tokens", "max_tokens", "api_key_variable"], "s")
    others |= {"token": None, "secret": "", "password": "${oc.env:PW}", "eos_token": 3}
    others |= {"bos_token": "s", "key": "s", "token": 5}
    assert masked(others) == others
    assert masked({"password": 123}) == {"password": "***"}


@pytest.mark.parametrize("text", ["x://a:", "redis://a:", "x:/", "a_", ", a-", "?a&", "Bearer "])
def test_a_long_text_is_masked_in_linear_time(text):
    seconds = []
    for number in (2_000, 40_000):
        begun = time.perf_counter()
        masked(text * number)
        seconds.append(time.perf_counter() - begun)
    assert seconds[1] < 100 * max(seconds[0], 1e-3)


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
