"""Conversations under the path that TorchRL's documentation uses; see :mod:`.history`."""

from __future__ import annotations

from torchrl_llm.data.history import (
    ContentBase,
    History,
    add_chat_template,
    remove_chat_template,
)

__all__ = ["ContentBase", "History", "add_chat_template", "remove_chat_template"]
