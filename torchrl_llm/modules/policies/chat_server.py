"""Policy over a chat completions server: it sends messages and receives text.

This policy is for evaluation only. The server renders the prompt with its own template and encodes
it with its own tokenizer, so there are no token ids or log-probs to train on. For servers that
accept and return token ids, use :class:`~torchrl_llm.modules.OpenAIBackend`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, Self

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from torchrl_llm._chat_server import ChatAnswer, ask_chat
from torchrl_llm._http import Cancellation, HTTPClient, RequestThreads
from torchrl_llm.data.chat import Chat
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.history import History
from torchrl_llm.data.messages import calls_of, canonical_message
from torchrl_llm.errors import BackendError, ConfigError, DataError, OverlongError

RESERVED = frozenset({"messages", "n", "stream", "tools"})
_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "tool_calls": FinishReason.TOOL_CALLS,
    "function_call": FinishReason.TOOL_CALLS,
}
_SENT = ("role", "content", "tool_call_id")


class ChatServerPolicy(TensorDictModuleBase):
    """Answers conversations with a chat completions server.

    The policy reads ``("history", "prompt")`` of rows ``[B]``. It writes ``("history", "full")``,
    ``("tokens", "finish_reason")`` (``ABORT`` if the server reports neither a stop nor a cut) and
    ``("tokens", "response_length")``, int64, the server's count or -1. Rows that ``"_step"``
    excludes are not sent.

    Args:
        http: HTTP client of the server.
        request: fields of every request, including ``model``.
        timeout_s: most seconds for one request, including retries.
        concurrency: most requests at once.
        on_overlong: what happens if the server rejects a conversation as longer than its context:
            raise :class:`~torchrl_llm.errors.OverlongError`, or write an empty response with
            ``ABORT``.
        tools: tool schemas for the server, which parses the calls.

    Raises:
        ConfigError: ``request`` contains reserved fields.

    Example:
        >>> http = HTTPClient("http://localhost:8000")
        >>> policy = ChatServerPolicy(http, {"model": "mine", "temperature": 0})
        >>> policy.in_keys
        [('history', 'prompt')]
    """

    in_keys = [("history", "prompt")]  # noqa: RUF012
    out_keys = [  # noqa: RUF012
        ("history", "full"),
        ("tokens", "finish_reason"),
        ("tokens", "response_length"),
    ]

    def __init__(
        self,
        http: HTTPClient,
        request: Mapping[str, Any],
        *,
        timeout_s: float = 600.0,
        concurrency: int = 64,
        on_overlong: Literal["error", "drop"] = "error",
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        super().__init__()
        if reserved := sorted(RESERVED & set(request)):
            raise ConfigError(f"{reserved} cannot be among the fields of a request")
        self._http, self._request, self._tools = http, dict(request), list(tools)
        self._timeout_s, self._on_overlong = timeout_s, on_overlong
        self._threads = RequestThreads(concurrency)

    def get_new_version(self, *, tools: Sequence[Mapping[str, Any]]) -> Self:
        """Return a policy over the same server, with tools."""
        other = copy.copy(self)
        other._tools = list(tools)
        return other

    def close(self) -> None:
        """Close connections and stop threads; the next call opens them again."""
        self._threads.close()
        self._http.close()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Request an answer for each row.

        Raises:
            BackendError: the server rejected a request, or its answer cannot be read.
            OverlongError: a conversation is longer than the server's context.
            WorkerError: the server did not answer.
        """
        chats = tensordict["history"].prompt.chats
        steps = tensordict.get("_step", None)
        asked = [True] * len(chats) if steps is None else steps.reshape(len(chats), -1).any(-1)
        rows = [row for row, yes in enumerate(asked) if yes]
        # Drawn from torch's generator, so that torch's seed makes runs repeatable if the server
        # supports seeds.
        seeds = torch.randint(2**31 - 1, (len(rows),)).tolist()
        jobs = [partial(self._answer, chats[i], s) for i, s in zip(rows, seeds, strict=True)]
        reasons = torch.full((len(chats),), int(FinishReason.ABORT), dtype=torch.int8)
        lengths = torch.zeros(len(chats), dtype=torch.int64)
        for row, answer in zip(rows, self._threads.run(jobs), strict=True):
            chats[row] = chats[row] + [_message(answer)]
            reasons[row] = int(_REASONS.get(answer.finish_reason, FinishReason.ABORT))
            lengths[row] = -1 if answer.num_tokens is None else answer.num_tokens
        tensordict.set(("history", "full"), History.of(chats))
        tensordict.set(("tokens", "finish_reason"), reasons)
        return tensordict.set(("tokens", "response_length"), lengths)

    def _answer(self, chat: Chat, seed: int, cancellation: Cancellation) -> ChatAnswer:
        body = {**self._request, "messages": [_sent(message) for message in chat]}
        if self._tools:
            body["tools"] = self._tools
        if body.get("temperature") != 0:
            body["seed"] = seed
        try:
            return ask_chat(self._http, body, timeout_s=self._timeout_s, cancellation=cancellation)
        except BackendError as error:
            # OpenAI and vLLM write "maximum context length"; no status code identifies this error.
            if "context" not in str(error) or "length" not in str(error):
                raise
            if self._on_overlong == "error":
                raise OverlongError(f"{error}; on_overlong=drop leaves it unanswered") from error
            return ChatAnswer({"content": ""}, None, 0)


def _sent(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a message to the protocol's form: arguments of calls are text."""
    out = {name: message[name] for name in _SENT if name in message}
    calls = []
    for call in calls_of(message):
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**out, "tool_calls": calls} if calls else out


def _message(answer: ChatAnswer) -> dict[str, Any]:
    """Convert a server's message to the form of conversations."""
    found = answer.message
    reasoning = found.get("reasoning_content") or found.get("reasoning")
    try:
        return canonical_message(
            {
                "role": "assistant",
                "content": found["content"] or found.get("refusal"),
                "reasoning_content": reasoning or None,
                "tool_calls": found.get("tool_calls"),
            }
        )
    except DataError as error:
        raise BackendError(f"the server's message cannot be read: {error}") from error
