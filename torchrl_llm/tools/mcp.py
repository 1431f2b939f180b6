"""Tools of Model Context Protocol servers: :class:`MCPToolTransform` and its parts.

:mod:`torchrl_llm.tools.mcp_client` starts and ends the servers.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Annotated, Any

from torchrl_llm._checked import Gt, checked
from torchrl_llm._imports import require
from torchrl_llm._masking import masked
from torchrl_llm.data.failures import Failure
from torchrl_llm.errors import ConfigError, WorkerError
from torchrl_llm.tools.background_loop import BackgroundLoop
from torchrl_llm.tools.call_parsers import MessageOrTagParser, PatternParser, ToolParser
from torchrl_llm.tools.mcp_client import MCPConnection, MCPServerConfig
from torchrl_llm.tools.tool import Restarted, Tool, ToolKind, no_answer
from torchrl_llm.tools.tool_call import BrokenCall, ToolCall, ToolOutput
from torchrl_llm.tools.tool_transform import ToolTransform

# Additional time that a thread waits, for a server that restarts.
_GRACE_S = 5.0


class MCPServers(Restarted):
    """Several servers in one background loop; the tools of the servers share the loop.

    Args:
        servers: maps a name to a configuration, in the form of the ``mcpServers`` of other
            programs: ``{"command": ..., "args": [...], "env": {...}}`` or ``{"url": ..., "headers":
            {...}}``, or only the URL.
        timeout: time limit of a call in seconds.
        start_timeout: time limit in seconds for a server to start and list its tools.
        tools: names of the tools that the model gets; all by default.
        actions: names of the tools whose calls are actions of the environment.
        prefix: name every tool ``server.name``; by default only tools with duplicate names.

    Raises:
        ConfigError: when there is no server, or for settings that are unknown or invalid.
        MissingExtraError: when the package ``mcp`` is not installed.

    Example:
        >>> servers = MCPServers({"time": {"command": "mcp-server-time"}})
        >>> servers.running
        False
    """

    _own = ("_loop", "_connections")

    @checked
    def __init__(
        self,
        servers: Mapping[str, MCPServerConfig | Mapping[str, Any] | str],
        *,
        timeout: Annotated[float, Gt(0)] = 10.0,
        start_timeout: Annotated[float, Gt(0)] = 60.0,
        tools: Collection[str] | None = None,
        actions: Collection[str] = (),
        prefix: bool = False,
    ) -> None:
        if not isinstance(servers, Mapping) or not servers:
            raise ConfigError(
                'servers must map names to {"command": ..., "args": [...]} or {"url": ...}, got '
                f"{masked(servers)!r}"
            )
        require("mcp", extra="mcp", feature="MCPToolTransform")
        self.configs = {name: MCPServerConfig.read(name, value) for name, value in servers.items()}
        self.timeout, self.start_timeout = timeout, start_timeout
        self.chosen = None if tools is None else frozenset(tools)
        self.actions = frozenset(actions)
        self.prefix = prefix
        self._begin()

    def _begin(self) -> None:
        self._loop = BackgroundLoop("torchrl_llm-mcp")
        self._connections: dict[str, MCPConnection] = {}

    @property
    def running(self) -> bool:
        """Whether servers have been started."""
        return bool(self._connections)

    def num_starts(self, server: str) -> int:
        """Number of starts of a server since this object was last closed.

        Args:
            server: name of the server.
        """
        connection = self._connections.get(server)
        return 0 if connection is None else connection.num_starts

    def start(self) -> list[MCPTool]:
        """Start all servers that are not running, in parallel, and list their tools.

        Raises:
            WorkerError: when a server did not start.
            ConfigError: when ``tools`` or ``actions`` name a tool that no server has.
        """
        limit = self.start_timeout + _GRACE_S
        try:
            found = self._loop.run(self._list(), timeout_s=limit)
            return self._named(found)
        except BaseException:
            self.close()
            raise

    def _named(self, found: list[tuple[str, Any]]) -> list[MCPTool]:
        taken = Counter(tool.name for _, tool in found)
        everything = {n for server, tool in found for n in (tool.name, f"{server}.{tool.name}")}
        if unknown := sorted(((self.chosen or frozenset()) | self.actions) - everything):
            raise ConfigError(
                f"no MCP server has a tool {unknown[0]!r}; there are "
                f"{', '.join(sorted(f'{server}.{tool.name}' for server, tool in found))}"
            )
        listed = []
        for server, tool in found:
            whole = f"{server}.{tool.name}"
            name = whole if self.prefix or taken[tool.name] > 1 else tool.name
            if self.chosen is None or {tool.name, whole} & self.chosen:
                kind = "action" if {tool.name, whole} & self.actions else "auxiliary"
                listed.append(MCPTool(self, server, tool, name=name, kind=kind))
        return listed

    async def _list(self) -> list[tuple[str, Any]]:
        for name, config in self.configs.items():
            if name not in self._connections:
                limit = self.start_timeout
                self._connections[name] = MCPConnection(name, config, start_timeout_s=limit)
        names = list(self._connections)
        lists = await asyncio.gather(*(self._connections[name].tools() for name in names))
        return [(name, tool) for name, tools in zip(names, lists, strict=True) for tool in tools]

    def call(self, server: str, tool: str, args: Mapping[str, Any]) -> Any:
        """Call a tool; raise the same errors as :meth:`MCPConnection.call`.

        Args:
            server: name of the server.
            tool: name of the tool on the server.
            args: arguments of the tool.
        """
        if server not in self._connections:
            self.start()
        work = self._connections[server].call(tool, args, timeout_s=self.timeout)
        return self._loop.run(work, timeout_s=self.timeout + self.start_timeout + _GRACE_S)

    def close(self) -> None:
        """End all servers; may be called twice, and a later call starts them again."""
        connections, loop = self._connections, self._loop
        self._begin()
        loop.close(lambda: _close_all(connections))


class MCPTool(Tool):
    """One tool of a server.

    Args:
        servers: the servers.
        server: name of the tool's server.
        tool: the server's description, ``mcp.types.Tool``.
        name: name of the tool for the model.
        kind: see :class:`~torchrl_llm.tools.tool.Tool`.
    """

    def __init__(
        self, servers: MCPServers, server: str, tool: Any, *, name: str, kind: ToolKind
    ) -> None:
        self.servers, self.server, self.remote_name = servers, server, tool.name
        self.name, self.kind = name, kind
        self.description = tool.description or ""
        self.parameters = {"type": "object", "properties": {}, **tool.input_schema}
        self.timeout = servers.timeout + _GRACE_S

    def start(self) -> None:
        """Start all servers that are not running."""
        if not self.servers.running:
            self.servers.start()

    def run(self, call: ToolCall) -> ToolOutput:
        """Call the server; an error, a timeout or a crash is returned as a result."""
        mcp = require("mcp", extra="mcp", feature="MCPToolTransform")
        try:
            result = self.servers.call(self.server, self.remote_name, call.args)
        except WorkerError as error:
            text = f"The server of {self.name} ended before it answered or could not be started."
            return ToolOutput(text, "WorkerError", failure=Failure.of(error, "tool"))
        except TimeoutError:
            text = f"{self.name} did not answer within {self.servers.timeout:g} s."
            return no_answer("TimeoutError", text)
        except mcp.MCPError as error:
            return ToolOutput(error.message, "MCPError")
        return ToolOutput(_text_of(result), "ToolError" if result.is_error else "")

    def close(self) -> None:
        """End all servers."""
        self.servers.close()


def _text_of(result: Any) -> str:
    """Return the text of a result; for pictures and sounds, their kind and size."""
    parts = [_block(block) for block in result.content]
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts)


def _block(block: Any) -> str:
    if block.type == "text":
        return block.text
    if block.type == "resource":
        resource = block.resource
        text = getattr(resource, "text", None)
        return f"[{resource.mime_type} {resource.uri}]" if text is None else text
    if block.type == "resource_link":
        return f"[{block.name}: {block.uri}]"
    size = len(block.data) * 3 // 4 - block.data[-2:].count("=")  # base64
    return f"[{block.mime_type}, {size} bytes]"


async def _close_all(connections: Mapping[str, MCPConnection]) -> None:
    await asyncio.gather(*(connection.close() for connection in connections.values()))


class MCPToolTransform(ToolTransform):
    r"""Lets a model use the tools of Model Context Protocol servers.

    The constructor starts the servers and lists their tools. The servers end with the environment
    (``env.close()``). If a server dies during a call, the result has an error, and the next call
    restarts the server. A copy in a different process starts its own servers.

    Calls are parsed in the form of the chat template, and as ``<tool>server.name\n{"argument":
    value} </tool>`` in the text of a turn. A tool is called by the name in :attr:`schemas`, by
    ``server.name``, or only by ``name``; if several servers have a tool of that name, the first
    server answers.

    Args:
        servers: see :class:`MCPServers`.
        tool_call_pattern: a regular expression with two groups, name and JSON arguments, for the
            calls in the text.
        tool_name: role of the appended messages.
        timeout: time limit of a call in seconds; the server is notified of the cancellation.
        parser: a parser that replaces both forms of calls.
        start_timeout: time limit in seconds for a server to start and list its tools.
        tools: names of the tools that the model gets; all by default.
        actions: names of the tools whose calls are actions of the environment.
        prefix: name every tool ``server.name``; by default only tools with duplicate names.
        kwargs: further arguments of :class:`~torchrl_llm.tools.ToolTransform`.

    Raises:
        ConfigError: for settings that are unknown or invalid.
        MissingExtraError: when the package ``mcp`` is not installed.
        WorkerError: when a server did not start; the message ends with its output.

    Example:
        >>> import sys
        >>> program = "from mcp.server import MCPServer; s = MCPServer('s');"
        >>> program += "s.tool(name='half')(lambda x: x / 2); s.run()"
        >>> servers = {"sums": {"command": sys.executable, "args": ["-c", program]}}
        >>> tools = MCPToolTransform(servers)
        >>> [schema["function"]["name"] for schema in tools.schemas]
        ['half']
        >>> tools.close()
    """

    def __init__(
        self,
        servers: Mapping[str, MCPServerConfig | Mapping[str, Any] | str],
        tool_call_pattern: str | None = None,
        tool_name: str = "tool",
        timeout: float = 10.0,
        *,
        parser: ToolParser | None = None,
        start_timeout: float = 60.0,
        tools: Collection[str] | None = None,
        actions: Collection[str] = (),
        prefix: bool = False,
        **kwargs: Any,
    ) -> None:
        if tool_call_pattern is not None and not isinstance(tool_call_pattern, str):
            raise ConfigError(
                "tool_call_pattern must be a regular expression with two groups, name and JSON "
                f"arguments, got {type(tool_call_pattern).__name__}; pass parser=... by its name"
            )
        if parser is not None and tool_call_pattern is not None:
            raise ConfigError("pass parser or tool_call_pattern, not both")
        if parser is None:
            written = None if tool_call_pattern is None else PatternParser(tool_call_pattern)
            parser = MessageOrTagParser(written)
        self.servers = MCPServers(
            servers,
            timeout=timeout,
            start_timeout=start_timeout,
            tools=tools,
            actions=actions,
            prefix=prefix,
        )
        try:
            super().__init__(
                self.servers.start(), parser, tool_name=tool_name, timeout=timeout, **kwargs
            )
        except BaseException:
            self.servers.close()
            raise
        self.tool_call_pattern = tool_call_pattern

    @property
    def server_configs(self) -> dict[str, MCPServerConfig]:
        """The configuration of each server, by name."""
        return self.servers.configs

    def _found(self, message: Any) -> list[ToolCall | BrokenCall]:
        """Return the calls, with the tool names of this transform."""
        found = super()._found(message)
        if all(isinstance(call, BrokenCall) or call.tool in self.tools for call in found):
            return found
        listed: dict[str, str] = {}
        for name, tool in self.tools.items():  # in the order of the servers
            for other in (f"{tool.server}.{tool.remote_name}", tool.remote_name):
                listed.setdefault(other, name)
        return [
            replace(call, tool=listed.get(call.tool, call.tool))
            if isinstance(call, ToolCall) and call.tool not in self.tools
            else call
            for call in found
        ]

    def close(self) -> None:
        """End the servers; a later call restarts them."""
        super().close()
        self.servers.close()
