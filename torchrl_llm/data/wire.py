"""Wire form of rows: flat values and lengths, for pickles, queues and checkpoints.

Rows live as one small tensor per row and key. Pickled like that, a batch costs twenty times too
much, and a row that is a view drags its whole storage along. :func:`pack_rows` turns any rows
into a few long tensors and lists, :func:`unpack_rows` back into the same rows: ragged tensors,
strings, other objects, chats with their token records, keys that only some rows have, and the
tensorclass of every node. :func:`own_rows` makes rows safe to keep for long.

Shape legend: ``N`` rows that have a column, ``L_n`` length of row ``n``, ``L`` their sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorDict,
    TensorDictBase,
    is_tensorclass,
)
from torch import Tensor

from torchrl_llm.data.chat import Chat
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.record import TokenRecord
from torchrl_llm.data.scoring import Support
from torchrl_llm.data.token_facts import RECORD_COLUMNS, SUPPORT_COLUMNS

Path = tuple[str, ...]
# A storage of this many bytes may be shared: copying flags and ids one by one costs more than a
# kept row can waste by it.
SHARED_BYTES = 4096
_ROW = torch.Size([])


@dataclass(frozen=True, slots=True)
class _Tensors:
    """One tensor per row: ``values`` with a leading row dimension, or flat with ``lengths``."""

    rows: list[int] | None
    values: Any
    lengths: list[int] | None

    @classmethod
    def of(cls, rows: list[int] | None, tensors: list[Tensor]) -> _Tensors:
        # Asking each tensor for its shape takes longer than to copy them all.
        ndim = tensors[0].dim()
        alike = len({(t.dtype, t.device, t.dim()) for t in tensors}) == 1
        if alike and ndim > 1:
            alike = len({t.shape[1:] for t in tensors}) == 1
        lengths = [t.size(0) for t in tensors] if alike and ndim else []
        if alike and len(set(lengths)) < 2:
            return cls(rows, torch.stack(tensors), None)
        if alike:
            return cls(rows, torch.cat(tensors), lengths)
        return cls(rows, [t.clone() for t in tensors], None)

    def split(self) -> Sequence[Tensor]:
        if isinstance(self.values, list):
            return self.values
        return self.values.unbind(0) if self.lengths is None else self.values.split(self.lengths)


@dataclass(frozen=True, slots=True)
class _Objects:
    rows: list[int] | None
    values: list[Any]

    def split(self) -> list[NonTensorData]:
        return [cell(value) for value in self.values]


@dataclass(frozen=True, slots=True)
class _Chats:
    """Messages as they are, records by their place in the table of records (-1 for none)."""

    rows: list[int] | None
    messages: list[tuple]
    records: list[int]


@dataclass(frozen=True, slots=True)
class _Nodes:
    """Sub-tensordicts that are kept whole, because they have a batch size of their own."""

    rows: list[int] | None
    values: list[Any]

    def split(self) -> list[Any]:
        return self.values


@dataclass(frozen=True, slots=True)
class _Records:
    columns: dict[str, _Tensors]
    num_messages: list[int]
    finish_reason: list[Any]
    response_start: list[int | None]
    fork_cause: list[str | None]
    earlier_turns: list[int]

    @classmethod
    def of(cls, records: list[TokenRecord]) -> _Records:
        columns = {
            name: _Tensors.of(None, [getattr(r, name) for r in records]) for name in RECORD_COLUMNS
        }
        for name in dict.fromkeys(name for r in records for name in r.facts):
            # A record that lacks the fact has no values of it, not even defaults.
            none = next(r.facts[name] for r in records if name in r.facts)[:0]
            columns[name] = _Tensors.of(None, [r.facts.get(name, none) for r in records])
        if any(r.support is not None for r in records):
            # A record without one has no counts, not even zeros.
            supports = [r.support or Support.whole(0) for r in records]
            for name, column in zip(SUPPORT_COLUMNS, zip(*supports, strict=True), strict=True):
                columns[name] = _Tensors.of(None, list(column))
        rest = ("num_messages", "finish_reason", "response_start", "fork_cause", "earlier_turns")
        return cls(columns, *([getattr(r, name) for r in records] for name in rest))

    def split(self) -> list[TokenRecord]:
        columns = {name: column.split() for name, column in self.columns.items()}
        supports = [columns.pop(name, None) for name in SUPPORT_COLUMNS]
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        if len(columns) > len(RECORD_COLUMNS):
            rows = [_without_lacking(row) for row in rows]
        return [
            TokenRecord.of(
                rows[i],
                num_messages=self.num_messages[i],
                finish_reason=self.finish_reason[i],
                response_start=self.response_start[i],
                fork_cause=self.fork_cause[i],
                earlier_turns=self.earlier_turns[i],
                support=None
                if supports[0] is None or not supports[1][i].numel()
                else Support(supports[0][i], supports[1][i]),
            )
            for i in range(len(self.num_messages))
        ]


def _without_lacking(row: dict[str, Tensor]) -> dict[str, Tensor]:
    """The columns of a record without the registered facts that it lacks."""
    length = row["token_ids"].shape[0]
    return {
        name: column
        for name, column in row.items()
        if name in RECORD_COLUMNS or column.shape[0] or not length
    }


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows in wire form; made by :func:`pack_rows`, picklable, a few tensors whatever the rows.

    Attributes:
        num_rows: how many rows were packed.
        columns: the packed columns by path.
        nodes: inner nodes by path: the rows that have the node (``None`` for all) and its
            tensorclass (``None`` for a plain tensordict).
        records: the token records of all chats, each once.
    """

    num_rows: int
    columns: dict[Path, Any]
    nodes: dict[tuple[Path, type | None], list[int] | None]
    records: _Records | None

    def unpack(self) -> LazyStackedTensorDict:
        """The rows; the same as :func:`unpack_rows`."""
        return unpack_rows(self)


def plain_node(value: Any) -> Any:
    """The tensordict under a tensorclass; anything else as it is.

    Args:
        value: a node of a row or batch.
    """
    return value._tensordict if is_tensorclass(value) else value


def leaf(row: TensorDict, path: Path) -> Any:
    """The value at a path of a row, or ``None``: ``row.get(path, None)`` at a tenth of its cost.

    Args:
        row: a row of plain tensordicts, with tensorclasses in it or not.
        path: the key as a tuple.
    """
    value: Any = row
    for name in path:
        value = plain_node(value) if type(value) is not TensorDict else value
        value = value._tensordict.get(name)
        if value is None:
            return None
    return value


def typed_node(cls: type, node: TensorDictBase) -> Any:
    """View a node as a tensorclass, without the checks of the public constructor.

    Args:
        cls: a tensorclass.
        node: the tensordict that holds its fields.
    """
    view = cls.__new__(cls)
    view.__dict__.update(_tensordict=node, _non_tensordict={})
    return view


def new_node(source: dict[str, Any]) -> TensorDict:
    """A tensordict without batch dimension over given values, with no check and no conversion.

    Args:
        source: name to tensor, cell or node; the tensordict keeps this very dict.
    """
    # What TensorDict._new_unsafe does without its options, at half its cost.
    node = TensorDict.__new__(TensorDict)
    node.__dict__.update(_device=None, _tensordict=source, _batch_size=_ROW, _td_dim_names=None)
    return node


def cell(value: Any) -> NonTensorData:
    """``NonTensorData(value)`` at a quarter of its cost, for an immutable value.

    Args:
        value: a string, a chat, any object that nobody changes.
    """
    new = NonTensorData.__new__(NonTensorData)
    new.__dict__.update(
        _tensordict=new_node({}),
        _non_tensordict={"data": value, "_is_non_tensor": True, "_metadata": None},
        _is_initialized=True,
    )
    return new


def set_copied(row: TensorDict, path: Path, value: Any) -> None:
    """Set a nested key through copies of the nodes on the way, which other rows may share.

    Args:
        row: a row without batch dimension; its root is changed.
        path: the key as a tuple.
        value: a tensor, cell or node.

    Example:
        >>> shared = TensorDict(reward=torch.ones(1))
        >>> row = TensorDict(next=shared)
        >>> set_copied(row, ("next", "reward"), torch.zeros(1))
        >>> row["next", "reward"].item(), shared["reward"].item()
        (0.0, 1.0)
    """
    node = row
    for name in path[:-1]:
        child = node._get_str(name, None)
        inner = new_node({} if child is None else dict(plain_node(child)._tensordict))
        typed = child is not None and is_tensorclass(child)
        node._tensordict[name] = typed_node(type(child), inner) if typed else inner
        node = inner
    node._tensordict[path[-1]] = value


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
    def __init__(self) -> None:
        self.leaves: dict[tuple[Path, str], tuple[list[int], list[Any]]] = {}
        self.nodes: dict[tuple[Path, type | None], list[int]] = {}
        self.records: dict[int, int] = {}
        self.record_list: list[TokenRecord] = []

    def add(self, rows: list[int], nodes: Sequence[TensorDict], path: Path) -> None:
        """Take the leaves of one node of some rows, a name at a time."""
        sources = [node._tensordict for node in nodes]
        names = tuple(sources[0])
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
        """Take one column, in parts where its values are of several kinds."""
        if len(set(map(type, values))) > 1:
            parts: dict[type, list[int]] = {}
            for at, value in enumerate(values):
                parts.setdefault(type(value), []).append(at)
            for part in parts.values():
                self.column([rows[at] for at in part], [values[at] for at in part], path)
            return
        kind, cls = _kind(values[0]), None
        if kind == "cell" and not any(value._tensordict._batch_size for value in values):
            # Through the tensorclass it takes thirty times as long.
            data = [value._non_tensordict["data"] for value in values]
            chats = [isinstance(value, Chat) for value in data]
            for kind, wanted in (("chat", True), ("object", False)):
                part = [at for at, flag in enumerate(chats) if flag is wanted]
                if part:
                    self.leaf([rows[at] for at in part], [data[at] for at in part], path, kind)
            return
        inner = values
        if kind == "class":
            cls, inner = type(values[0]), [value._tensordict for value in values]
            plain = all(type(node) is TensorDict for node in inner)
            is_node = not plain or any(value._non_tensordict for value in values)
            kind = "node" if is_node else "dict"
        if kind == "dict" and not any(node._batch_size for node in inner):
            self.nodes.setdefault((path, cls), []).extend(rows)
            self.add(rows, inner, path)
        else:
            self.leaf(rows, values, path, kind)

    def leaf(self, rows: list[int], values: Sequence[Any], path: Path, kind: str) -> None:
        known = self.leaves.setdefault((path, kind), ([], []))
        known[0].extend(rows)
        known[1].extend(values)

    def record(self, record: TokenRecord | None) -> int:
        if record is None:
            return -1
        place = self.records.setdefault(id(record), len(self.record_list))
        if place == len(self.record_list):
            self.record_list.append(record)
        return place

    def finish(self, num_rows: int) -> PackedRows:
        columns: dict[Any, Any] = {}
        for (path, kind), (rows, values) in self.leaves.items():
            where = None if len(rows) == num_rows else rows
            match kind:
                case "tensor":
                    column: Any = _Tensors.of(where, values)
                case "chat":
                    places = [self.record(chat.record) for chat in values]
                    column = _Chats(where, [chat.messages for chat in values], places)
                case "object":
                    column = _Objects(where, values)
                case _:
                    column = _Nodes(where, values)
            columns[path, kind] = column
        nodes = {key: None if len(rows) == num_rows else rows for key, rows in self.nodes.items()}
        records = _Records.of(self.record_list) if self.record_list else None
        return PackedRows(num_rows, columns, nodes, records)


_KINDS: dict[type, str] = {}


def _kind(value: Any) -> str:
    """What a value of a row is: tensor, cell, dict, class, or node for the rest."""
    kind = _KINDS.get(type(value))
    if kind is None:
        if isinstance(value, Tensor):
            kind = "tensor"
        elif isinstance(value, NonTensorData):
            kind = "cell"
        elif isinstance(value, TensorDict):
            kind = "dict"
        else:
            kind = "class" if is_tensorclass(value) else "node"
        _KINDS[type(value)] = kind
    return kind


def pack_rows(rows: TensorDictBase | Iterable[TensorDictBase]) -> PackedRows:
    """Turn rows into their wire form.

    Args:
        rows: a tensordict of batch size ``[N]``, or tensordicts without batch dimension. Rows may
            differ in their keys.

    Returns:
        The packed rows. Tensors are copied; objects are referenced.

    Raises:
        ValueError: for a tensordict with more or less than one batch dimension.

    Example:
        >>> from torchrl_llm.data.ragged import ragged_rows, read_rows
        >>> packed = pack_rows(ragged_rows({"ids": [torch.tensor([1, 2]), torch.tensor([3])]}))
        >>> [row.tolist() for row in read_rows(unpack_rows(packed), "ids")]
        [[1, 2], [3]]
    """
    members = _members(rows)
    packer = _Packer()
    for i, row in enumerate(members):
        if _kind(row) != "dict" or row.batch_dims:
            raise ValueError(
                f"row {i} must be a TensorDict without batch dimension, got {type(row).__name__} "
                f"of batch size {tuple(getattr(row, 'batch_size', ()))}"
            )
    if members:
        packer.add(list(range(len(members))), members, ())
    return packer.finish(len(members))


def unpack_rows(packed: PackedRows, *, own: bool = False) -> LazyStackedTensorDict:
    """Rows from their wire form.

    Args:
        packed: what :func:`pack_rows` returned.
        own: copy each row's tensors. Without it they are views of the long tensors: cheaper, but
            one kept row keeps the memory of all.

    Returns:
        A lazy stack of batch size ``[N]``.

    Raises:
        ValueError: for no rows at all, which a lazy stack cannot hold.
    """
    if not packed.num_rows:
        raise ValueError("no rows were packed; a lazy stack needs at least one")
    rows = unpack_row_list(packed)
    return lazy_rows(own_rows(rows) if own else rows)


def unpack_row_list(packed: PackedRows) -> list[TensorDict]:
    """Rows from their wire form as a list, which may be empty."""
    every = range(packed.num_rows)
    sources: list[dict[str, Any]] = [{} for _ in every]
    # What a node holds, by path and row; filled first and turned into tensordicts from the inside
    # out, for a tensordict copies the dict that it is given.
    inner: dict[Path, dict[int, dict[str, Any]]] = {(): dict(enumerate(sources))}
    for (path, _), rows in packed.nodes.items():
        inner.setdefault(path, {}).update({row: {} for row in (every if rows is None else rows)})
    records = packed.records.split() if packed.records is not None else []
    for (path, _), column in packed.columns.items():
        if isinstance(column, _Chats):
            column = _Objects(
                column.rows,
                [
                    Chat._of(messages, records[place] if place >= 0 else None)
                    for messages, place in zip(column.messages, column.records, strict=True)
                ],
            )
        holders, name = inner[path[:-1]], path[-1]
        rows = every if column.rows is None else column.rows
        for row, value in zip(rows, column.split(), strict=True):
            holders[row][name] = value
    for (path, cls), rows in sorted(packed.nodes.items(), key=lambda item: -len(item[0][0])):
        holders, own, name = inner[path[:-1]], inner[path], path[-1]
        for row in every if rows is None else rows:
            node = new_node(own[row])
            holders[row][name] = node if cls is None else typed_node(cls, node)
    return [new_node(source) for source in sources]


def own_rows(rows: Iterable[TensorDictBase]) -> list[TensorDictBase]:
    """Give each row memory of its own, copying only tensors that are parts of a larger storage.

    A row that is a view keeps its whole batch alive and drags it into every pickle. Storages of up
    to 4 KiB may stay shared, and a ``response`` that is the end of its ``full`` stays so.

    Args:
        rows: tensordicts without batch dimension; their tensors are replaced in place.

    Returns:
        The same rows as a list.
    """
    rows = list(rows)
    for row in rows:
        _own(row)
    return rows


def _own(node: TensorDict) -> None:
    leaves = node._tensordict
    tail = _tail(leaves) if "response" in leaves else 0
    for name, value in leaves.items():
        # The two common kinds first, by exact type: this loop sees every tensor that is kept.
        kind = type(value)
        if kind is Tensor:
            if value.untyped_storage().nbytes() > value.nbytes + SHARED_BYTES and not (
                tail and name == "response"
            ):
                leaves[name] = value.clone()
        elif kind is TensorDict:
            _own(value)
        elif kind is not NonTensorData and type(getattr(value, "_tensordict", None)) is TensorDict:
            _own(value._tensordict)
    if tail:
        leaves["response"] = leaves["full"][-tail:]


def _tail(leaves: dict[str, Any]) -> int:
    """How many values of ``full`` the response is a view of, at its end; 0 where it is none."""
    full, response = leaves.get("full"), leaves["response"]
    if type(full) is not Tensor or type(response) is not Tensor or not response.nbytes:
        return 0
    if full.data_ptr() + full.nbytes != response.data_ptr() + response.nbytes:
        return 0
    flat = full.is_contiguous() and response.is_contiguous()
    if not flat or full.dtype != response.dtype or full.shape[0] < response.shape[0]:
        return 0
    return response.shape[0]
