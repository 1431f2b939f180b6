"""Fixtures of the environment tests."""

from __future__ import annotations

import pytest
from tensordict import TensorDict

from torchrl_llm.data.history import History


@pytest.fixture
def queries():
    """Reset input of a bare ChatEnv."""
    return lambda *texts: TensorDict({"query": list(texts)}, batch_size=(len(texts),))


@pytest.fixture
def answer():
    """Append one assistant message to each conversation of a tensordict in history mode."""

    def write(td, *texts):
        chats = td["history"].prompt.chats
        full = [
            chat + [{"role": "assistant", "content": text}]
            for chat, text in zip(chats, texts, strict=True)
        ]
        td["history"].full = History.of(full)
        return td

    return write
