"""Text models: one interface for judges, critics, and agents whose policy is a text.

A :class:`TextModel` answers conversations and reports the cost of each answer. There are three
kinds: a model in this process (:class:`WrapperTextModel`), a server with the chat completions
protocol (:class:`EndpointTextModel`), and a function (:class:`ScriptedTextModel`). Answers have no
token ids; to sample for training, use a wrapper directly.

Next: :mod:`torchrl_llm.rewards.judge` parses scores from the text of a model.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase

from torchrl_llm._chat_server import PATH, ask_chat
from torchrl_llm._checked import Ge, Gt, checked
from torchrl_llm._http import HTTPClient, server_root
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.history import History
from torchrl_llm.data.input_modes import response_reader
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.data.views import ChatHistory
from torchrl_llm.errors import BackendError, ConfigError, RewardError
from torchrl_llm.rewards.reward_runner import run_rows

Messages = tuple[Mapping[str, str], ...]
_RESERVED = {"model", "messages", "n", "stream"}
_CHARACTERS_PER_TOKEN = 4


class Usage(NamedTuple):
    """Cost of an answer.

    Attributes:
        input_tokens: number of tokens of the conversation.
        output_tokens: number of tokens of the answer.
        seconds: wall-clock time; for a batch, the time of the batch.
        model: name of the model.
        num_retries: number of retries of the request.
        estimated: whether the numbers of tokens are estimated from the text lengths.
    """

    input_tokens: int
    output_tokens: int
    seconds: float = 0.0
    model: str = ""
    num_retries: int = 0
    estimated: bool = False


class TextAnswer(NamedTuple):
    """An answer to a conversation.

    Attributes:
        text: the answer; may be empty.
        usage: its cost.
        finish_reason: why the answer ended: ``"stop"``, ``"length"`` or a different word of the
            server; ``None`` if unknown.
    """

    text: str
    usage: Usage
    finish_reason: str | None = None


OnCall = Callable[[int, "TextAnswer | Exception | None"], None]
"""Callback ``(index, answer)``; ``answer`` is ``None`` when the call begins."""


def estimated_usage(
    messages: Sequence[Mapping[str, Any]], text: str, *, seconds: float = 0.0, model: str = ""
) -> Usage:
    """Estimate the cost of an answer: one token per four characters.

    Args:
        messages: the conversation.
        text: the answer.
        seconds: wall-clock time.
        model: name of the model.

    Example:
        >>> estimated_usage([{"role": "user", "content": "12345678"}], "abc")[:2]
        (2, 1)
    """
    asked = sum(len(str(message.get("content", ""))) for message in messages)
    tokens = (-(-length // _CHARACTERS_PER_TOKEN) for length in (asked, len(text)))
    return Usage(*tokens, seconds=seconds, model=model, estimated=True)


class TextModel:
    """Base class: answers conversations with a model in this process, a server or a function.

    A subclass defines :meth:`ask`, or :meth:`answer` if it knows the cost of an answer.
    """

    concurrency: int = 32
    """Number of conversations to send at the same time."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.ask is TextModel.ask and cls.answer is TextModel.answer:
            raise TypeError(f"{cls.__name__} must define ask, or answer where it knows the usage")

    def ask(self, conversations: Sequence[Messages]) -> Sequence[str | Exception]:
        """Answer conversations with texts only.

        Args:
            conversations: conversations; each is a tuple of messages with ``role`` and ``content``.

        Returns:
            For each conversation, an answer or the exception if it failed.
        """
        found = self.answer(conversations)
        return [each if isinstance(each, Exception) else each.text for each in found]

    def answer(
        self,
        conversations: Sequence[Messages],
        *,
        max_tokens: int | None = None,
        seed: int | None = None,
        on_call: OnCall | None = None,
    ) -> Sequence[TextAnswer | Exception]:
        """Answer conversations and report the cost.

        By default, this method uses the texts of :meth:`ask` and estimates the numbers of tokens.

        Args:
            conversations: see :meth:`ask`.
            max_tokens: largest number of tokens of an answer; by default the model's own limit.
            seed: seed of sampling, for a model in this process.
            on_call: see :data:`OnCall`.

        Returns:
            For each conversation, an answer or the exception if it failed.

        Raises:
            ConfigError: when the model cannot apply ``max_tokens``.
        """
        if max_tokens is not None:
            raise ConfigError(f"{type(self).__name__} takes no max_tokens: it defines ask only")
        _tell_begin(on_call, len(conversations))
        begun = time.perf_counter()
        found = self.ask(conversations)
        seconds, name = time.perf_counter() - begun, type(self).__name__
        return [
            text
            if isinstance(text, Exception)
            else TextAnswer(text, estimated_usage(messages, text, seconds=seconds, model=name))
            for messages, text in zip(conversations, found, strict=True)
        ]


class WrapperTextModel(TextModel):
    """A language model in a wrapper of torchrl_llm, in history mode.

    Args:
        wrapper: for example a :class:`~torchrl_llm.modules.TransformersWrapper` with
            ``generate=True``. Its settings control sampling (with temperature 0, the text is the
            same each time).
        batch_size: number of conversations per batch; all by default.
        name: name of the model in the usage.

    Raises:
        ConfigError: for a wrapper that does not read conversations, or an invalid number.
    """

    @checked
    def __init__(
        self,
        wrapper: TensorDictModuleBase,
        *,
        batch_size: Annotated[int, Ge(1)] | None = None,
        name: str | None = None,
    ) -> None:
        if ("history", "prompt") not in list(wrapper.in_keys):
            raise ConfigError(
                "a judge reads conversations: make the wrapper with input_mode='history' and "
                f"generate=True, its in_keys are {list(wrapper.in_keys)}"
            )
        self.wrapper, self.batch_size = wrapper, batch_size
        self.concurrency = batch_size or type(self).concurrency
        self.name = type(wrapper).__name__ if name is None else name
        self._reader = response_reader("history", None)
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def answer(
        self,
        conversations: Sequence[Messages],
        *,
        max_tokens: int | None = None,
        seed: int | None = None,
        on_call: OnCall | None = None,
    ) -> list[TextAnswer | Exception]:
        """Answer in batches; ``on_call`` is only called when a batch begins."""
        _tell_begin(on_call, len(conversations))
        options = {} if max_tokens is None else {"max_new_tokens": max_tokens}
        step = self.batch_size or max(len(conversations), 1)
        answers: list[TextAnswer | Exception] = []
        for start in range(0, len(conversations), step):
            # Each batch has a different seed, so equal conversations in two batches get independent
            # samples.
            more = {} if seed is None else {"seed": seed + start}
            with self._lock:
                answers += self._batch(conversations[start : start + step], {**options, **more})
        return answers

    def _batch(
        self, conversations: Sequence[Messages], options: Mapping[str, int]
    ) -> list[TextAnswer | Exception]:
        size, begun = [len(conversations)], time.perf_counter()
        prompt = History.from_chats([list(messages) for messages in conversations])
        history = ChatHistory(prompt=prompt, batch_size=size)
        try:
            td = self.wrapper(TensorDict(history=history, batch_size=size), **options)
        except Exception as error:  # the failure of a model is data
            return [error] * len(conversations)
        texts, seconds = self._reader.responses(td), time.perf_counter() - begun
        usages = self._usage(td, conversations, texts, seconds)
        return [_answer(*row) for row in zip(texts, usages, _reasons(td), strict=True)]

    def _usage(
        self, td: TensorDictBase, conversations: Sequence[Messages], texts: Sequence[Any], s: float
    ) -> list[Usage]:
        if td.get("tokens", None) is None:
            return [
                estimated_usage(messages, str(text), seconds=s, model=self.name)
                for messages, text in zip(conversations, texts, strict=True)
            ]
        counts = (
            [len(ids) for ids in read_rows(td, ("tokens", k))] for k in ("prompt", "response")
        )
        return [Usage(*pair, seconds=s, model=self.name) for pair in zip(*counts, strict=True)]


def _answer(text: str | Exception, usage: Usage, reason: str | None) -> TextAnswer | Exception:
    if reason == "abort":
        return BackendError("the model was not asked: the conversation does not fit its context")
    return text if isinstance(text, Exception) else TextAnswer(text, usage, reason)


def _tell_begin(on_call: OnCall | None, size: int) -> None:
    for place in range(size if on_call is not None else 0):
        on_call(place, None)


def _reasons(td: TensorDictBase) -> list[str | None]:
    found = td.get(("tokens", "finish_reason"), None)
    if found is None:
        return [None] * td.batch_size.numel()
    return [FinishReason(int(reason)).name.lower() for reason in found.reshape(-1)]


class _OneByOne(TextModel):
    """Base class of models with one request per conversation, at most ``concurrency`` at a time."""

    def answer(
        self,
        conversations: Sequence[Messages],
        *,
        max_tokens: int | None = None,
        seed: int | None = None,
        on_call: OnCall | None = None,
    ) -> list[TextAnswer | Exception]:
        """Answer; ``seed`` is ignored. If a conversation fails, its answer is the exception."""

        def call(place: int, messages: Messages) -> TextAnswer | Exception:
            if on_call is not None:
                on_call(place, None)
            try:
                found: TextAnswer | Exception = self._answer(messages, max_tokens)
            except Exception as error:  # the failure of a model is data
                found = error
            if on_call is not None:
                on_call(place, found)
            return found

        most = self.concurrency
        threads = 0 if most == 1 else min(most, max(len(conversations), 1))
        outcomes = run_rows(call, list(enumerate(conversations)), num_threads=threads)
        return [
            RewardError(f"{each.error}: {each.message}") if each.error else each.value
            for each in outcomes
        ]

    @abstractmethod
    def _answer(self, messages: Messages, max_tokens: int | None) -> TextAnswer: ...


class EndpointTextModel(_OneByOne):
    """A server with OpenAI's chat completions protocol, such as vLLM or a provider's server.

    A request is retried if the server rejected it or the connection broke. A request that exceeds
    its time limit is not retried.

    Args:
        url: ``http://host:port``, with or without ``/v1``.
        model: name of the model on the server.
        api_key: API key, sent as a bearer token.
        options: further fields of the request; by default ``{"temperature": 0, "max_tokens":
            512}``.
        timeout: time limit of a request in seconds, including retries.
        max_retries: largest number of retries.
        concurrency: number of parallel requests.
        path: path of the requests, if it is not ``/v1/chat/completions``; then the URL is used
            unchanged.
        max_tokens_field: name of the request field for the largest number of tokens of an answer.

    Raises:
        ConfigError: for a malformed URL, reserved options, or invalid numbers.

    Example:
        >>> EndpointTextModel("http://localhost:8000/v1", "judge").url
        'http://localhost:8000'
    """

    @checked
    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key: str | None = None,
        options: Mapping[str, Any] | None = None,
        timeout: Annotated[float, Gt(0)] = 60.0,
        max_retries: int = 4,
        concurrency: Annotated[int, Ge(1)] = 32,
        path: str | None = None,
        max_tokens_field: str = "max_tokens",
    ) -> None:
        options = {"temperature": 0, "max_tokens": 512} if options is None else dict(options)
        if reserved := sorted(_RESERVED & set(options)):
            raise ConfigError(f"{reserved} cannot be options of a request")
        self.model, self.options = model, options
        self.timeout, self.concurrency = timeout, concurrency
        address = server_root(url) if path is None else url
        self._path, self._field = path or PATH, max_tokens_field
        self._http = HTTPClient(address, api_key=api_key, max_retries=max_retries)
        self.url = self._http.url

    def ask(self, conversations: Sequence[Messages]) -> list[str | Exception]:
        """Answer conversations; a text that was cut at its token limit is an error.

        A server that rejects one request may still answer the others.
        """
        return [
            each if isinstance(each, Exception) else _whole(each)
            for each in self.answer(conversations)
        ]

    def _answer(self, messages: Messages, max_tokens: int | None) -> TextAnswer:
        # The request has no seed, because not every server supports this field.
        limit = {} if max_tokens is None else {self._field: max_tokens}
        body = {**self.options, **limit, "model": self.model}
        body["messages"] = [dict(message) for message in messages]
        begun = time.perf_counter()
        found = ask_chat(self._http, body, timeout_s=self.timeout, path=self._path)
        seconds, text = time.perf_counter() - begun, found.message.get("content") or ""
        guess = estimated_usage(messages, text, seconds=seconds, model=self.model)
        usage = guess._replace(num_retries=found.num_retries)
        if found.num_tokens is not None and found.num_prompt_tokens is not None:
            usage = usage._replace(
                input_tokens=found.num_prompt_tokens,
                output_tokens=found.num_tokens,
                estimated=False,
            )
        return TextAnswer(text, usage, found.finish_reason)

    def close(self) -> None:
        """Close the idle connections."""
        self._http.close()


def _whole(answer: TextAnswer) -> str | RewardError:
    if answer.finish_reason == "length":
        return RewardError(
            "the judge's answer was cut at its limit of tokens; raise max_tokens: "
            f"{answer.text[-100:]!r}"
        )
    return answer.text


class ScriptedTextModel(_OneByOne):
    """A function that answers: for tests, examples and dry runs.

    Args:
        function: takes a conversation, a tuple of messages, and returns a text; an exception
            becomes that row's error.
        name: name of the model in the usage.
        concurrency: number of parallel calls, in threads; with 1 the calls run in the caller's
            thread.

    Example:
        >>> model = ScriptedTextModel(lambda messages: messages[-1]["content"].upper())
        >>> model.ask([({"role": "user", "content": "hi"},)])
        ['HI']
    """

    def __init__(
        self, function: Callable[[Messages], str], *, name: str = "scripted", concurrency: int = 1
    ) -> None:
        if not callable(function):
            raise ConfigError(f"a scripted model is a function of messages, got {function!r}")
        self.function, self.name, self.concurrency = function, name, concurrency

    def _answer(self, messages: Messages, max_tokens: int | None) -> TextAnswer:
        # No settings: the function controls length and sampling itself.
        begun = time.perf_counter()
        text = self.function(messages)
        if not isinstance(text, str):
            raise RewardError(f"{self.name} answered without a text: {text!r}")
        seconds = time.perf_counter() - begun
        return TextAnswer(text, estimated_usage(messages, text, seconds=seconds, model=self.name))
