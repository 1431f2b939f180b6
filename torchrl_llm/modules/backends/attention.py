"""Attention of packed rows inside a Hugging Face model, and the check that a model can be packed.

How attention keeps the rows apart depends on its implementation:

- ``sdpa``: transformers passes a four-dimensional mask to ``scaled_dot_product_attention``
  unchanged. :class:`RowMask` is such a mask, but it stores only the blocks, like torch's own
  ``CausalBias``. When it is passed as ``attn_mask``, attention runs block by block. If
  :func:`has_row_kernel` is true and no prompt is shared, one kernel runs all rows.
- ``eager``: the same mask, materialized.
- ``flex_attention``: a ``BlockMask`` that skips positions that no row attends to.
- flash attention: receives the end of each row. The rows cannot share a prompt.

The model and transformers are not changed, and gradient checkpointing keeps these arguments with
the others. :func:`why_not_packed` detects models that mix tokens by operations other than attention
(convolutions, recurrences) or use the mask in a different way.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_llm.errors import ConfigError
from torchrl_llm.functional import AttentionBlock, packing
from torchrl_llm.modules.backends import head as heads

_KERNELS = ("sdpa", "eager", "flex_attention")
_PLAIN_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
_WINDOWS = ("sliding_window", "attention_chunk_size")
# Operations that models apply to a mask before attention; any other operation would need the
# entries of the mask.
_HARMLESS = {"__get__", "dim", "size", "numel", "is_floating_point", "__repr__"}


class RowMask(Tensor):
    """The mask of a stream of blocks, bool ``[1, 1, S, S]``, which occupies one byte of memory.

    Every use except as ``attn_mask`` of ``scaled_dot_product_attention`` raises ``TypeError``.

    Attributes:
        blocks: the stream.

    Example:
        >>> x = torch.randn(1, 2, 5, 4)
        >>> mask = RowMask.of([AttentionBlock(1, 3), AttentionBlock(1, 2)], x.device)
        >>> out = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        >>> mask.shape, out.shape
        (torch.Size([1, 1, 5, 5]), torch.Size([1, 2, 5, 4]))
    """

    blocks: tuple[AttentionBlock, ...]
    _prefixes: list[packing.PrefixView | None] | None = None
    _ends: Tensor | None = None

    @classmethod
    def of(cls, blocks: Sequence[AttentionBlock], device: torch.device) -> RowMask:
        """The mask of a stream.

        Args:
            blocks: the stream.
            device: device of the model.
        """
        size = sum(block.rows * block.width for block in blocks)
        one = torch.ones((), dtype=torch.bool, device=device)
        mask = one.expand(1, 1, size, size).as_subclass(cls)
        mask.blocks = tuple(blocks)
        return mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Dispatch of torch's functions."""
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _attend(*args, **kwargs)
        if func.__name__ in _HARMLESS:
            return super().__torch_function__(func, types, args, kwargs)
        if func is Tensor.__getitem__:
            taken = super().__torch_function__(func, types, args, kwargs)
            if taken.shape == args[0].shape:
                return args[0]
        raise TypeError(f"{func.__name__} is not possible for a mask of rows, which has no entries")


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: RowMask,
    is_causal: bool = False,
    **settings: Any,
) -> Tensor:
    if is_causal or query.shape[0] != 1:
        raise TypeError("a mask of rows needs a batch of one stream and is_causal=False")
    blocks = attn_mask.blocks
    dtype = compute_dtype(query.device, query.dtype)
    plain = not settings.get("dropout_p") and all(block.prefix is None for block in blocks)
    if plain and has_row_kernel(query.device, dtype, query.shape[-1]):
        query, key, value = (x.to(dtype) for x in (query, key, value))
        return _attend_rows(query, key, value, attn_mask, settings.get("scale"))
    if attn_mask._prefixes is None:
        # The same for all layers, and for the second forward of gradient checkpointing.
        attn_mask._prefixes = packing.prefix_views(blocks, query)
    return packing.block_attention(
        query, key, value, blocks, prefixes=attn_mask._prefixes, **settings
    )


def compute_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that attention computes in: autocast's dtype if autocast is enabled.

    Args:
        device: device of the model.
        dtype: dtype of the weights or states.
    """
    kind = device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype


def has_row_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether torch has one kernel for rows of all lengths (16 bits, on an Nvidia GPU).

    Args:
        device: device of the model.
        dtype: type that attention computes in.
        head_dim: width of a head.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    if not torch.cuda.is_available() or torch.version.hip or torch.compiler.is_compiling():
        return False
    fits = head_dim % 8 == 0 and head_dim <= 256
    return fits and torch.cuda.get_device_capability(device) >= (8, 0)


def _attend_rows(
    query: Tensor, key: Tensor, value: Tensor, mask: RowMask, scale: float | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    widths = [block.width for block in mask.blocks for _ in range(block.rows)]
    if mask._ends is None:
        ends = torch.tensor([0, *accumulate(widths)], dtype=torch.int32)
        mask._ends = ends.to(query.device, non_blocking=True)
    if key.shape[1] != query.shape[1]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    parts = [x[0].transpose(0, 1) for x in (query, key, value)]
    ends, most = mask._ends, max(widths)
    out = varlen_attn(*parts, ends, ends, most, most, scale=scale, window_size=(-1, 0))
    return out.transpose(0, 1)[None]


def stream_arguments(
    model: nn.Module, blocks: Sequence[AttentionBlock], device: torch.device
) -> dict[str, Any]:
    """Arguments of a model's forward that keep the rows of a stream apart.

    Args:
        model: a causal model.
        blocks: the stream; without prefixes for flash attention.
        device: device of the model.
    """
    if heads.uses_flash(model):
        widths = [block.width for block in blocks for _ in range(block.rows)]
        ends = torch.tensor([0, *accumulate(widths)], dtype=torch.int32)
        ends = ends.to(device, non_blocking=True)
        lengths = {"max_length_q": max(widths), "max_length_k": max(widths)}
        return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, **lengths}
    if heads.attention_name(model) == "flex_attention":
        return {"attention_mask": _flex_mask(blocks, device)}
    return {"attention_mask": row_mask(model, blocks, device)}


def _flex_mask(blocks: Sequence[AttentionBlock], device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    starts = list(accumulate((block.rows * block.width for block in blocks), initial=0))
    # For each row: its start, and the start and end of its prefix.
    spans, widths = [], []
    for block, start in zip(blocks, starts, strict=False):
        for row in range(block.rows):
            first = size = 0
            if block.prefix is not None:
                before = block.prefix.block
                first = starts[before] + block.prefix.owner[row] * blocks[before].width
                size = block.prefix.lengths[row]
            spans.append((start + row * block.width, first, first + size))
            widths.append(block.width)
    per_token = torch.tensor(spans).repeat_interleave(torch.tensor(widths), 0)
    per_token = per_token.t().contiguous().to(device, non_blocking=True)
    begin, first, last = per_token.unbind(0)

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = (begin[query] <= key) & (key <= query)
        return own | ((first[query] <= key) & (key < last[query]))

    # Without compilation, torch builds the mask of all pairs before it is cut into tiles.
    compiled = device.type != "cpu"
    return create_block_mask(
        seen, None, None, starts[-1], starts[-1], device=device, _compile=compiled
    )


def row_mask(model: nn.Module, blocks: Sequence[AttentionBlock], device: torch.device) -> Tensor:
    """Return the mask of a stream in the form that a model needs.

    Args:
        model: a causal model whose attention is ``sdpa`` or ``eager``.
        blocks: the stream.
        device: device of the model.

    Returns:
        A :class:`RowMask`, or for ``eager`` the materialized additive mask ``[1, 1, S, S]``.
    """
    if heads.attention_name(model) != "eager":
        return RowMask.of(blocks, device)
    seen = packing.block_mask(blocks, device)[None, None]
    dtype = heads.causal_model(model).dtype
    smallest = torch.finfo(dtype).min
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, smallest)


def longest_plain_row(model: nn.Module) -> float:
    """Return the longest row for which attention is plainly causal in all layers.

    Args:
        model: a causal model.

    Returns:
        The smallest window of sliding or chunked attention, in tokens; infinite if there is no
        window.
    """
    config = heads.causal_model(model).config.get_text_config(decoder=True)
    return min(getattr(config, name, None) or math.inf for name in _WINDOWS)


def check_rows_apart(model: nn.Module) -> None:
    """Reject a model whose rows depend on the padding after them or on other rows of the batch.

    Args:
        model: a causal model, in PEFT or not.

    Raises:
        ConfigError: a row has different logits alone and in a batch.
    """
    weight = heads.causal_model(model).get_input_embeddings().weight
    rows = torch.tensor([[1, 2, 3, 0, 0], [9, 8, 7, 6, 5]], device=weight.device) % len(weight)
    with heads.evaluating(model) as rounding:
        together = model(input_ids=rows, use_cache=False).logits[:1, :3]
        alone = model(input_ids=rows[:1, :3], use_cache=False).logits
    if together.shape != alone.shape or _distance(together, alone) > tolerance(rounding):
        raise ConfigError(
            f"{type(heads.causal_model(model)).__name__} gives a row different logits when tokens "
            "follow it or other rows are in the batch, so it is no causal language model (the "
            "BERT family is one with is_decoder=True in its configuration)"
        )


def tolerance(rounding: float) -> float:
    """Return the largest accepted relative error; 16-bit rounding can flip a choice of experts.

    Args:
        rounding: value from :func:`~torchrl_llm.modules.backends.head.evaluating`.
    """
    return rounding if rounding < 1e-2 else 4 * rounding


def why_not_packed(model: nn.Module, run: nn.Module) -> str | None:
    """Return why rows cannot be scored in one stream; ``None`` if they can.

    The function checks the configuration, then runs two short rows packed and padded. It runs them
    packed once more with different tokens in the first row, which must not affect the second row.

    Args:
        model: a causal model, in PEFT or not.
        run: its body, or the model itself.
    """
    causal = heads.causal_model(model)
    config = causal.config.get_text_config(decoder=True)
    name = type(causal).__name__
    kernel = heads.attention_name(model)
    if kernel not in _KERNELS and not heads.uses_flash(model):
        return (
            f"attn_implementation {kernel!r} cannot keep rows apart; "
            "'sdpa', 'eager', 'flex_attention' and flash attention are"
        )
    strange = set(getattr(config, "layer_types", None) or ()) - _PLAIN_LAYERS
    if strange:
        return f"{name} has layers of type {', '.join(sorted(strange))}"
    if {"position_ids", "args"}.isdisjoint(inspect.signature(causal.forward).parameters):
        return f"{name} takes no position_ids, which say where a row of a stream begins"
    if not heads.can_be_tried(model):
        return f"the weights of {name} are sharded or not loaded yet, so packing cannot be tested"
    size = causal.get_input_embeddings().weight.shape[0]
    device = causal.get_input_embeddings().weight.device
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7]], device=device) % size
    other = torch.tensor([[9, 8, 8, 9, 5, 6, 7]], device=device) % size
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]], device=device)
    apart = stream_arguments(model, [AttentionBlock(1, 4), AttentionBlock(1, 3)], device)
    settings = {**apart, "position_ids": positions, "use_cache": False}
    with heads.evaluating(model) as rounding:
        rows = [run(input_ids=part, use_cache=False)[0] for part in (ids[:, :4], ids[:, 4:])]
        try:
            packed = run(input_ids=ids, **settings)[0]
            changed = run(input_ids=other, **settings)[0]
        except (TypeError, ValueError, RuntimeError) as error:
            return f"{name} does not take rows in one stream: {error}"
    if _distance(packed, torch.cat(rows, dim=1)) > rounding:
        return f"{name} gives packed rows different states than padded ones"
    if _distance(packed[:, 4:], changed[:, 4:]) > rounding / 10:
        return f"tokens of one packed row reach the next one in {name}"
    if problem := heads.tried_once(_stream_limit, model):
        return f"{name} does not take a stream that is longer than its context: {problem}"
    return None


def _stream_limit(model: nn.Module) -> str | None:
    """Return why a stream of short rows may not be longer than the context.

    The test runs a copy on the meta device, so that a long context costs nothing and other threads
    can use the model.
    """
    config = copy.deepcopy(heads.causal_model(model).config)
    context = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if heads.attention_name(model) not in ("sdpa", "eager") or not context:
        return None
    config._attn_implementation = heads.attention_name(model)
    for rows in (1, 2):
        try:
            with torch.device("meta"), torch.no_grad():
                twin = type(heads.causal_model(model))(config).eval()
                ids = torch.zeros(1, rows * context, dtype=torch.int64)
                apart = stream_arguments(model, [AttentionBlock(rows, context)], ids.device)
                twin(input_ids=ids, position_ids=ids, use_cache=False, **apart)
        except (AssertionError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            # If one row fails too, the length is not the cause.
            return None if rows == 1 else str(error)
    return None


def _distance(left: Tensor, right: Tensor) -> float:
    return float((left.float() - right.float()).abs().max() / right.float().abs().max())
