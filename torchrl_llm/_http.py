"""HTTP client of model servers: kept-alive connections, retries and time limits.

It sends and receives JSON, over the asynchronous transport of httpx2 (which huggingface_hub brings)
in one thread of this process. The meaning of the requests is defined in
:mod:`torchrl_llm.modules.backends.openai` and :mod:`torchrl_llm.modules.backends.server`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, ThreadPoolExecutor, wait
from typing import Annotated, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import httpx2

from torchrl_llm._checked import Ge, checked
from torchrl_llm._masking import masked
from torchrl_llm.errors import BackendError, ConfigError, WorkerError

_Result = TypeVar("_Result")
# The server did not process the request, or a proxy lost its server; it is safe to retry.
_RETRIED = {429: "is busy", 502: "has no server behind it", 503: "is not available"}
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 8.0
# A separate generator, so that user seeds do not affect the pauses, and pauses do not affect user
# draws.
_JITTER = random.Random()
# Event loop per process id, because threads do not survive a fork.
_LOOPS: dict[int, asyncio.AbstractEventLoop] = {}


class Reply(NamedTuple):
    """Answer of a server.

    Attributes:
        status: HTTP status, below 500.
        data: the parsed JSON, or the text if it is not JSON.
        num_retries: how often the request was sent again.
    """

    status: int
    data: Any
    num_retries: int = 0


class Cancellation:
    """Cancels the requests that were made with it, from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: set[Future[Any]] = set()
        self.cancelled = False

    def cancel(self) -> None:
        """Close the connections, so that the server stops their work."""
        with self._lock:
            self.cancelled = True
            for request in self._requests:
                request.cancel()

    def _add(self, request: Future[Any]) -> None:
        with self._lock:
            self._requests.add(request)
            if self.cancelled:
                raise CancelledError

    def _remove(self, request: Future[Any]) -> None:
        with self._lock:
            self._requests.discard(request)


class RequestThreads:
    """Threads that wait for requests; their number limits the concurrent requests.

    Args:
        concurrency: number of threads.
    """

    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RequestThreads, (self._concurrency,)

    def run(self, jobs: Sequence[Callable[[Cancellation], _Result]]) -> list[_Result]:
        """Results of all jobs; the first error or interrupt cancels the others at the server."""
        if not jobs:
            return []
        cancellation = Cancellation()
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._concurrency, "torchrl_llm-requests")
            futures = [self._threads.submit(job, cancellation) for job in jobs]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            failed = [future for future in futures if future in done and future.exception()]
            if failed:
                raise failed[0].exception()
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            cancellation.cancel()
            raise

    def close(self) -> None:
        """End the threads; the next call starts new ones."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)


class HTTPClient:
    """A server's address and the idle connections to it; many threads may use it at once.

    A request is sent again if the server reports that it did not process it (429, 502, 503), or if
    the connection broke before an answer. It is never sent again after a time limit: otherwise long
    answers would be resampled until a short one comes, which biases the samples.

    Proxies and passwords of the environment (``HTTP_PROXY``, ``.netrc``) are not used, cookies are
    not kept, and redirections are errors.

    Args:
        url: ``http://host:port`` or ``https://...``, optionally with a path that precedes all
            request paths.
        api_key: sent as a bearer token.
        max_retries: how often one request is sent again.

    Attributes:
        url: the address, without a slash at its end.
        num_retries: number of repeated requests so far.

    Raises:
        ConfigError: the address is invalid, or the key cannot be sent in a header.

    Example:
        >>> HTTPClient("http://localhost:8000/").url
        'http://localhost:8000'
        >>> HTTPClient("localhost:8000")
        Traceback (most recent call last):
        ...
        torchrl_llm.errors.ConfigError: the address of a server looks like http://host:8000, got \
'localhost:8000'
    """

    @checked
    def __init__(
        self, url: str, *, api_key: str | None = None, max_retries: Annotated[int, Ge(0)] = 4
    ) -> None:
        parts = urlsplit(url)
        try:
            right = parts.port != 0 and httpx2.URL(url).scheme in ("http", "https")
        except (ValueError, httpx2.InvalidURL):
            right = False
        if not (right and parts.hostname) or parts.query or parts.fragment or parts.username:
            raise ConfigError(
                f"the address of a server looks like http://host:8000, got {masked(url)!r}"
            )
        self.url = url.rstrip("/")
        self.num_retries = 0
        self._api_key, self._max_retries = api_key, max_retries
        self._headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if api_key is not None:
            if not api_key.isprintable() or not api_key.isascii() or api_key != api_key.strip():
                raise ConfigError(
                    "api_key must be printable ASCII without a line break or blanks around it (a "
                    f"key that is read from a file often ends in one), got {len(api_key)} "
                    "characters with others among them"
                )
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._lock = threading.Lock()
        self._transports: dict[int, httpx2.AsyncHTTPTransport] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        # Connections belong to a process.
        return _rebuild, (self.url, self._api_key, self._max_retries)

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        transport = self._transports.pop(os.getpid(), None)
        if transport is not None:
            asyncio.run_coroutine_threadsafe(transport.aclose(), _loop())

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
        """Send a request and wait for the answer.

        Args:
            method: ``"GET"`` or ``"POST"``.
            path: begins with a slash; appended to the path of the address.
            body: sent as JSON; ``None`` for none.
            timeout_s: most seconds, including pauses between attempts.
            max_retries: retries of this request, instead of the client's number.
            cancellation: can cancel the request from another thread.

        Returns:
            The answer, even if it reports an error in the request.

        Raises:
            BackendError: the request was cancelled.
            ConfigError: a redirection, or no access.
            WorkerError: no connection, no answer in time, or an error of the server.
        """
        deadline = time.monotonic() + timeout_s
        headers, data = self._headers, None
        if body is not None:
            headers = {**headers, "Content-Type": "application/json"}
            data = json.dumps(body).encode()
        attempt, most = 0, self._max_retries if max_retries is None else max_retries
        while True:
            request = httpx2.Request(method, self.url + path, headers=headers, content=data)
            try:
                reply, pause_s = self._attempt(request, deadline, cancellation)
            except TimeoutError:
                raise WorkerError(f"{self.url}{path}: no answer within {timeout_s:g} s") from None
            except CancelledError:
                raise BackendError(f"{self.url}{path}: the request was cancelled") from None
            except httpx2.TransportError as error:
                cause = _root(error)
                pause_s, problem = None, f"{type(cause).__name__}: {cause}"
            else:
                if reply.status not in _RETRIED:
                    return self._checked(reply._replace(num_retries=attempt), path)
                reply = self._without_key(reply)
                problem = f"it {_RETRIED[reply.status]} ({reply.status}: {_message(reply.data)})"
            if pause_s is None:
                # Callers that were rejected together should not retry together.
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
        """Raise for an answer that reports an error in the request.

        Args:
            reply: as returned by :meth:`call`.
            path: as passed to :meth:`call`.

        Raises:
            ConfigError: the server has no such path or model.
            BackendError: any other error in the request.
        """
        if reply.status < 400:
            return
        kind = ConfigError if reply.status in (404, 405) else BackendError
        raise kind(f"{self.url}{path} refused ({reply.status}): {_message(reply.data)}")

    def _without_key(self, reply: Reply) -> Reply:
        """Remove the key from an error message, in case the server repeats it."""
        if self._api_key is None or reply.status < 400:
            return reply
        text = json.dumps(reply.data)
        return reply._replace(data=json.loads(text.replace(self._api_key, "***")))

    def _checked(self, reply: Reply, path: str) -> Reply:
        reply = self._without_key(reply)
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
        self, request: httpx2.Request, deadline: float, cancellation: Cancellation | None
    ) -> tuple[Reply, float | None]:
        """The answer, and how long the server asks us to wait before the next attempt."""
        cancellation = cancellation or Cancellation()
        sent = asyncio.run_coroutine_threadsafe(self._send(request, deadline), _loop())
        try:
            cancellation._add(sent)
            response = sent.result()
        finally:
            sent.cancel()  # if the caller was interrupted; no effect once there is an answer
            cancellation._remove(sent)
        try:
            data = json.loads(response.content)
        except ValueError:
            data = response.content.decode(errors="replace")
        pause = response.headers.get("Retry-After", "")
        return Reply(response.status_code, data), float(pause) if pause.isdigit() else None

    async def _send(self, request: httpx2.Request, deadline: float) -> httpx2.Response:
        transport = self._transports.get(os.getpid())
        if transport is None:
            # Use the transport and not the client, which would use environment proxies and keep
            # cookies.
            transport = self._transports[os.getpid()] = httpx2.AsyncHTTPTransport(
                verify=ssl.create_default_context(), limits=httpx2.Limits(keepalive_expiry=None)
            )
        # One limit for the whole request, however slowly the bytes arrive.
        async with asyncio.timeout(deadline - time.monotonic()):
            response = await transport.handle_async_request(request)
            packed = response.headers.get("Content-Encoding", "identity")
            try:
                if packed != "identity":  # a few bytes may unpack to any size
                    raise httpx2.RemoteProtocolError(f"its answer is packed by {packed}")
                await response.aread()
            finally:
                await response.aclose()
            return response


def server_root(url: Any) -> Any:
    """The address of a server, given with or without ``/v1``."""
    return url.rstrip("/").removesuffix("/v1") if isinstance(url, str) else url


def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process, which runs in a thread until the process ends."""
    process = os.getpid()
    if process not in _LOOPS:
        loop = asyncio.new_event_loop()
        if _LOOPS.setdefault(process, loop) is loop:
            threading.Thread(target=loop.run_forever, name="HTTPClient", daemon=True).start()
    return _LOOPS[process]


def _rebuild(url: str, api_key: str | None, max_retries: int) -> HTTPClient:
    return HTTPClient(url, api_key=api_key, max_retries=max_retries)


def _root(error: BaseException) -> BaseException:
    """Root cause of an error; if every address of a host failed, the cause of the first."""
    while (causes := getattr(error, "exceptions", [error.__cause__ or error.__context__]))[0]:
        error = causes[0]
    return error


def _message(data: Any) -> str:
    """The message of an error, whose format differs between servers."""
    found = data
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return str(found)[:300]
