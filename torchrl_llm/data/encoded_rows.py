"""Ids and assistant masks of rows that hold conversations alone, as a dataset does.

Rows that a policy wrote have ids, and these are what was sampled: they are never encoded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from torchrl_llm._log import tell_once
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.errors import ConfigError

# What TorchRL's losses and transforms set for `apply_chat_template`, and what always holds here.
_ALWAYS = {
    "tokenize": True,
    "return_assistant_tokens_mask": True,
    "return_dict": True,
    "return_tensors": "pt",
    "padding": False,
    "truncation": False,
    "add_generation_prompt": False,
    "continue_final_message": False,
}


class EncodedRows(NamedTuple):
    """Conversations as tokens.

    Attributes:
        token_ids: ``B`` int64 tensors ``[T_b]``.
        assistant: ``B`` bool tensors ``[T_b]``, the assistant's tokens.
    """

    token_ids: list[Tensor]
    assistant: list[Tensor]


def encode_rows(chats: Sequence[Any], formatter: ChatFormatter | None, asker: str) -> EncodedRows:
    """Encode whole conversations.

    Args:
        chats: ``B`` conversations, :class:`~torchrl_llm.data.chat.Chat` or lists of messages.
        formatter: what encodes; ``None`` where neither model nor user gave a tokenizer.
        asker: what to call the asker in the error.

    Raises:
        ConfigError: without a formatter.
    """
    if formatter is None:
        raise ConfigError(
            f"rows with conversations alone need a tokenizer: pass tokenizer= to {asker}"
        )
    rows = formatter.encode_batch(chats, add_generation_prompt=False)
    return EncodedRows([row.token_ids for row in rows], [row.assistant for row in rows])


def row_formatter(
    model: Any, tokenizer: Any, settings: Mapping[str, Any] | None
) -> ChatFormatter | None:
    """The model's own formatter unless another one is described.

    Args:
        model: what scores; its ``formatter`` or ``tokenizer`` is used.
        tokenizer: encodes instead of the model's.
        settings: keyword arguments of :class:`~torchrl_llm.data.text.ChatFormatter`. What TorchRL
            passes to ``apply_chat_template`` besides is taken where it says what holds anyway.

    Returns:
        ``None`` where there is no tokenizer.

    Raises:
        ConfigError: for settings that cannot be kept, or that come without a tokenizer.
    """
    settings = _checked(settings or {})
    if tokenizer is None and not settings:
        return getattr(model, "formatter", None)
    if tokenizer is None:
        tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise ConfigError("tokenizer_kwargs need a tokenizer, and the model has none")
    return ChatFormatter(tokenizer, **settings)


def _checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in settings.items():
        if name not in _ALWAYS or value is None or value == _ALWAYS[name]:
            continue
        if name not in ("padding", "return_dict", "return_tensors"):
            raise ConfigError(
                f"tokenizer_kwargs {name}={value!r} cannot be kept: whole conversations are "
                f"encoded with their assistant mask ({name}={_ALWAYS[name]!r}); leave it out"
            )
        tell_once(f"tokenizer_kwargs {name}={value!r} has no effect: rows are ragged tensors")
    return {name: value for name, value in settings.items() if name not in _ALWAYS}
