"""Tensors and plain values as bytes that are safe to read from untrusted sources.

Reading runs no code. A message is a head of fixed size and a safetensors file: the tensors by name,
the plain values as JSON in its metadata. The head has the checksum that safetensors lacks and the
length, so that a file can contain consecutive messages, which are read in place. Any error in the
bytes raises a :class:`~torchrl_llm.errors.DataError`.

The number of bytes bounds the cost of reading: no two tensors share bytes, and for objects without
their own bytes (the rows of an empty tensor, see ``claims``) the header is padded with spaces.

Next: :mod:`torchrl_llm.data.wire` for rows.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrl_llm.errors import DataError

# Magic and version, two tags, total bytes, CRC-32 of the bytes after the head, CRC-32 of the head.
_HEAD = struct.Struct("<8sqqqII")
HEAD_BYTES = _HEAD.size
"""Size of the head of a message in bytes."""
_MAGIC = b"tensors1"
_ALIGN = 8
_MAX_EMPTY = 1 << 24
_MAX_DIMS = 16
MAX_DEPTH = 256
"""Maximum nesting depth of lists and dicts."""
_MAX_HEADER = 1 << 28
_ERROR_CHARS = 200
CLAIM_BYTES = 8
"""Bytes of a message per claim, that is, per object without its own bytes."""
# Dtypes by their names in safetensors.
_DTYPES = {
    **{"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16},
    **{"I32": torch.int32, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F32": torch.float32, "F64": torch.float64},
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
MALFORMED = (
    *(KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError),
    *(RecursionError, ArithmeticError),
)
"""Exceptions that may occur when objects are built from untrusted values."""


class Head(NamedTuple):
    """The fields of the head of a message.

    Attributes:
        tags: numbers chosen by the writer.
        num_bytes: length of the whole message.
        crc: CRC-32 of the bytes after the head.
    """

    tags: tuple[int, int]
    num_bytes: int
    crc: int


class Message(NamedTuple):
    """Result of :func:`from_bytes`.

    Attributes:
        head: the head of the message.
        about: the plain values.
        tensors: by name, views of the buffer or of its copy.
    """

    head: Head
    about: Any
    tensors: dict[str, Tensor]


def check(holds: bool, what: str) -> None:
    """Raise a ``ValueError`` with the text ``what`` unless ``holds``."""
    if not holds:
        raise ValueError(what)


def told(what: str, error: Exception) -> DataError:
    """An error about untrusted bytes, with its text cut to a maximum length."""
    return DataError(f"{what}: {type(error).__name__}: {error}"[:_ERROR_CHARS])


def to_bytes(
    about: Any,
    tensors: Mapping[str, Tensor] | None = None,
    *,
    tags: tuple[int, int] = (0, 0),
    claims: int = 0,
) -> bytes:
    """Write plain values and tensors.

    Args:
        about: ``None``, bools, numbers, strings, and lists and dicts of them with string keys.
        tensors: dense, of any usual dtype and device, by name.
        tags: numbers from 0, which can be read without the rest.
        claims: number of objects that a reader builds from ``about`` alone; the message is padded
            to ``CLAIM_BYTES`` for each.

    Raises:
        DataError: a value cannot be written.

    Example:
        >>> data = to_bytes({"name": "x"}, {"ids": torch.arange(3)})
        >>> message = from_bytes(data)
        >>> message.about, message.tensors["ids"].tolist()
        ({'name': 'x'}, [0, 1, 2])
    """
    header: dict[str, Any] = {}
    parts, size = [], 0
    # The largest dtypes first, so that each tensor is aligned without gaps.
    for name, tensor in sorted((tensors or {}).items(), key=lambda item: -item[1].itemsize):
        if tensor.dtype not in _NAMES or tensor.layout != torch.strided:
            raise DataError(f"a {tensor.layout} tensor of {tensor.dtype} cannot be written safely")
        dense = tensor.detach().cpu().contiguous()
        parts.append(dense.reshape(-1).view(torch.uint8).numpy())
        end = size + dense.nbytes
        entry = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape)}
        header[name], size = entry | {"data_offsets": [size, end]}, end
        claims += _empty_rows(tensor.shape)
    try:
        check_depth(about)
        text = json.dumps(about, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"only plain values can be written: {error}") from None
    header["__metadata__"] = {"about": text.ljust(CLAIM_BYTES * claims - size)}
    written = json.dumps(header, separators=(",", ":")).encode()
    written += b" " * (-len(written) % _ALIGN)
    parts = [len(written).to_bytes(8, "little"), written, *parts, bytes(-size % _ALIGN)]
    body = b"".join(parts)
    head = _HEAD.pack(_MAGIC, *tags, HEAD_BYTES + len(body), zlib.crc32(body), 0)[:-4]
    return head + zlib.crc32(head).to_bytes(4, "little") + body


def read_head(buffer: Any, start: int = 0) -> Head | None:
    """The head of a message.

    Args:
        buffer: bytes or a memory map.
        start: where the message begins.

    Returns:
        The head; ``None`` if the buffer ends before the head or the message does.

    Raises:
        DataError: no message begins here.
    """
    data = bytes(buffer[start : start + HEAD_BYTES])
    if len(data) < HEAD_BYTES:
        return None
    magic, *tags, num_bytes, body_crc, crc = _HEAD.unpack(data)
    head = Head(tuple(tags), num_bytes, body_crc)
    sound = magic == _MAGIC and crc == zlib.crc32(data[:-4]) and min(tags) >= 0
    if not sound or head.num_bytes < HEAD_BYTES + 8 or head.num_bytes % _ALIGN:
        raise DataError(f"no message of this version of torchrl_llm begins at byte {start}")
    return None if start + head.num_bytes > len(buffer) else head


def is_sound(buffer: Any, start: int, head: Head) -> bool:
    """Whether the checksum of a message is correct.

    Args:
        buffer: bytes or a memory map.
        start: where the message begins.
        head: its head.
    """
    with memoryview(buffer) as view, view[start + HEAD_BYTES : start + head.num_bytes] as body:
        return zlib.crc32(body) == head.crc


def from_bytes(buffer: Any, start: int = 0) -> Message:
    """Read what :func:`to_bytes` wrote.

    Args:
        buffer: untrusted: bytes, which are copied, or a writable buffer such as a memory map.
        start: where the message begins.

    Raises:
        DataError: the bytes are not in this format, truncated or damaged.
    """
    buffer = bytearray(buffer) if isinstance(buffer, bytes) else buffer
    head = read_head(buffer, start)
    if head is None or not is_sound(buffer, start, head):
        raise DataError(
            f"a message of {len(buffer) - start} bytes is damaged or truncated: it is shorter than "
            "its head states, or its checksum is wrong; let the sender send it again"
        )
    try:
        return Message(head, *_read(buffer, start + HEAD_BYTES, head.num_bytes - HEAD_BYTES))
    except MALFORMED as error:
        raise told("the header of a message is malformed", error) from None


def _read(buffer: Any, start: int, size: int) -> tuple[Any, dict[str, Tensor]]:
    length = int.from_bytes(buffer[start : start + 8], "little")
    check(length <= min(size - 8, _MAX_HEADER) and not length % _ALIGN, "an impossible length")
    header = json.loads(bytes(buffer[start + 8 : start + 8 + length]))
    about = json.loads(header.pop("__metadata__")["about"])
    check_depth(about)
    tensors, end, empty = {}, 0, 0
    for name, entry in header.items():
        dtype, shape, (begin, stop) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        check(all(type(n) is int and 0 <= n < 1 << 40 for n in shape), "an impossible shape")
        check(len(shape) <= _MAX_DIMS, "too many dimensions")
        count = math.prod(shape)
        holds = begin == end and begin % dtype.itemsize == 0
        check(holds and stop == begin + count * dtype.itemsize, "a tensor in an impossible place")
        end = stop
        check(end <= size - 8 - length, "a tensor behind the end")
        if count:
            place = start + 8 + length + begin
            flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=place)
        else:
            empty += _empty_rows(shape)
            check(max(shape) <= _MAX_EMPTY and empty <= size // CLAIM_BYTES, "too many empty rows")
            flat = torch.empty(0, dtype=dtype)
        tensors[name] = flat.view(shape)
    check(end + -end % _ALIGN == size - 8 - length, "bytes that are no tensor's")
    return about, tensors


def check_depth(value: Any) -> None:
    """Raise if values are nested too deeply for recursive functions.

    Raises:
        ValueError: the nesting is too deep.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, (list, dict))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise ValueError(f"values nested more than {MAX_DEPTH} deep")


def _empty_rows(shape: Any) -> int:
    """Number of tensors or lists into which an empty tensor can be split; 0 if it has bytes."""
    return 0 if all(shape) else math.prod(itertools.takewhile(bool, shape))
