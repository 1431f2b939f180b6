"""Typed views over the columns of a batch: tokens, log-probs, masks, text, chats, trace.

Each class is a view: ``Tokens._from_tensordict(node)`` wraps the node that is stored, ragged (a
lazy stack of rows) or dense (padded), and copies nothing. Ragged columns are read as lists,
``tokens.get("full", as_list=True)`` or :func:`torchrl_llm.data.ragged.read_rows`; a dense one by
attribute, ``tokens.full``.

Shape legend: ``B`` rows, ``T`` tokens of prompt and response, ``P`` prompt, ``R`` response;
``T``, ``P`` and ``R`` differ from row to row.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorClass
from torch import Tensor
from torchrl.data import Composite, NonTensor, Unbounded

__all__ = ["ChatHistory", "LogProbs", "Masks", "Text", "TokenTrace", "Tokens"]


class _View:
    """What the token-aligned containers share; a mixin, because tensorclasses do not inherit."""

    _dtypes: dict[str, torch.dtype]

    @property
    def padded(self) -> bool:
        """Whether the rows are dense (padded to one length) rather than ragged."""
        return not isinstance(self._tensordict, LazyStackedTensorDict)

    @classmethod
    def default_spec(cls, shape: Any = (-1,), keys: list[str] | None = None) -> Composite:
        """Spec of the container with one dynamic dimension for the tokens.

        Args:
            shape: batch dimensions followed by the dynamic token dimension, ``(*B, -1)``.
            keys: the fields to declare; all token-aligned ones by default.
        """
        shape = torch.Size(shape)
        names = list(cls._dtypes) if keys is None else keys
        leaves = {name: Unbounded(shape=shape, dtype=cls._dtypes[name]) for name in names}
        return Composite(leaves, shape=shape[:-1], data_cls=cls)


class Tokens(TensorClass["nocast"], _View):
    """Token ids of a batch of rows.

    Attributes:
        prompt: int64 ``[B, P]``; padded on the left when dense.
        response: int64 ``[B, R]``; padded on the right when dense.
        full: int64 ``[B, T]``, prompt and response without a gap; padded on the right when dense.
        finish_reason: int8 ``[B]``, codes of :class:`~torchrl_llm.data.enums.FinishReason`.
        temperature: float32 ``[B]``, temperature that the response was sampled at (1.0 for greedy).
        truncated_support: bool ``[B]``, whether top-k, top-p or min-p cut the distribution and the
            kept ids were not stored; ratios of such rows are not defined.

    Example:
        >>> from torchrl_llm.data.ragged import ragged_rows
        >>> node = ragged_rows({"full": [torch.tensor([1, 2]), torch.tensor([3])]})
        >>> Tokens._from_tensordict(node).padded
        False
    """

    prompt: Tensor | None = None
    response: Tensor | None = None
    full: Tensor | None = None
    finish_reason: Tensor | None = None
    temperature: Tensor | None = None
    truncated_support: Tensor | None = None


class LogProbs(TensorClass["nocast"], _View):
    """Log-probs of tokens in nats, log p(x_t | x_<t), aligned with :class:`Tokens`.

    Attributes:
        prompt: float32 ``[B, P]``.
        response: float32 ``[B, R]``.
        full: float32 ``[B, T]``; 0.0 at index 0 and wherever nothing was sampled or scored.
    """

    prompt: Tensor | None = None
    response: Tensor | None = None
    full: Tensor | None = None


class Masks(TensorClass["nocast"], _View):
    """Masks aligned with ``tokens.full``.

    Attributes:
        all_attention_mask: bool ``[B, T]``, true at every token, false at padding.
        all_assistant_mask: bool ``[B, T]``, true at the tokens of the assistant's turns, their
            end-of-turn tokens included.
    """

    all_attention_mask: Tensor | None = None
    all_assistant_mask: Tensor | None = None


class TokenTrace(TensorClass["nocast"], _View):
    """Where each token of ``tokens.full`` came from.

    Attributes:
        source: int8 ``[B, T]``, codes of :class:`~torchrl_llm.data.enums.Source`.
        turn: int16 ``[B, T]``, turn of the model that sampled the token, else -1.
        policy_version: int32 ``[B, T]``, weights that sampled the token, else -1.
        mask_reason: int8 ``[B, T]``, codes of :class:`~torchrl_llm.data.enums.MaskReason`.
    """

    source: Tensor | None = None
    turn: Tensor | None = None
    policy_version: Tensor | None = None
    mask_reason: Tensor | None = None


class Text(TensorClass["nocast"]):
    """The decoded view of a row, a string each.

    Attributes:
        prompt: the prompt with its template's special tokens.
        response: the response as sampled.
        full: both, without a gap.
    """

    prompt: str | None = None
    response: str | None = None
    full: str | None = None

    @classmethod
    def default_spec(cls, shape: Any = (-1,), keys: list[str] | None = None) -> Composite:
        """Spec of the container; ``shape`` ends with a dimension that strings do not have."""
        shape = torch.Size(shape)[:-1]
        names = ["prompt", "response", "full"] if keys is None else keys
        leaves = {name: NonTensor(shape=shape, example_data="a string") for name in names}
        return Composite(leaves, shape=shape, data_cls=cls)


class ChatHistory(TensorClass["nocast"]):
    """The conversations of a batch, each field a :class:`~torchrl_llm.data.history.History`.

    Attributes:
        prompt: the conversation that the model answers.
        response: the one message that it answered.
        full: both.
    """

    prompt: Any = None
    response: Any = None
    full: Any = None


_INT8, _INT16, _INT32 = torch.int8, torch.int16, torch.int32
Tokens._dtypes = dict.fromkeys(("prompt", "response", "full"), torch.int64)
LogProbs._dtypes = dict.fromkeys(("prompt", "response", "full"), torch.float32)
Masks._dtypes = dict.fromkeys(("all_attention_mask", "all_assistant_mask"), torch.bool)
TokenTrace._dtypes = {
    "source": _INT8,
    "turn": _INT16,
    "policy_version": _INT32,
    "mask_reason": _INT8,
}
