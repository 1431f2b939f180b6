"""Transform that keeps the token ids of conversations: :class:`IncrementalTokenizer`."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Composite
from torchrl.envs import Transform

from torchrl_llm._registry import FullSignature
from torchrl_llm.data.chat import Chat
from torchrl_llm.data.history import History
from torchrl_llm.data.ragged import ragged_rows
from torchrl_llm.data.record import TokenRecord
from torchrl_llm.data.specs import RaggedSpec
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.errors import ConfigError


class IncrementalTokenizer(Transform):
    """Writes ``("tokens", "prompt")`` for ``("history", "prompt")``; encodes only new messages.

    A conversation carries the record of the ids that were sampled in it. At each step the messages
    that came after them are encoded and appended, and the record is put back into the conversation,
    so policies in history mode continue exactly these tokens. Append it after the transforms that
    add messages: ``ChatEnv(with_tokenizer=True)`` keeps it last by itself.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        history_key: the conversations to read.
        tokens_key: where the ids go, a nested key.
        add_generation_prompt: end the ids with the header of the model's next turn. Without it, the
            ids are only written next to the conversation, and a policy adds the header when it
            continues.
        kwargs: arguments of :class:`~torchrl_llm.data.text.ChatFormatter`: the template, its tools
            and variables.

    Raises:
        TemplateError: for a tokenizer without chat template.
        ConfigError: for a ``tokens_key`` that is not nested.

    Ragged ids are a lazy stack; read them with :func:`~torchrl_llm.data.ragged.read_rows`.
    """

    __signature__ = FullSignature(ChatFormatter)

    def __init__(
        self,
        tokenizer: Any,
        *,
        history_key: NestedKey = ("history", "prompt"),
        tokens_key: NestedKey = ("tokens", "prompt"),
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_keys=[history_key], out_keys=[history_key, tokens_key])
        if not isinstance(tokens_key, tuple) or len(tokens_key) != 2:
            raise ConfigError(f"tokens_key must have two parts, got {tokens_key!r}")
        self.formatter = ChatFormatter(tokenizer, **kwargs)
        self.history_key, self.tokens_key = history_key, tokens_key
        self.tokenizer, self.add_generation_prompt = tokenizer, add_generation_prompt
        self.chat_template_name = kwargs.get("chat_template_name")
        self.chat_template = kwargs.get("chat_template")
        question = [{"role": "user", "content": "A question?"}]
        bare = self.formatter.encode(question, add_generation_prompt=False).token_ids
        self._header = self.formatter.encode(question).token_ids[len(bare) :]

    def _record(self, chat: Chat) -> TokenRecord:
        record = chat.record
        if record is not None:
            # finish_reason is None if the ids are already a prompt
            if record.num_messages == len(chat) and record.finish_reason is None:
                return record
            return self.formatter.continue_record(record, chat)
        return self.formatter.encode(chat).prompt_record(chat)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        chats = next_tensordict.get(self.history_key).chats
        # Rows that do not start in this reset are fillers without messages.
        records = [self._record(chat) if len(chat) else None for chat in chats]
        chats = [chat.with_record(record) for chat, record in zip(chats, records, strict=True)]
        next_tensordict.set(self.history_key, History.of(chats))
        empty = torch.zeros(0, dtype=torch.int64)
        ids = [empty if record is None else self._shown(record.token_ids) for record in records]
        node, field = self.tokens_key
        next_tensordict.set(node, ragged_rows({field: ids}))
        return next_tensordict

    def _shown(self, ids: Tensor) -> Tensor:
        size = len(self._header)
        ends = size and len(ids) >= size and torch.equal(ids[-size:], self._header)
        return ids[:-size] if ends and not self.add_generation_prompt else ids

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        return self._call(tensordict_reset)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Encode the conversations of rows outside an environment."""
        return self._call(tensordict)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the ids."""
        node, field = self.tokens_key
        observation_spec[node] = RaggedSpec({field: torch.int64}, shape=observation_spec.shape)
        return observation_spec
