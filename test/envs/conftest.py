"""Fixtures of the environment tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensordict import TensorDict

from torchrl_llm.data.history import History

REPO = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def gsm8k_dir():
    """The real GSM8K files, where the machine has them."""
    folder = REPO.parent / "shared" / "data" / "gsm8k"
    if not (folder / "train.jsonl").exists():
        pytest.skip(f"no GSM8K files in {folder}; download openai/gsm8k as JSON lines into it")
    return folder


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
