"""Causal model that decodes in tensors at fixed addresses, so that a step is a CUDA graph.

If Python launches each kernel of a step, a small model mostly waits for the launches (some thousand
at 0.5B parameters); reading its weights takes less than a millisecond. A CUDA graph launches all
kernels at once. A graph needs:

- A cache with room for further tokens, which are written at an index in a tensor, and a mask that
  hides the unfilled part. A full cache is replaced by one of twice the size, so a response of 8,192
  tokens costs five recordings. Each recording runs the model's Python twice, which costs much less
  than ``torch.compile``.
- A batch of fixed size. Ended rows stay in the step. They are removed when half of the rows have
  ended and the cache is large. With a small cache, a smaller batch would not save the cost of a
  recording.
- No operation that waits for the device. Sampling stays outside of the graph: its launches overlap
  with the step.

A graph exists for one call of ``generate``, because parameters may be replaced between two calls.
Without a GPU, the same step runs without recording.

Heads that share a key (GQA) become rows of one query. Otherwise transformers, with a mask, would
copy the cache for each head: with Qwen2.5-0.5B, seven times its bytes in each step.

Shape legend: ``B`` rows in the step, ``C`` capacity of the cache in tokens, ``D`` size of a head.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from torchrl_llm._checked import check
from torchrl_llm._log import tell_once
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules.backends.attention import longest_plain_row
from torchrl_llm.modules.backends.causal_decoder import BlockLayer, CausalDecoder
from torchrl_llm.modules.backends.cuda_graph import GraphRecorder, Step
from torchrl_llm.modules.backends.decoding import Decoder
from torchrl_llm.modules.backends.head import (
    GROUPED,
    attention_name,
    causal_model,
    evaluating,
    is_whole,
)

DecodeMode = Literal["auto", "plain", "graph"]

_RECORDED_ON = "cuda"
# With fewer steps, a recording does not pay.
_FEWEST_STEPS = 16
_LEAST_ROOM = 512
# Attention kernels copy a mask whose rows are not aligned.
_ALIGNED = 64
# Reading this many bytes takes 0.3 ms per step; saving half of it soon pays for a recording.
_COMPACT_ABOVE_BYTES = 2**30
_WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# A configuration has one attention name at a time, even if several threads sample with its models.
_SWITCHED = threading.RLock()
# If the context is shorter than its window, a sliding layer works as a full one.
_LAYERS = (BlockLayer, DynamicSlidingWindowLayer)


class StaticDecoder:
    """Continues from a plain decoder that has read the prompts; see ``decoding.Decoder``.

    Args:
        plain: the plain decoder, whose cache and model this decoder uses from now on.
        max_new_tokens: most further tokens.
        record: turns a step into an equivalent function; called again after each change of shape.
    """

    def __init__(
        self, plain: CausalDecoder, max_new_tokens: int, record: Callable[[Step], Step]
    ) -> None:
        self._plain, self._record = plain, record
        self._held, self._most = plain.held, plain.held + max_new_tokens
        self._next = plain.next_positions
        rows = len(self._next)
        # Indices of the unfinished rows in the step.
        self._live = torch.arange(rows, device=self._next.device)
        self._slot = self._next.new_zeros(1)
        self._ids, self._positions = self._next.new_zeros(2, rows, 1)
        self._bias = plain.cache.layers[0].keys.new_zeros(rows, 1, 1, self._held)
        if plain.mask is not None:
            pads = ~plain.mask[:, None, None, : self._held]
            self._bias.masked_fill_(pads, torch.finfo(self._bias.dtype).min)
        self._layers = [_StaticLayer(layer, self._held, self._slot) for layer in plain.cache.layers]
        plain.cache.layers = self._layers
        self._make_room()

    def advance(self, token_ids: Tensor) -> Tensor:
        """See ``decoding.Decoder``."""
        if self._held == self._bias.shape[-1]:
            self._make_room()
        self._ids[self._live, 0] = token_ids
        self._positions[:, 0] = self._plain.in_context(self._next)
        self._next = self._next + 1
        self._slot.fill_(self._held)
        self._bias.select(-1, self._held).zero_()
        self._held += 1
        if self._run is None:
            step = partial(_forward, self._plain, self._ids, self._positions, self._bias)
            self._run = self._record(step)
        return self._run()[self._live]

    def keep(self, rows: Tensor) -> None:
        """See ``decoding.Decoder``."""
        self._live = live = self._live[rows]
        num_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in self._layers)
        if 2 * len(live) <= len(self._ids) and num_bytes >= _COMPACT_ABOVE_BYTES:
            self._run = None
            self._next, self._bias = self._next[live], self._bias[live]
            self._ids, self._positions = self._ids[live], self._positions[live]
            for layer in self._layers:
                layer.keys, layer.values = layer.keys[live], layer.values[live]
            self._live = torch.arange(len(live), device=live.device)

    def _make_room(self) -> None:
        self._run: Step | None = None  # free the graph before the memory that it uses
        room = min(max(self._held, _LEAST_ROOM), self._most - self._held)
        more = -(-(self._held + room) // _ALIGNED) * _ALIGNED - self._held
        self._bias = pad(self._bias, (0, more), value=torch.finfo(self._bias.dtype).min)
        for layer in self._layers:
            layer.keys = pad(layer.keys, (0, 0, 0, more))
            layer.values = pad(layer.values, (0, 0, 0, more))


def _forward(plain: CausalDecoder, ids: Tensor, positions: Tensor, bias: Tensor) -> Tensor:
    if attention_name(plain.model) != "sdpa":
        return plain.forward(ids, positions, bias)
    config = causal_model(plain.model).config.get_text_config(decoder=True)
    with _SWITCHED:
        config._attn_implementation = GROUPED
        try:
            return plain.forward(ids, positions, bias)
        finally:
            config._attn_implementation = "sdpa"


class _StaticLayer(DynamicLayer):
    """Keys and values ``[B, heads, C, D]``; attention reads all of them, with a mask.

    Args:
        layer: layer of the plain decoder.
        held: number of tokens in it.
        slot: int64 ``[1]``, index of the next token.
    """

    def __init__(self, layer: DynamicLayer, held: int, slot: Tensor) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = layer.dtype, layer.device, True
        self.keys, self.values = layer.keys[..., :held, :], layer.values[..., :held, :]
        self._held, self._slot = held, slot

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the states of one token, in place."""
        self.keys.index_copy_(-2, self._slot, key_states)
        self.values.index_copy_(-2, self._slot, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Number of tokens at the start; it is constant in a graph.

        A model that uses this number computes wrong logits; :func:`why_not_static` detects this.
        """
        return self._held


def _grouped(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **settings: Any
) -> tuple[Tensor, None]:
    """The ``sdpa`` of transformers, without copies of the keys for one token per row."""
    is_plain = attention_mask is not None and settings.get("position_bias") is None
    if not is_plain or query.shape[2] != 1 or attention_mask.shape[1] != 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    grouped = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
    attended = scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=settings.get("scaling")
    )
    return attended.reshape(len(query), 1, query.shape[1], -1), None


# Handles all calls, because another thread may run a model with the same configuration.
AttentionInterface.register(GROUPED, _grouped)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


class _OnDevice(TorchDispatchMode):
    """Rejects operations whose result must be known on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Dispatch of torch's operations."""
        if func is torch.ops.aten.index.Tensor:
            # The shape is unknown only if an index is a mask.
            waits = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        else:
            waits = not _WAITS.isdisjoint(func.tags)
        if waits:
            raise RuntimeError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


def why_not_static(model: nn.Module, takes: frozenset[str]) -> str | None:
    """Return why a model cannot decode in static tensors; ``None`` if it can.

    The test decodes two short rows both ways, with large values in the unfilled part of the static
    cache.

    Args:
        model: a causal model, in PEFT or not, on one device and not sharded.
        takes: names of the arguments of its forward.
    """
    name = type(causal_model(model)).__name__
    implementation = attention_name(model)
    if implementation not in ("sdpa", "eager"):
        return f"attn_implementation {implementation!r} takes no mask; 'sdpa' and 'eager' do"
    embedding = causal_model(model).get_input_embeddings().weight
    prompts = [torch.tensor(ids) % len(embedding) for ids in ([1, 2, 3, 4], [5, 6])]
    tokens = torch.tensor([[3, 6], [4, 7], [5, 8]], device=embedding.device) % len(embedding)
    try:
        with evaluating(model) as rounding, torch.autocast(embedding.device.type, enabled=False):
            plain, other = (CausalDecoder(model, prompts, None, 4, takes=takes) for _ in range(2))
            plain.prefill(torch.arange(2))
            other.prefill(torch.arange(2))
            for layer in other.cache.layers:
                if type(layer) not in _LAYERS or layer.get_seq_length() != other.held:
                    return f"{name} caches more than keys and values of its tokens"
            static = StaticDecoder(other, 4, _as_it_is)
            for layer in other.cache.layers:
                layer.keys[..., other.held :, :] = layer.values[..., other.held :, :] = 100.0
            for ids in tokens:
                expected = plain.advance(ids).float()
                with _OnDevice():
                    got = static.advance(ids).float()
                if not bool((got - expected).abs().max() <= rounding * expected.abs().max()):
                    return f"{name} gives different logits with a static cache"
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        return f"{name} takes no static cache: {error}"
    return None


class DecoderChoice:
    """Chooses for each call of ``generate`` between the plain and the static decoder.

    Args:
        mode: ``"auto"``, ``"plain"`` or ``"graph"``.

    Raises:
        ConfigError: for an unknown mode.
    """

    def __init__(self, mode: DecodeMode) -> None:
        check("decode", mode, DecodeMode)
        self.mode, self._can_record = mode, True
        # Keyed by attention implementation and by device, which may change between two calls.
        self._problems: dict[str, str | None] = {}
        self._recorders: dict[torch.device, GraphRecorder] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A graph belongs to its process and its device.
        return {**self.__dict__, "_problems": {}, "_recorders": {}}

    def over(self, plain: CausalDecoder, max_new_tokens: int) -> Decoder:
        """Choose the decoder that continues.

        Args:
            plain: a decoder that has read the prompts.
            max_new_tokens: most tokens that will follow.

        Raises:
            ConfigError: in mode ``"graph"``, if the model cannot decode with a graph.
        """
        device = plain.next_positions.device
        records = device.type == _RECORDED_ON and self._can_record
        # Outside of the main thread, a trainer may run at the same time, and a recording would
        # disturb it.
        is_alone = threading.current_thread() is threading.main_thread()
        pays = is_alone and records and max_new_tokens >= _FEWEST_STEPS
        is_short = plain.held + max_new_tokens <= longest_plain_row(plain.model)
        if not is_short or self.mode == "plain" or (self.mode == "auto" and not pays):
            return plain
        problem = self._problem(plain)
        if problem is None:
            record = partial(self._recorded, device) if records else _as_it_is
            return StaticDecoder(plain, max_new_tokens, record)
        if self.mode == "graph":
            raise ConfigError(f"decode='graph' is not possible: {problem}; pass decode='auto'")
        tell_once(f"decoding is not recorded as a CUDA graph: {problem}")
        return plain

    def _problem(self, plain: CausalDecoder) -> str | None:
        weights = list(plain.model.parameters())
        if any(not is_whole(p) or p.device != weights[0].device for p in weights):
            return "the weights are sharded or on several devices"
        implementation = attention_name(plain.model)
        if implementation not in self._problems:
            self._problems[implementation] = why_not_static(plain.model, plain.takes)
        return self._problems[implementation]

    def _recorded(self, device: torch.device, step: Step) -> Step:
        try:
            if device not in self._recorders:
                self._recorders[device] = GraphRecorder(device)
            return self._recorders[device](step)
        except (AttributeError, RuntimeError, TypeError) as error:
            self._can_record = False
            tell_once(f"decoding continues without a CUDA graph, which failed: {error}")
            return step


def _as_it_is(step: Step) -> Step:
    return step
