"""Base class of protocols: they read calls and write answers, events and errors.

An answer is complete before it is written. A stream sends it in a few pieces, so that streaming
clients work. Next: :mod:`torchrl_llm.gateway.app` serves the protocols.
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.gateway.calls import Answer, Call, Port, RefusedCallError
from torchrl_llm.gateway.protocols.fields import SAMPLING_HINTS, Table, read_object, refused

STATUS = {"invalid": 400, "context": 400, "key": 401, "missing": 404, "size": 413}
STATUS |= {"busy": 429, "server": 500}
"""HTTP status of each kind of :class:`~torchrl_llm.gateway.calls.RefusedCallError`."""

ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error"}
"""OpenAI's type of an error by its status; else ``"invalid_request_error"``."""
_ERROR_CODES = {
    "context": "context_length_exceeded",
    "key": "invalid_api_key",
    "missing": "not_found",
    "busy": "rate_limit_exceeded",
}
_MOST_PIECES = 4
_SHORTEST_PIECE = 16


class Reply(NamedTuple):
    """The reply to a request.

    Attributes:
        body: body of the request, already parsed.
        answers: one or more answers.
        port: port of the answers.
    """

    body: Mapping[str, Any]
    answers: Sequence[Answer]
    port: Port

    @property
    def model(self) -> str:
        """The client's name for the model."""
        return self.body.get("model") or self.port.model

    @property
    def token_counts(self) -> tuple[int, int]:
        """Number of tokens of the prompt, and of all answers together."""
        sampled = sum(len(answer.token_ids) for answer in self.answers)
        return len(self.answers[0].prompt_ids), sampled

    def prompt_ids(self) -> dict[str, Any]:
        """The field ``prompt_token_ids``, if ``return_token_ids`` requests it."""
        ids = self.answers[0].prompt_ids
        return {"prompt_token_ids": ids.tolist()} if self.body.get("return_token_ids") else {}

    def token_ids(self, answer: Answer) -> dict[str, Any]:
        """The field ``token_ids`` of an answer, if ``return_token_ids`` requests it."""
        ids = answer.token_ids
        return {"token_ids": ids.tolist()} if self.body.get("return_token_ids") else {}

    def token_entries(self, answer: Answer) -> list[dict[str, Any]]:
        """The sampled tokens and their log-probs, in the form of chat completions and responses."""
        texts = self.port.token_texts(answer.token_ids)
        return [
            {"token": text, "logprob": log_prob, "bytes": _bytes(text), "top_logprobs": []}
            for text, log_prob in zip(texts, answer.log_probs.tolist(), strict=True)
        ]


def _bytes(text: str) -> list[int] | None:
    """Bytes of a token; ``None`` for a part of a character, because its text does not show them."""
    return None if "\ufffd" in text else list(text.encode())


class Protocol(ABC):
    """A JSON format of calls, answers and errors; stateless."""

    path: str
    """Path of its requests."""

    stream_end: tuple[str, ...] = ()
    """Text after the last event of a stream."""

    table: ClassVar[Table]
    """The fields of a body. Our names are those of :class:`~torchrl_llm.modules.SamplingParams`,
    ``system`` (a text), ``messages``, ``prompt``, ``tools`` (functions) and ``tool_choice``."""

    no_messages = ("messages", "must have at least one message")
    """The field and message for a missing conversation."""

    def parse(self, body: Mapping[str, Any]) -> Call:
        """Read a call.

        Args:
            body: JSON body of the request.

        Raises:
            RefusedCallError: a field that is wrong or cannot be honoured.
        """
        found = read_object(self.table, body)
        system = [{"role": "system", "content": found["system"]}] if "system" in found else []
        messages = (*system, *found.get("messages", ()))
        if not messages and "prompt" not in found:
            raise refused(*self.no_messages)
        functions = () if found.get("tool_choice") == "none" else found.get("tools", ())
        return Call(
            messages=messages,
            prompt=found.get("prompt"),
            tools=tuple({"type": "function", "function": each} for each in functions),
            sampling={name: found[name] for name in SAMPLING_HINTS if name in found},
            num_samples=found.get("n", 1),
        )

    @abstractmethod
    def response(self, reply: Reply) -> dict[str, Any]:
        """Write answers as one JSON object."""

    @abstractmethod
    def events(self, reply: Reply) -> Iterator[dict[str, Any]]:
        """Write answers as events of a stream."""

    def stream(self, reply: Reply) -> bytes:
        """All events as ``text/event-stream``; an event with a ``type`` is named by it."""
        frames = [_frame(event) for event in self.events(reply)]
        return "".join([*frames, *self.stream_end]).encode()

    def refusal(self, error: RefusedCallError, status: int) -> dict[str, Any]:
        """Write an error, in OpenAI's form unless the protocol has its own.

        Args:
            error: the error.
            status: HTTP status, see ``STATUS``.
        """
        return {
            "error": {
                "message": error.message,
                "type": ERROR_TYPES.get(status, "invalid_request_error"),
                "param": error.field,
                "code": _ERROR_CODES.get(error.kind),
            }
        }


def _frame(event: Mapping[str, Any]) -> str:
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event)}\n\n"


def new_id(prefix: str) -> str:
    """A unique id for an answer.

    Args:
        prefix: its prefix.
    """
    return prefix + secrets.token_hex(12)


def finish_reason(answer: Answer) -> FinishReason:
    """Finish reason for clients that only look for calls if the reason says so."""
    if answer.message.get("tool_calls") and answer.finish_reason is FinishReason.STOP:
        return FinishReason.TOOL_CALLS
    return answer.finish_reason


def arguments_text(call: Mapping[str, Any]) -> str:
    """The arguments of a tool call as JSON; malformed ones are unchanged."""
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def pieces(text: str) -> list[str]:
    """Split a text into at most four pieces; none for an empty text.

    Example:
        >>> pieces("a" * 40)
        ['aaaaaaaaaaaaaaaa', 'aaaaaaaaaaaaaaaa', 'aaaaaaaa']
    """
    size = max(_SHORTEST_PIECE, -(-len(text) // _MOST_PIECES))
    return [text[at : at + size] for at in range(0, len(text), size)]
