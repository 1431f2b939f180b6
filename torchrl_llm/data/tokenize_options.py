"""Options of ``History.apply_chat_template``, and conversion of rows of ids accordingly.

Next: :mod:`torchrl_llm.data.text.whole_chats` makes these rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_llm._checked import checked
from torchrl_llm.data.ragged import pad_rows, ragged_rows
from torchrl_llm.data.text.whole_chats import EncodedChat
from torchrl_llm.errors import ConfigError, TokenizerError


@checked
@dataclass(frozen=True, kw_only=True)
class TokenizeOptions:
    """Options for the result of ``apply_chat_template``.

    Args:
        tokenize: return ids, not text; ``None``: if any option below needs ids.
        padding: ``False``, ``True`` or ``"longest"``, ``"max_length"``.
        truncation: cut rows to ``max_length``.
        max_length: in tokens; the tokenizer's ``model_max_length`` by default.
        return_tensors: ``"pt"`` or ``None``.
        return_dict: ``None`` and ``True``: a TensorDict; ``False``: only the ids.
        assistant_mask: also return the assistant mask.

    Raises:
        ConfigError: a setting is unknown, or would have no effect.
    """

    tokenize: bool | None = None
    padding: Literal[False, True, "longest", "max_length", "do_not_pad"] = False
    truncation: bool = False
    max_length: int | None = None
    return_tensors: Literal["pt"] | None = None
    return_dict: bool | None = None
    assistant_mask: bool = False

    def __post_init__(self) -> None:
        if self.max_length is not None and not (self.truncation or self.padding == "max_length"):
            raise ConfigError("max_length has no effect without truncation or padding='max_length'")
        if self.assistant_mask and self.return_dict is False:
            raise ConfigError("return_assistant_tokens_mask needs return_dict=True")
        if self.tokenize is False and (self.assistant_mask or self.return_tensors is not None):
            raise ConfigError("tokenize=False returns text, which has no mask and no tensors")
        if not self.ids and (self.padded or self.truncation):
            raise ConfigError("padding and truncation act on ids: pass tokenize=True")

    @property
    def ids(self) -> bool:
        """Whether ids are returned, not text."""
        if self.tokenize is not None:
            return self.tokenize
        return self.assistant_mask or self.return_tensors is not None or bool(self.return_dict)

    @property
    def padded(self) -> bool:
        """Whether rows are padded to equal length."""
        return self.padding not in (False, "do_not_pad")

    def finish(self, rows: Sequence[EncodedChat], tokenizer: Any, batched: bool) -> Any:
        """Convert encoded conversations to the requested form.

        Args:
            rows: one per conversation.
            tokenizer: defines padding id and side, truncation side, and the default maximum.
            batched: whether there is a batch dimension (else there is one row).

        Raises:
            ConfigError: a maximum length is needed but unknown.
            TokenizerError: the tokenizer has neither a padding nor an end-of-sequence token.
        """
        if self.truncation:
            rows = [self._cut(row, tokenizer) for row in rows]
        columns = {
            "input_ids": [row.token_ids for row in rows],
            "attention_mask": [torch.ones_like(row.token_ids, dtype=torch.bool) for row in rows],
        }
        if self.assistant_mask:
            columns["assistant_masks"] = [row.assistant for row in rows]
        if self.padded:
            return self._padded(columns, tokenizer, batched)
        if self.return_dict is not False:
            return (
                ragged_rows(columns)
                if batched
                else TensorDict({k: c[0] for k, c in columns.items()})
            )
        ids = columns["input_ids"]
        ids = ids if self.return_tensors else [row.tolist() for row in ids]
        return ids if batched else ids[0]

    def _length(self, tokenizer: Any) -> int:
        length = self.max_length or tokenizer.model_max_length
        if length is None or length > 10**9:  # transformers' value for "unknown"
            raise ConfigError("pass max_length: the tokenizer does not define its maximum")
        return int(length)

    def _cut(self, row: EncodedChat, tokenizer: Any) -> EncodedChat:
        length = self._length(tokenizer)
        kept = slice(-length, None) if tokenizer.truncation_side == "left" else slice(length)
        mask = None if row.assistant is None else row.assistant[kept]
        return EncodedChat(row.token_ids[kept], mask)

    def _padded(
        self, columns: dict[str, list[Tensor]], tokenizer: Any, batched: bool
    ) -> TensorDictBase | Tensor | list:
        pad = tokenizer.pad_token_id
        pad = tokenizer.eos_token_id if pad is None else pad  # masks come from lengths, not ids
        if pad is None:
            raise TokenizerError("padding needs a tokenizer with a pad or an eos token")
        target = self._length(tokenizer) if self.padding == "max_length" else 0
        dense = {}
        for name, rows in columns.items():
            value = pad if name == "input_ids" else 0
            whole = pad_rows(rows, value, side=tokenizer.padding_side)
            missing = max(0, target - whole.shape[1])
            sides = (missing, 0) if tokenizer.padding_side == "left" else (0, missing)
            dense[name] = torch.nn.functional.pad(whole, sides, value=value)
        if not batched:
            dense = {name: value[0] for name, value in dense.items()}
        if self.return_dict is not False:
            size = [len(columns["input_ids"])] if batched else []
            return TensorDict(dense, batch_size=size)
        return dense["input_ids"] if self.return_tensors else dense["input_ids"].tolist()
