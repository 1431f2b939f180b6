"""Addresses that a browser may open: what Python says, what Chromium is told, and the proxy."""

from __future__ import annotations

import asyncio
import socket

import pytest
from cases import cases
from tools.web import leads_to, names_of_this_machine

from torchrl_llm.errors import ConfigError
from torchrl_llm.tools import browser_rules
from torchrl_llm.tools.browser_rules import AddressRules, PublicProxy, is_public

CASES = cases(__file__)

OWN = "127.0.0.77"


ALLOWED = CASES["allowed"]


def test_what_is_allowed_has_no_problem():
    problems = {(str(hosts), url): AddressRules(hosts).problem(url) for hosts, url in ALLOWED}
    assert not {case: problem for case, problem in problems.items() if problem}


REFUSED = CASES["refused"]


def test_what_is_not_allowed_is_refused_with_a_reason():
    assert not [case for case in REFUSED if not AddressRules(case[0]).problem(case[1])]


def test_chromium_is_told_the_sites_and_that_nothing_else_exists():
    rules = AddressRules(["example.org", "127.0.0.1:8000", "[::1]:9", "10.0.0.1"]).resolver_rules
    assert rules == (
        "EXCLUDE example.org, EXCLUDE *.example.org, MAP 127.0.0.1:8000 127.0.0.1, "
        "MAP [::1]:9 [::1], EXCLUDE 10.0.0.1, MAP * ~NOTFOUND"
    )


def test_without_a_list_chromium_knows_no_name_and_only_the_proxy_resolves():
    assert AddressRules().resolver_rules == "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"


PUBLIC = ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8")
NOT_PUBLIC = (
    "0.0.0.0 127.0.0.1 10.0.0.1 100.64.0.1 172.16.0.1 192.168.0.1 169.254.169.254 224.0.0.1 "
    "255.255.255.255 :: ::1 fd00::1 fe80::1 fe80::1%eth0 ff02::1 ::ffff:127.0.0.1 ::127.0.0.1 "
    "64:ff9b::10.0.0.1 2002:7f00:1:: 2001:0:1::1 localhost"
)


def test_an_address_is_public_or_not_also_within_another():
    assert [ip for ip in PUBLIC if not is_public(ip)] == []
    assert [ip for ip in ("", *NOT_PUBLIC.split()) if is_public(ip)] == []


@pytest.mark.parametrize(
    "allowed",
    [[], "example.org", [""], ["http://example.org"], ["*.example.org"], ["a b"], ["x:port"], [3]]
    + [["a,MAP * 127.0.0.1"], ["x" * 70 + ".org"]],
)
def test_what_is_no_host_is_refused(allowed):
    with pytest.raises(ConfigError, match="allowed_domains"):
        AddressRules(allowed)


async def asks(port, host, there):
    """Ask a proxy for a host: the code of its answer, and what the server says after a greeting."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    name = host.encode()
    writer.write(b"\5\1\0" + b"\5\1\0\3" + bytes([len(name)]) + name + there.to_bytes(2, "big"))
    answer = await reader.readexactly(12)
    assert answer[:2] == b"\5\0"
    if answer[3] == 0:
        writer.write(b"hello")
        writer.write_eof()
    said = await reader.read()
    writer.close()
    return answer[3], said


def through_a_proxy(*hosts):
    """Answers for a server on every address of this machine, and what it was told in all."""
    told = []

    async def echo(reader, writer):
        told.append(await reader.read())
        writer.write(told[-1].upper())
        writer.close()

    async def run():
        proxy = PublicProxy()
        async with await asyncio.start_server(echo, "0.0.0.0", 0) as server:
            there = server.sockets[0].getsockname()[1]
            answers = [await asks(await proxy.start(), host, there) for host in hosts]
            await proxy.close()
        return answers

    return asyncio.run(asyncio.wait_for(run(), 60)), told


def test_what_leads_to_this_machine_is_unreachable(monkeypatch):
    leads_to(monkeypatch, {"rebound.example": "127.0.0.1", "mapped.example": "::ffff:127.0.0.1"})
    hosts = {socket.gethostname(), socket.gethostname().upper() + ".", socket.getfqdn()}
    hosts |= {name.strip("[]") for name in names_of_this_machine()}
    hosts |= {"localhost.", "127.1", "2130706433", "0177.1", "0x7f.1", "0", "::1", "::ffff:7f00:1"}
    hosts |= {"rebound.example", "mapped.example"}
    answers, told = through_a_proxy(*sorted(hosts))
    assert {answer for answer, _ in answers} == {4}
    assert told == []


def test_a_public_address_that_this_machine_has_is_its_own(monkeypatch):
    monkeypatch.setattr(browser_rules, "is_public", lambda ip: True)
    assert through_a_proxy(OWN, "127.0.0.1") == ([(4, b"")] * 2, [])
    assert not browser_rules._is_own("192.0.2.200")


def test_its_own_name_is_refused_wherever_it_leads(monkeypatch):
    name = socket.gethostname()
    leads_to(monkeypatch, {name: OWN})
    monkeypatch.setattr(browser_rules, "_may_reach", lambda ip: ip == OWN)
    assert through_a_proxy(name, f"{name}.") == ([(4, b"")] * 2, [])


def test_it_connects_to_the_address_that_it_has_checked_and_carries_both_ways(monkeypatch):
    looked_up = []

    def once(host, *args, **kwargs):
        if host == "public.example":
            looked_up.append(host)
            host = OWN if len(looked_up) == 1 else "127.0.0.1"  # a name that changes its address
        return ours(host, *args, **kwargs)

    ours = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", once)
    monkeypatch.setattr(browser_rules, "_may_reach", lambda ip: ip == OWN)
    assert through_a_proxy("public.example") == ([(0, b"HELLO")], [b"hello"])
    assert looked_up == ["public.example"]


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\5\1\0\5\2\0\1" + bytes(6)])
def test_who_speaks_something_else_is_hung_up_on(said):
    async def run():
        proxy = PublicProxy()
        reader, writer = await asyncio.open_connection("127.0.0.1", await proxy.start())
        writer.write(said)
        writer.write_eof()
        answer = await reader.read()
        writer.close()
        await proxy.close()
        return answer

    assert asyncio.run(asyncio.wait_for(run(), 60)) in (b"", b"\5\0")
