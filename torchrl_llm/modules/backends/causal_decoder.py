"""Plain decoder for every causal model, with a growing cache.

The fast alternative is :class:`~torchrl_llm.modules.backends.static_decoder.StaticDecoder`.

Shape legend: ``U`` different prompts, ``B`` rows to decode, ``P`` tokens of the longest prompt,
``V`` vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from torchrl_llm._log import tell_once
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules.backends.attention import tolerance
from torchrl_llm.modules.backends.head import causal_model, evaluating

# Number of tokens that a cache has room for beyond its content.
_MOST_ROOM = 64
# Prompts for testing a model, the first ones with padding.
_RAGGED, _EQUAL = ([1, 2, 3, 4, 5], [6, 7]), ([1, 2, 3, 4, 5], [6, 7, 3, 2, 1])
# Some errors in the state between steps appear only after several steps.
_STEPS = 8
_FAILURES = (AssertionError, LookupError, AttributeError, RuntimeError, TypeError, ValueError)


class CausalDecoder:
    """A causal model and its cache during decoding; see ``decoding.Decoder``.

    Args:
        model: the model, in PEFT or not.
        prompts: ``U`` int64 tensors.
        max_length: context of the model, if it is limited.
        max_new_tokens: number of tokens after the prompts.
        takes: names of the arguments of the model's forward.

    Attributes:
        model: the model.
        takes: names of the arguments of its forward.
        cache: its cache.
        held: tokens in the cache, including the pads before shorter prompts.
        mask: bool ``[B, >= held]``, ``False`` for pads; ``None`` when there are none.
        next_positions: int64 ``[B]``, positions of the next tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        prompts: list[Tensor],
        max_length: int | None,
        max_new_tokens: int,
        *,
        takes: frozenset[str],
    ) -> None:
        device = causal_model(model).get_input_embeddings().weight.device
        self.model = model
        self.cache = make_cache(causal_model(model), max_new_tokens)
        self.takes = takes
        self._last_position = max_length - 1 if max_length else None
        lengths = torch.tensor([p.shape[0] for p in prompts])
        self.held = int(lengths.max())
        ids_UP = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_side="left")
        self._ids = ids_UP.to(device)
        mask = torch.arange(self.held) >= (self.held - lengths)[:, None]
        # Without pads no mask is needed, and attention uses its fast path.
        self.mask = None if bool(mask.all()) else mask.to(device)
        self.next_positions = lengths.to(device)

    def prefill(self, owners: Tensor) -> Tensor:
        """Read each prompt once; ``owners``: prompt of each row. Returns logits ``[B, V]``."""
        if self.mask is None:
            positions = torch.arange(self.held, device=self._ids.device).expand_as(self._ids)
        else:
            positions = (self.mask.long().cumsum(-1) - 1).clamp_min_(0)
        logits = self.forward(self._ids, positions, self.mask)
        if owners.tolist() != list(range(self._ids.shape[0])):
            owners = owners.to(logits.device)
            self.keep(owners)
            logits = logits[owners]
        return logits

    def advance(self, token_ids: Tensor) -> Tensor:
        """Append one id per row, int64 ``[B]``, and return the logits after it, ``[B, V]``."""
        positions = self.in_context(self.next_positions)[:, None]
        self.next_positions = self.next_positions + 1
        self.held += 1
        if self.mask is not None and self.mask.shape[1] < self.held:
            self.mask = torch.nn.functional.pad(self.mask, (0, 64), value=True)
        mask = None if self.mask is None else self.mask[:, : self.held]
        return self.forward(token_ids[:, None], positions, mask)

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows, int64 indices into the current batch."""
        # This selects every state of every layer; batch_select_indices only handles keys and
        # values.
        self.cache.reorder_cache(rows)
        self.next_positions = self.next_positions[rows]
        if self.mask is not None:
            self.mask = self.mask[rows]

    def in_context(self, positions: Tensor) -> Tensor:
        """Limit positions to the context: full rows have ended, but may stay in the batch."""
        if self._last_position is None:
            return positions
        return positions.clamp_max(self._last_position)

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Add ids ``[B, T]`` to the cache; return the logits ``[B, V]`` after the last ones."""
        # Arguments are passed by keyword, because the second positional argument is not the mask in
        # every model.
        wanted = {"position_ids": positions, "logits_to_keep": 1}
        extra = {name: value for name, value in wanted.items() if name in self.takes}
        output = self.model(
            input_ids=ids, attention_mask=mask, past_key_values=self.cache, use_cache=True, **extra
        )
        return output.logits[:, -1]


class BlockLayer(DynamicLayer):
    """A full-attention layer whose tensors have room for further tokens.

    The layer of transformers concatenates, which copies the whole cache at each token.
    """

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room
        self._length = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append states ``[B, heads, T, dim]`` and return views of all states."""
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
        """Return the number of tokens in the layer; the tensors may be larger."""
        return self._length


def _with_length(states: Tensor, length: int) -> torch.Size:
    return states.shape[:-2] + (length, states.shape[-1])


def make_cache(model: Any, max_new_tokens: int) -> DynamicCache:
    """Create a model's empty cache; sliding and recurrent layers keep transformers' classes.

    Args:
        model: a transformers causal language model.
        max_new_tokens: number of tokens after the first ones; memory for some of them is reserved
            together.
    """
    room = min(max_new_tokens, _MOST_ROOM)
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    cache.layers = [BlockLayer(room) if type(l) is DynamicLayer else l for l in cache.layers]
    # The configuration of an encoder-decoder family counts both kinds of layers; the cache needs
    # the decoder's.
    missing = getattr(config, "decoder_layers", 0) - len(cache.layers)
    cache.layers += [BlockLayer(room) for _ in range(missing)]
    return cache


def takes_ragged_prompts(model: nn.Module, takes: frozenset[str]) -> bool:
    """Test once whether rows sampled together have the same logits as each row alone.

    The test reads two prompts of different length, continues one of them as two rows, and removes
    rows. It then repeats this with two prompts of equal length, which need no padding.

    Args:
        model: a causal model, in PEFT or not.
        takes: names of the arguments of its forward.

    Returns:
        Whether prompts of different length may be in one batch.

    Raises:
        ConfigError: prompts of equal length have different logits, too.
    """
    if _deviation(model, takes, _RAGGED) is None:
        return True
    name = type(causal_model(model)).__name__
    if problem := _deviation(model, takes, _EQUAL):
        raise ConfigError(f"{name} cannot be sampled from: {problem}")
    tell_once(f"{name} does not take padded prompts: batches have prompts of equal length")
    return False


def _deviation(
    model: nn.Module, takes: frozenset[str], prompts: tuple[list[int], list[int]]
) -> str | None:
    weight = causal_model(model).get_input_embeddings().weight
    # On the CPU: logits may be on another device than the embedding.
    device, owners, staying = weight.device, torch.tensor([0, 1, 1]), torch.tensor([2, 0])
    rows = [torch.tensor(ids) % len(weight) for ids in prompts]
    # The next id of each of the three rows.
    tokens = torch.arange(3, 3 + 3 * _STEPS, device=device).view(_STEPS, 3) % len(weight)
    with evaluating(model) as rounding:
        try:
            decoder = CausalDecoder(model, rows, None, _STEPS, takes=takes)
            steps = [decoder.prefill(owners)[staying], decoder.advance(tokens[0])[staying]]
            decoder.keep(staying)
            steps += [decoder.advance(ids) for ids in tokens[1:, staying]]
        except _FAILURES as error:
            return f"with a cache it fails with {type(error).__name__}: {error}"
        for got, row in zip(torch.stack(steps, 1).float(), staying.tolist(), strict=True):
            ids = torch.cat([rows[owners[row]].to(device), tokens[:, row]])
            alone = model(input_ids=ids[None], use_cache=False).logits[0, -len(steps) :].float()
            error = float((got - alone).abs().max() / alone.abs().max())
            if error > tolerance(rounding):
                return f"its logits with a cache are {error:.0e} off those of each row alone"
    return None
