"""The only interface to Redis: connections with time limits, and this package's errors.

No other file imports ``redis`` directly.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from torchrl_llm._checked import Ge, checked
from torchrl_llm._imports import require
from torchrl_llm._masking import MASK
from torchrl_llm.errors import ConfigError, ResourceError, WorkerError

RECONNECT_S = 60.0
"""Default time limit in seconds for which a Redis server may be unreachable."""

PASSWORD_VARIABLE = "TORCHRL_LLM_REDIS_PASSWORD"
"""Environment variable with the password of the Redis server."""

_CONNECT_S = 5.0
_ANSWER_S = 20.0
_PAUSE_S = (0.05, 1.0)
_T = TypeVar("_T")
# Servers on which a link of this process timed out: until such a server answers, no call waits for
# it again (several links may use one server, and closing each makes a last call).
_given_up: set[str] = set()
_SHOWN = re.compile(
    r"(\w+://)(?:[^@/?]*@)?((?:\[[^]@]*\]|[^:@/?]*)(?::\d*)?(?:/[^@?]*)?)(?:\?[^@]*)?"
)


class RedisLink:
    """A connection that survives restarts of the server; picklable and thread-safe.

    Args:
        url: ``redis://[user:password@]host:port/db``, ``rediss://`` for TLS, or ``unix://path``. A
            password that is missing or masked as ``***`` is read from the environment variable
            ``TORCHRL_LLM_REDIS_PASSWORD`` of each process.
        feature: the feature that needs it; begins error messages.
        reconnect_s: seconds of retries while the server is unreachable, once for all links of this
            process to it.

    Raises:
        MissingExtraError: redis-py is not installed.
        ConfigError: a malformed URL, or a password that is wrong or missing.
        WorkerError: the server does not answer.
    """

    @checked
    def __init__(
        self, url: str, *, feature: str, reconnect_s: Annotated[float, Ge(0)] = RECONNECT_S
    ) -> None:
        self._url, self._feature, self._reconnect_s = url, feature, reconnect_s
        self._connect()

    def _connect(self) -> None:
        redis = require("redis", extra="redis", feature=self._feature)
        self._errors = redis.exceptions
        try:
            options = redis.connection.parse_url(self._url)
        except ValueError:  # its message may contain a part of the password
            raise ConfigError(
                f"{self.place} is no URL of a Redis; expected redis://host:port/db, rediss:// for "
                "TLS, or unix://path"
            ) from None
        options["socket_timeout"] = _ANSWER_S
        # The client retries by itself, and then it is unknown whether the first attempt took
        # effect.
        options["retry"] = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
        if "path" not in options:
            options["socket_connect_timeout"] = _CONNECT_S
        user, password = options.pop("username", None), options.pop("password", None)
        if password in (None, MASK):
            password = os.environ.get(PASSWORD_VARIABLE, password)
        if password == MASK:
            raise ConfigError(
                f"the password of the Redis at {self.place} is masked; put it into the environment "
                f"variable {PASSWORD_VARIABLE}"
            )
        self._password = password
        if password is not None:
            # Some versions of redis-py show a pool's password in its repr, but not a credential
            # provider.
            provider = redis.UsernamePasswordCredentialProvider(user, password)
            options["credential_provider"] = provider
        elif user is not None:
            options["username"] = user
        self.client = redis.Redis.from_pool(redis.ConnectionPool(**options))

    def __getstate__(self) -> dict[str, Any]:
        return {key: self.__dict__[key] for key in ("_url", "_feature", "_reconnect_s")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._connect()

    @property
    def place(self) -> str:
        """The URL without user and password, and without anything that may be a part of them."""
        shown = _SHOWN.fullmatch(self._url)
        if shown is not None:
            return shown[1] + shown[2]
        scheme, separator, rest = self._url.rpartition("://")
        return f"{scheme}{separator}{MASK}" if separator or re.search("[:@]", rest) else rest

    def _said(self, error: Exception) -> str:
        # A server that does not know a command repeats its arguments.
        return str(error).replace(self._password, MASK) if self._password else str(error)

    def call(self, command: Callable[[bool], _T]) -> _T:
        """Run a command, and retry while the server is unreachable.

        Args:
            command: called with whether this is a retry: the server may have executed the first
                attempt.

        Raises:
            WorkerError: the server stayed unreachable, or rejects the command.
            ResourceError: the server is out of memory.
            ConfigError: the server denies access.
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
                raise ConfigError(
                    f"the Redis at {self.place} refuses us: {self._said(error)}. Its password "
                    f"belongs in the environment variable {PASSWORD_VARIABLE}"
                ) from None
            except errors.OutOfMemoryError as error:
                raise ResourceError(
                    f"the Redis at {self.place} is out of memory: {self._said(error)}. Raise its "
                    "maxmemory, or let fewer deliveries wait (max_size)"
                ) from None
            except (errors.ConnectionError, errors.TimeoutError) as error:  # BusyLoadingError too
                if time.monotonic() + pause_s > deadline:
                    _given_up.add(self._url)
                    raise WorkerError(
                        f"{self._feature}: the Redis at {self.place} has not answered for "
                        f"{self._reconnect_s:g} s: {self._said(error)}"
                    ) from None
            except errors.RedisError as error:
                raise WorkerError(
                    f"{self._feature}: the Redis at {self.place} says: {self._said(error)}"
                ) from None
            time.sleep(pause_s)
            pause_s, again = min(2 * pause_s, _PAUSE_S[1]), True

    def read(self, fill: Callable[[Any], object]) -> list[Any]:
        """Answers of several commands, read atomically.

        Args:
            fill: adds the commands to the given pipeline.

        Returns:
            An answer for each command; ``None`` if a key holds a value of a different type.

        Raises:
            WorkerError: see :meth:`call`.
        """

        def run(again: bool) -> list[Any]:
            with self.client.pipeline(transaction=True) as pipe:
                fill(pipe)
                answers = pipe.execute(raise_on_error=False)
            for place, answer in enumerate(answers):
                if isinstance(answer, self._errors.RedisError):
                    if not str(answer).startswith("WRONGTYPE"):
                        raise answer
                    answers[place] = None
            return answers

        return self.call(run)

    def close(self) -> None:
        """Close the connections."""
        self.client.close()
