"""HTTP server that runs the gateway's application in a thread of this process.

Next: :mod:`torchrl_llm.gateway.app` is the application.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import TYPE_CHECKING, Annotated

from torchrl_llm._checked import Ge, In, checked
from torchrl_llm._imports import require
from torchrl_llm.errors import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

_BACKLOG = 2048
# Longer than clients keep a connection (5 s), so that the server does not close it first.
_KEEP_ALIVE_S = 60
_CLOSE_S = 10.0


class GatewayServer:
    """Serves an application over HTTP, from a thread with its own event loop.

    Args:
        app: the application, see :func:`~torchrl_llm.gateway.app.make_app`.
        host: the address to listen on; the default is reachable only from this machine.
        port: the port to listen on; 0 takes a free one.
        max_connections: requests on further connections are rejected (503).

    Raises:
        MissingExtraError: the extra ``gateway`` is not installed.

    Example:
        >>> from torchrl_llm.gateway.app import make_app
        >>> with GatewayServer(make_app({}.get)) as server:
        ...     server.url.rpartition(":")[0]
        'http://127.0.0.1'
    """

    @checked
    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str = "127.0.0.1",
        port: Annotated[int, In("[0, 65535]")] = 0,
        max_connections: Annotated[int, Ge(1)] = 8192,
    ) -> None:
        self.host, self.port = host, port
        uvicorn = require("uvicorn", extra="gateway", feature="GatewayServer")
        settings = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="critical",  # it warns of broken requests and calls cancelled at the end
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=max_connections,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(settings)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def url(self) -> str:
        """URL for clients, without ``/v1``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the ports, for ``call_soon_threadsafe`` from other threads."""
        assert self._loop is not None, "start() comes first"
        return self._loop

    def start(self) -> None:
        """Start the server; when it returns, clients can connect.

        Raises:
            ConfigError: it cannot listen on this host and port.
        """
        assert self._loop is None, "a server starts once"
        listener = self._listen()
        self.port = listener.getsockname()[1]
        ready = threading.Event()
        serving = (self._serve(listener, ready),)
        self._thread = threading.Thread(
            target=asyncio.run, args=serving, name="gateway", daemon=True
        )
        self._thread.start()
        ready.wait()

    def close(self) -> None:
        """Stop the server; waiting calls are cancelled after a second."""
        if self._thread is not None:
            self._server.should_exit = True
            self._thread.join(_CLOSE_S)
            self._thread = None

    def __enter__(self) -> GatewayServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listen(self) -> socket.socket:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                self.host, self.port, proto=socket.IPPROTO_TCP
            )[0]
            # Only a socket created with the TCP protocol gets TCP_NODELAY; without it an answer
            # takes 40 ms longer.
            listener = socket.socket(family, kind, protocol)
        except OSError as error:
            raise self._refused(error) from error
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise self._refused(error) from error
        return listener

    def _refused(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"the gateway cannot listen on host={self.host!r}, port={self.port}: {error}; "
            "port=0 takes a free port"
        )

    async def _serve(self, listener: socket.socket, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        ready.set()
        await self._server.serve(sockets=[listener])
