"""Who can be asked to judge: a language model in this process, or a server.

Next: :mod:`torchrl_llm.rewards.judge` asks them and reads what they say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase

from torchrl_llm._http import HTTPClient
from torchrl_llm.data.containers import ChatHistory
from torchrl_llm.data.history import History
from torchrl_llm.data.input_modes import response_reader
from torchrl_llm.errors import ConfigError, RewardError
from torchrl_llm.rewards.judge import Grader, Messages
from torchrl_llm.rewards.reward_runner import run_rows

_PATH = "/v1/chat/completions"
_RESERVED = {"model", "messages", "n", "stream"}


class WrapperGrader(Grader):
    """A language model behind one of this package's wrappers, in history mode.

    Args:
        wrapper: a :class:`~torchrl_llm.modules.TransformersWrapper`, for example, that generates;
            how it samples is its own business (temperature 0 gives the same score each time).
        batch_size: conversations at a time; all of them if not given.

    Raises:
        ConfigError: a wrapper that does not read conversations, or an impossible number.
    """

    def __init__(self, wrapper: TensorDictModuleBase, *, batch_size: int | None = None) -> None:
        if ("history", "prompt") not in list(wrapper.in_keys):
            raise ConfigError(
                "a judge reads conversations: make the wrapper with input_mode='history' and "
                f"generate=True, its in_keys are {list(wrapper.in_keys)}"
            )
        if batch_size is not None and batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {batch_size}")
        self.wrapper, self.batch_size = wrapper, batch_size
        self._reader = response_reader("history", None)

    def ask(self, conversations: Sequence[Messages]) -> list[str | Exception]:
        """See :class:`Grader`."""
        step = self.batch_size or max(len(conversations), 1)
        answers: list[str | Exception] = []
        for start in range(0, len(conversations), step):
            answers += self._ask(conversations[start : start + step])
        return answers

    def _ask(self, conversations: Sequence[Messages]) -> list[str | Exception]:
        size = [len(conversations)]
        prompt = History.from_chats([list(messages) for messages in conversations])
        history = ChatHistory(prompt=prompt, batch_size=size)
        return self._reader.responses(self.wrapper(TensorDict(history=history, batch_size=size)))


class EndpointGrader(Grader):
    """A server that speaks chat completions, OpenAI's protocol: vLLM's, or a provider's.

    A request that the server did not take, or whose connection broke, is sent again; one that takes
    longer than its limit is not.

    Args:
        url: ``http://host:port``, with or without ``/v1``.
        model: name of the model there.
        api_key: sent as a bearer token.
        options: fields of the request beside ``model`` and ``messages``, such as
            ``{"temperature": 0, "max_tokens": 512}``, which are the default.
        timeout: seconds that a request may take, with those that were sent again.
        max_retries: how often it is sent again.
        concurrency: requests at a time.

    Raises:
        ConfigError: an address that is none, options that are not the user's to set, or impossible
            numbers.

    Example:
        >>> EndpointGrader("http://localhost:8000/v1", "judge").url
        'http://localhost:8000'
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key: str | None = None,
        options: Mapping[str, Any] | None = None,
        timeout: float = 60.0,
        max_retries: int = 4,
        concurrency: int = 32,
    ) -> None:
        options = {"temperature": 0, "max_tokens": 512} if options is None else dict(options)
        if reserved := sorted(_RESERVED & set(options)):
            raise ConfigError(f"{reserved} cannot be options of a judge")
        if not timeout > 0 or concurrency < 1:
            raise ConfigError(
                f"timeout and concurrency must be positive, got {timeout} and {concurrency}"
            )
        self.model, self.options = model, options
        self.timeout, self.concurrency = timeout, concurrency
        base = url.rstrip("/").removesuffix("/v1")
        self._http = HTTPClient(base, api_key=api_key, max_retries=max_retries)
        self.url = self._http.url

    def ask(self, conversations: Sequence[Messages]) -> list[str | Exception]:
        """See :class:`Grader`; a server that refuses one request may answer the others."""

        def ask(messages: Messages) -> str | Exception:
            try:
                return self._ask(messages)
            except Exception as error:  # a server's failure is data
                return error

        rows = [(messages,) for messages in conversations]
        outcomes = run_rows(ask, rows, num_threads=min(self.concurrency, max(len(rows), 1)))
        return [outcome.value for outcome in outcomes]

    def _ask(self, messages: Messages) -> str:
        body = {**self.options, "model": self.model, "messages": [dict(m) for m in messages]}
        reply = self._http.call("POST", _PATH, body, timeout_s=self.timeout)
        self._http.check(reply, _PATH)
        try:
            choice = reply.data["choices"][0]
            content, reason = choice["message"]["content"], choice.get("finish_reason")
        except (KeyError, IndexError, TypeError, AttributeError):
            content, reason = None, None
        if not isinstance(content, str):
            raise RewardError(f"{self.url} answered without a text: {str(reply.data)[:200]}")
        if reason == "length":
            raise RewardError(
                f"the judge's answer was cut at its limit of tokens; raise max_tokens: "
                f"{content[-100:]!r}"
            )
        return content

    def close(self) -> None:
        """Close the idle connections."""
        self._http.close()
