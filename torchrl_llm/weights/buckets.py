"""Weights as few flat buffers: what both ends of a transfer work out from names and shapes alone.

One collective for each of hundreds of tensors costs ten times one collective for all of them.
Buffers hold one dtype and a bounded number of bytes, so that a big model never needs its size once
more for sending.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_llm.errors import ConfigError

Metadata = Mapping[str, tuple[torch.dtype, torch.Size]]
"""Name to dtype and shape."""


class Piece(NamedTuple):
    """One tensor in a buffer.

    Attributes:
        name: of the weight.
        shape: of the weight.
        offset: of its first element.
        numel: number of its elements.
    """

    name: str
    shape: torch.Size
    offset: int
    numel: int


class Bucket(NamedTuple):
    """One buffer.

    Attributes:
        dtype: of all its elements.
        numel: number of its elements.
        pieces: what lies in it, without gaps.
    """

    dtype: torch.dtype
    numel: int
    pieces: tuple[Piece, ...]


def plan_buckets(metadata: Metadata, bucket_bytes: int, bucket_tensors: int = 0) -> list[Bucket]:
    """Which tensors share a buffer; the same on every machine.

    Args:
        metadata: of all tensors, in any order.
        bucket_bytes: most bytes a buffer; a tensor that is larger has one of its own.
        bucket_tensors: most tensors a buffer; 0 for any number.

    Returns:
        Buffers, by dtype and then by name.

    Example:
        >>> shape = torch.Size([2])
        >>> kinds = {"b": (torch.float32, shape), "a": (torch.float32, shape)}
        >>> [[piece.name for piece in bucket.pieces] for bucket in plan_buckets(kinds, 1024)]
        [['a', 'b']]
        >>> [[piece.name for piece in bucket.pieces] for bucket in plan_buckets(kinds, 8)]
        [['a'], ['b']]
    """
    if bucket_bytes < 1:
        raise ConfigError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    if bucket_tensors < 0:
        raise ConfigError(f"bucket_tensors must be at least 0, got {bucket_tensors}")
    buckets: list[Bucket] = []
    open_dtype: torch.dtype | None = None
    pieces: list[Piece] = []
    numel = 0

    def close() -> None:
        if pieces:
            buckets.append(Bucket(open_dtype, numel, tuple(pieces)))

    for name, (dtype, shape) in sorted(metadata.items(), key=lambda x: (str(x[1][0]), x[0])):
        size = shape.numel()
        full = (numel + size) * dtype.itemsize > bucket_bytes or len(pieces) == bucket_tensors > 0
        if dtype != open_dtype or full:
            close()
            open_dtype, pieces, numel = dtype, [], 0
        pieces.append(Piece(name, shape, numel, size))
        numel += size
    close()
    return buckets


def flatten(bucket: Bucket, weights: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """The buffer with the values of its tensors, ``[numel]``; a lone tensor is not copied."""
    parts = [weights[piece.name].reshape(-1) for piece in bucket.pieces]
    if len(parts) == 1:
        return parts[0].to(device).contiguous()
    buffer = torch.empty(bucket.numel, dtype=bucket.dtype, device=device)
    for piece, part in zip(bucket.pieces, parts, strict=True):
        buffer[piece.offset : piece.offset + piece.numel].copy_(part)
    return buffer


def split(bucket: Bucket, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Names and views of the tensors in a buffer."""
    for piece in bucket.pieces:
        values = buffer[piece.offset : piece.offset + piece.numel]
        yield piece.name, values.view(piece.shape)


def metadata_to_json(metadata: Metadata) -> tuple[str, str]:
    """Metadata as text, and a short name for it by which its readers may keep it."""
    rows = [
        [name, str(dtype).removeprefix("torch."), list(shape)]
        for name, (dtype, shape) in sorted(metadata.items())
    ]
    text = json.dumps(rows)
    return text, hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def metadata_from_json(text: str) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """What :func:`metadata_to_json` wrote."""
    return {
        name: (getattr(torch, dtype), torch.Size(shape)) for name, dtype, shape in json.loads(text)
    }
