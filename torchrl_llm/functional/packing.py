"""Streams of rows of different lengths, and attention that keeps the rows separate.

A stream is a sequence of rectangles ("blocks"). A block holds rows that are padded to one width.
Layers that act per token run on the stream directly. Attention runs block by block, so no mask over
the whole stream is built. A block may continue rows of an earlier block (responses that share a
prompt). Then its rows attend to their own prefix and, causally, to themselves.

Shape legend: ``S`` tokens of the stream, ``H`` heads, ``K`` key-value heads, ``D`` size of a head,
``n`` rows of a block, ``T`` its width, ``P`` width of the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Prefix(NamedTuple):
    """The rows that a block continues.

    Attributes:
        block: index of the block that holds the prefixes.
        owner: ``n`` row indices into that block, one per row.
        lengths: ``n`` lengths: how many tokens of the prefix a row sees.
    """

    block: int
    owner: tuple[int, ...]
    lengths: tuple[int, ...]


class AttentionBlock(NamedTuple):
    """A rectangle of rows in a stream; blocks follow each other without gaps.

    Attributes:
        rows: ``n``, number of rows.
        width: ``T``, width of the block; shorter rows are padded on the right.
        prefix: the prefix that the rows continue, or ``None`` if they have no prefix.
    """

    rows: int
    width: int
    prefix: Prefix | None = None


class PrefixView(NamedTuple):
    """A prefix in the form that attention reads.

    Attributes:
        block: index of the block that holds the prefixes.
        owner: int64 ``[n]``, rows of that block.
        mask: term added to the scores, ``[n, 1, T, P + T]``, or ``[1, 1, T, P + T]`` if all rows
            share one mask: 0 for visible keys, minus infinity for hidden keys.
    """

    block: int
    owner: Tensor
    mask: Tensor


class RowCosts(NamedTuple):
    """Costs of the parts of a forward and backward, in any common unit.

    Attributes:
        token: cost of one token outside of attention.
        pair: cost of one pair of query and key in attention.
        call: cost of one call of the model.
        block: cost of one more attention within a call, over all layers.
    """

    token: float
    pair: float
    call: float
    block: float


def length_buckets(
    lengths: Sequence[int], *, token: float, pair: float, cut: float
) -> list[list[int]]:
    """Split rows into buckets of similar length, with little padding and few buckets.

    Rows are taken from longest to shortest. A bucket ends when its padding would cost more than a
    new bucket. The total cost is at most twice the optimum.

    Args:
        lengths: tokens in each row.
        token: cost of a padded token.
        pair: cost of a padded query and key.
        cut: cost of a bucket.

    Returns:
        Row indices of each bucket, longest rows first; each row appears once.

    Example:
        >>> length_buckets([2, 9, 3, 8], token=1.0, pair=0.0, cut=4.0)
        [[1, 3], [2, 0]]
    """
    buckets: list[list[int]] = []
    width, waste = 0, 0.0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        length = lengths[row]
        waste += token * (width - length) + pair * (width**2 - length**2) / 2
        if not buckets or waste > cut:
            buckets.append([])
            width, waste = length, 0.0
        buckets[-1].append(row)
    return buckets


def blocks_cost(blocks: Sequence[AttentionBlock], costs: RowCosts, *, calls: int = 1) -> float:
    """Estimate the cost of a stream.

    Args:
        blocks: the stream.
        costs: costs of the parts of a stream.
        calls: number of calls of the model; the number of blocks if each block is a separate call.

    Example:
        >>> costs = RowCosts(token=1.0, pair=0.0, call=10.0, block=1.0)
        >>> blocks_cost([AttentionBlock(2, 8), AttentionBlock(1, 4)], costs)
        31.0
    """
    tokens = pairs = 0.0
    for block in blocks:
        area = block.rows * block.width
        tokens += area
        if block.prefix is None:
            pairs += area * block.width / 2
        else:
            # Attention with a mask also computes the hidden keys.
            pairs += area * (block.width + max(block.prefix.lengths))
    extra = len(blocks) - calls
    return costs.token * tokens + costs.pair * pairs + costs.call * calls + costs.block * extra


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Sequence[AttentionBlock],
    *,
    prefixes: Sequence[PrefixView | None] | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute the causal attention of a stream, block by block.

    Args:
        query: ``[1, H, S, D]``.
        key: ``[1, K, S, D]``.
        value: ``[1, K, S, D]``.
        blocks: the stream; their areas sum to ``S``.
        prefixes: result of :func:`prefix_views` for the blocks, if several layers share it.
        dropout_p: see ``scaled_dot_product_attention``, which also documents the next two
            arguments.
        scale: factor on the scores.
        enable_gqa: whether ``K`` may be smaller than ``H``; ``K`` must divide ``H``.

    Returns:
        ``[1, H, S, D]``.

    Example:
        >>> x = torch.randn(1, 2, 7, 4)
        >>> out = block_attention(x, x, x, [AttentionBlock(1, 3), AttentionBlock(2, 2)])
        >>> alone = torch.nn.functional.scaled_dot_product_attention(
        ...     x[:, :, :3], x[:, :, :3], x[:, :, :3], is_causal=True)
        >>> torch.allclose(out[:, :, :3], alone, atol=1e-6)
        True
    """
    attend = torch.nn.functional.scaled_dot_product_attention
    settings = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    # One split per tensor: with single slices, the backward would allocate a stream of zeros for
    # each slice.
    sizes = [block.rows * block.width for block in blocks]
    queries, keys, values = (
        [_rectangle(part, block) for part, block in zip(x.split(sizes, dim=2), blocks, strict=True)]
        for x in (query, key, value)
    )
    if prefixes is None:
        prefixes = prefix_views(blocks, query)
    outputs = []
    for q, k, v, prefix in zip(queries, keys, values, prefixes, strict=True):
        if prefix is None:
            out = attend(q, k, v, is_causal=True, **settings)
        else:
            k = torch.cat([keys[prefix.block].index_select(0, prefix.owner), k], dim=2)
            v = torch.cat([values[prefix.block].index_select(0, prefix.owner), v], dim=2)
            out = attend(q, k, v, attn_mask=prefix.mask, **settings)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).transpose(0, 1)[None]


def _rectangle(part: Tensor, block: AttentionBlock) -> Tensor:
    """Convert ``[1, H, n T, D]`` of a stream to ``[n, H, T, D]``."""
    if block.rows == 1:
        return part
    _, heads, _, size = part.shape
    return part.reshape(heads, block.rows, block.width, size).transpose(0, 1)


def prefix_views(blocks: Sequence[AttentionBlock], like: Tensor) -> list[PrefixView | None]:
    """Return the prefixes that blocks attend to; ``None`` for blocks without a prefix.

    Args:
        blocks: the stream.
        like: a tensor with the dtype and device of the scores.

    Example:
        >>> blocks = [AttentionBlock(1, 2), AttentionBlock(1, 1, Prefix(0, (0,), (1,)))]
        >>> prefix_views(blocks, torch.zeros(()))[1].mask
        tensor([[[[0., -inf, 0.]]]])
    """
    return [None if b.prefix is None else _view(b, blocks[b.prefix.block], like) for b in blocks]


def _view(block: AttentionBlock, before: AttentionBlock, like: Tensor) -> PrefixView:
    lengths = block.prefix.lengths
    lengths = lengths[:1] if len(set(lengths)) == 1 else lengths
    device = like.device
    # Only two short lists are copied, without blocking the host; the masks are built on the device.
    sizes, owner = (
        torch.tensor(x).to(device, non_blocking=True) for x in (lengths, block.prefix.owner)
    )
    seen = torch.arange(before.width, device=device) < sizes[:, None]
    own = torch.ones(block.width, block.width, dtype=torch.bool, device=device).tril()
    shape = (len(lengths), 1, block.width)
    seen = seen[:, None, None].expand(*shape, before.width)
    whole = torch.cat([seen, own.expand(*shape, block.width)], dim=-1)
    mask = torch.zeros(whole.shape, dtype=like.dtype, device=device)
    return PrefixView(block.prefix.block, owner, mask.masked_fill_(~whole, -torch.inf))


def block_mask(blocks: Sequence[AttentionBlock], device: torch.device | None = None) -> Tensor:
    """Return the mask that :func:`block_attention` avoids: which tokens each token attends to.

    Returns:
        bool ``[S, S]``; the first dimension is the query.

    Example:
        >>> block_mask([AttentionBlock(1, 2), AttentionBlock(1, 1)]).int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 0, 1]], dtype=torch.int32)
    """
    starts = [0]
    for block in blocks:
        starts.append(starts[-1] + block.rows * block.width)
    mask = torch.zeros(starts[-1], starts[-1], dtype=torch.bool, device=device)
    for block, start in zip(blocks, starts, strict=False):
        causal = torch.ones(block.width, block.width, dtype=torch.bool, device=device).tril()
        for row in range(block.rows):
            own = slice(start + row * block.width, start + (row + 1) * block.width)
            mask[own, own] = causal
            if block.prefix is not None:
                before = block.prefix.block
                first = starts[before] + block.prefix.owner[row] * blocks[before].width
                mask[own, first : first + block.prefix.lengths[row]] = True
    return mask
