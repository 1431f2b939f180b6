"""Redis, behind one door: connections with limits on every wait, and errors of our own.

No other file imports ``redis`` but through :func:`connect`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from torchrl_llm._imports import require
from torchrl_llm.errors import ConfigError, ResourceError, WorkerError

__all__ = ["RECONNECT_S", "RedisLink"]

RECONNECT_S = 60.0
"""Seconds for which a Redis that went away may stay away, unless its caller says otherwise."""

_CONNECT_S = 5.0
_ANSWER_S = 20.0
_PAUSE_S = (0.05, 1.0)
_T = TypeVar("_T")
# Servers that a link of this process has given up: until one answers, no call waits for it again
# (several links lead to one server, and each is closed by a last call).
_given_up: set[str] = set()


class RedisLink:
    """A connection that outlives restarts of the server; picklable, for threads too.

    Args:
        url: ``redis://[user:password@]host:port/db``, ``rediss://`` for TLS, or ``unix://path``.
        feature: what needs it; begins error messages.
        reconnect_s: seconds to try again while the server is away, once for all links of this
            process to it.

    Raises:
        MissingExtraError: redis-py is not installed.
        ConfigError: a URL that is none, or a password that is wrong.
        WorkerError: the server does not answer.
    """

    def __init__(self, url: str, *, feature: str, reconnect_s: float = RECONNECT_S) -> None:
        if reconnect_s < 0:
            raise ConfigError(f"reconnect_s must not be negative, got {reconnect_s}")
        self._url, self._feature, self._reconnect_s = url, feature, reconnect_s
        self._connect()

    def _connect(self) -> None:
        redis = require("redis", extra="redis", feature=self._feature)
        backoff = require("redis.backoff", extra="redis", feature=self._feature)
        retry = require("redis.retry", extra="redis", feature=self._feature)
        self._errors = redis.exceptions
        options: dict[str, Any] = {
            "socket_timeout": _ANSWER_S,
            # It tries again by itself, and then does not know whether the first try was done.
            "retry": retry.Retry(backoff.NoBackoff(), 0),
        }
        if not self._url.startswith("unix:"):
            options["socket_connect_timeout"] = _CONNECT_S
        try:
            self.client = redis.Redis.from_url(self._url, **options)
        except ValueError as error:
            raise ConfigError(f"{self.place} is no URL of a Redis: {error}") from None

    def __getstate__(self) -> dict[str, Any]:
        return {key: self.__dict__[key] for key in ("_url", "_feature", "_reconnect_s")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._connect()

    @property
    def place(self) -> str:
        """The URL without user and password."""
        scheme, separator, rest = self._url.partition("?")[0].partition("://")
        host, slash, path = rest.partition("/")
        return scheme + separator + host.rpartition("@")[2] + slash + path

    def call(self, command: Callable[[bool], _T]) -> _T:
        """Run a command, again while the server is away.

        Args:
            command: gets whether this is another try: the server may have done the first one.

        Raises:
            WorkerError: the server stayed away, or refuses the command.
            ResourceError: it is out of memory.
            ConfigError: it does not let us in.
        """
        errors = self._errors
        patience_s = 0.0 if self._url in _given_up else self._reconnect_s
        deadline, pause_s, again = time.monotonic() + patience_s, _PAUSE_S[0], False
        while True:
            try:
                answer = command(again)
                _given_up.discard(self._url)
                return answer
            except (errors.AuthenticationError, errors.NoPermissionError) as error:
                raise ConfigError(f"the Redis at {self.place} refuses us: {error}") from None
            except errors.OutOfMemoryError as error:
                raise ResourceError(
                    f"the Redis at {self.place} is out of memory: {error}. Raise its maxmemory, or "
                    "let fewer deliveries wait (max_size)"
                ) from None
            except (errors.ConnectionError, errors.TimeoutError) as error:  # BusyLoadingError too
                if time.monotonic() + pause_s > deadline:
                    _given_up.add(self._url)
                    raise WorkerError(
                        f"{self._feature}: the Redis at {self.place} has not answered for "
                        f"{self._reconnect_s:g} s: {error}"
                    ) from None
            except errors.RedisError as error:
                raise WorkerError(
                    f"{self._feature}: the Redis at {self.place} says: {error}"
                ) from None
            time.sleep(pause_s)
            pause_s, again = min(2 * pause_s, _PAUSE_S[1]), True

    def close(self) -> None:
        """Give the connections back."""
        self.client.close()
