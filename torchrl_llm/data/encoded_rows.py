"""Ids and assistant masks of rows that contain only conversations, as in a dataset.

Rows from a policy already have the sampled ids, and are never encoded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from torchrl_llm._log import tell_once
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.errors import ConfigError

# Arguments that TorchRL's losses and transforms pass to `apply_chat_template`, with their fixed
# values in torchrl_llm.
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
        formatter: encodes conversations; ``None`` if neither the model nor the user provides a
            tokenizer.
        asker: name of the caller in the error.

    Raises:
        ConfigError: there is no formatter.
    """
    if formatter is None:
        raise ConfigError(
            f"rows that hold only conversations need a tokenizer: pass tokenizer= to {asker}"
        )
    rows = formatter.encode_batch(chats, add_generation_prompt=False)
    return EncodedRows([row.token_ids for row in rows], [row.assistant for row in rows])


def row_formatter(
    model: Any, tokenizer: Any, settings: Mapping[str, Any] | None
) -> ChatFormatter | None:
    """Return the model's own formatter, unless the arguments describe a different one.

    Args:
        model: the scorer; its ``formatter`` or ``tokenizer`` is used.
        tokenizer: tokenizer to use instead of the model's.
        settings: keyword arguments of :class:`~torchrl_llm.data.text.ChatFormatter`. Other
            arguments that TorchRL passes to ``apply_chat_template`` are accepted if they equal the
            fixed values.

    Returns:
        ``None`` if there is no tokenizer.

    Raises:
        ConfigError: settings are not supported, or there is no tokenizer.
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
                f"tokenizer_kwargs {name}={value!r} is not supported: whole conversations are "
                f"encoded with their assistant mask ({name}={_ALWAYS[name]!r}); leave it out"
            )
        tell_once(f"tokenizer_kwargs {name}={value!r} has no effect: rows are ragged tensors")
    return {name: value for name, value in settings.items() if name not in _ALWAYS}
