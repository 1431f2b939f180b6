"""What each protocol does: it reads calls and writes answers, events and errors.

The answer is there as a whole before it is written; as a stream it comes in a few pieces, so that
clients that read streams work. Next: :mod:`torchrl_llm.gateway.app` serves the protocols.
"""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.gateway.calls import Answer, Call, Port, RefusedCallError

STATUS = {"invalid": 400, "context": 400, "key": 401, "missing": 404, "busy": 429, "server": 500}
"""HTTP status of each kind of :class:`~torchrl_llm.gateway.calls.RefusedCallError`."""

_ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error"}
_ERROR_CODES = {
    "context": "context_length_exceeded",
    "key": "invalid_api_key",
    "missing": "not_found",
    "busy": "rate_limit_exceeded",
}
_MOST_PIECES = 4
_SHORTEST_PIECE = 16


class Protocol(ABC):
    """One way to write a call, its answers and its errors as JSON; it has no state."""

    path: str
    """Where its requests are sent."""

    stream_end: tuple[str, ...] = ()
    """What follows the last event of a stream."""

    @abstractmethod
    def parse(self, body: Mapping[str, Any]) -> Call:
        """Read a call.

        Args:
            body: of the request.

        Raises:
            RefusedCallError: a field that is wrong or cannot be honoured.
        """

    @abstractmethod
    def response(
        self, body: Mapping[str, Any], answers: Sequence[Answer], port: Port
    ) -> dict[str, Any]:
        """Write answers.

        Args:
            body: of the request, which :meth:`parse` accepted.
            answers: at least one.
            port: that gave them.
        """

    @abstractmethod
    def events(
        self, body: Mapping[str, Any], answers: Sequence[Answer], port: Port
    ) -> Iterator[dict[str, Any]]:
        """Write answers as events of a stream, see :meth:`response` for the arguments."""

    def stream(self, body: Mapping[str, Any], answers: Sequence[Answer], port: Port) -> bytes:
        """All events as ``text/event-stream``; one that has a ``type`` is called by it."""
        frames = [_frame(event) for event in self.events(body, answers, port)]
        return "".join([*frames, *self.stream_end]).encode()

    def refusal(self, error: RefusedCallError, status: int) -> dict[str, Any]:
        """Write an error, in OpenAI's form unless the protocol has its own.

        Args:
            error: why there is no answer.
            status: of HTTP, see :data:`STATUS`.
        """
        return {
            "error": {
                "message": error.message,
                "type": _ERROR_TYPES.get(status, "invalid_request_error"),
                "param": error.field,
                "code": _ERROR_CODES.get(error.kind),
            }
        }


def _frame(event: Mapping[str, Any]) -> str:
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event)}\n\n"


def new_id(prefix: str) -> str:
    """An id that no other answer has.

    Args:
        prefix: what it begins with.
    """
    return prefix + secrets.token_hex(12)


def header(body: Mapping[str, Any], port: Port, prefix: str, kind: str) -> dict[str, Any]:
    """What an answer in OpenAI's protocols begins with.

    Args:
        body: of the request.
        port: that answered.
        prefix: of the id.
        kind: of the object.
    """
    model = body.get("model") or port.model
    return {"id": new_id(prefix), "object": kind, "created": int(time.time()), "model": model}


def finish_reason(answer: Answer) -> FinishReason:
    """How an answer ended, for clients that look for calls where the reason says so."""
    if answer.message.get("tool_calls") and answer.finish_reason is FinishReason.STOP:
        return FinishReason.TOOL_CALLS
    return answer.finish_reason


def token_counts(answers: Sequence[Answer]) -> tuple[int, int]:
    """How many tokens the prompt has, and all answers together."""
    return len(answers[0].prompt_ids), sum(len(answer.token_ids) for answer in answers)


def arguments_text(call: Mapping[str, Any]) -> str:
    """The arguments of a tool call as JSON; those that are none, as the model wrote them."""
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def token_entries(answer: Answer, port: Port) -> list[dict[str, Any]]:
    """The sampled tokens with their log-probs, as the chat and responses protocols write them."""
    texts = port.token_texts(answer.token_ids)
    return [
        {"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, log_prob in zip(texts, answer.log_probs.tolist(), strict=True)
    ]


def pieces(text: str) -> list[str]:
    """A text in at most four pieces; none of an empty one.

    Example:
        >>> pieces("a" * 40)
        ['aaaaaaaaaaaaaaaa', 'aaaaaaaaaaaaaaaa', 'aaaaaaaa']
    """
    size = max(_SHORTEST_PIECE, -(-len(text) // _MOST_PIECES))
    return [text[at : at + size] for at in range(0, len(text), size)]
