"""Values of rows as JSON and named tensors; reading them runs no code.

Supported are tensors, ``None``, bools, numbers, dates and times, strings, bytes, lists, tuples,
sets and dicts of them, NumPy arrays and numbers, chats with their token records, the enums of
:mod:`torchrl_llm.data.enums`, and nodes that are tensordicts, lazy stacks, columns or known
tensorclasses. The reader checks values before it builds objects from them, and looks up classes by
name among the known classes (see :func:`safe_class`).

Next: :mod:`torchrl_llm.data.wire` for rows, :mod:`torchrl_llm.data.safe_state` for checkpoints.
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
from torchrl_llm.data.nodes import cell, typed_node
from torchrl_llm.data.record import TokenRecord, rebuild_record
from torchrl_llm.data.safe_bytes import check
from torchrl_llm.data.token_facts import FACTS, RECORD_COLUMNS, added_facts
from torchrl_llm.errors import ConfigError, DataError

MAX_ROWS = 1 << 20
"""Maximum number of rows of a message."""
# A lazy stack of lazy stacks takes twice as long to build with each dimension.
_MAX_BATCH_DIMS = 4
# Values with equal hashes are compared one by one, and the writer of a message can choose them.
_MAX_EQUAL_HASHES = 64
# Tensors may be used several times; each use costs one claim per this many bytes.
_BYTES_PER_CLAIM = 32
# The functions that write each type as text and read it.
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
_COLLECTIONS = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}
_ENUMS = {name: getattr(enums, name) for name in enums.__all__}
_CLASSES: dict[str, type] = {
    "History": History,
    **{name: getattr(views, name) for name in views.__all__},
}
_Class = TypeVar("_Class", bound=type)


def safe_class(cls: _Class) -> _Class:
    """Decorator that allows rows with nodes of a tensorclass to be sent and received.

    Args:
        cls: a tensorclass whose fields are tensors and plain values; sender and receiver must
            register it by the same name.

    Raises:
        ConfigError: not a tensorclass, or the name is taken.

    Example:
        >>> from tensordict import TensorClass
        >>> @safe_class
        ... class Board(TensorClass):
        ...     cells: torch.Tensor
        >>> safe_class(Board) is Board
        True
    """
    if not _is_tensorclass(cls):
        raise ConfigError(f"{cls!r} is not a tensorclass")
    if _CLASSES.setdefault(cls.__name__, cls) is not cls:
        raise ConfigError(f"a different class is registered as {cls.__name__!r}")
    return cls


def class_name(cls: type | None) -> str | None:
    """The name by which :func:`class_of` finds a tensorclass; ``None`` for ``None``.

    Raises:
        DataError: the class is not known.
    """
    if cls is not None and _CLASSES.get(cls.__name__) is not cls:
        raise DataError(f"the class {cls.__name__} is not known; see safe_class")
    return cls and cls.__name__


def class_of(name: str | None) -> type | None:
    """The tensorclass of a name; ``None`` for ``None``.

    Raises:
        KeyError: the name is not known.
    """
    return None if name is None else _CLASSES[name]


def use_of(tensor: Tensor) -> int:
    """Number of claims of a use of a tensor, see :func:`~torchrl_llm.data.safe_bytes.to_bytes`."""
    return 1 + tensor.nbytes // _BYTES_PER_CLAIM


class ValueWriter:
    """Turns values into JSON that refers to tensors by their names in ``tensors``.

    Attributes:
        tensors: the tensors of the values, by name.
        claims: number of objects that a reader builds from the JSON alone.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.claims = 0

    def tensor(self, tensor: Tensor, name: str = "") -> str:
        """Store a tensor and return its name, which begins with the given one."""
        self.claims += use_of(tensor)
        while not name or name in self.tensors:
            name = f"{name}#{len(self.tensors)}"
        self.tensors[name] = tensor
        return name

    def value(self, value: Any) -> Any:
        """A plain value as JSON: itself, or a list that begins with the name of its type."""
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind in _COLLECTIONS.values():
            return [kind.__name__, *map(self.value, value)]
        if kind is dict or kind is ContentItem:
            name = "dict" if kind is dict else "content"
            return [name, *([self.value(k), self.value(v)] for k, v in value.items())]
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
        if isinstance(value, Tensor):
            return ["tensor", self.tensor(value)]
        if kind is Chat:
            record = value.record and value.record.__reduce__()[1]
            return ["chat", self.value((value.messages, record))]
        raise DataError(
            f"a {kind.__module__}.{kind.__qualname__} has no safe form; send tensors, numbers, "
            "strings, and lists, tuples or dicts of them"
        )

    def node(self, node: Any) -> Any:
        """A node or leaf of a row as JSON."""
        if isinstance(node, Tensor):
            return ["tensor", self.tensor(node)]
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
            return ["class", class_name(type(node)), self.node(node._tensordict), plain]
        if isinstance(node, LazyStackedTensorDict):
            return ["stack", node.stack_dim, *map(self.node, node.tensordicts)]
        if isinstance(node, TensorDict):
            items = [[name, self.node(value)] for name, value in node._tensordict.items()]
            return ["dict", list(node.batch_size), items]
        raise DataError(f"a node of {type(node).__name__} has no safe form")


class ValueReader:
    """Builds values from untrusted JSON, checking each part first.

    Its methods raise one of :data:`~torchrl_llm.data.safe_bytes.MALFORMED` for malformed input.

    Args:
        tensors: the tensors that the JSON refers to; each use copies.
        claims: number of objects that may be built.
    """

    def __init__(self, tensors: Mapping[str, Tensor], claims: int) -> None:
        self._tensors, self._claims_left = tensors, claims

    def claim(self, count: int) -> None:
        """Count objects before they are built."""
        self._claims_left -= count
        check(self._claims_left >= 0, "more rows than its bytes can hold")

    def view(self, name: Any) -> Tensor:
        """The tensor of a name, for reading."""
        tensor = self._tensors[name]
        self.claim(use_of(tensor))
        return tensor

    def tensor(self, name: Any) -> Tensor:
        """A copy of the tensor of a name."""
        return self.view(name).clone()

    def value(self, value: Any) -> Any:
        """Read a value written by :meth:`ValueWriter.value`."""
        if type(value) is not list:
            check(type(value) is not dict, "a JSON object where a value should be")
            return value
        match value:
            case ["list" | "tuple" | "set" | "frozenset" as name, *items]:
                values = [self.value(item) for item in items]
                return _COLLECTIONS[name](_hashable(values) if "set" in name else values)
            case ["dict", *items]:
                keys = _hashable([self.value(key) for key, _ in items])
                return dict(zip(keys, [self.value(item) for _, item in items], strict=True))
            case ["number", str(dtype), item]:
                return numpy.dtype(dtype).type(self.value(item))
            case ["array", str(dtype), list(shape), place]:
                check(not (kind := numpy.dtype(dtype)).hasobject, "an array of objects")
                return self.tensor(place).numpy().view(kind).reshape(shape)
            case ["content", *items]:
                return ContentItem(self.value(["dict", *items]))
            case ["bytes", str(text)]:
                return base64.b85decode(text)
            case [str(name), str(text)] if name in _READERS:
                return _READERS[name](text)
            case ["enum", str(name), int(code)]:
                return _ENUMS[name](code)
            case ["tensor", place]:
                return self.tensor(place)
            case ["chat", ["tuple", messages, record]]:
                messages = tuple(typed(m, dict) for m in typed(self.value(messages), tuple))
                record = None if record is None else rebuild_record(*self.value(record))
                return Chat._of(messages, record and checked_record(record))
        raise ValueError("an unknown kind of value")

    def node(self, node: Any) -> Any:
        """Read a node written by :meth:`ValueWriter.node`."""
        match node:
            case ["tensor", place]:
                return self.tensor(place)
            case ["cell", [], value]:
                return cell(self.value(value))
            case ["cell", list(size), value]:
                return NonTensorData(self.value(value), batch_size=self._size(size))
            case ["column", *values]:
                return Column.of([self.value(value) for value in values])
            case ["class", str(name), inner, dict(plain)]:
                view = typed_node(_CLASSES[name], self.node(inner))
                view._non_tensordict.update({k: self.value(v) for k, v in plain.items()})
                return view
            case ["stack", int(dim), *parts]:
                stack = LazyStackedTensorDict(*map(self.node, parts), stack_dim=dim)
                check(stack.batch_dims <= _MAX_BATCH_DIMS, "too many batch dimensions")
                return stack
            case ["dict", list(size), list(items)]:
                source = {typed(name, str): self.node(value) for name, value in items}
                return TensorDict(source, batch_size=self._size(size))
        raise ValueError("an unknown kind of node")

    def _size(self, values: Any) -> list[int]:
        check(len(naturals(values, MAX_ROWS)) <= _MAX_BATCH_DIMS, "too many batch dimensions")
        self.claim(math.prod(values))
        return values


def naturals(values: Any, limit: int) -> list[int]:
    """The values, which must be a list of whole numbers from 0 to ``limit - 1``."""
    check(type(values) is list, "expected a list of numbers")
    check(set(map(type, values)) <= {int}, "no whole number")
    check(not values or (min(values) >= 0 and max(values) < limit), "a number out of range")
    return values


def typed(value: Any, kind: type) -> Any:
    """The value, which must be of exactly this type."""
    check(type(value) is kind, f"expected {kind.__name__}, got {type(value).__name__}")
    return value


def checked_record(record: TokenRecord) -> TokenRecord:
    """The record, after a check that its columns are aligned, so that no read goes past its end.

    Raises:
        ValueError: it is malformed.
    """
    length = record.token_ids.shape[0]
    unknown = record.facts and sorted({*record.facts} - {fact.name for fact in added_facts()})
    check(not unknown, f"facts {unknown} are not registered here; see register_fact")
    for name, column in record.columns().items():
        fact = FACTS[name]
        check(column.shape == (length, *fact.shape), f"{name} of a record has another length")
        check(name in RECORD_COLUMNS or column.dtype == fact.dtype, f"{name} is not {fact.dtype}")
    check(record.token_ids.dtype == torch.int64, "token ids are not int64")
    start, reason, cause = record.response_start, record.finish_reason, record.fork_cause
    naturals([record.num_messages, record.earlier_turns], 1 << 15)
    check(
        start is None or (type(start) is int and 0 <= start <= length),
        "a response begins behind the end",
    )
    check(reason is None or type(reason) is enums.FinishReason, "no reason of an end")
    check(cause is None or type(cause) is str, "a cause of forks")
    if record.support is not None:
        ids, counts = record.support
        check(counts.shape == (length,) and ids.ndim == 1, "a support of another length")
        check(not counts.dtype.is_floating_point, "a support without counts")
        check(bool((counts >= 0).all()) and int(counts.sum()) == len(ids), "a support's counts")
    return record


def _hashable(values: list[Any]) -> list[Any]:
    if len(values) > _MAX_EQUAL_HASHES:
        most = max(Counter(map(hash, values)).values())
        check(most <= _MAX_EQUAL_HASHES, "values with the same hash")
    return values
