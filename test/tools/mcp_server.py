"""A small server of the Model Context Protocol for tests: ``python mcp_server.py [port]``.

Without a port it speaks over its standard input and output, with one over streamable HTTP.
"""

from __future__ import annotations

import os
import sys
import time

from mcp.server import MCPServer
from mcp.server.mcpserver import Image
from mcp.types import ToolAnnotations

server = MCPServer("ours")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def echo(text: str) -> str:
    """Say it again."""
    return text


@server.tool()
def fail() -> str:
    """Raise."""
    raise ValueError("no luck today")


@server.tool()
def die() -> str:
    """End the whole server without an answer."""
    os._exit(3)


@server.tool()
def sleep(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return f"slept {seconds}"


@server.tool()
def big(characters: int) -> str:
    """A long text."""
    return "x" * characters


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def picture() -> Image:
    """A picture."""
    return Image(data=b"\x89PNG" + bytes(96), format="png")


@server.tool()
def environment() -> list[str]:
    """Names of the server's environment variables."""
    return sorted(os.environ)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
