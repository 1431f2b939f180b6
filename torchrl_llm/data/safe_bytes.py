"""Tensors and plain values as bytes that may come from anyone: reading them runs no code.

The way of safetensors: a JSON header, then the raw bytes of the tensors. Whatever is wrong with the
bytes is a :class:`~torchrl_llm.errors.DataError`.

.. code-block:: text

    8 bytes   magic and version of the format
    4 bytes   CRC-32 of all that follows
    8 bytes   length H of the header
    H bytes   JSON: {"about": ..., "tensors": [[dtype, shape, offset], ...]}
    ...       the tensors in this order, each at a multiple of 8 bytes from here

What reading costs is bounded by the number of bytes: no two tensors share any, and what a header
claims without bytes of its own (the rows of an empty tensor, see ``claims``) is paid for by spaces
at the end of the header.

Next: :mod:`torchrl_llm.data.safe_wire` for rows.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchrl_llm.errors import DataError

_MAGIC = b"trlLLM\x00\x01"
_HEAD = struct.Struct("<8sIQ")
_ALIGN = 8
_MAX_EMPTY = 1 << 24
_MAX_DIMS = 16
_MAX_DEPTH = 256
_ERROR_CHARS = 200
CLAIM_BYTES = 8
"""Bytes of a message for each thing that it claims without bytes of its own."""
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def to_bytes(about: Any, tensors: Sequence[Tensor] = (), *, claims: int = 0) -> bytes:
    """Write plain values and tensors.

    Args:
        about: ``None``, bools, numbers, strings, and lists and dicts of them with string keys.
        tensors: dense, of any usual dtype and device.
        claims: things that a reader builds of ``about`` alone; the message is made long enough for
            them, with ``CLAIM_BYTES`` each.

    Raises:
        DataError: something that cannot be written.

    Example:
        >>> data = to_bytes({"name": "x"}, [torch.arange(3)])
        >>> about, tensors = from_bytes(data)
        >>> about, tensors[0].tolist()
        ({'name': 'x'}, [0, 1, 2])
    """
    table, parts, offset = [], [], 0
    for tensor in tensors:
        if tensor.dtype not in _NAMES or tensor.layout != torch.strided:
            raise DataError(f"a {tensor.layout} tensor of {tensor.dtype} cannot be written safely")
        flat = tensor.detach().to("cpu").contiguous().flatten()
        content = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        table.append([_NAMES[tensor.dtype], list(tensor.shape), offset])
        claims += 0 if content else _empty_rows(tensor.shape)
        padding = -len(content) % _ALIGN
        parts += [content, b"\0" * padding]
        offset += len(content) + padding
    try:
        _check_depth(about)
        header = json.dumps({"about": about, "tensors": table}, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"only plain values can be written: {error}") from None
    header += b" " * (CLAIM_BYTES * claims - len(header) - offset)
    header += b" " * (-(_HEAD.size + len(header)) % _ALIGN)
    body = b"".join([header, *parts])
    crc = zlib.crc32(body, zlib.crc32(struct.pack("<Q", len(header))))
    return _HEAD.pack(_MAGIC, crc, len(header)) + body


def from_bytes(data: bytes) -> tuple[Any, list[Tensor]]:
    """Read what :func:`to_bytes` wrote.

    Args:
        data: from anyone.

    Returns:
        The plain values, and the tensors on the CPU: views of one block of memory of their own.

    Raises:
        DataError: the bytes are not of this format, cut short or damaged.
    """
    if len(data) < _HEAD.size or data[: len(_MAGIC)] != _MAGIC:
        raise DataError(
            f"{len(data)} bytes are not a message of torchrl_llm (or of another version)"
        )
    _, crc, length = _HEAD.unpack_from(data)
    start = _HEAD.size + length
    body = memoryview(data)[_HEAD.size :]
    if start > len(data) or crc != zlib.crc32(body, zlib.crc32(data[12:20])):
        raise DataError(f"a message of {len(data)} bytes is cut short or damaged")
    try:
        header = json.loads(data[_HEAD.size : start])
        about, table = header["about"], header["tensors"]
        _check_depth(about)
        return about, _read(bytearray(body[length:]), table, len(data) // CLAIM_BYTES)
    except (KeyError, TypeError, ValueError, RecursionError, RuntimeError, OverflowError) as error:
        said = str(error)[:_ERROR_CHARS]
        raise DataError(f"the header of a message is malformed: {said}") from None


def _check_depth(value: Any) -> None:
    """Refuse what functions that call themselves could not walk through."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, (list, dict))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise ValueError(f"values nested more than {_MAX_DEPTH} deep")


def _empty_rows(shape: Sequence[int]) -> int:
    """How many tensors or lists an empty tensor falls into."""
    return math.prod(itertools.takewhile(bool, shape))


def _read(block: bytearray, table: list[Any], claims: int) -> list[Tensor]:
    tensors, end = [], 0
    for name, shape, offset in table:
        dtype = _DTYPES[name]
        if len(shape) > _MAX_DIMS or not all(type(n) is int and n >= 0 for n in (*shape, offset)):
            raise ValueError("a shape or offset is not a natural number")
        count = math.prod(shape)
        if not count:
            claims -= _empty_rows(shape)
            if max(shape) > _MAX_EMPTY or claims < 0:
                raise ValueError("an empty tensor of an impossible shape")
            tensors.append(torch.empty(shape, dtype=dtype))
            continue
        if offset % _ALIGN or offset < end or offset + count * dtype.itemsize > len(block):
            raise ValueError("a tensor lies outside the message, or on another one")
        end = offset + count * dtype.itemsize
        tensors.append(torch.frombuffer(block, dtype=dtype, count=count, offset=offset).view(shape))
    return tensors
