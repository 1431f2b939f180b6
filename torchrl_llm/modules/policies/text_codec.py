"""Text to token ids and back, for prompts that are text and for the text view of any row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrl_llm.data.text.codec import Codec, Piece
from torchrl_llm.errors import ConfigError

_ARGUMENTS = frozenset({"add_special_tokens", "split_special_tokens", "truncation", "max_length"})


class TextCodec:
    """Encodes and decodes batches of text with one tokenizer, from any thread.

    Text is taken to be complete: nothing is added (a chat template writes its own first token), and
    special-token strings are special tokens, for rendered conversations hold them.

    Args:
        tokenizer: a fast tokenizer.
        tokenizer_kwargs: arguments of the tokenizer's call: ``add_special_tokens``,
            ``split_special_tokens``, ``truncation`` and ``max_length``.
        skip_special_tokens: leave special tokens out of decoded text.

    Raises:
        ConfigError: for other arguments; padding belongs to the output, ``pad_output=True``.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        skip_special_tokens: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self._codec = Codec(tokenizer)
        self._kwargs = dict(tokenizer_kwargs or {})
        if unknown := sorted(set(self._kwargs) - _ARGUMENTS):
            raise ConfigError(
                f"tokenizer_kwargs takes {sorted(_ARGUMENTS)}, got {unknown}; rows are not padded "
                "before the model, pad_output=True pads what comes out"
            )
        self._skip = skip_special_tokens

    def encode(self, texts: Sequence[str]) -> list[Tensor]:
        """``B`` int64 tensors ``[T_b]``."""
        with self._codec.lock:
            options = {"add_special_tokens": False, **self._kwargs}
            rows = self.tokenizer(list(texts), **options)["input_ids"]
        return [torch.as_tensor(row, dtype=torch.int64) for row in rows]

    def encode_continuation(self, text: str) -> Tensor:
        """Ids of text that goes on behind other text, int64 ``[T]``: no prefix space is added."""
        return torch.from_numpy(self._codec.encode(Piece(text, continues=True)).ids.copy())

    def decode(self, rows: Sequence[Tensor]) -> list[str]:
        """The text of each row; equal rows are decoded once."""
        known: dict[bytes, str] = {}
        texts = []
        for ids in rows:
            key = ids.numpy().tobytes()
            if key not in known:
                known[key] = self._decode(ids.tolist())
            texts.append(known[key])
        return texts

    def _decode(self, ids: list[int]) -> str:
        if self._skip:
            return self.tokenizer.decode(ids, skip_special_tokens=True)
        return self._codec.decode(ids)
