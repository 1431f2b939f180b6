"""Small batches for the tests of policies."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from torchrl_llm.data import Chat, ChatHistory
from torchrl_llm.data.history import History
from torchrl_llm.data.ragged import ragged_rows
from torchrl_llm.modules import FakeWrapper

USER = {"role": "user", "content": "Hi"}


def history_td(*chats):
    chats = [chat if isinstance(chat, Chat) else Chat(chat) for chat in chats]
    size = [len(chats)]
    return TensorDict(
        history=ChatHistory(prompt=History.of(chats), batch_size=size), batch_size=size
    )


def tokens_td(*rows, **more):
    node = ragged_rows({"prompt": [torch.tensor(row) for row in rows]})
    return TensorDict(tokens=node, batch_size=[len(rows)], **more)


def fake_tokens(answers=None, **options):
    options = {"vocab_size": 40, "eos_token_ids": (2,), **options}
    return FakeWrapper(answers, input_mode="tokens", **options)


def follow(out, *messages):
    """The next prompt of an environment whose transforms append messages."""
    return history_td(*(chat + list(messages) for chat in out["history"].full.chats))
