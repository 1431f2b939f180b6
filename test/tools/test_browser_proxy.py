"""The proxy of a browser without a list: to public addresses, and to no name of this machine."""

from __future__ import annotations

import asyncio
import socket

import pytest
from tools.web import leads_to, names_of_this_machine

from torchrl_llm.tools import browser_rules
from torchrl_llm.tools.browser_rules import PublicProxy

OWN = "127.0.0.77"


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
