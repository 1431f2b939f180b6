"""Addresses that a browser may open: what Python says, and what Chromium is told."""

from __future__ import annotations

import pytest

from torchrl_llm.envs.transforms.tools.browser_rules import AddressRules
from torchrl_llm.errors import ConfigError


@pytest.mark.parametrize(
    ("allowed", "url"),
    [
        (["example.org"], "https://example.org/page?q=1#x"),
        (["example.org"], "HTTP://EXAMPLE.ORG."),
        (["example.org"], "http://user:pw@www.example.org:8080/"),
        (["Example.ORG"], "http://a.b.example.org"),
        (["127.0.0.1:8000"], "http://127.0.0.1:8000/"),
        (["localhost:80"], "http://localhost/"),
        (["localhost:443"], "https://localhost/"),
        (["::1"], "http://[::1]:99/"),
        (["[::1]:99"], "http://[::1]:99/"),
        (["bücher.example"], "http://xn--bcher-kva.example/"),
        (None, "https://example.org"),
        (None, "http://8.8.8.8/"),
    ],
)
def test_what_is_allowed_has_no_problem(allowed, url):
    assert AddressRules(allowed).problem(url) == ""


@pytest.mark.parametrize(
    ("allowed", "url"),
    [
        (["example.org"], "http://example.com"),
        (["example.org"], "http://evilexample.org"),
        (["example.org"], "http://example.org.evil.com"),
        (["example.org"], "http://example.org@evil.com/"),
        (["example.org"], "http://evil.com/?example.org"),
        (["127.0.0.1:8000"], "http://127.0.0.1:8001/"),
        (["127.0.0.1"], "http://1.127.0.0.1/"),
        (["localhost:80"], "https://localhost/"),
        (["example.org"], "file:///etc/passwd"),
        (["example.org"], "file://example.org/etc/passwd"),
        (["example.org"], "chrome://settings"),
        (["example.org"], "javascript:alert(1)"),
        (["example.org"], "view-source:http://example.org"),
        (["example.org"], "data:text/html,hi"),
        (["example.org"], "example.org"),
        (["example.org"], "http://"),
        (["example.org"], "http://[::1"),
        (["example.org"], "http://example.org:port/"),
        (["example.org"], ""),
        (None, "http://localhost:8000"),
        (None, "http://127.0.0.1"),
        (None, "http://10.1.2.3"),
        (None, "http://192.168.0.1"),
        (None, "http://172.20.0.1"),
        (None, "http://169.254.169.254/latest/meta-data"),
        (None, "http://[::1]/"),
        (None, "http://[fd00::1]/"),
        (None, "http://printer.local"),
        (None, "http://metadata.google.internal"),
    ],
)
def test_what_is_not_allowed_is_refused_with_a_reason(allowed, url):
    assert AddressRules(allowed).problem(url)


def test_chromium_is_told_the_sites_and_that_nothing_else_exists():
    rules = AddressRules(["example.org", "127.0.0.1:8000", "[::1]:9", "10.0.0.1"]).resolver_rules
    assert rules == (
        "EXCLUDE example.org, EXCLUDE *.example.org, MAP 127.0.0.1:8000 127.0.0.1, "
        "MAP [::1]:9 [::1], EXCLUDE 10.0.0.1, MAP * ~NOTFOUND"
    )


def test_without_a_list_private_machines_are_unknown_to_chromium():
    rules = AddressRules().resolver_rules.split(", ")
    for name in ("localhost", "127.*", "10.*", "169.254.*", "172.16.*", "172.31.*", "fd*:*:*"):
        assert f"MAP {name} ~NOTFOUND" in rules
    assert "MAP * ~NOTFOUND" not in rules


def test_a_server_behind_a_public_name_may_not_be_private_unless_its_name_is_listed():
    assert AddressRules().refuses_server("10.0.0.1")
    assert not AddressRules().refuses_server("8.8.8.8")
    assert not AddressRules(["intranet"]).refuses_server("10.0.0.1")


@pytest.mark.parametrize(
    "allowed",
    [[], "example.org", [""], ["http://example.org"], ["*.example.org"], ["a b"], ["x:port"], [3]]
    + [["a,MAP * 127.0.0.1"], ["x" * 70 + ".org"]],
)
def test_what_is_no_host_is_refused(allowed):
    with pytest.raises(ConfigError, match="allowed_domains"):
        AddressRules(allowed)
