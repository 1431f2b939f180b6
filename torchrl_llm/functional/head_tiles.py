"""Tiles of the logits of a language-model head; some are kept for the backward.

The arithmetic on tiles is in :mod:`torchrl_llm.functional.chunked_head`.

Shape legend: ``N`` tokens, ``V`` vocabulary, ``D`` hidden size, ``R`` rank of an adapter; a tile is
``v`` vocabulary entries by ``n`` tokens, because products are faster in this order.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_llm.functional import head_kernels
from torchrl_llm.functional.logit_form import LogitForm

# Number of logits in memory at once. On a CPU a tile should stay in the cache. On a GPU 2,048
# entries of 8,192 tokens fill the device; their float32 logits and bfloat16 gradients are 96 MiB.
_TILE = {"cpu": 1 << 21, "cuda": 1 << 24}
_MAX_ROWS = {"cpu": 1024, "cuda": 8192}
# Matrix products on a GPU are fast when both sides of a tile are multiples of this.
_ALIGNED = 128
# Number of logits kept for the backward instead of being computed twice: 256 MiB of float32.
_KEPT = 1 << 26


class HeadSettings(NamedTuple):
    """Settings of a head: its logit form, and how it is computed.

    Attributes:
        form: scale and soft-cap of the logits.
        entropy: whether to compute entropies.
        chunk_size: largest number of logits in memory at once, or ``None`` for the device's
            default.
        in_place: add the weight's gradient to ``weight.grad`` in the backward.
        keep: keep tiles for the backward if there is memory for them.
        dtype: type of the factors of the matrix products.
    """

    form: LogitForm
    entropy: bool
    chunk_size: int | None
    in_place: bool
    keep: bool
    dtype: torch.dtype

    @property
    def sum_dtype(self) -> torch.dtype:
        """Dtype of logits and sums: float32, or float64 if the products are float64."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32


def logits_bytes(
    num_tokens: int, num_entries: int, *, chunk_size: int | None = None, kind: str = "cpu"
) -> int:
    """Return the bytes of float32 logits that a head holds at once in training.

    Usually the head holds one tile, so the number does not grow with tokens times vocabulary. The
    head holds all logits only if they fit into ``chunk_size``. On a GPU with products in bfloat16
    or float16, it holds one tile and the tile's gradient in this dtype.

    Args:
        num_tokens: number of tokens of the forward.
        num_entries: number of entries of the vocabulary.
        chunk_size: see :class:`HeadSettings`.
        kind: type of the device, ``"cpu"`` or ``"cuda"``.

    Example:
        >>> logits_bytes(16_384, 151_936) < 16_384 * 151_936 * 4 // 1000
        True
    """
    rows, columns = _tile_shape(num_tokens, num_entries, chunk_size, kind)
    if kind != "cpu":
        return (4 + 2) * rows * columns
    kept = num_tokens * num_entries
    return 4 * (rows * columns + (kept if kept <= (chunk_size or _KEPT) else 0))


def _tile_shape(
    num_tokens: int, num_entries: int, chunk_size: int | None, kind: str
) -> tuple[int, int]:
    """Return the number of tokens and of vocabulary entries of a tile."""
    tile = chunk_size or _TILE.get(kind, _TILE["cuda"])
    rows = max(1, min(num_tokens, _MAX_ROWS.get(kind, _MAX_ROWS["cuda"]), tile))
    columns = tile // rows
    if kind != "cpu" and columns > _ALIGNED:
        columns -= columns % _ALIGNED
    return rows, max(1, min(num_entries, columns))


def matmul_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of the factors of the matrix products; see ``chunked_log_probs``.

    Args:
        hidden: ``[N, D]``.
        weight: ``[V, D]``.
    """
    kind = hidden.device.type
    if torch.float64 in (hidden.dtype, weight.dtype):
        return torch.float64
    if kind == "cpu":
        return torch.float32
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return torch.promote_types(hidden.dtype, weight.dtype)


def without_autocast(kind: str) -> AbstractContextManager:
    """Return a context in which products keep the dtypes of their inputs.

    Args:
        kind: type of the device.
    """
    if torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices; the result is float32, or float64 if the factors are float64."""
    if left.dtype in (torch.float32, torch.float64):
        return left @ right
    return torch.mm(left, right, out_dtype=torch.float32)


def _sums(into: Tensor, factor: Tensor) -> bool:
    return into.dtype is factor.dtype and into.dtype in (torch.float32, torch.float64)


def _widens(into: Tensor, factor: Tensor) -> bool:
    """Whether a product of 16-bit factors is summed in float32; only a GPU can do this."""
    return into.dtype is torch.float32 and factor.dtype in (torch.bfloat16, torch.float16)


def write_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """``into = left @ right``, summed in at least float32 for all dtypes."""
    if _sums(into, left):
        torch.mm(left, right, out=into)
    elif _widens(into, left):
        torch.mm(left, right, out_dtype=torch.float32, out=into)
    else:
        into.copy_(_product(left, right))


def add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """``into += left @ right``, summed in at least float32 for all dtypes."""
    if _sums(into, left):
        into.addmm_(left, right)
    elif _widens(into, left) and not torch.compiler.is_compiling():  # torch.compile cannot trace it
        torch.addmm(into, left, right, out_dtype=torch.float32, out=into)
    else:
        into.add_(_product(left, right))


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


class HeadTiles:
    """The tiles of one head over one set of tokens.

    Args:
        hidden: ``[N, D]``.
        weight: ``[V, D]``.
        bias: ``[V]`` or ``None``.
        adapter: ``[N, R]`` or ``None``.
        adapter_weight: ``[V, R]`` or ``None``.
        temperature: a number, or float32 ``[N]``.
        settings: settings of the head.

    Attributes:
        rows: slices of the tokens.
        columns: slices of the vocabulary.
        factor: factor by which the states were multiplied: a number, or ``[N]``.
        fused: whether :mod:`torchrl_llm.functional.head_kernels` reads the tiles.
    """

    def __init__(self, hidden, weight, bias, adapter, adapter_weight, temperature, settings):
        self.weight, self.bias, self.adapter_weight = weight, bias, adapter_weight
        self.settings = settings
        num_rows, num_columns = hidden.shape[0], weight.shape[0]
        kind = hidden.device.type
        height, width = _tile_shape(num_rows, num_columns, settings.chunk_size, kind)
        self.rows = _slices(num_rows, height)
        self.columns = _slices(num_columns, width)
        plain = bias is None and not settings.form.squashes
        self.fused = plain and head_kernels.available(hidden.device, settings.dtype)
        self._buffer = None
        # Without a cap, all factors are one number per row. It is cheaper to multiply the [N, D]
        # states by it.
        self.late = None
        factor = settings.form.scale
        if isinstance(temperature, Tensor):
            temperature = temperature.to(settings.sum_dtype)
        if not settings.form.squashes:
            factor = factor / temperature
        elif isinstance(temperature, Tensor) or temperature != 1.0:
            self.late = 1.0 / temperature
        self.factor = factor
        self.hidden = self._scaled(hidden)
        self.adapter = None if adapter is None else self._scaled(adapter)

    def _scaled(self, states: Tensor) -> Tensor:
        if isinstance(self.factor, Tensor):
            states = states.to(self.settings.sum_dtype) * self.factor[:, None]
        elif self.factor != 1.0:
            states = states.to(self.settings.sum_dtype) * self.factor
        return states.to(self.settings.dtype)

    def _late(self, rows: slice) -> Tensor | float:
        return self.late[rows] if isinstance(self.late, Tensor) else self.late

    def buffer(self, rows: slice, columns: slice) -> Tensor:
        """Allocate memory for one tile ``[v, n]``, in the dtype of the sums; all tiles reuse it."""
        height, width = columns.stop - columns.start, rows.stop - rows.start
        if self._buffer is None:
            self._buffer = torch.empty(
                height * width, dtype=self.settings.sum_dtype, device=self.hidden.device
            )
        flat = self._buffer[: height * width]
        # The kernels read the logits of a token from consecutive memory.
        return flat.view(width, height).t() if self.fused else flat.view(height, width)

    def logits(self, rows: slice, columns: slice, weight: Tensor, into: Tensor) -> Tensor:
        """Write the input of the softmax, ``[v, n]``, into ``into``."""
        write_product(into, weight, self.hidden[rows].t())
        if self.adapter is not None:
            add_product(into, self.slice_of_adapter(columns), self.adapter[rows].t())
        if self.bias is not None:
            factor = self.factor[rows] if isinstance(self.factor, Tensor) else self.factor
            into.add_(self.bias[columns, None].to(into.dtype) * factor)
        self.settings.form.squash_(into)
        return into if self.late is None else into.mul_(self._late(rows))

    def uncap(self, grad: Tensor, logits: Tensor, rows: slice) -> Tensor:
        """Turn the gradient after the cap into the gradient before it, in place."""
        if self.late is not None:
            late = self._late(rows)
            grad.mul_(late)
            logits = logits / late
        return grad.mul_(self.settings.form.slope(logits))

    def slice_of_weight(self, columns: slice) -> Tensor:
        """Return ``[v, D]`` of the weight, in the dtype of the products."""
        return self.weight[columns].to(self.settings.dtype)

    def slice_of_adapter(self, columns: slice) -> Tensor:
        """Return ``[v, R]`` of the adapter, in the dtype of the products."""
        return self.adapter_weight[columns].to(self.settings.dtype)


class KeptTiles:
    """Exponentials of tiles that are kept, so that the backward need not compute them again.

    If all logits fit into ``chunk_size`` (256 MiB by default), all are kept. Otherwise the first
    tiles are kept, in the memory of the weight's gradient. This memory is needed anyway. The
    backward reads tiles and writes gradients in the same order, from the first column on. Kept
    tiles are packed towards the end of the memory, with a gap of one tile's columns, so that a
    write never overwrites a tile that has not been read. With ``b`` columns done, ``c`` columns
    kept and ``v`` columns in a tile, ``(b + v) D <= V D - (c - b) N`` must hold. It is linear in
    ``b``, so checking both ends is enough.

    Args:
        flat: the memory.
        start: position of the first tile in the memory.
        columns: vocabulary entries that are kept.
        count: ``N``.
        gradient: the memory as the weight's gradient ``[V, D]``, if it is used for the gradient.

    Attributes:
        gradient: the argument of this name.
        tops: for each tile, the maximum that was subtracted before the exponentials, ``[n]``.
    """

    def __init__(
        self, flat: Tensor, start: int, columns: int, count: int, gradient: Tensor | None = None
    ) -> None:
        self._flat, self._start, self._columns, self._count = flat, start, columns, count
        self.gradient = gradient
        self.tops: dict[tuple[int, int], Tensor] = {}

    @classmethod
    def of(cls, head: HeadTiles, weight: Tensor) -> KeptTiles | None:
        """Return the tiles of a head that can be kept; ``None`` if there is no memory for any.

        Args:
            head: the tiles.
            weight: ``[V, D]``, the parameter that takes gradients.
        """
        if head.fused:
            return None  # next to gradients in bfloat16 no tile fits, unless the inputs are small
        count, size = head.hidden.shape
        dtype, all_columns = head.settings.sum_dtype, weight.shape[0]
        if count * all_columns <= (head.settings.chunk_size or _KEPT):
            flat = torch.empty(count * all_columns, dtype=dtype, device=head.hidden.device)
            return cls(flat, 0, all_columns, count)
        fits = weight.dtype is dtype and weight.is_contiguous()
        if head.settings.in_place or not weight.requires_grad or not fits:
            return None
        gradient = torch.empty_like(weight)
        room, width, kept = gradient.numel(), head.columns[0].stop, 0
        for columns in head.columns:
            end = columns.stop
            if end * count + width * size > room or end * size + width * count > room:
                break
            kept = end
        return cls(gradient.view(-1), room - kept * count, kept, count, gradient)

    def tile(self, rows: slice, columns: slice) -> Tensor | None:
        """Return the memory of a tile, float32 ``[v, n]``, or ``None`` when it is not kept."""
        if columns.stop > self._columns:
            return None
        height, width = columns.stop - columns.start, rows.stop - rows.start
        start = self._start + columns.start * self._count + height * rows.start
        return self._flat[start : start + height * width].view(height, width)


def empty_gradients(inputs: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor]:
    """Allocate memory for those gradients of :class:`HeadGradients` that are needed.

    Args:
        inputs: see :class:`HeadGradients`.
        needs: see :class:`HeadGradients`.
    """
    wanted = [like for like, need in zip(inputs, needs, strict=True) if need]
    keeps_strides = inputs[1]  # the other gradients are collected in contiguous memory
    return [
        torch.empty_like(like) if like is keeps_strides else like.new_empty(like.shape)
        for like in wanted
    ]


class HeadGradients:
    """Collects the gradients of the five differentiable inputs of a head tile by tile.

    Args:
        head: the tiles.
        inputs: hidden states, weight, bias, adapter's states and weight; the last three may be
            ``None``.
        needs: whether each input needs a gradient.
        leaf: the weight, if its gradient is added in place.
        kept: tiles whose memory the weight's gradient takes over.
    """

    def __init__(
        self, head: HeadTiles, inputs, needs, leaf: Tensor | None, kept: KeptTiles | None
    ) -> None:
        hidden, weight, bias, adapter, adapter_weight = inputs
        self.head, self.inputs = head, inputs
        self.hidden = self._zeros(hidden) if needs[0] else None
        self.bias = self._zeros(bias) if needs[2] else None
        self.adapter = self._zeros(adapter) if needs[3] else None
        self.adapter_weight = self._zeros(adapter_weight) if needs[4] else None
        self.leaf = leaf
        self.weight = None
        if leaf is not None:
            if leaf.grad is None:
                leaf.grad = torch.zeros_like(leaf)
        elif needs[1]:
            shared = None if kept is None else kept.gradient
            self.weight = torch.empty_like(weight) if shared is None else shared
            if not head.rows:
                self.weight.zero_()

    def _zeros(self, like: Tensor) -> Tensor:
        return torch.zeros(like.shape, dtype=self.head.settings.sum_dtype, device=like.device)

    def add(self, tile_VN: Tensor, rows: slice, columns: slice, weight: Tensor) -> None:
        """Add the gradients of one tile; call it in the order of the tiles.

        Args:
            tile_VN: gradient of the tile's logits, ``[v, n]``.
            rows: the tile's tokens.
            columns: the tile's vocabulary entries.
            weight: ``[v, D]``, the weight of these entries.
        """
        head = self.head
        grad_VN = tile_VN.to(head.settings.dtype)
        if self.hidden is not None:
            add_product(self.hidden[rows], grad_VN.t(), weight)
        if self.leaf is not None:
            add_product(self.leaf.grad[columns], grad_VN, head.hidden[rows])
        elif self.weight is not None:
            add = write_product if rows.start == 0 else add_product
            add(self.weight[columns], grad_VN, head.hidden[rows])
        if self.bias is not None:
            factor = head.factor[rows] if isinstance(head.factor, Tensor) else head.factor
            self.bias[columns] += (tile_VN * factor).sum(1)
        if self.adapter is not None:
            add_product(self.adapter[rows], grad_VN.t(), head.slice_of_adapter(columns))
        if self.adapter_weight is not None:
            add_product(self.adapter_weight[columns], grad_VN, head.adapter[rows])

    def finish(self) -> list[Tensor | None]:
        """Return the gradients of the five inputs in their dtypes; ``None`` where not needed."""
        hidden, _, bias, adapter, adapter_weight = self.inputs
        factor = self.head.factor
        for states in (self.hidden, self.adapter):
            if states is not None:
                if isinstance(factor, Tensor):
                    states.mul_(factor[:, None])
                elif factor != 1.0:
                    states.mul_(factor)
        pairs = (
            (self.hidden, hidden),
            (self.weight, self.weight),
            (self.bias, bias),
            (self.adapter, adapter),
            (self.adapter_weight, adapter_weight),
        )
        return [None if grad is None else grad.to(like.dtype) for grad, like in pairs]
