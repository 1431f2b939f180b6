"""Environments behind an OpenEnv server, over the WebSocket sessions of its protocol (0.3).

A server runs one environment for each connection; this process does not import or run its code. The
messages are JSON: requests are ``reset``, ``step``, ``state`` and ``close``, replies are
``observation``, ``state`` and ``error``.

OpenEnv's own tools start a server.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from torchrl_llm._imports import require
from torchrl_llm._masking import masked
from torchrl_llm.envs.actions import ActionError, ActionForm, CallAction, make_action_parser
from torchrl_llm.envs.libs.sessions import Observed, Session, SessionEnv
from torchrl_llm.errors import BackendError, ConfigError, ResourceError, WorkerError

_MAX_MESSAGE = 100 * 2**20


class OpenEnvClient:
    """One session of a server.

    Connects at the first message. Not thread-safe.

    Args:
        url: URL of the server, ``http://host:port``; a path before ``/ws`` may follow.
        connect_timeout_s: seconds to connect.
        message_timeout_s: seconds to wait for a reply.

    Raises:
        MissingExtraError: the package ``websockets`` is not installed; raised at the first message.
        WorkerError: the server cannot be reached, is gone, or does not answer in time.
        ResourceError: the server allows no further session.
        ActionError: the server does not accept an action; nothing has happened.
        BackendError: the environment has failed.
    """

    def __init__(
        self, url: str, *, connect_timeout_s: float = 10.0, message_timeout_s: float = 60.0
    ) -> None:
        self.url = _address(url, "ws", "/ws")
        self.place = masked(self.url)  # as in error messages
        self.connect_timeout_s = connect_timeout_s
        self.message_timeout_s = message_timeout_s
        self._socket: Any = None

    def reset(self, **options: Any) -> dict[str, Any]:
        """Begin an episode.

        Args:
            options: arguments of the environment's reset, such as ``seed``.

        Returns:
            ``observation`` (a dict), ``reward`` and ``done``.
        """
        return self._ask("reset", options, "observation")

    def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        """Act.

        Args:
            action: an action in the server's schema.

        Returns:
            ``observation`` (a dict), ``reward`` and ``done``.
        """
        return self._ask("step", dict(action), "observation")

    def state(self) -> dict[str, Any]:
        """State of the episode on the server: ``episode_id``, ``step_count`` and more."""
        return self._ask("state", None, "state")

    def close(self) -> None:
        """End the session; the next message would begin a new one."""
        socket, self._socket = self._socket, None
        if socket is None:
            return
        try:
            socket.send(json.dumps({"type": "close"}))
        except Exception:  # a broken connection may raise any error; it is closed
            pass
        finally:
            socket.close()

    def _connected(self) -> Any:
        if self._socket is None:
            client = require("websockets.sync.client", extra="openenv", feature="OpenEnvClient")
            try:
                self._socket = client.connect(
                    self.url,
                    open_timeout=self.connect_timeout_s,
                    close_timeout=1.0,
                    max_size=_MAX_MESSAGE,
                    proxy=None,
                )
            except Exception as error:  # refused, unknown host, no WebSocket, no answer
                raise WorkerError(f"cannot connect to {self.place}: {_said(error)}") from error
        return self._socket

    def _ask(self, kind: str, data: Mapping[str, Any] | None, reply: str) -> dict[str, Any]:
        message = {"type": kind} if data is None else {"type": kind, "data": dict(data)}
        socket = self._connected()
        try:
            # A full server reports it and closes the connection, perhaps before the first request.
            with suppress(Exception):
                socket.send(json.dumps(message))
            answer = json.loads(socket.recv(timeout=self.message_timeout_s))
        except TimeoutError as error:
            self.close()
            raise WorkerError(
                f"{self.place} did not answer {kind!r} within {self.message_timeout_s} s"
            ) from error
        except Exception as error:  # the connection is gone, or the reply is no JSON
            self.close()
            raise WorkerError(
                f"{self.place} is gone or does not speak OpenEnv: {_said(error)}"
            ) from error
        return self._read(answer, kind, reply)

    def _read(self, answer: Any, kind: str, reply: str) -> dict[str, Any]:
        told = answer.get("type") if isinstance(answer, Mapping) else None
        data = answer.get("data") if isinstance(answer, Mapping) else None
        if told == reply and isinstance(data, Mapping):
            return dict(data)
        if told != "error" or not isinstance(data, Mapping):
            self.close()
            raise WorkerError(f"{self.place} answered {kind!r} with {str(answer)[:200]!r}")
        code, text = str(data.get("code")), str(data.get("message"))
        if code == "CAPACITY_REACHED":
            self.close()
            raise ResourceError(
                f"{self.place} allows no further session: {text}. Lower num_envs, or let the "
                "server run more environments (max_concurrent_envs)"
            )
        if code == "VALIDATION_ERROR" and kind == "step":
            raise ActionError(_validation(data))
        raise BackendError(f"{self.place} failed in {kind!r} ({code}): {text}")


class OpenEnvSession(Session):
    """A session of a server as a world.

    Args:
        client: the connection.
        observe: function from an observation to text.
        success_above: an episode that ends with a higher last reward is a success.
    """

    def __init__(
        self,
        client: OpenEnvClient,
        observe: Callable[[Mapping[str, Any]], str],
        *,
        success_above: float = 0.0,
    ) -> None:
        self.client = client
        self.observe = observe
        self.success_above = success_above

    def reset(self, options: Mapping[str, Any]) -> Observed:
        """See :meth:`Session.reset`."""
        return self._seen(self.client.reset(**options))

    def step(self, action: Mapping[str, Any]) -> Observed:
        """See :meth:`Session.step`."""
        return self._seen(self.client.step(action))

    def close(self) -> None:
        """See :meth:`Session.close`."""
        self.client.close()

    def _seen(self, data: Mapping[str, Any]) -> Observed:
        observation = data.get("observation")
        reward, done = data.get("reward"), bool(data.get("done"))
        reward = 0.0 if reward is None else float(reward)
        if not isinstance(observation, Mapping):
            raise BackendError(f"{self.client.place} gave no observation, but {observation!r:.100}")
        success = done and reward > self.success_above
        return Observed(self.observe(observation), reward, terminated=done, success=success)


def observation_text(observation: Mapping[str, Any]) -> str:
    """An observation as text: its one string, or all of it as JSON.

    Args:
        observation: as the server returns it.

    Example:
        >>> observation_text({"echoed": "Hi"}), observation_text({"x": 1, "y": 2})
        ('Hi', '{"x": 1, "y": 2}')
    """
    shown = {key: value for key, value in observation.items() if key != "metadata"}
    values = list(shown.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(shown, ensure_ascii=False)


class OpenEnvEnv(SessionEnv):
    """Conversations with the environment of an OpenEnv server, one session per row.

    The server defines rewards and ends. It reports ``done`` without a reason, which becomes
    ``terminated``. If the server does not accept an action, the reward is ``invalid_reward`` and
    the model reads the reason.

    Args:
        url: URL of the server, ``http://host:port``.
        actions: how an answer writes its action: ``"bare"`` (the whole answer), ``"tag"``
            (``<action>...</action>``) or ``"call"``, a call of the tool ``action`` whose arguments
            are the fields of the server's actions. If an action needs one field, the text is its
            value; if it needs several fields, the text is a JSON object of them.
        action_field: field of which the text is the value, if the server's schema does not
            determine it.
        observe: function from an observation (a dict) to text; ``observation_text`` if not given.
        success_above: an episode that ends with a higher last reward is a success.
        connect_timeout_s: seconds to connect.
        message_timeout_s: seconds to wait for a reply.
        kwargs: arguments of :class:`~torchrl_llm.envs.libs.sessions.SessionEnv` and
            :class:`~torchrl_llm.envs.DatasetChatEnv`; ``dataset`` holds the options of resets.

    Raises:
        WorkerError: the server does not answer.
        ConfigError: for impossible arguments.
    """

    def __init__(
        self,
        url: str,
        *,
        actions: ActionForm = "bare",
        action_field: str | None = None,
        observe: Callable[[Mapping[str, Any]], str] = observation_text,
        success_above: float = 0.0,
        connect_timeout_s: float = 10.0,
        message_timeout_s: float = 60.0,
        **kwargs: Any,
    ) -> None:
        schema = _action_schema(url, connect_timeout_s)
        fields = dict(schema.get("properties") or {})
        if action_field is not None and action_field not in fields:
            raise ConfigError(f"action_field {action_field!r} is none of {sorted(fields)}")
        if actions == "call":
            parser = CallAction("action", "its arguments", parameters=schema)
            read = parser.arguments
        else:
            needed = [action_field] if action_field else list(schema.get("required") or fields)
            parser = make_action_parser(actions, "action", _described(needed, fields))
            read = partial(_read_fields, parser.parse, needed, fields)
        limits = {"connect_timeout_s": connect_timeout_s, "message_timeout_s": message_timeout_s}
        opens = partial(_open, url, limits, observe, success_above)
        super().__init__(opens, actions=parser, read_action=read, **kwargs)


def _open(
    url: str, limits: Mapping[str, float], observe: Callable[..., str], success_above: float
) -> OpenEnvSession:
    return OpenEnvSession(OpenEnvClient(url, **limits), observe, success_above=success_above)


def _described(needed: list[str], fields: Mapping[str, Any]) -> str:
    if len(needed) == 1:
        about = fields[needed[0]].get("description")
        return f"the {needed[0]}" + (f" ({about})" if about else "")
    return f"a JSON object with {', '.join(needed) or 'no fields'}"


def _read_fields(
    parse: Callable[[Mapping[str, Any]], str],
    needed: list[str],
    fields: Mapping[str, Any],
    message: Mapping[str, Any],
) -> dict[str, Any]:
    text = parse(message)
    if len(needed) == 1:
        name = needed[0]
        if fields[name].get("type", "string") == "string":
            return {name: text}
        try:
            return {name: json.loads(text)}
        except ValueError as error:
            kind = fields[name].get("type")
            raise ActionError(f"The {name} must be of type {kind}.") from error
    try:
        action = json.loads(text)
    except ValueError as error:
        raise ActionError(f"Your action is not JSON: {error}.") from error
    if not isinstance(action, dict):
        raise ActionError("Your action must be a JSON object.")
    return action


def _action_schema(url: str, timeout_s: float) -> dict[str, Any]:
    """JSON schema of the server's actions, without their metadata."""
    address = _address(url, "http", "/schema")
    # The user's own servers are not behind the proxy in the environment variables.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(address, timeout=timeout_s) as reply:
            schema = json.load(reply)["action"]
            fields = {k: v for k, v in schema["properties"].items() if k != "metadata"}
    except Exception as error:  # unreachable, slow, or no OpenEnv server
        raise WorkerError(f"{masked(address)} gave no schema of actions: {_said(error)}") from error
    required = [name for name in schema.get("required") or () if name in fields]
    definitions = {k: v for k, v in schema.items() if k == "$defs"}
    return {"type": "object", "properties": fields, "required": required, **definitions}


def _address(url: str, scheme: str, path: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https", "ws", "wss") or not parts.netloc:
        shown = masked(url)
        raise ConfigError(f"a server's url is http://host:port or https://..., got {shown!r}")
    secure = "s" if parts.scheme in ("https", "wss") else ""
    base = parts.path.rstrip("/").removesuffix("/ws")
    return urlunsplit((scheme + secure, parts.netloc, base + path, "", ""))


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _validation(data: Mapping[str, Any]) -> str:
    errors = [e for e in data.get("errors") or () if isinstance(e, Mapping)]
    found = [f"{'.'.join(map(str, e.get('loc') or ()))}: {e.get('msg')}" for e in errors]
    return f"The action is not taken: {'; '.join(found) or data.get('message')}."
