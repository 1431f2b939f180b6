"""ASGI application of the gateway: routes each request to the port of its session.

It does not depend on models or templates. Next: :mod:`torchrl_llm.gateway.server` runs it.
"""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

from torchrl._utils import logger

from torchrl_llm._checked import Ge, checked
from torchrl_llm._imports import require
from torchrl_llm._masking import masked
from torchrl_llm.data.failures import place_of
from torchrl_llm.gateway.calls import Answer, Call, Port, RefusedCallError
from torchrl_llm.gateway.protocols.anthropic import AnthropicMessages
from torchrl_llm.gateway.protocols.chat_completions import ChatCompletions
from torchrl_llm.gateway.protocols.completions import Completions
from torchrl_llm.gateway.protocols.protocol import STATUS, Protocol, Reply
from torchrl_llm.gateway.protocols.responses import Responses

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response

    Endpoint = Callable[[Request], Awaitable[Response]]

_CHAT, _ANTHROPIC = ChatCompletions(), AnthropicMessages()
_PROTOCOLS: tuple[Protocol, ...] = (_CHAT, Completions(), Responses(), _ANTHROPIC)
_MOST_LEVELS = 100
_LONGEST_ERROR = 2000
_MOST_KINDS = 100
_CLIENT_GONE = 499  # the client does not read it


@checked
def make_app(
    find_port: Callable[[str], Port | None],
    *,
    max_body_bytes: Annotated[int, Ge(1)] = 16 * 2**20,
    max_calls: Annotated[int, Ge(1)] = 4096,
) -> Starlette:
    """Make the application for all protocols.

    The key of a session is in a header (``Authorization: Bearer KEY`` or ``x-api-key: KEY``) or in
    the path (``/session/KEY/v1/...``). With a key in the path, the header must not contain the key
    of a different session.

    Args:
        find_port: function from a key to the port of its session; ``None`` for an unknown key. A
            request without a key has the key ``""``.
        max_body_bytes: a longer request is rejected (413).
        max_calls: most calls that may wait for answers; further ones are rejected (429).

    Raises:
        MissingExtraError: the extra ``gateway`` is not installed.
    """
    routing, gateway = _starlette("routing"), _Gateway(find_port, max_body_bytes, max_calls)
    paths = [(each.path, "POST", gateway.answers_by(each)) for each in _PROTOCOLS]
    paths += [
        ("/v1/messages/count_tokens", "POST", gateway.guarded(gateway.count_tokens, _ANTHROPIC)),
        ("/v1/models", "GET", gateway.guarded(gateway.models)),
        ("/v1/models/{name:path}", "GET", gateway.guarded(gateway.models)),
        ("/health", "GET", gateway.health),
    ]
    routes = [routing.Route(path, endpoint, methods=[method]) for path, method, endpoint in paths]
    routes.append(routing.Mount("/session/{key}", routes=list(routes)))
    handlers = {_starlette("exceptions").HTTPException: gateway.no_route}
    app = _starlette("applications").Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


def _starlette(part: str) -> ModuleType:
    return require(f"starlette.{part}", extra="gateway", feature="the gateway")


class _ClientGoneError(Exception):
    """The client has disconnected."""


class _Gateway:
    """The endpoints of the application."""

    def __init__(
        self, find_port: Callable[[str], Port | None], max_body_bytes: int, max_calls: int
    ) -> None:
        self._find_port = find_port
        self._max_body_bytes = max_body_bytes
        self._max_calls = max_calls
        self._num_calls = 0
        self._shown: set[tuple[str, str]] = set()
        self._response = _starlette("responses").Response
        self._gone = (_ClientGoneError, _starlette("requests").ClientDisconnect)

    def answers_by(self, protocol: Protocol) -> Endpoint:
        """The endpoint for calls in a protocol."""

        async def answer(request: Request) -> Response:
            body = await self._body(request)
            port = self._port(request)
            answers = await self._answers(request, port, protocol.parse(body))
            reply = Reply(body, answers, port)
            if body.get("stream"):
                return self._response(protocol.stream(reply), media_type="text/event-stream")
            return self._json(protocol.response(reply))

        return self.guarded(answer, protocol)

    async def count_tokens(self, request: Request) -> Response:
        """Number of prompt tokens of a call in Anthropic's protocol."""
        call = _ANTHROPIC.parse_count(await self._body(request))
        return self._json({"input_tokens": self._port(request).count_tokens(call)})

    async def models(self, request: Request) -> Response:
        """The model of a session, in the form of OpenAI and Anthropic."""
        card = _model_card(self._port(request).model)
        name = request.path_params.get("name")
        if name is None:
            ends = {"first_id": card["id"], "last_id": card["id"], "has_more": False}
            return self._json({"object": "list", "data": [card], **ends})
        if name != card["id"]:
            raise RefusedCallError(f"there is no model {name!r:.100}", kind="missing")
        return self._json(card)

    async def health(self, request: Request) -> Response:
        """Health check."""
        return self._json({"status": "ok"})

    async def no_route(self, request: Request, error: HTTPException) -> Response:
        """The answer for an unknown path or method."""
        why = f"there is no {request.method} {request.url.path:.100}"
        refused = RefusedCallError(why, kind="missing")
        return self._json(_spoken(request).refusal(refused, error.status_code), error.status_code)

    def guarded(self, endpoint: Endpoint, protocol: Protocol | None = None) -> Endpoint:
        """Wrap an endpoint so that its errors become answers.

        Args:
            endpoint: may raise any error.
            protocol: protocol of the answers; by default detected from the client.
        """

        async def guard(request: Request) -> Response:
            try:
                return await endpoint(request)
            except RefusedCallError as error:
                refused = error
            except self._gone:
                return self._response(status_code=_CLIENT_GONE)
            except Exception as error:  # the program gets the error, and other calls continue
                refused = self._failed(error)
            status = STATUS[refused.kind]
            return self._json((protocol or _spoken(request)).refusal(refused, status), status)

        return guard

    def _failed(self, error: Exception) -> RefusedCallError:
        """The answer for an unexpected error; the first of each kind is also logged."""
        name = type(error).__name__
        kind = (name, place_of(error))
        if kind not in self._shown and len(self._shown) < _MOST_KINDS:
            self._shown.add(kind)
            told = "".join(traceback.format_exception(error))
            logger.warning(
                "A call of the gateway failed; its program was told so (HTTP 500). Only the first "
                f"of each kind is shown.\n{masked(told)}"
            )
        why = masked(f"{name}: {error}"[:_LONGEST_ERROR])
        return RefusedCallError(f"the gateway failed: {why}", kind="server")

    def _json(self, body: Mapping[str, Any], status: int = 200) -> Response:
        return self._response(json.dumps(body), status, media_type="application/json")

    def _port(self, request: Request) -> Port:
        """The port of the session of a request."""
        in_path, headers = request.path_params.get("key"), request.headers
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        keys = {in_path, bearer.strip() * (scheme.lower() == "bearer"), headers.get("x-api-key")}
        keys = keys - {None, ""} or {""}
        ports = {key: port for key in keys if (port := self._find_port(key)) is not None}
        if not ports or (in_path is not None and in_path not in ports):
            raise RefusedCallError("the key of the session is not known", kind="key")
        if len(ports) > 1:
            raise RefusedCallError("the keys belong to different sessions", kind="key")
        return next(iter(ports.values()))

    async def _body(self, request: Request) -> dict[str, Any]:
        """The body of a request; a body that is too long is read to its end but not kept."""
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size <= self._max_body_bytes:
                chunks.append(chunk)
        if size > self._max_body_bytes:
            told = f"the body is longer than {self._max_body_bytes} bytes"
            raise RefusedCallError(told, kind="size")
        return read_json(b"".join(chunks))

    async def _answers(self, request: Request, port: Port, call: Call) -> Sequence[Answer]:
        """Wait for the answers; if the client disconnects, cancel them."""
        if self._num_calls >= self._max_calls:
            raise RefusedCallError(f"{self._num_calls} calls wait for answers", kind="busy")
        self._num_calls += 1
        work = asyncio.ensure_future(port.answer(call))
        left = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise _ClientGoneError
            if work.cancelled():
                raise RefusedCallError("the call was cancelled by its session", kind="server")
            return work.result()
        finally:
            left.cancel()
            work.cancel()
            await asyncio.wait({work})
            if not work.cancelled():
                work.exception()  # retrieve the exception, otherwise asyncio would log it
            self._num_calls -= 1


async def _left(request: Request) -> None:
    """Wait for the client to disconnect, the only event after the body."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def read_json(text: bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        text: in UTF-8.

    Raises:
        RefusedCallError: it is not a JSON object, has more than 100 levels, or contains invalid
            Unicode.

    Example:
        >>> read_json(b'{"n": 2}')
        {'n': 2}
    """
    try:
        body = json.loads(text.decode(), parse_constant=_no_number)
        if b"\\ud" in text.lower():
            json.dumps(body, ensure_ascii=False).encode()  # lone surrogates cannot be encoded
    except (ValueError, RecursionError) as error:
        raise RefusedCallError(f"the body is not JSON: {error!s:.200}") from None
    if not isinstance(body, dict):
        raise RefusedCallError("the body must be a JSON object")
    if text.count(b"{") + text.count(b"[") > _MOST_LEVELS:
        _check_levels(body)
    return body


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _check_levels(body: dict[str, Any]) -> None:
    level: list[Any] = [body]
    for _ in range(_MOST_LEVELS):
        below = [each.values() if isinstance(each, dict) else each for each in level]
        level = [item for each in below for item in each if isinstance(item, (dict, list))]
    if level:
        raise RefusedCallError(f"the body has more than {_MOST_LEVELS} levels")


def _spoken(request: Request) -> Protocol:
    """The protocol of a client, if the path does not determine it."""
    return _ANTHROPIC if "anthropic-version" in request.headers else _CHAT


def _model_card(name: str) -> dict[str, Any]:
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "torchrl_llm"}
    since = "1970-01-01T00:00:00Z"
    return {**openai, "type": "model", "display_name": name, "created_at": since}
