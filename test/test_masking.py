"""Secrets are hidden in whatever is shown or saved."""

from __future__ import annotations

import time

import pytest

from torchrl_llm._masking import masked


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
