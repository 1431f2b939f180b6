"""The way out of a browser without a list of sites: a proxy that reaches public addresses only.

Chromium's own rules know names and not what they lead to. Here a name is looked up, and the
connection made to the very address that was checked, for pages, redirects, frames, scripts and
sockets alike. The machine itself is out of reach by each of its names and addresses.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import socket

from torchrl_llm.tools.browser_rules import is_public

_CONNECT_S = 10.0
_CHUNK = 1 << 16
# SOCKS 5 (RFC 1928): its version, "no password", and the two answers; no address is told.
_VERSION, _CONNECT, _IPV4, _NAME, _IPV6 = 5, 1, 1, 3, 4
_NO_PASSWORD = bytes([_VERSION, 0])
_REACHED, _UNREACHABLE = (bytes([_VERSION, code, 0, _IPV4, *bytes(6)]) for code in (0, 4))
_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class PublicProxy:
    """A SOCKS proxy on loopback, in the asyncio loop that starts it."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Start to listen, unless it does.

        Returns:
            Its port.
        """
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """End every connection."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        there: _Stream | None = None
        try:
            there = await _reach(*await _asked(reader, writer))
            writer.write(_UNREACHABLE if there is None else _REACHED)
            if there is not None:
                await asyncio.gather(_copy(reader, there[1]), _copy(there[0], writer))
        except (OSError, EOFError, ValueError):
            pass  # one of both is gone, or speaks something else
        finally:
            writer.close()
            if there is not None:
                there[1].close()


async def _asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[str, int]:
    """Host and port that a client wants."""
    version, methods = await reader.readexactly(2)
    await reader.readexactly(methods)
    writer.write(_NO_PASSWORD)
    version, command, _, kind = await reader.readexactly(4)
    if (version, command) != (_VERSION, _CONNECT):
        raise ValueError("not a connection by SOCKS 5")
    if kind == _NAME:
        host = (await reader.readexactly((await reader.readexactly(1))[0])).decode("ascii")
    else:
        host = str(ipaddress.ip_address(await reader.readexactly({_IPV4: 4, _IPV6: 16}[kind])))
    return host, int.from_bytes(await reader.readexactly(2), "big")


async def _reach(host: str, port: int) -> _Stream | None:
    loop = asyncio.get_running_loop()
    if host.rstrip(".").lower() in await loop.run_in_executor(None, _own_names):
        return None
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for ip in dict.fromkeys(address[0] for *_, address in found):
        if _may_reach(ip):
            with contextlib.suppress(OSError, TimeoutError):
                return await asyncio.wait_for(asyncio.open_connection(ip, port), _CONNECT_S)
    return None


def _may_reach(ip: str) -> bool:
    return is_public(ip) and not _is_own(ip)


@functools.cache
def _own_names() -> frozenset[str]:
    # Also where they lead to an address outside that comes back here.
    return frozenset(name.lower() for name in (socket.gethostname(), socket.getfqdn()))


def _is_own(ip: str) -> bool:
    """Whether a public address is one of this machine: only those can be bound."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((ip, 0))
        except OSError:
            return False
        return True


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    writer.write_eof()
