"""Tensors and plain values as bytes that may come from anyone: reading them runs no code.

A message is a CRC-32, which safetensors does not have, and then a safetensors file. Its tensors are
called ``"0"``, ``"1"``, ... and ``"about"``, which holds JSON. Whatever is wrong with the bytes is
a :class:`~torchrl_llm.errors.DataError`.

The number of bytes bounds what reading costs: no two tensors share any, and what a message claims
without bytes of its own (the rows of an empty tensor, see ``claims``) is paid for by spaces at the
end of the JSON.

Next: :mod:`torchrl_llm.data.safe_wire` for rows.
"""

from __future__ import annotations

import itertools
import json
import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from torchrl_llm.errors import DataError

_CRC_BYTES = 4
_MAX_EMPTY = 1 << 24
_MAX_DIMS = 16
_MAX_DEPTH = 256
_ERROR_CHARS = 200
CLAIM_BYTES = 8
"""Bytes of a message for each thing that it claims without bytes of its own."""
_DTYPES = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
_WRONG = (KeyError, TypeError, ValueError, RecursionError, RuntimeError, OverflowError)


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
    parts = {}
    for place, tensor in enumerate(tensors):
        if tensor.dtype not in _DTYPES or tensor.layout != torch.strided:
            raise DataError(f"a {tensor.layout} tensor of {tensor.dtype} cannot be written safely")
        # safetensors refuses tensors that share memory, as views of one column do.
        dense = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        parts[str(place)] = dense
        claims += _empty_rows(dense)
    try:
        _check_depth(about)
        text = json.dumps(about, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"only plain values can be written: {error}") from None
    paid = sum(tensor.nbytes for tensor in parts.values())
    text += b" " * (CLAIM_BYTES * claims - len(text) - paid)
    parts["about"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    body = save(parts)
    return zlib.crc32(body).to_bytes(_CRC_BYTES, "little") + body


def from_bytes(data: bytes) -> tuple[Any, list[Tensor]]:
    """Read what :func:`to_bytes` wrote.

    Args:
        data: from anyone.

    Returns:
        The plain values, and the tensors on the CPU, in memory of their own.

    Raises:
        DataError: the bytes are not of this format, cut short or damaged.
    """
    body = data[_CRC_BYTES:]
    if zlib.crc32(body).to_bytes(_CRC_BYTES, "little") != data[:_CRC_BYTES]:
        raise DataError(
            f"{len(data)} bytes are not a message of torchrl_llm (or of another version), or one "
            "that is cut short or damaged; let the other end send it again"
        )
    try:
        parts = load(body)
        about = json.loads(parts.pop("about").numpy().tobytes())
        _check_depth(about)
        tensors = [parts[str(place)] for place in range(len(parts))]
        if any(t.dtype not in _DTYPES or t.ndim > _MAX_DIMS for t in tensors):
            raise ValueError("a tensor of an impossible type or shape")
        empty = [tensor for tensor in tensors if not tensor.numel()]
        claimed = sum(map(_empty_rows, empty))
        if claimed > len(data) // CLAIM_BYTES or any(max(t.shape) > _MAX_EMPTY for t in empty):
            raise ValueError("an empty tensor of an impossible shape")
        return about, tensors
    except (*_WRONG, SafetensorError) as error:
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


def _empty_rows(tensor: Tensor) -> int:
    """How many tensors or lists an empty tensor falls into; 0 for one that has bytes."""
    return 0 if tensor.numel() else math.prod(itertools.takewhile(bool, tensor.shape))
