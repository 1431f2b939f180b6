"""Rules for the addresses that a browser may open: a list of sites, or all public sites.

Chromium's name resolution enforces a list, so the list also applies to redirects, frames, pictures,
scripts and sockets of a page. Without a list, all traffic goes through :class:`PublicProxy`,
because Chromium's rules match names and not IP addresses. The proxy looks up a name and connects to
the same address that it checked. The browser cannot reach this machine by any of its names and
addresses. ``torchrl_llm.tools.browser_driver`` controls the browser.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from torchrl_llm.errors import ConfigError

# NAT64: these IPv6 addresses contain an IPv4 address.
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_CONNECT_S = 10.0
_CHUNK = 1 << 16
# SOCKS 5 (RFC 1928): its version, "no password", and the two replies. The replies contain no
# address.
_VERSION, _CONNECT, _IPV4, _NAME, _IPV6 = 5, 1, 1, 3, 4
_NO_PASSWORD = bytes([_VERSION, 0])
_REACHED, _UNREACHABLE = (bytes([_VERSION, code, 0, _IPV4, *bytes(6)]) for code in (0, 4))
_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class AddressRules:
    """The allowed addresses, in forms for Python and for Chromium.

    Args:
        allowed_domains: hosts such as ``"example.org"`` (its subdomains are allowed too) or
            ``"127.0.0.1:8000"`` (this port only); ``None`` allows every host except this machine
            and private networks.

    Raises:
        ConfigError: for an entry that is not a host, or an empty list.

    Example:
        >>> rules = AddressRules(["example.org"])
        >>> rules.problem("https://www.example.org/page"), rules.problem("file:///etc/passwd")
        ('', "only http and https addresses can be opened, got 'file:///etc/passwd'")
    """

    def __init__(self, allowed_domains: Sequence[str] | None = None) -> None:
        if isinstance(allowed_domains, str):
            raise ConfigError(f"allowed_domains must be a list, got the string {allowed_domains!r}")
        self.allowed = None if allowed_domains is None else tuple(map(_entry, allowed_domains))
        if self.allowed == ():
            raise ConfigError("allowed_domains is empty: nothing could be opened")

    def problem(self, url: str) -> str:
        """Return why an address is forbidden, as a message for the model; empty if it is allowed.

        Chromium (by :attr:`resolver_rules`) or the proxy makes the final decision.

        Args:
            url: address that the model wrote.
        """
        try:
            parts = urlsplit(url.strip())
            host, port = (parts.hostname or "").rstrip("."), parts.port
        except ValueError:
            return f"not an address: {url!r}"
        if parts.scheme.lower() not in ("http", "https"):
            return f"only http and https addresses can be opened, got {url!r}"
        if not host:
            return f"an address needs a host, got {url!r}"
        if self.allowed is None:
            return f"{host} is not a public site" if _is_private(host) else ""
        for name, only_port in self.allowed:
            known = host == name or (not _is_literal(name) and host.endswith(f".{name}"))
            given = port or (443 if parts.scheme.lower() == "https" else 80)
            if known and only_port in (None, given):
                return ""
        return f"{host} is not among the allowed sites: {', '.join(map(_spell, self.allowed))}"

    @property
    def resolver_rules(self) -> str:
        """The same rules for Chromium's ``--host-resolver-rules``; the first match applies.

        Without a list, Chromium resolves only the proxy; the proxy resolves names.
        """
        if self.allowed is None:
            return "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
        rules = []
        for name, port in self.allowed:
            for pattern in [name] if _is_literal(name) else [name, f"*.{name}"]:
                # An exclusion cannot contain ports, and a subdomain cannot be mapped to itself.
                if port is None:
                    rules.append(f"EXCLUDE {pattern}")
                elif pattern == name:
                    rules.append(f"MAP {_spell((name, port))} {_bracketed(name)}")
        return ", ".join([*rules, "MAP * ~NOTFOUND"])


def is_public(ip: str) -> bool:
    """Whether an address is public: not an address of this machine or a private network.

    Args:
        ip: IPv4 or IPv6 address; if it contains another address, the inner address counts.

    Example:
        >>> is_public("8.8.8.8"), is_public("169.254.169.254"), is_public("::ffff:10.0.0.1")
        (True, False, False)
    """
    address = _literal(ip)
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address.sixtofour or address
        if address in _NAT64 or int(address) < 1 << 32:
            address = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address is not None and address.is_global and not address.is_multicast


def _entry(domain: str) -> tuple[str, int | None]:
    if not isinstance(domain, str) or not domain.strip() or "/" in domain or "*" in domain:
        raise ConfigError(
            f"allowed_domains holds hosts such as 'example.org' or '127.0.0.1:8000', got {domain!r}"
        )
    text = domain.strip().lower()
    if text.count(":") > 1 and not text.startswith("["):
        text = f"[{text}]"
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"allowed_domains holds {domain!r}: {error}") from None
    if not host or any(c.isspace() or c == "," for c in host):
        raise ConfigError(f"allowed_domains holds {domain!r}, which is not a host")
    try:
        host = host if _is_literal(host) else host.encode("idna").decode()
    except UnicodeError as error:
        raise ConfigError(f"allowed_domains holds {domain!r}: {error}") from None
    return host.rstrip("."), port


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def _is_literal(host: str) -> bool:
    return _literal(host) is not None


def _is_private(host: str) -> bool:
    if _is_literal(host):
        return not is_public(host)
    return host == "localhost" or host.endswith((".localhost", ".local", ".internal"))


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _spell(entry: tuple[str, int | None]) -> str:
    host, port = entry
    return _bracketed(host) if port is None else f"{_bracketed(host)}:{port}"


class PublicProxy:
    """A SOCKS proxy on loopback, in the asyncio loop that starts it."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Start to listen, unless the proxy already listens.

        Returns:
            The port.
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
            pass  # one side has closed the connection, or uses a different protocol
        finally:
            writer.close()
            if there is not None:
                there[1].close()


async def _asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[str, int]:
    """Read the host and port that a client requests."""
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
    # Rejected even if they resolve to a public address of this machine.
    return frozenset(name.lower() for name in (socket.gethostname(), socket.getfqdn()))


def _is_own(ip: str) -> bool:
    """Whether a public address belongs to this machine; only such addresses can be bound."""
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
