"""Requests to a server over kept-alive connections, with a limit on every wait.

Of the standard library alone. What a request means is the business of
:mod:`torchrl_llm.modules.backends.openai` and :mod:`torchrl_llm.modules.backends.server`.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import random
import selectors
import socket
import ssl
import threading
import time
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from torchrl_llm.errors import BackendError, ConfigError, WorkerError

# Nothing was computed for these, or a proxy lost its server; the same request may be sent again.
_RETRIED = {429: "is busy", 502: "has no server behind it", 503: "is not available"}
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 8.0
# Of its own, for nobody's seed may change what is drawn here, or be changed by it.
_JITTER = random.Random()


class Reply(NamedTuple):
    """What a server answered.

    Attributes:
        status: of HTTP; below 500.
        data: the parsed JSON, or text where it is none.
    """

    status: int
    data: Any


class Cancellation:
    """Ends the requests that were made with it, from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self.cancelled = False

    def cancel(self) -> None:
        """Close the connections, whereupon a server drops the work for them."""
        with self._lock:
            self.cancelled = True
            for sock in self._sockets:
                with contextlib.suppress(OSError):  # closed already
                    sock.shutdown(socket.SHUT_RDWR)

    def _add(self, sock: socket.socket) -> None:
        with self._lock:
            self._sockets.add(sock)
            if self.cancelled:
                raise BackendError("the request was cancelled")

    def _remove(self, sock: socket.socket) -> None:
        with self._lock:
            self._sockets.discard(sock)


class HTTPClient:
    """A server's address and the idle connections to it; many threads may use it at once.

    A request is sent again when the server said that it did not take it (429, 502, 503) or when the
    connection broke before there was an answer, but never after a time limit: what is slow to
    answer would only be favoured when it happens to be short the second time.

    Args:
        url: ``http://host:port`` or ``https://...``, with a path that comes before all others.
        api_key: sent as a bearer token.
        max_retries: how often one request is sent again.

    Attributes:
        url: without a slash at its end.
        num_retries: requests that were sent again so far.

    Raises:
        ConfigError: for an address that is none.

    Example:
        >>> HTTPClient("http://localhost:8000/").url
        'http://localhost:8000'
        >>> HTTPClient("localhost:8000")
        Traceback (most recent call last):
        ...
        torchrl_llm.errors.ConfigError: the address of a server looks like http://host:8000, got \
'localhost:8000'
    """

    def __init__(self, url: str, *, api_key: str | None = None, max_retries: int = 4) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        wrong = parts.scheme not in ("http", "https") or not parts.hostname or port == -1
        if wrong or parts.query or parts.fragment or parts.username:
            raise ConfigError(f"the address of a server looks like http://host:8000, got {url!r}")
        if max_retries < 0:
            raise ConfigError(f"max_retries must be at least 0, got {max_retries}")
        self.url = url.rstrip("/")
        self.num_retries = 0
        self._api_key = api_key
        self._max_retries = max_retries
        self._host, self._port, self._path = parts.hostname, port, parts.path.rstrip("/")
        self._secure = ssl.create_default_context() if parts.scheme == "https" else None
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []

    def __reduce__(self) -> tuple[Any, ...]:
        # Connections belong to a process.
        return _rebuild, (self.url, self._api_key, self._max_retries)

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.release()

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout_s: float,
        max_retries: int | None = None,
        cancellation: Cancellation | None = None,
    ) -> Reply:
        """Send a request and wait for its answer.

        Args:
            method: ``"GET"`` or ``"POST"``.
            path: begins with a slash; what the address has comes before it.
            body: sent as JSON; ``None`` for none.
            timeout_s: most seconds, those between attempts included.
            max_retries: of this request, instead of the client's.
            cancellation: may end it from another thread.

        Returns:
            The answer, also one that says that the request was wrong.

        Raises:
            BackendError: it was cancelled.
            ConfigError: a redirection, or no access.
            WorkerError: no connection, no answer in time, or an error of the server's.
        """
        deadline = time.monotonic() + timeout_s
        data = None if body is None else json.dumps(body).encode()
        attempt, most = 0, self._max_retries if max_retries is None else max_retries
        while True:
            try:
                reply, pause_s = self._attempt(method, path, data, deadline, cancellation)
            except TimeoutError:
                raise WorkerError(f"{self.url}{path}: no answer within {timeout_s:g} s") from None
            except (OSError, http.client.HTTPException) as error:
                if cancellation is not None and cancellation.cancelled:
                    raise BackendError(f"{self.url}{path}: the request was cancelled") from None
                reply, pause_s, problem = None, None, f"{type(error).__name__}: {error}"
            else:
                if reply.status not in _RETRIED:
                    return self._checked(reply, path)
                problem = f"it {_RETRIED[reply.status]} ({reply.status}: {_message(reply.data)})"
            if pause_s is None:
                # Callers that were turned away together should not come back together.
                pause_s = min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S)
                pause_s *= 0.5 + _JITTER.random()
            if attempt >= most or time.monotonic() + pause_s >= deadline:
                raise WorkerError(
                    f"{self.url}{path} gave no answer in {attempt + 1} attempts: {problem}"
                )
            attempt += 1
            with self._lock:
                self.num_retries += 1
            time.sleep(pause_s)

    def check(self, reply: Reply, path: str) -> None:
        """Raise for an answer that says that the request was wrong.

        Args:
            reply: as returned by :meth:`call`.
            path: as given to it.

        Raises:
            ConfigError: there is no such path or model at the server.
            BackendError: another fault of the request.
        """
        if reply.status < 400:
            return
        kind = ConfigError if reply.status in (404, 405) else BackendError
        raise kind(f"{self.url}{path} refused ({reply.status}): {_message(reply.data)}")

    def _checked(self, reply: Reply, path: str) -> Reply:
        if 300 <= reply.status < 400:
            raise ConfigError(
                f"{self.url}{path} answered {reply.status}, a redirection; give the address that "
                "it leads to"
            )
        if reply.status in (401, 403):
            raise ConfigError(
                f"{self.url}{path} refuses access ({reply.status}: {_message(reply.data)}); "
                "is api_key right?"
            )
        if reply.status >= 500:
            raise WorkerError(
                f"{self.url}{path} failed with {reply.status}: {_message(reply.data)}"
            )
        return reply

    def _attempt(
        self,
        method: str,
        path: str,
        data: bytes | None,
        deadline: float,
        cancellation: Cancellation | None,
    ) -> tuple[Reply, float | None]:
        headers = {"Accept": "application/json"}
        if data is not None:
            headers["Content-Type"] = "application/json"
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key}"
        connection = self._connect(deadline)
        # Only a connection whose answer was read to its end may serve the next request.
        keep = False
        try:
            if cancellation is not None:
                cancellation._add(connection.raw)
            connection.request(method, self._path + path, data, headers)
            response = connection.getresponse()
            content = response.read()
            keep = not response.will_close
        finally:
            if cancellation is not None:
                cancellation._remove(connection.raw)
            if keep:
                with self._lock:
                    self._idle.append(connection)
            else:
                connection.release()
        pause = response.headers.get("Retry-After", "")
        return Reply(response.status, _parsed(content)), float(pause) if pause.isdigit() else None

    def _connect(self, deadline: float) -> _Connection:
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return _Connection(self._host, self._port, deadline, self._secure)
            if connection.usable():
                connection.renew(deadline)
                return connection
            connection.release()


class _Connection(http.client.HTTPConnection):
    """A connection whose every wait ends at one moment, however slowly bytes drip in."""

    auto_open = 0

    def __init__(
        self, host: str, port: int | None, deadline: float, secure: ssl.SSLContext | None
    ) -> None:
        default = self.default_port if secure is None else http.client.HTTPS_PORT
        super().__init__(host, default if port is None else port)
        left = max(deadline - time.monotonic(), 1e-3)
        self.raw = socket.create_connection((self.host, self.port), timeout=left)
        try:
            self.raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if secure is not None:
                self.raw = secure.wrap_socket(self.raw, server_hostname=host)
        except BaseException:
            self.raw.close()
            raise
        self.sock = self._timed = _TimedSocket(self.raw, deadline)

    def renew(self, deadline: float) -> None:
        """Use it for another request, which ends at ``deadline``."""
        self.sock, self._timed.deadline = self._timed, deadline

    def usable(self) -> bool:
        """Whether the server has not closed it, nor sent what nobody asked for."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.raw, selectors.EVENT_READ)
            return not selector.select(0)

    def release(self) -> None:
        """Close it for good; ``close`` is also called before a last answer was read."""
        self.close()
        self.raw.close()


class _TimedSocket:
    """What ``http.client`` needs of a socket, with the time that is left as its limit."""

    def __init__(self, raw: socket.socket, deadline: float) -> None:
        self._raw, self.deadline = raw, deadline

    def _limit(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._raw.settimeout(left)

    def sendall(self, data: bytes) -> None:
        self._limit()
        self._raw.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedReader(self))

    def read_into(self, buffer: Any) -> int:
        self._limit()
        return self._raw.recv_into(buffer)

    def close(self) -> None:
        pass  # the connection closes the socket itself, when the answer has been read


class _TimedReader(io.RawIOBase):
    def __init__(self, sock: _TimedSocket) -> None:
        self._sock = sock

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._sock.read_into(buffer)


def _rebuild(url: str, api_key: str | None, max_retries: int) -> HTTPClient:
    return HTTPClient(url, api_key=api_key, max_retries=max_retries)


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return content.decode(errors="replace")


def _message(data: Any) -> str:
    """The words of an error, whose form differs between servers."""
    found = data
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return str(found)[:300]
