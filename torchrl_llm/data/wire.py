"""Codec of rows: a few long tensors and a table of objects, for pickles, networks and files.

In memory, rows have one small tensor per row and key. Pickling a batch in this form costs twenty
times as much, and a row that is a view includes its whole storage. :func:`pack_rows` converts any
rows to columns. It supports ragged tensors, strings, other objects, chats with their token records,
keys that only some rows have, and the tensorclass of every node. :class:`PackedRows` can read any
row without the others, and :meth:`PackedRows.unpack` returns all rows.

Processes that trust each other pickle packed rows. For untrusted connections, :func:`encode` writes
them as bytes. :meth:`PackedRows.open` reads these bytes, in place in a file or from a network. It
checks the bytes first, runs no code, and raises a :class:`~torchrl_llm.errors.DataError` for
invalid data. The number of bytes limits time and memory of reading: each row of each node and
column, and each use of a tensor, needs some bytes of its own.

Next: :mod:`torchrl_llm.data.safe_values` for the form of single values,
:mod:`torchrl_llm.data.rollout_store` for files of rows.

Shape legend: ``N`` rows that have a column, ``L`` records.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorDict,
    TensorDictBase,
    is_tensorclass,
)
from torch import Tensor

from torchrl_llm.data import safe_bytes
from torchrl_llm.data.chat import Chat
from torchrl_llm.data.nodes import Path, cell, new_node, plain_node, typed_node
from torchrl_llm.data.ragged import RaggedColumn, lazy_rows
from torchrl_llm.data.record import TokenRecord
from torchrl_llm.data.safe_values import (
    MAX_ROWS,
    ValueReader,
    ValueWriter,
    checked_record,
    class_name,
    class_of,
    naturals,
    typed,
    use_of,
)
from torchrl_llm.data.scoring import Support
from torchrl_llm.data.token_facts import SUPPORT_COLUMNS
from torchrl_llm.errors import DataError

_MAX_PATH = 32
# Key of the other values of a token record; not the name of a fact.
_REST = "*"
# After this many rows have been cut out of their columns one by one, all rows are cut together.
_FEW_ROWS = 4
_to_json = json.JSONEncoder(separators=(",", ":")).encode
_from_json = json.JSONDecoder().decode


class PackedColumn(NamedTuple):
    """A key of some rows, whose values have the same kind.

    Attributes:
        path: the key.
        kind: ``"tensor"``, ``"object"``, ``"node"`` (its contents are columns, too), or ``"whole"``
            for nodes that have their own batch size.
        rows: indices of the rows that have it; ``None`` for all.
        content: a :class:`~torchrl_llm.data.ragged.RaggedColumn`, the indices of objects in the
            table, a node's tensorclass or ``None``, or whole nodes; read by index.
    """

    path: Path
    kind: str
    rows: list[int] | None
    content: Any


class _Chat(NamedTuple):
    """A chat in a table: its messages, and the index of its record (-1 for none)."""

    messages: tuple[dict[str, Any], ...]
    record: int


@dataclass(slots=True, eq=False)
class _Table:
    """Objects and token records, each stored once; columns refer to them by index."""

    objects: Sequence[Any] = ()
    records: PackedRows | None = None
    is_checked: bool = True
    # Records of the row that is being read, so that its chats share records as before packing.
    row_records: dict[int, TokenRecord] = field(default_factory=dict)
    _cells: dict[int, NonTensorData] = field(default_factory=dict)

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        return _slots(self, row_records={}, _cells={})

    def cell(self, place: int) -> NonTensorData:
        """Return the cell of an object; rows share it unless it is a chat."""
        found = self._cells.get(place)
        if found is not None:
            return found
        value = self.objects[place]
        if type(value) is _Chat:
            return cell(Chat._of(value.messages, self._record(value.record)))
        found = self._cells[place] = cell(value)
        return found

    def _record(self, place: int) -> TokenRecord | None:
        found = self.row_records.get(place)
        if found is None and place >= 0:
            found = _record_of(self.records.read(place))
            self.row_records[place] = found if self.is_checked else checked_record(found)
        return found


@dataclass(slots=True, eq=False)
class _Whole:
    nodes: list[Any]

    def __getitem__(self, index: int) -> Any:
        return self.nodes[index].clone(recurse=False)


@dataclass(slots=True, eq=False)
class PackedRows:
    """Rows stored as columns, from :func:`pack_rows` or :meth:`open`; picklable, read by index.

    Attributes:
        num_rows: number of rows.
        columns: the keys, a node before its contents.
        table: objects and token records, to which the columns refer.
        about: values that were sent with the rows.

    Example:
        >>> packed = pack_rows([TensorDict(ids=torch.arange(n)) for n in (2, 4)])
        >>> len(packed), packed[1]["ids"].tolist()
        (2, [0, 1, 2, 3])
    """

    num_rows: int
    columns: list[PackedColumn]
    table: _Table
    about: dict[str, Any] = field(default_factory=dict)
    _plan: tuple[int, list[Any], list[Any]] | None = field(default=None, init=False)
    _reads: int = field(default=0, init=False)

    @classmethod
    def open(cls, buffer: Any, start: int = 0) -> PackedRows:
        """Read rows that :func:`encode` wrote.

        Args:
            buffer: untrusted data. ``bytes`` are checked as a whole, and the rows have their own
                memory. In a writable buffer, such as a memory map, each row is checked when it is
                read. Its tensors are views: clone them before you change them.
            start: position where the message begins.

        Raises:
            DataError: the bytes are truncated, damaged or not such rows.
        """
        message, copied = safe_bytes.from_bytes(buffer, start), isinstance(buffer, bytes)
        opener = _Opener(message.tensors, message.head.num_bytes // safe_bytes.CLAIM_BYTES, copied)
        try:
            packed = opener.rows(typed(message.about, dict))
            for place in range(len(packed.table.objects)) if copied else ():
                if type(packed.table.objects[place]) is _Chat:
                    packed.table.cell(place)
        except safe_bytes.MALFORMED as error:
            raise safe_bytes.told("a message holds no rows", error) from None
        return packed

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        return _slots(self, _plan=None, _reads=0)

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> TensorDict:
        """One row, a tensordict without batch dimension.

        Raises:
            IndexError: there is no such row.
            DataError: it is malformed.
        """
        if not 0 <= index < self.num_rows:
            raise IndexError(f"row {index} of {self.num_rows}")
        self.table.row_records.clear()
        try:
            return new_node(self.read(index))
        except safe_bytes.MALFORMED as error:
            raise safe_bytes.told(f"row {index} is malformed", error) from None

    def unpack(self) -> LazyStackedTensorDict:
        """Return all rows as a lazy stack of batch size ``[N]``.

        The tensors of a row are views of the long tensors, so one row keeps all of these in memory;
        see :func:`~torchrl_llm.data.nodes.own_rows`.

        Raises:
            ValueError: there are no rows; a lazy stack cannot be empty.
        """
        if not self.num_rows:
            raise ValueError("no rows were packed; a lazy stack needs at least one")
        return lazy_rows(unpack_row_list(self))

    def read(self, index: int) -> dict[str, Any]:
        """The contents of the tensordict of a row."""
        self._reads += 1
        if self._reads in (1, _FEW_ROWS):
            self._plan = self._make_plan(cut=self._reads > 1)
        num_slots, leaves, nodes = self._plan
        holders: list[dict[str, Any]] = [{} for _ in range(num_slots)]
        for slot, name, where, content in leaves:
            if where is None or index in where:
                value = content[index if where is None else where[index]]
                holders[slot][name] = self.table.cell(value) if type(value) is int else value
        for slot, parent, name, cls, where in nodes:
            if where is None or index in where:
                node = new_node(holders[slot])
                holders[parent][name] = node if cls is None else typed_node(cls, node)
        return holders[0]

    def _make_plan(self, *, cut: bool) -> tuple[int, list[Any], list[Any]]:
        """Plan with numbers instead of paths: one per node, whatever its class in each row."""
        paths = dict.fromkeys(column.path for column in self.columns if column.kind == "node")
        slots: dict[Path, int] = {path: slot for slot, path in enumerate([(), *paths])}
        leaves, nodes = [], []
        # Inner nodes first.
        for path, kind, rows, content in sorted(self.columns, key=lambda c: -len(c.path)):
            parent, name, where = slots[path[:-1]], path[-1], _where(rows)
            if kind == "node":
                nodes.append((slots[path], parent, name, content, where))
            else:
                content = content.split() if cut and kind == "tensor" else content
                leaves.append((parent, name, where, content))
        return len(slots), leaves, nodes


def _slots(of: Any, **anew: Any) -> tuple[None, dict[str, Any]]:
    """The pickled values of slots, without caches from reading."""
    return None, {name: getattr(of, name) for name in of.__slots__} | anew


def _where(rows: list[int] | None) -> dict[int, int] | None:
    """Map of row to its index in a column that only some rows have."""
    return None if rows is None else {row: place for place, row in enumerate(rows)}


def pack_rows(rows: TensorDictBase | Iterable[TensorDictBase]) -> PackedRows:
    """Convert rows to columns.

    Args:
        rows: a tensordict of batch size ``[N]``, or tensordicts without batch dimension. Rows may
            have different keys.

    Returns:
        The packed rows. Tensors are copied; objects are referenced.

    Raises:
        ValueError: a tensordict does not have exactly one batch dimension.

    Example:
        >>> from torchrl_llm.data.ragged import ragged_rows, read_rows
        >>> packed = pack_rows(ragged_rows({"ids": [torch.tensor([1, 2]), torch.tensor([3])]}))
        >>> [row.tolist() for row in read_rows(packed.unpack(), "ids")]
        [[1, 2], [3]]
    """
    members = _members(rows)
    for i, row in enumerate(members):
        if not isinstance(row, TensorDict) or row.batch_dims:
            raise ValueError(
                f"row {i} must be a TensorDict without batch dimension, got {type(row).__name__} "
                f"of batch size {tuple(getattr(row, 'batch_size', ()))}"
            )
    packer = _Packer()
    packed = packer.pack([row._tensordict for row in members])
    packed.table.records = packer.pack([_record_columns(record) for record in packer.records])
    return packed


def unpack_row_list(packed: PackedRows) -> list[TensorDict]:
    """Unpack rows into a list, which may be empty."""
    return [packed[index] for index in range(packed.num_rows)]


def encode(
    packed: PackedRows, about: Mapping[str, Any] | None = None, *, tags: tuple[int, int] = (0, 0)
) -> bytes:
    """Write rows as bytes for :meth:`PackedRows.open`; equal rows give equal bytes.

    Args:
        packed: the rows.
        about: plain values to send with them, by name.
        tags: see :func:`~torchrl_llm.data.safe_bytes.to_bytes`.

    Raises:
        DataError: a value has no safe form; the message names its key.

    Example:
        >>> packed = pack_rows([TensorDict(ids=torch.arange(n)) for n in (2, 4)])
        >>> opened = PackedRows.open(encode(packed, {"worker": "a"}))
        >>> opened[1]["ids"].tolist(), opened.about
        ([0, 1, 2, 3], {'worker': 'a'})
    """
    if packed.num_rows >= MAX_ROWS:
        raise DataError(f"a message holds fewer than {MAX_ROWS} rows, got {packed.num_rows}")
    encoder = _Encoder(packed.table)
    header = encoder.header(packed, about or {})
    return safe_bytes.to_bytes(header, encoder.tensors, tags=tags, claims=encoder.claims)


# -- packing --------------------------------------------------------------------------------------


def _members(rows: Any) -> list[TensorDictBase]:
    rows = plain_node(rows)
    if isinstance(rows, TensorDictBase):
        if rows.batch_dims != 1:
            raise ValueError(
                f"rows must have one batch dimension, got batch size {tuple(rows.batch_size)}; "
                "split a rollout with torchrl_llm.data.rollouts.split_rollout first"
            )
        return list(rows.unbind(0))
    return list(rows)


class _Packer:
    """Fills columns, and a table with each object and record once, in order of occurrence."""

    def __init__(self) -> None:
        self.table = _Table([])
        self.records: list[TokenRecord] = []
        self._places: dict[int, int] = {}

    def pack(self, sources: Sequence[dict[str, Any]]) -> PackedRows:
        """Pack the contents of the rows."""
        self.num_rows, self.columns = len(sources), []
        self.add(list(range(len(sources))), sources, ())
        return PackedRows(self.num_rows, self.columns, self.table)

    def place(self, value: Any) -> int:
        """Add a new object to the table and return its index."""
        place = self._places[id(value)] = len(self.table.objects)
        if isinstance(value, Chat):
            record = -1 if value.record is None else self._record(value.record)
            value = _Chat(value.messages, record)
        self.table.objects.append(value)
        return place

    def _record(self, record: TokenRecord) -> int:
        place = self._places.setdefault(id(record), len(self.records))
        if place == len(self.records):
            self.records.append(record)
        return place

    def add(self, rows: list[int], sources: Sequence[dict[str, Any]], path: Path) -> None:
        """Add the contents of one node of some rows, name by name."""
        names = tuple(sources[0]) if sources else ()
        if all(tuple(source) == names for source in sources):
            values = zip(*(source.values() for source in sources), strict=True)
            for name, column in zip(names, values, strict=True):
                self.column(rows, column, (*path, name))
            return
        for name in dict.fromkeys(chain.from_iterable(sources)):
            where = [at for at, source in enumerate(sources) if name in source]
            column = [sources[at][name] for at in where]
            self.column([rows[at] for at in where], column, (*path, name))

    def column(self, rows: list[int], values: Sequence[Any], path: Path) -> None:
        """Add one column, in parts if its values have several kinds."""
        if len(set(map(type, values))) > 1:
            self.parts(rows, values, path, type)
            return
        first, cls, inner = values[0], None, values
        if isinstance(first, Tensor):
            # Reading the shape of each tensor takes longer than copying all of them.
            alike = len({(t.dtype, t.device, t.dim()) for t in values}) == 1
            if not alike or (first.dim() > 1 and len({t.shape[1:] for t in values}) > 1):
                self.parts(rows, values, path, lambda t: (t.dtype, t.device, t.dim(), t.shape[1:]))
                return
            self.leaf(rows, RaggedColumn.of(values), path, "tensor")
            return
        is_cell = isinstance(first, NonTensorData)
        if is_cell and not any(value._tensordict._batch_size for value in values):
            # Access through the tensorclass takes thirty times as long.
            data = [value._non_tensordict["data"] for value in values]
            known = self._places
            places = [known[id(v)] if id(v) in known else self.place(v) for v in data]
            self.leaf(rows, places, path, "object")
            return
        if is_tensorclass(first) and not any(value._non_tensordict for value in values):
            cls, inner = type(first), [value._tensordict for value in values]
        if all(type(node) is TensorDict and not node._batch_size for node in inner):
            self.leaf(rows, cls, path, "node")
            self.add(rows, [node._tensordict for node in inner], path)
        else:
            self.leaf(rows, _Whole(list(values)), path, "whole")

    def parts(
        self, rows: list[int], values: Sequence[Any], path: Path, by: Callable[[Any], Any]
    ) -> None:
        """Add a column in parts whose values have the same kind."""
        parts: dict[Any, list[int]] = {}
        for at, value in enumerate(values):
            parts.setdefault(by(value), []).append(at)
        for part in parts.values():
            self.column([rows[at] for at in part], [values[at] for at in part], path)

    def leaf(self, rows: list[int], content: Any, path: Path, kind: str) -> None:
        where = None if len(rows) == self.num_rows else rows
        self.columns.append(PackedColumn(path, kind, where, content))


def _record_columns(record: TokenRecord) -> dict[str, Any]:
    """A token record as the contents of a row; a missing fact has no values, not even defaults."""
    columns: dict[str, Any] = record.columns()
    columns.update(zip(SUPPORT_COLUMNS, record.support or (), strict=False))
    rest = (record.num_messages, record.finish_reason, record.response_start)
    return columns | {_REST: cell((*rest, record.fork_cause, record.earlier_turns))}


def _record_of(columns: dict[str, Any]) -> TokenRecord:
    messages, reason, start, cause, turns = columns.pop(_REST)._non_tensordict["data"]
    support = [columns.pop(name) for name in SUPPORT_COLUMNS if name in columns]
    return TokenRecord.of(
        columns,
        num_messages=messages,
        finish_reason=reason,
        response_start=start,
        fork_cause=cause,
        support=Support(*support) if support else None,
        earlier_turns=turns,
    )


# -- bytes ----------------------------------------------------------------------------------------


class _Encoder(ValueWriter):
    """Tensors and texts of rows, equal ones only once, and the header that refers to them."""

    def __init__(self, table: _Table) -> None:
        super().__init__()
        self._objects = table.objects
        self._names: dict[Any, str] = {}
        self._texts: dict[bytes, int] = {}
        # Also by the id of an object or message, because many rows share them.
        self._known: dict[int, int] = {}

    def tensor(self, tensor: Tensor, name: str = "") -> str:
        dense = tensor.detach().cpu().contiguous()
        key = (dense.dtype, dense.shape, dense.reshape(-1).view(torch.uint8).numpy().tobytes())
        known = self._names.get(key)
        if known is None:
            known = self._names[key] = super().tensor(dense, name)
        else:
            self.claims += use_of(dense)
        return known

    def numbers(self, values: Sequence[int], name: str) -> str:
        return self.tensor(torch.tensor(values, dtype=torch.int64), name)

    def text(self, value: Any) -> int:
        """Index of the text of an object in the table; a chat's messages precede it."""
        found = self._known.get(id(value))
        if found is None:
            if type(value) is _Chat:
                places = ",".join(map(str, self.texts(value.messages)))
                text = f'["row_chat",[{places}],{value.record}]'.encode()
            else:
                written = self.value(value)
                text = _to_json(written).encode()
                if text.count(b"[") > safe_bytes.MAX_DEPTH:
                    safe_bytes.check_depth(written)
            found = self._known[id(value)] = self._texts.setdefault(text, len(self._texts))
        return found

    def texts(self, values: Iterable[Any]) -> list[int]:
        known = self._known
        return [known[id(v)] if id(v) in known else self.text(v) for v in values]

    def header(self, packed: PackedRows, about: Mapping[str, Any]) -> dict[str, Any]:
        records = self.columns(packed.table.records)
        header = {"about": self.value(dict(about)), "rows": self.columns(packed)}
        text = torch.frombuffer(bytearray(b"".join(self._texts) or b" "), dtype=torch.uint8)
        lengths = self.numbers(list(map(len, self._texts)), "texts/lengths")
        return header | {"records": records, "texts": [self.tensor(text, "texts"), lengths]}

    def columns(self, packed: PackedRows) -> list[Any]:
        columns = []
        # Sorted: the order of a row's keys has no meaning, and may differ after a resume.
        for path, kind, rows, content in sorted(packed.columns, key=lambda column: column[:2]):
            name = "/".join(path)
            self.claims += packed.num_rows if rows is None else len(rows)
            where = None if rows is None else self.numbers(rows, f"{name}/rows")
            try:
                columns.append([list(path), kind, where, self.content(content, name)])
            except (DataError, ValueError) as error:
                raise DataError(f"key {path}: {error}") from None
        self.claims += packed.num_rows
        return [packed.num_rows, columns]

    def content(self, content: Any, name: str) -> Any:
        if isinstance(content, RaggedColumn):
            lengths = content.lengths
            if lengths is not None:
                lengths = self.numbers(lengths, f"{name}/lengths")
            return [self.tensor(content.values, name), lengths]
        if isinstance(content, list):
            return self.numbers(self.texts([self._objects[place] for place in content]), name)
        if isinstance(content, _Whole):
            return list(map(self.node, content.nodes))
        return class_name(content)


class _Texts:
    """Objects as concatenated texts, each parsed on demand."""

    def __init__(self, text: Tensor, lengths: list[int], read: Callable[[Any], Any]) -> None:
        safe_bytes.check(text.ndim == 1 and text.dtype == torch.uint8, "texts of another type")
        self._text, self._ends = memoryview(text.numpy()), [0, *accumulate(lengths)]
        self._read, self._known = read, {}
        safe_bytes.check(self._ends[-1] <= len(text), "texts of other lengths")

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __reduce__(self) -> tuple[Any, ...]:
        return list, ([self[place] for place in range(len(self))],)

    def __getitem__(self, place: int) -> Any:
        if place not in self._known:
            text = str(self._text[self._ends[place] : self._ends[place + 1]], "utf-8")
            value = _from_json(text)
            if type(value) is list and value[:1] == ["row_chat"]:
                _, messages, record = value
                # Each message precedes the chat, so that no chat contains itself.
                known = self._known
                held = [known[p] if p in known else self[p] for p in naturals(messages, place)]
                safe_bytes.check(
                    all(type(m) is dict for m in held) and type(record) is int, "no chat"
                )
                known[place] = _Chat(tuple(held), record)
            else:
                self._known[place] = self._read(value)
        return self._known[place]


class _Opener(ValueReader):
    """Builds rows from an untrusted header, checking each part first."""

    def __init__(self, tensors: Mapping[str, Tensor], claims: int, copied: bool) -> None:
        super().__init__(tensors, claims)
        self._array = self.tensor if copied else self.view
        self._table = _Table(is_checked=False)

    def rows(self, header: dict[str, Any]) -> PackedRows:
        about, (text, lengths) = typed(self.value(header["about"]), dict), header["texts"]
        self._table.objects = _Texts(self._array(text), self._numbers(lengths, 1 << 40), self.value)
        self._table.records = self._rows(header["records"], {})
        return self._rows(header["rows"], about)

    def _rows(self, content: Any, about: dict[str, Any]) -> PackedRows:
        num_rows, written = content
        self.claim(*naturals([num_rows], MAX_ROWS))
        every, columns = range(num_rows), []
        # The rows that have a node, and those that have a key.
        have: dict[Path, set[int]] = {(): set(every)}
        taken: dict[Path, set[int]] = {}
        for path, kind, where, content in typed(written, list):
            safe_bytes.check(0 < len(typed(path, list)) <= _MAX_PATH, "a key of impossible length")
            path = tuple(typed(name, str) for name in path)
            places = None if where is None else self._numbers(where, num_rows)
            rows = set(every if places is None else places)
            self.claim(len(rows))
            safe_bytes.check(places is None or len(rows) == len(places), "a row twice in a column")
            safe_bytes.check(rows <= have.get(path[:-1], set()), f"{path} stands nowhere")
            safe_bytes.check(not rows & taken.get(path, set()), f"the key {path} twice in a row")
            taken[path] = taken.get(path, set()) | rows
            if kind == "node":
                have[path] = have.get(path, set()) | rows
            column = self._content(typed(kind, str), content, len(rows))
            columns.append(PackedColumn(path, kind, places, column))
        return PackedRows(num_rows, columns, self._table, about)

    def _numbers(self, place: Any, limit: int, count: int | None = None) -> list[int]:
        array = self.view(place)
        safe_bytes.check(array.dtype == torch.int64 and array.ndim == 1, "numbers of another type")
        safe_bytes.check(count is None or len(array) == count, "a column is too short or too long")
        values = array.tolist()
        safe_bytes.check(
            not values or (min(values) >= 0 and max(values) < limit), "a number out of range"
        )
        return values

    def _content(self, kind: str, content: Any, count: int) -> Any:
        if kind == "node":
            return class_of(content)
        if kind == "object":
            return self._numbers(content, len(self._table.objects), count)
        if kind == "whole":
            nodes = [self.node(node) for node in typed(content, list)]
            safe_bytes.check(len(nodes) == count, "a column is too short or too long")
            return _Whole(nodes)
        values, lengths = content
        array = self._array(values)
        safe_bytes.check(kind == "tensor" and array.ndim > 0, "a column without a row dimension")
        if lengths is not None:
            lengths = self._numbers(lengths, array.shape[0] + 1, count)
        held = count if lengths is None else sum(lengths)
        safe_bytes.check(array.shape[0] == held, "a column is too short or too long")
        return RaggedColumn(array, lengths)
