"""Rows as bytes for a network that is not trusted: no pickle, only what is listed here.

:class:`~torchrl_llm.data.wire.PackedRows` are a few tensors and plain values; here they become
bytes and come back the same, by :mod:`torchrl_llm.data.safe_bytes`. What is read is checked before
anything is built of it, classes are looked up by name among those of :func:`safe_class`, and
whatever does not fit is a :class:`~torchrl_llm.errors.DataError`. Time and memory of reading grow
with the bytes of a message, whatever it claims: each row of each node and column needs its share of
them, and no tensor is in two places.

Written are tensors, ``None``, bools, numbers, dates and times, strings, bytes, lists, tuples, sets
and dicts of them, NumPy's arrays and numbers, chats with their token records, the enums of
:mod:`torchrl_llm.data.enums`, and nodes that are tensordicts, lazy stacks, columns or known
tensorclasses.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import IntEnum
from typing import Any, TypeVar

import numpy
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict
from tensordict import is_tensorclass as _is_tensorclass
from torch import Tensor

from torchrl_llm.data import enums, views
from torchrl_llm.data.chat import Chat
from torchrl_llm.data.column import Column
from torchrl_llm.data.content import ContentItem
from torchrl_llm.data.history import History
from torchrl_llm.data.record import TokenRecord
from torchrl_llm.data.safe_bytes import CLAIM_BYTES, from_bytes, to_bytes
from torchrl_llm.data.token_facts import FACTS, RECORD_COLUMNS, SUPPORT_COLUMNS, added_facts
from torchrl_llm.data.wire import (
    PackedRows,
    _Chats,
    _Nodes,
    _Objects,
    _Records,
    _Tensors,
    cell,
    typed_node,
)
from torchrl_llm.errors import ConfigError, DataError

_MAX_ROWS = 1 << 20
_MAX_PATH = 32
# A lazy stack of lazy stacks takes twice as long to build with each dimension.
_MAX_BATCH_DIMS = 4
# Values of one hash are compared one by one, and whoever writes a message can choose their hashes.
_MAX_EQUAL_HASHES = 64
_ERROR_CHARS = 200
# Each as a text, and what reads it.
_SCALARS: dict[type, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    Decimal: (str, Decimal),
    date: (date.isoformat, date.fromisoformat),
    datetime: (datetime.isoformat, datetime.fromisoformat),
    time: (time.isoformat, time.fromisoformat),
    timedelta: (
        lambda span: str(span // timedelta(microseconds=1)),
        lambda text: timedelta(microseconds=int(text)),
    ),
}
_READERS = {kind.__name__: read for kind, (_, read) in _SCALARS.items()}
_ENUMS = {name: getattr(enums, name) for name in enums.__all__}
_CLASSES: dict[str, type] = {
    "History": History,
    **{name: getattr(views, name) for name in views.__all__},
}
_Class = TypeVar("_Class", bound=type)
_WRONG = (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError)
_WRONG = (*_WRONG, RecursionError, ArithmeticError)


def safe_class(cls: _Class) -> _Class:
    """Let rows with nodes of a tensorclass be sent and received; a decorator.

    Args:
        cls: a tensorclass whose fields are tensors and plain values; both ends must know it by the
            same name.

    Raises:
        ConfigError: it is no tensorclass, or the name is taken.

    Example:
        >>> from tensordict import TensorClass
        >>> @safe_class
        ... class Board(TensorClass):
        ...     cells: torch.Tensor
        >>> safe_class(Board) is Board
        True
    """
    if not _is_tensorclass(cls):
        raise ConfigError(f"{cls!r} is no tensorclass")
    if _CLASSES.setdefault(cls.__name__, cls) is not cls:
        raise ConfigError(f"another class is known as {cls.__name__!r}")
    return cls


def rows_to_bytes(rows: PackedRows, about: Mapping[str, Any] | None = None) -> bytes:
    """Write rows.

    Args:
        rows: in wire form.
        about: plain values to go with them, by name.

    Raises:
        DataError: a value that has no safe form; the message names its key.

    Example:
        >>> from torchrl_llm.data.ragged import ragged_rows, read_rows
        >>> from torchrl_llm.data.wire import pack_rows
        >>> packed = pack_rows(ragged_rows({"ids": [torch.tensor([1, 2]), torch.tensor([3])]}))
        >>> rows, about = rows_from_bytes(rows_to_bytes(packed, {"worker": "a"}))
        >>> [ids.tolist() for ids in read_rows(rows.unpack(), "ids")], about
        ([[1, 2], [3]], {'worker': 'a'})
    """
    writer = _Writer()
    writer.claims += rows.num_rows
    columns = []
    for (path, kind), column in rows.columns.items():
        writer.claims += _count(rows, column.rows)
        try:
            columns.append([list(path), kind, column.rows, writer.column(column)])
        except DataError as error:
            raise DataError(f"key {path}: {error}") from None
    nodes = [
        [list(path), None if cls is None else _name_of(cls), where]
        for (path, cls), where in rows.nodes.items()
    ]
    writer.claims += sum(_count(rows, where) for where in rows.nodes.values())
    records = None if rows.records is None else writer.records(rows.records)
    header = {
        "about": writer.value(dict(about or {})),
        "num_rows": rows.num_rows,
        "columns": columns,
        "nodes": nodes,
        "records": records,
    }
    return to_bytes(header, writer.tensors, claims=writer.claims)


def rows_from_bytes(data: bytes) -> tuple[PackedRows, dict[str, Any]]:
    """Read rows that :func:`rows_to_bytes` wrote.

    Args:
        data: from anyone.

    Returns:
        The rows in wire form, and what was sent with them.

    Raises:
        DataError: the bytes are no such rows.
    """
    header, tensors = from_bytes(data)
    try:
        return _Reader(header, tensors, len(data) // CLAIM_BYTES).rows()
    except _WRONG as error:
        said = f"{type(error).__name__}: {error}"[:_ERROR_CHARS]
        raise DataError(f"a message holds no rows: {said}") from None


def _count(rows: PackedRows, where: list[int] | None) -> int:
    return rows.num_rows if where is None else len(where)


def _name_of(cls: type) -> str:
    if _CLASSES.get(cls.__name__) is not cls:
        raise DataError(f"the class {cls.__name__} is not known; see safe_class")
    return cls.__name__


class _Writer:
    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.claims = 0

    def tensor(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def column(self, column: Any) -> Any:
        if isinstance(column, _Tensors):
            values = column.values
            several = isinstance(values, list)
            written = list(map(self.tensor, values)) if several else self.tensor(values)
            return [written, column.lengths]
        if isinstance(column, _Chats):
            return [self.value([list(m) for m in column.messages]), column.records]
        if isinstance(column, _Objects):
            return self.value(column.values)
        return [self.node(value) for value in column.values]

    def records(self, records: _Records) -> Any:
        columns = {name: self.column(column) for name, column in records.columns.items()}
        self.claims += len(records.num_messages) * len(columns)
        finish = [None if reason is None else int(reason) for reason in records.finish_reason]
        rest = [records.num_messages, finish, records.response_start, records.fork_cause]
        return [columns, *rest, records.earlier_turns]

    def value(self, value: Any) -> Any:
        """A plain value as JSON: itself, or a list that begins with the name of its type."""
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind in (list, tuple, set, frozenset):
            return [kind.__name__, *map(self.value, value)]
        if kind is dict:
            return ["dict", *([self.value(k), self.value(v)] for k, v in value.items())]
        if kind is bytes:
            return ["bytes", base64.b85encode(value).decode()]
        if kind in _SCALARS:
            return [kind.__name__, _SCALARS[kind][0](value)]
        if isinstance(value, IntEnum) and _ENUMS.get(kind.__name__) is kind:
            return ["enum", kind.__name__, int(value)]
        if isinstance(value, numpy.generic):
            return ["number", str(value.dtype), self.value(value.item())]
        if kind is numpy.ndarray and not value.dtype.hasobject:
            raw = numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8)
            place = self.tensor(torch.from_numpy(raw.copy()))
            return ["array", str(value.dtype), list(value.shape), place]
        if kind is ContentItem:
            return ["content", *([self.value(k), self.value(v)] for k, v in value.items())]
        if isinstance(value, Tensor):
            return ["tensor", self.tensor(value)]
        if kind is Chat:
            record = None if value.record is None else self.records(_Records.of([value.record]))
            return ["chat", self.value(list(value.messages)), record]
        raise DataError(
            f"a {kind.__module__}.{kind.__qualname__} has no safe form; send tensors, numbers, "
            "strings, and lists, tuples or dicts of them"
        )

    def node(self, node: Any) -> Any:
        if isinstance(node, (NonTensorData, TensorDict)):
            self.claims += node.batch_size.numel()
        if isinstance(node, NonTensorData):
            return ["cell", list(node.batch_size), self.value(node.data)]
        if isinstance(node, NonTensorStack):
            if node.batch_dims != 1:
                raise DataError("a stack of objects with more than one batch dimension")
            return ["column", *map(self.value, node.tolist())]
        if _is_tensorclass(node):
            plain = {name: self.value(value) for name, value in node._non_tensordict.items()}
            return ["class", _name_of(type(node)), self.node(node._tensordict), plain]
        if isinstance(node, LazyStackedTensorDict):
            return ["stack", node.stack_dim, *map(self.node, node.tensordicts)]
        if isinstance(node, TensorDict):
            items = [[name, self._leaf(value)] for name, value in node._tensordict.items()]
            return ["dict", list(node.batch_size), items]
        raise DataError(f"a node of {type(node).__name__} has no safe form")

    def _leaf(self, value: Any) -> Any:
        return ["tensor", self.tensor(value)] if isinstance(value, Tensor) else self.node(value)


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _naturals(values: Any, limit: int) -> list[int]:
    _check(type(values) is list, "expected a list of numbers")
    _check(all(type(v) is int and 0 <= v < limit for v in values), "a number out of range")
    return values


def _hashable(values: list[Any]) -> list[Any]:
    most = max(Counter(map(hash, values)).values(), default=0)
    _check(most <= _MAX_EQUAL_HASHES, "values with the same hash")
    return values


def _typed(value: Any, kind: type) -> Any:
    _check(type(value) is kind, f"expected {kind.__name__}, got {type(value).__name__}")
    return value


class _Reader:
    """Builds rows of a header that nobody vouches for, checking each part first."""

    def __init__(self, header: Any, tensors: list[Tensor], claims: int) -> None:
        self.header, self.claims_left = _typed(header, dict), claims
        # Each is taken once; a second one of its place would cost what no bytes were sent for.
        self.tensors: list[Tensor | None] = list(tensors)
        self.num_rows = header["num_rows"]
        _naturals([self.num_rows], _MAX_ROWS)
        self.claim(self.num_rows)

    def claim(self, count: int) -> None:
        self.claims_left -= count
        _check(self.claims_left >= 0, "more rows than its bytes can hold")

    def rows(self) -> tuple[PackedRows, dict[str, Any]]:
        about = _typed(self.value(self.header["about"]), dict)
        records = self.header["records"]
        records = None if records is None else self.records(records)
        self.num_records = 0 if records is None else len(records.num_messages)
        nodes: dict[Any, Any] = {}
        for path, name, where in _typed(self.header["nodes"], list):
            cls = None if name is None else _CLASSES[name]
            nodes[self.path(path), cls] = self.where(where)
        columns: dict[Any, Any] = {}
        for path, kind, where, content in _typed(self.header["columns"], list):
            where = self.where(where)
            count = self.num_rows if where is None else len(where)
            columns[self.path(path), _typed(kind, str)] = self.column(kind, where, count, content)
        packed = PackedRows(self.num_rows, columns, nodes, records)
        self._check_places(packed)
        return packed, about

    def _check_places(self, packed: PackedRows) -> None:
        """Every column and node stands in a node that its rows have."""
        every = set(range(self.num_rows))
        have: dict[Any, set[int]] = {(): every}
        for (path, _), where in packed.nodes.items():
            rows = every if where is None else set(where)
            _check(not rows & have.get(path, set()), f"the node {path} twice in a row")
            have[path] = have.get(path, set()) | rows
        taken = {path: set(rows) for path, rows in have.items()}
        for (path, _), column in packed.columns.items():
            rows = every if column.rows is None else set(column.rows)
            _check(not rows & taken.get(path, set()), f"the key {path} twice in a row")
            taken.setdefault(path, set()).update(rows)
        for path, rows in taken.items():
            _check(not path or rows <= have.get(path[:-1], set()), f"{path} stands nowhere")

    def path(self, path: Any) -> tuple[str, ...]:
        _check(0 < len(_typed(path, list)) <= _MAX_PATH, "a key of impossible length")
        return tuple(_typed(name, str) for name in path)

    def where(self, where: Any) -> list[int] | None:
        self.claim(self.num_rows if where is None else len(_typed(where, list)))
        if where is None:
            return None
        _naturals(where, self.num_rows)
        _check(len(set(where)) == len(where), "a row twice in a column")
        return where

    def tensor(self, place: Any) -> Tensor:
        (place,) = _naturals([place], len(self.tensors))
        tensor, self.tensors[place] = self.tensors[place], None
        _check(tensor is not None, "a tensor in two places")
        return tensor

    def size(self, values: Any) -> list[int]:
        _check(len(_naturals(values, _MAX_ROWS)) <= _MAX_BATCH_DIMS, "too many batch dimensions")
        self.claim(math.prod(values))
        return values

    def column(self, kind: str, where: list[int] | None, count: int, content: Any) -> Any:
        builders: dict[str, Callable[..., Any]] = {
            "tensor": self.tensor_column,
            "chat": self.chats,
            "object": self.objects,
        }
        if kind in builders:
            return builders[kind](where, count, content)
        nodes = [self.node(node) for node in _typed(content, list)]
        _check(len(nodes) == count, "a column is too short or too long")
        return _Nodes(where, nodes)

    def tensor_column(self, where: list[int] | None, count: int, content: Any) -> _Tensors:
        places, lengths = content
        if type(places) is list:
            _check(lengths is None and len(places) == count, "a column is too short or too long")
            return _Tensors(where, [self.tensor(place) for place in places], None)
        values = self.tensor(places)
        _check(values.ndim > 0, "a column without a row dimension")
        if lengths is None:
            _check(values.shape[0] == count, "a column is too short or too long")
        else:
            _naturals(lengths, values.shape[0] + 1)
            _check(len(lengths) == count and sum(lengths) == values.shape[0], "wrong lengths")
        return _Tensors(where, values, lengths)

    def objects(self, where: list[int] | None, count: int, content: Any) -> _Objects:
        values = _typed(self.value(content), list)
        _check(len(values) == count, "a column is too short or too long")
        return _Objects(where, values)

    def chats(self, where: list[int] | None, count: int, content: Any) -> _Chats:
        written, records = content
        messages = [self.messages(chat) for chat in _typed(self.value(written), list)]
        _check(len(messages) == len(_typed(records, list)) == count, "a column is too short")
        _naturals([place + 1 for place in records], self.num_records + 1)
        return _Chats(where, messages, records)

    def messages(self, chat: Any) -> tuple[dict[str, Any], ...]:
        return tuple(_typed(message, dict) for message in _typed(chat, list))

    def records(self, content: Any) -> _Records:
        columns, num_messages, finish, starts, causes, turns = content
        count = len(_naturals(num_messages, _MAX_ROWS))
        names = set(_typed(columns, dict))
        self.claim(count * len(names))
        _check(names.issuperset(RECORD_COLUMNS), "wrong columns of records")
        facts = names.difference(RECORD_COLUMNS, SUPPORT_COLUMNS)
        _check(len(names & set(SUPPORT_COLUMNS)) != 1, "wrong columns of records")
        unknown = sorted(facts.difference(fact.name for fact in added_facts()))
        _check(not unknown, f"facts {unknown} are not registered here; see register_fact")
        lists = [_typed(part, list) for part in (finish, starts, causes, turns)]
        _check(all(len(part) == count for part in lists), "a record is missing")
        _naturals([start for start in starts if start is not None], 1 << 40)
        _naturals(turns, 1 << 15)
        _check(all(cause is None or type(cause) is str for cause in causes), "a cause of forks")
        built = {name: self.tensor_column(None, count, part) for name, part in columns.items()}
        reasons = [None if code is None else enums.FinishReason(code) for code in finish]
        records = _Records(built, num_messages, reasons, starts, causes, turns)
        for record in records.split():
            _check_record(record)
        return records

    def value(self, value: Any) -> Any:
        if type(value) is not list:
            _check(type(value) is not dict, "a JSON object where a value should be")
            return value
        match value:
            case ["list", *items]:
                return [self.value(item) for item in items]
            case ["tuple", *items]:
                return tuple(self.value(item) for item in items)
            case ["set", *items]:
                return set(_hashable([self.value(item) for item in items]))
            case ["frozenset", *items]:
                return frozenset(_hashable([self.value(item) for item in items]))
            case ["dict", *items]:
                keys = _hashable([self.value(key) for key, _ in items])
                return dict(zip(keys, [self.value(item) for _, item in items], strict=True))
            case ["number", str(dtype), item]:
                return numpy.dtype(dtype).type(self.value(item))
            case ["array", str(dtype), list(shape), place]:
                _check(not (kind := numpy.dtype(dtype)).hasobject, "an array of objects")
                return self.tensor(place).numpy().view(kind).reshape(shape).copy()
            case ["content", *items]:
                return ContentItem(_typed(self.value(["dict", *items]), dict))
            case ["bytes", str(text)]:
                return base64.b85decode(text)
            case [str(name), str(text)] if name in _READERS:
                return _READERS[name](text)
            case ["enum", str(name), int(code)]:
                return _ENUMS[name](code)
            case ["tensor", place]:
                return self.tensor(place)
            case ["chat", messages, record]:
                records = [None] if record is None else self.records(record).split()
                (one,) = records
                return Chat._of(self.messages(self.value(messages)), one)
        raise ValueError("an unknown kind of value")

    def node(self, node: Any) -> Any:
        match node:
            case ["tensor", place]:
                return self.tensor(place)
            case ["cell", [], value]:
                return cell(self.value(value))
            case ["cell", list(size), value]:
                return NonTensorData(self.value(value), batch_size=self.size(size))
            case ["column", *values]:
                return Column.of([self.value(value) for value in values])
            case ["class", str(name), inner, dict(plain)]:
                view = typed_node(_CLASSES[name], self.node(inner))
                view._non_tensordict.update({k: self.value(v) for k, v in plain.items()})
                return view
            case ["stack", int(dim), *parts]:
                stack = LazyStackedTensorDict(*map(self.node, parts), stack_dim=dim)
                _check(stack.batch_dims <= _MAX_BATCH_DIMS, "too many batch dimensions")
                return stack
            case ["dict", list(size), list(items)]:
                source = {_typed(name, str): self.node(value) for name, value in items}
                return TensorDict(source, batch_size=self.size(size))
        raise ValueError("an unknown kind of node")


def _check_record(record: TokenRecord) -> None:
    """The columns of a record are aligned, or whatever reads it would read past its end."""
    length = record.token_ids.shape[0]
    for name, column in record.columns().items():
        fact = FACTS[name]
        _check(column.shape == (length, *fact.shape), f"{name} of a record has another length")
        _check(name in RECORD_COLUMNS or column.dtype == fact.dtype, f"{name} is not {fact.dtype}")
    _check(record.token_ids.dtype == torch.int64, "token ids are not int64")
    start = record.response_start
    _check(start is None or start <= length, "a response begins behind the end")
    if record.support is not None:
        ids, counts = record.support
        _check(counts.shape == (length,) and ids.ndim == 1, "a support of another length")
        _check(not counts.dtype.is_floating_point, "a support without counts")
        _check(bool((counts >= 0).all()) and int(counts.sum()) == len(ids), "a support's counts")
