"""Key-value caches that grow in blocks instead of being copied at every token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

_MOST_ROOM = 64


class _BlockLayer(DynamicLayer):
    """A full-attention layer whose tensors have room for more tokens than they hold.

    transformers' own layer concatenates, which copies the whole cache at each token.
    """

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room
        self._length = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append states ``[B, heads, T, dim]`` and return views of all that is held."""
        end = self._length + key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys = key_states.new_empty(_with_length(key_states, end + self._room))
            self.values = value_states.new_empty(_with_length(value_states, end + self._room))
        elif end > self.keys.shape[-2]:
            room = max(end, self.keys.shape[-2] * 3 // 2) + self._room
            self.keys = self._moved(self.keys, room)
            self.values = self._moved(self.values, room)
        self.keys[..., self._length : end, :] = key_states
        self.values[..., self._length : end, :] = value_states
        self._length = end
        return self.keys[..., :end, :], self.values[..., :end, :]

    def _moved(self, old: Tensor, room: int) -> Tensor:
        new = old.new_empty(_with_length(old, room))
        new[..., : self._length, :] = old[..., : self._length, :]
        return new

    def get_seq_length(self) -> int:
        """Tokens held, which is less than the tensors have room for."""
        return self._length


def _with_length(states: Tensor, length: int) -> torch.Size:
    return states.shape[:-2] + (length, states.shape[-1])


def make_cache(model: Any, max_new_tokens: int) -> DynamicCache:
    """An empty cache for a model; sliding-window and recurrent layers keep transformers' classes.

    Args:
        model: a transformers causal language model.
        max_new_tokens: tokens that will follow the first ones, of which room is made for some.
    """
    room = min(max_new_tokens, _MOST_ROOM)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    cache.layers = [_BlockLayer(room) if type(l) is DynamicLayer else l for l in cache.layers]
    return cache
