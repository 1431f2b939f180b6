"""A request to the gateway and its answers, independent of the protocol.

A protocol (:mod:`torchrl_llm.gateway.protocols`) reads a :class:`Call` from a request's body and
writes :class:`Answer` objects as its response. A :class:`Port` answers calls and does not depend on
a protocol.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.errors import TorchRLLLMError

Kind = Literal["invalid", "context", "key", "missing", "size", "busy", "server"]


class RefusedCallError(TorchRLLLMError, ValueError):
    """The gateway rejects a request; each protocol has its own form of the error.

    Args:
        message: the problem, the expectation and what to do.
        kind: ``"invalid"`` (a field is wrong or cannot be honoured, HTTP 400), ``"context"`` (the
            prompt is longer than the model's context, 400), ``"key"`` (an unknown key or the key of
            a different session, 401), ``"missing"`` (no such path, 404), ``"size"`` (the body is
            too long, 413), ``"busy"`` (429) or ``"server"`` (500).
        field: name of the wrong field, as the client wrote it.
    """

    def __init__(self, message: str, *, kind: Kind = "invalid", field: str | None = None) -> None:
        super().__init__(message)
        self.message, self.kind, self.field = message, kind, field


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request for answers.

    Args:
        messages: the conversation in canonical form
            (:func:`~torchrl_llm.data.messages.canonical_message`); empty if ``prompt`` is given.
        prompt: a text or token ids to continue, instead of messages.
        tools: schemas of functions in OpenAI's form, in the order of the request.
        sampling: the fields of :class:`~torchrl_llm.modules.SamplingParams` that the request sets;
            the port decides the others.
        num_samples: number of requested answers.
    """

    messages: tuple[Mapping[str, Any], ...] = ()
    prompt: str | tuple[int, ...] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    num_samples: int = 1


class Answer(NamedTuple):
    """One answer to a call.

    Attributes:
        message: the assistant's message in canonical form, without ``raw``. Its content does not
            include a stop string of the request, and each tool call has an ``id``.
        finish_reason: how it ended.
        prompt_ids: int64 ``[P]``.
        token_ids: int64 ``[R]``, all sampled ids, including those of a stop string.
        log_probs: float32 ``[R]``, log p(x_t | x_<t) in nats.
    """

    message: Mapping[str, Any]
    finish_reason: FinishReason
    prompt_ids: Tensor
    token_ids: Tensor
    log_probs: Tensor


class Port(ABC):
    """Answers the calls of one session."""

    model: str = "policy"
    """Name of the model in ``/v1/models``."""

    @abstractmethod
    async def answer(self, call: Call) -> Sequence[Answer]:
        """Answer a call; cancelled if the client disconnects.

        Raises:
            RefusedCallError: the call cannot be answered.
        """

    @abstractmethod
    def token_texts(self, token_ids: Tensor) -> list[str]:
        """The text of each token.

        Args:
            token_ids: int64 ``[R]``.
        """

    @abstractmethod
    def count_tokens(self, call: Call) -> int:
        """Number of tokens in the prompt of a call.

        Raises:
            RefusedCallError: the template cannot express it.
        """
