"""One request to ``/v1/chat/completions``, OpenAI's protocol, and the server's answer.

The server renders the prompt with its own template and returns text without token ids. To sample
for training with token ids, see :mod:`torchrl_llm.modules.backends.openai`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torchrl_llm._http import Cancellation, HTTPClient
from torchrl_llm.errors import BackendError

PATH = "/v1/chat/completions"


class ChatAnswer(NamedTuple):
    """Answer of a server to a conversation.

    Attributes:
        message: the assistant's message, as the server wrote it; its ``content`` may be ``None``,
            next to tool calls or if the answer consists only of reasoning.
        finish_reason: why the answer ended, in the server's words; ``None`` if not reported.
        num_tokens: tokens of the response; ``None`` if not reported.
        num_prompt_tokens: tokens of the prompt; ``None`` if not reported.
        num_retries: how often the request was sent again.
    """

    message: Mapping[str, Any]
    finish_reason: str | None
    num_tokens: int | None
    num_prompt_tokens: int | None = None
    num_retries: int = 0


def ask_chat(
    http: HTTPClient,
    body: Mapping[str, Any],
    *,
    timeout_s: float,
    path: str = PATH,
    cancellation: Cancellation | None = None,
) -> ChatAnswer:
    """Request one answer to a conversation.

    Args:
        http: the server.
        body: the request, with ``model`` and ``messages``.
        timeout_s: most seconds, including repeated attempts.
        path: path of the endpoint, appended to the server's address.
        cancellation: can cancel the request from another thread.

    Raises:
        BackendError: the server rejects the request, or answers without a message.
        ConfigError: no access, or no such path or model.
        WorkerError: no answer.
    """
    reply = http.call("POST", path, body, timeout_s=timeout_s, cancellation=cancellation)
    http.check(reply, path)
    try:
        [choice, *_], usage = reply.data["choices"], reply.data.get("usage") or {}
        message, reason = choice["message"], choice.get("finish_reason")
        text, prompt = message["content"], _count(usage, "prompt_tokens")
        count = _count(usage, "completion_tokens")
    except (KeyError, ValueError, TypeError, AttributeError):
        text = message = None
    if message is None or not isinstance(text, (str, type(None))):
        raise BackendError(f"{http.url} answered without a text: {str(reply.data)[:200]}")
    return ChatAnswer(message, reason, count, prompt, reply.num_retries)


def _count(usage: Mapping[str, Any], name: str) -> int | None:
    count = usage.get(name)
    return count if isinstance(count, int) and count >= 0 else None
