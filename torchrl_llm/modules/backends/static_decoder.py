"""Causal model that decodes in tensors that stay where they are, so that a step is a CUDA graph.

Run from Python, a step of a small model waits for the launches of its kernels: some thousand at
0.5B parameters, 20 ms, where reading the weights takes less than one. A CUDA graph launches them at
once. What a graph needs:

- A cache with room for the tokens to come, written at an index that is a tensor, and a mask that
  hides what is not filled. Room doubles when it is full, so that a response of 8,192 tokens costs
  five recordings. Each is about three plain steps, much cheaper than ``torch.compile``.
- A batch that stays as it is. Rows that have ended stay in the step, and leave when half of them
  have and the cache is large: with a small one, a step costs the same and a recording does not pay.
- Nothing that waits for the device. Sampling stays outside: its launches are hidden by the step.

Graphs live for one call of ``generate``: parameters may be replaced between two calls. Without a
GPU the same step is called instead of recorded.

Heads that share a key (GQA) are attended as rows of one query. transformers copies the cache for
each head when there is a mask, which would cost more than the rest of the step.

Shape legend: ``B`` rows in the step, ``b`` rows still decoded, ``C`` tokens that there is room for,
``V`` vocabulary, ``D`` size of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from torchrl_llm._log import tell_once
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules.backends.attention import longest_plain_row
from torchrl_llm.modules.backends.causal_decoder import BlockLayer, CausalDecoder
from torchrl_llm.modules.backends.cuda_graph import GraphRecorder, Step
from torchrl_llm.modules.backends.decoding import Decoder
from torchrl_llm.modules.backends.head import causal_model, evaluating

MODES = ("auto", "plain", "graph")

_RECORDED_ON = "cuda"
# Fewer steps do not pay for a recording.
_FEWEST_STEPS = 16
_LEAST_ROOM = 512
# Attention kernels copy a mask whose rows are not aligned.
_ALIGNED = 64
# Reading this much takes 0.3 ms of a step, so that half of it pays for a recording soon.
_COMPACT_ABOVE_BYTES = 2**30
_GROUPED = "torchrl_llm_grouped"
_WHAT_FAILS = (AttributeError, KeyError, RuntimeError, TypeError, ValueError)


class StaticDecoder:
    """Goes on from a plain decoder that has read the prompts; see ``decoding.Decoder``.

    Args:
        plain: its cache and its model are taken over.
        max_new_tokens: most tokens that will follow.
        record: makes a function that does the same from a step, again for each change of shape.
    """

    def __init__(
        self, plain: CausalDecoder, max_new_tokens: int, record: Callable[[Step], Step]
    ) -> None:
        self._plain, self._record = plain, record
        self._held, self._most = plain.held, plain.held + max_new_tokens
        self._next = plain.next_positions
        rows, device = self._next.shape[0], self._next.device
        self._slot = torch.zeros(1, dtype=torch.int64, device=device)
        self._ids, self._positions = torch.zeros(2, rows, 1, dtype=torch.int64, device=device)
        dtype = plain.cache.layers[0].keys.dtype
        self._bias = torch.zeros(rows, 1, 1, self._held, dtype=dtype, device=device)
        if plain.mask is not None:
            pads = ~plain.mask[:, None, None, : self._held]
            self._bias.masked_fill_(pads, torch.finfo(dtype).min)
        self._layers = [_StaticLayer(layer, self._held, self._slot) for layer in plain.cache.layers]
        plain.cache.layers = self._layers
        # Rows of the step that are still decoded; None for all.
        self._live: Tensor | None = None
        self._run: Step | None = None
        self._make_room()

    def advance(self, token_ids: Tensor) -> Tensor:
        """See ``decoding.Decoder``; the logits ``[b, V]`` may be overwritten by the next call."""
        if self._held == self._bias.shape[-1]:
            self._make_room()
        if self._live is None:
            self._ids[:, 0] = token_ids
        else:
            self._ids[self._live, 0] = token_ids
        self._positions[:, 0] = self._plain.in_context(self._next)
        self._next = self._next + 1
        self._slot.fill_(self._held)
        self._bias.select(-1, self._held).zero_()
        self._held += 1
        if self._run is None:
            step = partial(_forward, self._plain, self._ids, self._positions, self._bias)
            self._run = self._record(step)
        logits = self._run()
        return logits if self._live is None else logits[self._live]

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only, int64 indices into the present ``b``."""
        self._live = rows if self._live is None else self._live[rows]
        held_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in self._layers)
        if 2 * rows.shape[0] > self._ids.shape[0] or held_bytes < _COMPACT_ABOVE_BYTES:
            return
        live, self._live = self._live, None
        self._next = self._next[live]
        self._ids, self._positions = self._ids[live], self._positions[live]
        self._bias = self._bias[live]
        for layer in self._layers:
            layer.keys, layer.values = layer.keys[live], layer.values[live]
        self._run = None

    def _make_room(self) -> None:
        self._run = None  # a graph of the old addresses, gone before the new ones are made
        room = min(max(self._held, _LEAST_ROOM), self._most - self._held)
        size = -(-(self._held + room) // _ALIGNED) * _ALIGNED
        for layer in self._layers:
            layer.keys = _padded(layer.keys, size, 0.0, -2)
            layer.values = _padded(layer.values, size, 0.0, -2)
        self._bias = _padded(self._bias, size, torch.finfo(self._bias.dtype).min, -1)


def _forward(plain: CausalDecoder, ids: Tensor, positions: Tensor, bias: Tensor) -> Tensor:
    with _grouped_attention(plain.model):
        return plain.forward(ids, positions, bias)


def _padded(tensor: Tensor, size: int, value: float, dim: int) -> Tensor:
    shape, held = list(tensor.shape), tensor.shape[dim]
    shape[dim] = size
    new = tensor.new_full(shape, value)
    new.narrow(dim, 0, held).copy_(tensor)
    return new


class _StaticLayer(DynamicLayer):
    """Keys and values ``[B, heads, C, D]``; all of them are attended, under a mask.

    Args:
        layer: of the plain decoder.
        held: tokens that it holds.
        slot: int64 ``[1]``, where the next token is written.
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
        """Tokens at the start: a graph knows no other number.

        A model that makes use of it gives wrong logits, which :func:`why_not_static` finds.
        """
        return self._held


def _grouped(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """The ``sdpa`` of transformers; for one token a row it makes no copies of the keys."""
    if query.shape[2] != 1 or attention_mask is None or attention_mask.shape[1] != 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **settings
        )
    if settings.get("position_bias") is not None:
        raise NotImplementedError("attention with a bias of positions")
    rows, heads = query.shape[:2]
    grouped = query.reshape(rows, key.shape[1], -1, query.shape[-1])
    attended = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=scaling
    )
    return attended.reshape(rows, 1, heads, value.shape[-1]), None


AttentionInterface.register(_GROUPED, _grouped)
AttentionMaskInterface.register(_GROUPED, sdpa_mask)


@contextmanager
def _grouped_attention(model: nn.Module) -> Iterator[None]:
    config = _text_config(model)
    before = config._attn_implementation
    if before == "sdpa":
        config._attn_implementation = _GROUPED
    try:
        yield
    finally:
        config._attn_implementation = before


def _text_config(model: nn.Module) -> Any:
    return causal_model(model).config.get_text_config(decoder=True)


class _OnDevice(TorchDispatchMode):
    """Refuses operations whose result must be known on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Dispatch of torch's operations."""
        waits = not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.isdisjoint(
            func.tags
        )
        if func is torch.ops.aten.index.Tensor:
            # Only a mask among the indices makes a shape that is not known.
            waits = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        if waits:
            raise RuntimeError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


def why_not_static(model: nn.Module, takes: frozenset[str]) -> str | None:
    """Why a model cannot decode in static tensors; ``None`` when it can.

    Looks at the configuration, then decodes two short rows both ways, with noise where the static
    cache is not filled.

    Args:
        model: a causal model, in PEFT or not.
        takes: names of the arguments of its forward.
    """
    name, implementation = (
        type(causal_model(model)).__name__,
        _text_config(model)._attn_implementation,
    )
    if implementation not in ("sdpa", "eager"):
        return f"attn_implementation {implementation!r} takes no mask; 'sdpa' and 'eager' do"
    if "position_ids" not in takes:
        return f"{name} takes no position_ids"
    weights = list(model.parameters())
    if any(isinstance(p, DTensor) for p in weights) or len({p.device for p in weights}) > 1:
        return f"the weights of {name} are sharded or on several devices"
    embedding = causal_model(model).get_input_embeddings().weight
    size, device = embedding.shape[0], embedding.device
    prompts = [torch.tensor([1, 2, 3, 4]) % size, torch.tensor([5, 6]) % size]
    try:
        with evaluating(model) as rounding, torch.autocast(device.type, enabled=False):
            plain, other = (CausalDecoder(model, prompts, None, 4, takes=takes) for _ in range(2))
            plain.prefill(torch.arange(2))
            other.prefill(torch.arange(2))
            for layer in other.cache.layers:
                if type(layer) not in (BlockLayer, DynamicSlidingWindowLayer):
                    return f"{name} has a cache of {type(layer).__name__}"
                if layer.get_seq_length() != other.held:
                    return f"{name} caches more than its tokens"
            static = StaticDecoder(other, 4, lambda step: step)
            for layer in other.cache.layers:
                layer.keys[..., other.held :, :] = layer.values[..., other.held :, :] = 100.0
            for token in (3, 4, 5):
                ids = torch.tensor([token, token + 3], device=device) % size
                expected = plain.advance(ids).float()
                with _OnDevice():
                    got = static.advance(ids).float()
                if not bool((got - expected).abs().max() <= rounding * expected.abs().max()):
                    return f"{name} gives other logits with a static cache"
    except _WHAT_FAILS as error:
        return f"{name} takes no static cache: {error}"
    return None


class DecoderChoice:
    """Chooses for each call of ``generate`` between the plain and the static decoder.

    Args:
        mode: ``"auto"``, ``"plain"`` or ``"graph"``.

    Raises:
        ConfigError: for another mode.
    """

    def __init__(self, mode: str) -> None:
        if mode not in MODES:
            raise ConfigError(f"decode must be one of {', '.join(MODES)}, got {mode!r}")
        self.mode = mode
        # By attention implementation and whether weights are sharded: both may be changed later.
        self._problems: dict[tuple[str, bool], str | None] = {}
        self._recorder: GraphRecorder | None = None
        self._can_record = True

    def __getstate__(self) -> dict[str, Any]:
        # A graph belongs to its process and its device.
        return {**self.__dict__, "_problems": {}, "_recorder": None}

    def over(self, plain: CausalDecoder, max_new_tokens: int) -> Decoder:
        """The decoder to go on with.

        Args:
            plain: has read the prompts.
            max_new_tokens: most tokens that will follow.

        Raises:
            ConfigError: in mode ``"graph"``, when the model cannot.
        """
        device = plain.next_positions.device
        records = device.type == _RECORDED_ON and self._can_record
        pays = records and max_new_tokens >= _FEWEST_STEPS
        if self.mode == "plain" or (self.mode == "auto" and not pays):
            return plain
        if plain.held + max_new_tokens > longest_plain_row(plain.model):
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
        sharded = any(isinstance(p, DTensor) for p in plain.model.parameters())
        key = (_text_config(plain.model)._attn_implementation, sharded)
        if key not in self._problems:
            self._problems[key] = why_not_static(plain.model, plain.takes)
        return self._problems[key]

    def _recorded(self, device: torch.device, step: Step) -> Step:
        try:
            if self._recorder is None or self._recorder.device != device:
                self._recorder = GraphRecorder(device)
            return self._recorder(step)
        except RuntimeError as error:
            self._can_record = False
            tell_once(f"decoding goes on without a CUDA graph, which failed: {error}")
            return step


def _as_it_is(step: Step) -> Step:
    return step
