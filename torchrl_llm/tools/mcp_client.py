"""A client of one Model Context Protocol server: starts, calls, watches and restarts it.

It uses the official ``mcp`` package, over the pipes of a process or streamable HTTP, and runs
inside an asyncio loop. :mod:`torchrl_llm.tools.mcp` makes a server's tools available to a model.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from torchrl._utils import logger

from torchrl_llm._imports import require
from torchrl_llm._masking import masked
from torchrl_llm.errors import ConfigError, WorkerError

_FEATURE = "MCPToolTransform"
# Bytes of a server's standard error that are kept for error messages.
_TAIL_BYTES = 2000
# With the package's limit of 1 MiB, longer results would be errors; torchrl_llm shortens them
# later.
_MAX_EVENT_BYTES = 64 << 20
# Limit, because a server may return new cursors forever.
_MAX_PAGES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class MCPServerConfig:
    """Configuration of a server: a program to start, or a URL.

    Args:
        command: program that speaks the protocol on its standard input and output.
        args: arguments of the program. env: environment variables of the program, in addition to
            ``PATH``, ``HOME`` and similar
            variables; other variables of the trainer are not passed on.
        cwd: working directory of the program.
        url: URL of a server with streamable HTTP.
        headers: HTTP headers of every request to ``url``.

    Raises:
        ConfigError: when not exactly one of ``command`` and ``url`` is given, or a value has a
            wrong type.

    Example:
        >>> MCPServerConfig.read("time", {"command": "mcp-server-time"}).command
        'mcp-server-time'
    """

    command: str | None = None
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: str | None = None
    url: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if (self.command is None) == (self.url is None):
            raise ConfigError(
                'an MCP server is either {"command": program, "args": [...]} or {"url": address}, '
                f"got command={self.command!r} and url={masked(self.url)!r}"
            )
        if self.url is not None and urlsplit(self.url).scheme not in ("http", "https"):
            raise ConfigError(
                f"the url of an MCP server begins with http, got {masked(self.url)!r}"
            )
        if isinstance(self.args, str) or not all(isinstance(arg, str) for arg in self.args):
            raise ConfigError(f"args of an MCP server must be a list of strings, got {self.args!r}")
        for name in ("env", "headers"):
            values = getattr(self, name)
            if not all(isinstance(text, str) for pair in values.items() for text in pair):
                raise ConfigError(f"{name} of an MCP server must map strings to strings")
        unused = {"url": ("args", "env", "cwd"), "command": ("headers",)}
        kind = "url" if self.command is None else "command"
        if ignored := [name for name in unused[kind] if getattr(self, name)]:
            raise ConfigError(
                f"{', '.join(ignored)} would have no effect on a server with a {kind}"
            )

    @classmethod
    def read(cls, name: str, value: MCPServerConfig | Mapping[str, Any] | str) -> MCPServerConfig:
        """Read a configuration from user input.

        Args:
            name: name of the server, for messages.
            value: a configuration, a mapping of its arguments, or a URL.

        Raises:
            ConfigError: for unknown or invalid settings.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls(url=value)
        known = cls.__slots__
        if unknown := sorted(set(value) - set(known)):
            raise ConfigError(
                f"MCP server {name!r}: unknown settings {', '.join(unknown)}; known are "
                f"{', '.join(known)}"
            )
        try:
            return cls(**value)
        except ConfigError as error:
            raise ConfigError(f"MCP server {name!r}: {error}") from None


class _Life:
    """One run of a server, from its start to its end."""

    def __init__(self) -> None:
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.over = asyncio.Event()
        self.client: Any = None
        self.tools: list[Any] = []
        self.errors = b""
        self.task: asyncio.Task[None]

    @property
    def said(self) -> str:
        """The last bytes of the server's standard error, for messages."""
        text = self.errors.decode(errors="replace").strip()
        return f"; it wrote: {text}" if text else ""


class MCPConnection:
    """Keeps a server running and calls it; every method runs in the same loop.

    Args:
        name: name of the server, for messages.
        config: configuration of the server.
        start_timeout_s: time limit in seconds for the server to start and list its tools.

    Attributes:
        num_starts: number of starts.
    """

    def __init__(self, name: str, config: MCPServerConfig, *, start_timeout_s: float) -> None:
        self.name, self.config, self.start_timeout_s = name, config, start_timeout_s
        self.num_starts = 0
        self._life: _Life | None = None
        self._starting = asyncio.Lock()

    async def tools(self) -> list[Any]:
        """Return the server's tools, ``mcp.types.Tool``; start the server if needed.

        Raises:
            WorkerError: when the server did not start.
        """
        return (await self._living()).tools

    async def call(self, tool: str, args: Mapping[str, Any], *, timeout_s: float) -> Any:
        """Call a tool; a server that has ended is restarted first.

        Args:
            tool: name of the tool on the server.
            args: arguments of the tool.
            timeout_s: time limit of the call in seconds, not including the start.

        Returns:
            ``mcp.types.CallToolResult``.

        Raises:
            WorkerError: when the server did not start, or ended before it answered.
            TimeoutError: when the server did not answer in time; it is notified of the
                cancellation.
            mcp.MCPError: when the server returned an error.
        """
        types = require("mcp.types", extra="mcp", feature=_FEATURE)
        error_type = require("mcp", extra="mcp", feature=_FEATURE).MCPError
        life = await self._living()
        # Detects the end of the server even if a child keeps its pipe open.
        request = asyncio.create_task(life.client.call_tool(tool, dict(args)))
        ending = asyncio.create_task(life.over.wait())
        try:
            await asyncio.wait(
                {request, ending}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not request.done() and not life.over.is_set():
                raise TimeoutError(f"no answer within {timeout_s:g} s")
            if not request.done():
                raise WorkerError(self._died(life))
            return request.result()
        except error_type as error:
            if error.code != types.CONNECTION_CLOSED and not self._lost(error):
                raise
            life.over.set()
            raise WorkerError(self._died(life)) from error
        finally:
            ending.cancel()
            request.cancel()
            await asyncio.gather(request, ending, return_exceptions=True)

    async def close(self) -> None:
        """End the server's process or the connection; may be called twice."""
        life, self._life = self._life, None
        if life is not None:
            life.over.set()
            await asyncio.wait({life.task}, timeout=10.0)

    def _lost(self, error: Any) -> bool:
        # A remote server that restarted does not know the session, or does not answer.
        text = str(error.message).lower()
        return self.config.url is not None and ("session" in text or "connect" in text)

    def _died(self, life: _Life) -> str:
        # Its output may contain host file names, and the model reads this message.
        logger.warning(f"MCP server {self.name!r} ended{life.said}")
        return f"the MCP server {self.name!r} ended before it answered"

    async def _living(self) -> _Life:
        async with self._starting:
            life = self._life
            if life is not None and not life.over.is_set():
                return life
            await self.close()
            return await self._start()

    async def _start(self) -> _Life:
        self.num_starts += 1
        life = _Life()
        life.task = asyncio.create_task(self._live(life))
        try:
            await asyncio.wait_for(asyncio.shield(life.ready), self.start_timeout_s)
        except BaseException as error:
            life.over.set()
            life.task.cancel()
            await asyncio.gather(life.task, return_exceptions=True)
            if not isinstance(error, Exception):
                raise
            reason = (
                f"no answer within {self.start_timeout_s:g} s"
                if isinstance(error, TimeoutError)
                else _first(error)
            )
            where = self.config.command or masked(self.config.url)
            raise WorkerError(
                f"the MCP server {self.name!r} ({where}) did not start:  {reason}{life.said}"
            ) from None
        self._life = life
        return life

    async def _live(self, life: _Life) -> None:
        # A transport must be closed by the task that opened it, so one task runs one server life.
        mcp = require("mcp", extra="mcp", feature=_FEATURE)
        try:
            async with mcp.Client(_watched(self._transport(life), life.over.set)) as client:
                life.tools = await _list_tools(client)
                life.client = client
                life.ready.set_result(None)
                await life.over.wait()
        except Exception as error:
            if not life.ready.done():
                life.ready.set_exception(error)
        finally:
            life.over.set()

    @asynccontextmanager
    async def _transport(self, life: _Life) -> AsyncIterator[Any]:
        config = self.config
        async with AsyncExitStack() as stack:
            if config.url is not None:
                http = require("mcp.client.streamable_http", extra="mcp", feature=_FEATURE)
                client = http.create_mcp_http_client(headers=dict(config.headers))
                await stack.enter_async_context(client)
                transport = http.streamable_http_client(
                    config.url, http_client=client, max_sse_event_size=_MAX_EVENT_BYTES
                )
            else:
                mcp = require("mcp", extra="mcp", feature=_FEATURE)
                parameters = mcp.StdioServerParameters(
                    command=config.command,
                    args=list(config.args),
                    env=dict(config.env),
                    cwd=config.cwd,
                )
                errors = stack.enter_context(_Tail(life))
                transport = mcp.stdio_client(parameters, errlog=errors)
            yield await stack.enter_async_context(transport)


class _Tail:
    """A file for a server's standard error that keeps the last bytes."""

    def __init__(self, life: _Life) -> None:
        self.life = life

    def __enter__(self) -> Any:
        self.reader, writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.loop = asyncio.get_running_loop()
        self.loop.add_reader(self.reader, self._read)
        self.writer = os.fdopen(writer, "w")
        return self.writer

    def _read(self) -> None:
        try:
            data = os.read(self.reader, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self.loop.remove_reader(self.reader)
        self.life.errors = (self.life.errors + data)[-_TAIL_BYTES:]

    def __exit__(self, *exc: object) -> None:
        self.writer.close()
        self._read()
        self.loop.remove_reader(self.reader)
        os.close(self.reader)


class _Watched:
    """A stream of incoming messages that signals its end."""

    def __init__(self, stream: Any, on_end: Callable[[], None]) -> None:
        self._stream, self._on_end = stream, on_end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __aiter__(self) -> _Watched:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._stream.__anext__()
        except BaseException:
            self._on_end()
            raise

    async def __aenter__(self) -> _Watched:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *exc: Any) -> bool | None:
        return await self._stream.__aexit__(*exc)


@asynccontextmanager
async def _watched(transport: Any, on_end: Callable[[], None]) -> AsyncIterator[Any]:
    async with transport as (read, write):
        yield _Watched(read, on_end), write


async def _list_tools(client: Any) -> list[Any]:
    tools: list[Any] = []
    cursor = None
    for _ in range(_MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    return tools


def _first(error: BaseException) -> str:
    """Unwrap an error from nested exception groups."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
