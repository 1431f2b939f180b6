"""One step's rows as a block of bytes, of which any row is read without reading the others.

A block is a head of fixed size, a header in JSON and the columns of all rows as flat arrays at
multiples of 8 bytes, so that a file of blocks is read where it lies. Columns that are equal are
written once; messages and other values are JSON each, and written once however many rows have them.
Reading runs no code, and what is read is checked first, as in :mod:`torchrl_llm.data.safe_wire`,
whose form of values this is.

Next: :mod:`torchrl_llm.data.rollout_store` for the files.

Shape legend: ``N`` rows, ``L_n`` length of row ``n``, ``L`` their sum.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_llm.data import safe_wire
from torchrl_llm.data.chat import Chat
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.record import TokenRecord
from torchrl_llm.data.safe_bytes import _DTYPES, _check_depth
from torchrl_llm.data.safe_wire import (
    _CLASSES,
    _MAX_ROWS,
    _WRONG,
    _check,
    _check_record,
    _name_of,
    _typed,
)
from torchrl_llm.data.scoring import Support
from torchrl_llm.data.token_facts import RECORD_COLUMNS, SUPPORT_COLUMNS
from torchrl_llm.data.wire import (
    PackedRows,
    _Chats,
    _Objects,
    _Records,
    _Tensors,
    _without_lacking,
    cell,
    new_node,
    pack_rows,
    typed_node,
)
from torchrl_llm.errors import DataError

# Magic and version, step, rows, bytes of the header, bytes of all, CRC-32 of all behind the head,
# CRC-32 of the head.
_HEAD = struct.Struct("<8sqqqqII")
HEAD_BYTES = _HEAD.size
"""Bytes of the head of a block."""
_MAGIC = b"rollout1"
_ALIGN = 8
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _DTYPES}
_BY_NAME = {name: dtype for dtype, name in _NAMES.items()}
# Rows of a block that are cut out of its columns one by one, before all are cut at once.
_FEW_ROWS = 4
_MAX_HEADER = 1 << 28


_CALLS = ("next", "tools", "calls")


def _timeless(calls: Any) -> Any:
    """Records of tool calls without their seconds."""
    return tuple({name: fact for name, fact in c.items() if name != "seconds"} for c in calls)


class Head(NamedTuple):
    """What the head of a block says.

    Attributes:
        step: training step of the rows.
        num_rows: how many there are.
        header_bytes: length of the JSON behind the head.
        num_bytes: length of the whole block.
        crc: CRC-32 of what stands behind the head.
    """

    step: int
    num_rows: int
    header_bytes: int
    num_bytes: int
    crc: int


def write_block(step: int, rows: Iterable[Any], about: Mapping[str, Any] | None = None) -> bytes:
    """Rows of a step as bytes, the same for the same rows: times (``..._seconds``) are left out.

    Args:
        step: its number.
        rows: tensordicts without batch dimension, at least one.
        about: plain values to go with them.

    Raises:
        DataError: a value that has no safe form; the message names its key.

    Example:
        >>> data = write_block(3, [TensorDict(ids=torch.arange(n)) for n in (2, 4)])
        >>> block = Block(data)
        >>> block.head.step, len(block), block.row(1)["ids"].tolist()
        (3, 2, [0, 1, 2, 3])
    """
    packed = pack_rows(rows)
    if not 0 < packed.num_rows <= _MAX_ROWS:
        raise DataError(f"a block has from 1 to {_MAX_ROWS} rows, got {packed.num_rows}")
    writer = _BlockWriter()
    header = writer.header(packed, about or {})
    text = json.dumps(header, separators=(",", ":")).encode()
    parts = [text, b" " * (-len(text) % _ALIGN)]
    for array in writer.arrays:
        parts += [array, bytes(-len(array) % _ALIGN)]
    body = b"".join(parts)
    told = (_MAGIC, step, packed.num_rows, len(text), HEAD_BYTES + len(body), zlib.crc32(body))
    head = _HEAD.pack(*told, 0)[:-4]
    return head + zlib.crc32(head).to_bytes(4, "little") + body


def read_head(buffer: Any, start: int = 0) -> Head | None:
    """The head of a block.

    Args:
        buffer: bytes or a memory map.
        start: where the block begins.

    Returns:
        What it says; ``None`` where the buffer ends before the head or the block does.

    Raises:
        DataError: no block begins here.
    """
    data = bytes(buffer[start : start + HEAD_BYTES])
    if len(data) < HEAD_BYTES:
        return None
    magic, *told, crc = _HEAD.unpack(data)
    head = Head(*told)
    sound = magic == _MAGIC and crc == zlib.crc32(data[:-4])
    sound = sound and head.step >= 0 and 0 < head.num_rows <= _MAX_ROWS
    sound = sound and 0 < head.header_bytes <= min(head.num_bytes - HEAD_BYTES, _MAX_HEADER)
    if not sound or head.num_bytes % _ALIGN:
        raise DataError(f"no block of rollouts of this version begins at byte {start}")
    return None if start + head.num_bytes > len(buffer) else head


def is_sound(buffer: Any, start: int, head: Head) -> bool:
    """Whether a block is what was written, by its checksum.

    Args:
        buffer: bytes or a memory map.
        start: where the block begins.
        head: what its head says.
    """
    with memoryview(buffer) as view, view[start + HEAD_BYTES : start + head.num_bytes] as body:
        return zlib.crc32(body) == head.crc


class _BlockWriter:
    """Arrays and values of a block, each once, and the header that says where they are."""

    def __init__(self) -> None:
        self.arrays: list[memoryview | bytes] = []
        self.shapes: list[list[Any]] = []
        self._places: dict[Any, int] = {}
        self._values = safe_wire._Writer()
        self._texts: dict[bytes, int] = {}
        # By object, too: the rows hold them all, and many have the same.
        self._by_id: dict[int, int] = {}

    def tensor(self, tensor: Tensor) -> int:
        dense = tensor.detach().cpu().contiguous()
        if dense.dtype not in _NAMES:
            raise DataError(f"a tensor of {dense.dtype} cannot be kept")
        data = dense.reshape(-1).view(torch.uint8).numpy().tobytes()
        about = [_NAMES[dense.dtype], *dense.shape]
        return self._place(data, about)

    def numbers(self, values: Sequence[int]) -> int:
        return self.tensor(torch.tensor(values, dtype=torch.int64))

    def _place(self, data: bytes, about: list[Any]) -> int:
        key = (*about, data)
        place = self._places.setdefault(key, len(self.arrays))
        if place == len(self.arrays):
            self.arrays.append(data)
            self.shapes.append(about)
        return place

    def place_texts(self, values: Iterable[Any]) -> int:
        """The array of where values stand among the texts of the block."""
        known = self._by_id
        places = [
            known[at] if (at := id(value)) in known else self._text(value) for value in values
        ]
        return self.numbers(places)

    def _text(self, value: Any) -> int:
        text = json.dumps(self._values.value(value), separators=(",", ":")).encode()
        place = self._texts.setdefault(text, len(self._texts))
        self._by_id[id(value)] = place
        return place

    def header(self, packed: PackedRows, about: Mapping[str, Any]) -> dict[str, Any]:
        columns = []
        # Sorted: the order of a row's keys says nothing, and may differ after a resume.
        for (path, kind), column in sorted(packed.columns.items(), key=itemgetter(0)):
            if path[-1].endswith("seconds"):
                continue
            if path == _CALLS:
                column = _Objects(column.rows, list(map(_timeless, column.values)))
            try:
                content = self.column(column)
            except DataError as error:
                raise DataError(f"key {path}: {error}") from None
            kind = kind if kind in ("tensor", "chat", "object") else "node"
            columns.append([list(path), kind, self.where(column.rows), content])
        nodes = [
            [list(path), None if cls is None else _name_of(cls), self.where(rows)]
            for (path, cls), rows in sorted(packed.nodes.items(), key=lambda node: node[0][0])
        ]
        header = {
            "about": self._values.value(dict(about)),
            "columns": columns,
            "nodes": nodes,
            "records": None if packed.records is None else self.records(packed.records),
        }
        inner = [self.tensor(tensor) for tensor in self._values.tensors]
        texts = [self.numbers(list(map(len, self._texts)))]
        texts.append(self._place(b"".join(self._texts), ["uint8", sum(map(len, self._texts))]))
        return {**header, "inner": inner, "texts": texts, "arrays": self.shapes}

    def where(self, rows: list[int] | None) -> int | None:
        return None if rows is None else self.numbers(rows)

    def column(self, column: Any) -> Any:
        if isinstance(column, _Tensors):
            if isinstance(column.values, list):
                return [list(map(self.tensor, column.values)), None]
            lengths = None if column.lengths is None else self.numbers(column.lengths)
            return [self.tensor(column.values), lengths]
        if isinstance(column, _Chats):
            messages = self.place_texts(chain.from_iterable(column.messages))
            lengths = list(map(len, column.messages))
            return [messages, self.numbers(lengths), self.numbers(column.records)]
        if isinstance(column, _Objects):
            return self.place_texts(column.values)
        return [self._values.node(value) for value in column.values]

    def records(self, records: _Records) -> list[Any]:
        columns = {name: self.column(column) for name, column in records.columns.items()}
        finish = [None if reason is None else int(reason) for reason in records.finish_reason]
        rest = [records.num_messages, finish, records.response_start, records.fork_cause]
        return [columns, *rest, records.earlier_turns]


class _Values(safe_wire._Reader):
    """Plain values and nodes, whose tensors may be read more than once."""

    def __init__(self, num_rows: int, tensors: list[Tensor], claims: int) -> None:
        super().__init__({"num_rows": num_rows}, tensors, claims)

    def tensor(self, place: Any) -> Tensor:
        _check(type(place) is int and 0 <= place < len(self.tensors), "no such tensor")
        return self.tensors[place].clone()


class _Cut:
    """A column of tensors, of which rows are cut."""

    def __init__(self, values: Any, lengths: Sequence[int] | None, where: Any) -> None:
        self._where, self._lengths = where, lengths
        self._values, self._parts = values, values if isinstance(values, list) else None
        self._ends = None if lengths is None else [0, *accumulate(lengths)]

    def of(self, index: int) -> Tensor | None:
        """The tensor of a row, ``None`` where it has none."""
        where = self._where
        if where is not None:
            if index not in where:
                return None
            index = where[index]
        if self._parts is not None:
            return self._parts[index]
        if self._ends is None:
            return self._values[index]
        return self._values[self._ends[index] : self._ends[index + 1]]

    def cut(self) -> None:
        """Cut all rows at once, which is cheaper than one by one."""
        if self._parts is None:
            flat = self._lengths is None
            self._parts = (
                self._values.unbind(0) if flat else self._values.split(list(self._lengths))
            )


class _ChatColumn(NamedTuple):
    messages: list[int]
    ends: list[int]
    records: list[int]


class Block:
    """The rows of a step, read one by one from the bytes of :func:`write_block`.

    Args:
        buffer: bytes, which are copied, or a memory map that may be written to.
        start: where the block begins.

    Attributes:
        head: what its head says.
        about: what was written with the rows.

    Raises:
        DataError: the bytes are cut short, damaged or malformed.
    """

    def __init__(self, buffer: Any, start: int = 0) -> None:
        buffer = bytearray(buffer) if isinstance(buffer, bytes) else buffer
        head = read_head(buffer, start)
        if head is None:
            raise DataError("a block of rollouts is cut short")
        self.head = head
        if not is_sound(buffer, start, head):
            raise DataError(
                f"the rollouts of step {head.step} are damaged: their checksum is wrong"
            )
        text = bytes(buffer[start + HEAD_BYTES : start + HEAD_BYTES + head.header_bytes])
        try:
            self._open(json.loads(text), buffer, start)
        except _WRONG as error:
            raise self._malformed(error) from None
        self._reads = 0

    def __len__(self) -> int:
        return self.head.num_rows

    def _malformed(self, error: Exception) -> DataError:
        said = f"{type(error).__name__}: {error}"[:200]
        return DataError(f"the rollouts of step {self.head.step} are malformed: {said}")

    # -- opening ----------------------------------------------------------------------------------

    def _open(self, header: Any, buffer: Any, start: int) -> None:
        _check_depth(header)
        _typed(header, dict)
        self._arrays = self._map(header["arrays"], buffer, start)
        inner = [self._array(place) for place in _typed(header["inner"], list)]
        values = _Values(self.head.num_rows, inner, self.head.num_bytes)
        self._value = values.value
        self.about: dict[str, Any] = _typed(self._value(header["about"]), dict)
        lengths, text = header["texts"]
        ends = [0, *accumulate(self._numbers(lengths, self.head.num_bytes))]
        self._text = self._array(text).numpy()
        _check(self._text.ndim == 1 and ends[-1] == len(self._text), "texts of other lengths")
        self._text_ends, self._read_texts = ends, {}
        self._cuts: list[_Cut] = []
        self._known_cuts: dict[Any, int] = {}
        self._open_records(header["records"])
        self._nodes: list[tuple[int, str, type | None, Any]] = []
        packed = PackedRows(self.head.num_rows, {}, {}, None)
        nodes = sorted(_typed(header["nodes"], list), key=lambda node: len(node[0]))
        slots: dict[Any, int] = {(): 0}
        for path, name, place in nodes:
            path, cls = values.path(path), None if name is None else _CLASSES[name]
            where = self._where(place)
            packed.nodes[path, cls] = None if where is None else list(where)
            # One slot a path, whatever its class is in which row.
            slots.setdefault(path, len(slots))
            self._nodes.append((slots[path], slots[path[:-1]], path[-1], cls, where))
        self._num_slots = len(slots)
        self._leaves: list[tuple[int, str, int]] = []
        self._cells: list[tuple[int, str, str, dict[int, int] | None, Any]] = []
        for path, kind, place, content in _typed(header["columns"], list):
            path, where = values.path(path), self._where(place)
            count = self.head.num_rows if where is None else len(where)
            slot, name = slots[path[:-1]], path[-1]
            if kind == "tensor":
                self._leaves.append((slot, name, self._cut(content, count, place)))
            else:
                if kind == "chat":
                    held: Any = self._chats(content, count)
                elif kind == "object":
                    held = self._numbers(content, len(ends) - 1, count)
                else:
                    held = [values.node(node) for node in _typed(content, list)]
                    _check(kind == "node" and len(held) == count, "a column of an impossible kind")
                self._cells.append((slot, name, kind, where, held))
            column = _Objects(None if where is None else list(where), [])
            packed.columns[path, kind] = column
        values._check_places(packed)

    def _map(self, shapes: Any, buffer: Any, start: int) -> list[Tensor]:
        """The arrays of the block, where they lie."""
        at = start + HEAD_BYTES + self.head.header_bytes
        at += -self.head.header_bytes % _ALIGN
        end = start + self.head.num_bytes
        arrays = []
        for name, *shape in _typed(shapes, list):
            dtype = _BY_NAME[name]
            _check(all(type(n) is int and 0 <= n < 1 << 40 for n in shape), "an impossible shape")
            _check(len(shape) <= 16, "too many dimensions")
            count = math.prod(shape)
            size = count * dtype.itemsize
            _check(at + size <= end, "an array behind the end")
            if count:
                flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=at)
            else:
                _check(max(shape) < 1 << 24, "an empty array of an impossible shape")
                flat = torch.empty(0, dtype=dtype)
            arrays.append(flat.view(shape))
            at += size + -size % _ALIGN
        return arrays

    def _array(self, place: Any) -> Tensor:
        _check(type(place) is int and 0 <= place < len(self._arrays), "no such array")
        return self._arrays[place]

    def _numbers(self, place: Any, limit: int, count: int | None = None) -> list[int]:
        array = self._array(place)
        _check(array.dtype == torch.int64 and array.ndim == 1, "numbers of another type")
        _check(count is None or len(array) == count, "a column is too short or too long")
        values = array.tolist()
        _check(not values or (min(values) >= 0 and max(values) < max(limit, 1)), "out of range")
        return values

    def _where(self, place: Any) -> dict[int, int] | None:
        """Row to its place in a column."""
        if place is None:
            return None
        rows = self._numbers(place, self.head.num_rows)
        where = {row: at for at, row in enumerate(rows)}
        _check(len(where) == len(rows), "a row twice in a column")
        return where

    def _cut(self, content: Any, count: int, place: Any) -> int:
        """Which of the cut columns a column is; equal ones are one."""
        values, lengths = content
        key = (tuple(values) if type(values) is list else values, lengths, place)
        number = self._known_cuts.setdefault(key, len(self._cuts))
        if number == len(self._cuts):
            self._cuts.append(self._tensors(values, lengths, count, self._where(place)))
        return number

    def _tensors(self, values: Any, lengths: Any, count: int, where: Any) -> _Cut:
        if type(values) is list:
            _check(len(values) == count and lengths is None, "a column is too short or too long")
            return _Cut([self._array(place) for place in values], None, where)
        array = self._array(values)
        _check(array.ndim > 0, "a column without a row dimension")
        if lengths is None:
            _check(array.shape[0] == count, "a column is too short or too long")
            return _Cut(array, None, where)
        numbers = self._numbers(lengths, array.shape[0] + 1, count)
        _check(sum(numbers) == array.shape[0], "wrong lengths")
        return _Cut(array, numbers, where)

    def _chats(self, content: Any, count: int) -> _ChatColumn:
        messages, lengths, records = content
        told = self._array(records)
        _check(told.dtype == torch.int64 and told.shape == (count,), "records of another type")
        places = told.tolist()
        _check(not places or (min(places) >= -1 and max(places) < self._num_records), "no record")
        found = self._numbers(messages, len(self._text_ends) - 1)
        ends = [0, *accumulate(self._numbers(lengths, len(found) + 1, count))]
        _check(ends[-1] == len(found), "wrong lengths")
        return _ChatColumn(found, ends, places)

    def _open_records(self, content: Any) -> None:
        self._num_records, self._record_columns = 0, {}
        if content is None:
            return
        columns, *rest = content
        self._num_records = len(rest[0])
        _check(all(type(p) is list and len(p) == self._num_records for p in rest), "a record lacks")
        names = set(_typed(columns, dict))
        _check(names.issuperset(RECORD_COLUMNS), "wrong columns of records")
        _check(len(names & set(SUPPORT_COLUMNS)) != 1, "wrong columns of records")
        for name, (values, lengths) in columns.items():
            column = self._tensors(values, lengths, self._num_records, None)
            self._record_columns[name] = column
        num_messages, finish, starts, causes, turns = rest
        reasons = [None if code is None else FinishReason(code) for code in finish]
        counts = (*num_messages, *turns, *(s for s in starts if s is not None))
        _check(all(type(n) is int and 0 <= n < 1 << 40 for n in counts), "a number out of range")
        _check(all(c is None or type(c) is str for c in causes), "a cause of forks")
        self._record_rest = (num_messages, reasons, starts, causes, turns)

    # -- reading ----------------------------------------------------------------------------------

    def row(self, index: int) -> TensorDict:
        """One row, as it was written.

        Args:
            index: from 0.

        Returns:
            A tensordict without batch dimension. Its tensors are views of the buffer: clone what is
            to be changed.

        Raises:
            DataError: the row is malformed.
        """
        self._reads += 1
        if self._reads == _FEW_ROWS:
            for column in (*self._cuts, *self._record_columns.values()):
                column.cut()
        try:
            return self._row(index)
        except _WRONG as error:
            raise self._malformed(error) from None

    def _row(self, index: int) -> TensorDict:
        parts = [column.of(index) for column in self._cuts]
        holders: list[dict[str, Any]] = [{} for _ in range(self._num_slots)]
        for slot, name, number in self._leaves:
            part = parts[number]
            if part is not None:
                holders[slot][name] = part
        records: dict[int, TokenRecord] = {}
        for slot, name, kind, where, held in self._cells:
            place = index if where is None else where.get(index)
            if place is None:
                continue
            if kind == "chat":
                holders[slot][name] = cell(self._chat(held, place, records))
            elif kind == "object":
                holders[slot][name] = self._cell(held[place])
            else:
                holders[slot][name] = held[place].clone()
        for slot, parent, name, cls, where in reversed(self._nodes):
            if where is None or index in where:
                node = new_node(holders[slot])
                holders[parent][name] = node if cls is None else typed_node(cls, node)
        return new_node(holders[0])

    def _read(self, place: int) -> Any:
        return self._value(
            json.loads(bytes(self._text[slice(*self._text_ends[place : place + 2])]))
        )

    def _cell(self, place: int) -> Any:
        found = self._read_texts.get(place)
        if found is None:
            found = self._read_texts[place] = cell(self._read(place))
        return found

    def _message(self, place: int) -> dict[str, Any]:
        found = self._read_texts.get(~place)
        if found is None:
            found = self._read_texts[~place] = _typed(self._read(place), dict)
        return found

    def _chat(self, column: _ChatColumn, place: int, records: dict[int, TokenRecord]) -> Chat:
        begin, end = column.ends[place : place + 2]
        messages = tuple(map(self._message, column.messages[begin:end]))
        number = column.records[place]
        if number < 0:
            return Chat._of(messages, None)
        if number not in records:
            records[number] = self._record(number)
        return Chat._of(messages, records[number])

    def _record(self, number: int) -> TokenRecord:
        columns = {name: column.of(number) for name, column in self._record_columns.items()}
        ids, counts = (columns.pop(name, None) for name in SUPPORT_COLUMNS)
        if len(columns) > len(RECORD_COLUMNS):
            columns = _without_lacking(columns)
        num_messages, reasons, starts, causes, turns = self._record_rest
        record = TokenRecord.of(
            columns,
            num_messages=num_messages[number],
            finish_reason=reasons[number],
            response_start=starts[number],
            fork_cause=causes[number],
            earlier_turns=turns[number],
            support=None if ids is None or not counts.numel() else Support(ids, counts),
        )
        _check_record(record)
        return record
