"""Addresses that a browser may open: what Python says, and what Chromium is told."""

from __future__ import annotations

import pytest

from torchrl_llm.errors import ConfigError
from torchrl_llm.tools.browser_rules import AddressRules, is_public


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


def test_without_a_list_chromium_knows_no_name_and_only_the_proxy_resolves():
    assert AddressRules().resolver_rules == "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"


@pytest.mark.parametrize(
    ("ip", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::8.8.8.8", True),
        *((ip, False) for ip in ("0.0.0.0", "127.0.0.1", "10.0.0.1", "100.64.0.1", "172.16.0.1")),
        *((ip, False) for ip in ("192.168.0.1", "169.254.169.254", "224.0.0.1", "255.255.255.255")),
        *((ip, False) for ip in ("::", "::1", "fd00::1", "fe80::1", "fe80::1%eth0", "ff02::1")),
        *((ip, False) for ip in ("::ffff:127.0.0.1", "::127.0.0.1", "64:ff9b::10.0.0.1")),
        *((ip, False) for ip in ("2002:7f00:1::", "2001:0:1::1", "localhost", "")),
    ],
)
def test_an_address_is_public_or_not_also_within_another(ip, public):
    assert is_public(ip) == public


@pytest.mark.parametrize(
    "allowed",
    [[], "example.org", [""], ["http://example.org"], ["*.example.org"], ["a b"], ["x:port"], [3]]
    + [["a,MAP * 127.0.0.1"], ["x" * 70 + ".org"]],
)
def test_what_is_no_host_is_refused(allowed):
    with pytest.raises(ConfigError, match="allowed_domains"):
        AddressRules(allowed)
