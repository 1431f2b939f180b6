"""Columns of Python objects, and the nodes that hold them.

TorchRL's environments copy every non-tensor leaf at each step. A :class:`Column` keeps its cells in
one Python list, and builds ``NonTensorData`` per row only if an operation needs them.

Next: :mod:`torchrl_llm.data.chat` is the content of a cell, :mod:`torchrl_llm.data.history` wraps a
column of chats for users.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterable, Sequence
from functools import wraps
from multiprocessing import reduction
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from torchrl_llm.data.chat import Chat, Message
from torchrl_llm.data.content import ContentBase
from torchrl_llm.data.messages import canonical_message
from torchrl_llm.data.nodes import cell, new_node
from torchrl_llm.errors import ConfigError, DataError


def mapped_with_its_rows(memmap: Any) -> Any:
    """Implement ``_memmap_``, and raise if a storage reserves space for later rows."""

    @wraps(memmap)
    def mapped(self: Any, *args: Any, like: bool = False, **kwargs: Any) -> Any:
        if like:
            raise ConfigError(
                "a memory-mapped storage loses text and conversations: every row would read back "
                "as the first one. Use storage=LazyStackStorage(...), or select tensor keys first"
            )
        return memmap(self, *args, like=like, **kwargs)

    return mapped


class Column(NonTensorStack):
    """A one-dimensional column of immutable Python objects, such as chats and strings.

    It is a ``NonTensorStack`` of tensordict and behaves in the same way. Inherited methods that
    this class does not override build cells: they are correct, but slower. Never assign items in
    place, because rows may share cells. Build a new column and ``set`` it.

    Example:
        >>> column = Column.of(["a", "b", "c"])
        >>> column.tolist(), column[torch.tensor([True, False, True])].tolist()
        (['a', 'b', 'c'], ['a', 'c'])
    """

    @classmethod
    def of(cls, items: Iterable[Any]) -> Column:
        """Make a column of the given objects, one per row."""
        self = cls.__new__(cls)
        items = list(items)
        self.__dict__["_is_locked"] = None
        self.__dict__.update(_items=items, _cells=None)
        self.stack_dim = 0
        self._batch_size = torch.Size([len(items)])
        self.hook_out = self.hook_in = None
        return self

    @property
    def tensordicts(self) -> list[NonTensorData]:
        """The cells, built on demand; after that, they replace the list of objects."""
        state = self.__dict__
        if state["_cells"] is None:
            state["_cells"], state["_items"] = [cell(x) for x in state["_items"]], None
        return state["_cells"]

    @tensordicts.setter
    def tensordicts(self, cells: Sequence[NonTensorData]) -> None:
        self.__dict__.update(_cells=list(cells), _items=None)
        self.__dict__.setdefault("_is_locked", None)

    def _flat(self) -> list[Any] | None:
        """Return the objects of a one-dimensional column, or ``None`` for a column of columns."""
        items, cells = self.__dict__["_items"], self.__dict__["_cells"]
        if items is not None:
            return items
        if all(isinstance(each, NonTensorData) and not each.batch_dims for each in cells):
            return [each.__dict__["_non_tensordict"]["data"] for each in cells]  # as each.data
        return None

    def tolist(self, **kwargs: Any) -> list[Any]:
        """Return the objects, one per row, as a new list."""
        items = None if kwargs else self._flat()
        return super().tolist(**kwargs) if items is None else list(items)

    def _clone(self, recurse: bool = True, **kwargs: Any) -> NonTensorStack:
        items = self._flat()
        if items is None:
            return super()._clone(recurse, **kwargs)
        return type(self).of(items)

    def clone(self, recurse: bool = True, **kwargs: Any) -> NonTensorStack:
        """Return a new column with the same immutable objects."""
        return self._clone(recurse, **kwargs)

    def copy(self) -> NonTensorStack:
        """Return a new column with the same immutable objects."""
        return self._clone(False)

    def empty(self, recurse: bool = False, **kwargs: Any) -> NonTensorStack:
        """Return this column: its objects are not entries, so none is removed."""
        items = None if kwargs else self._flat()
        return super().empty(recurse, **kwargs) if items is None else type(self).of(items)

    def where(
        self,
        condition: Tensor,
        other: Any,
        *,
        out: Any = None,
        pad: int | bool | None = None,
        update_batch_size: bool = False,
    ) -> Any:
        """Return rows of this column where ``condition`` is true, and rows of ``other`` elsewhere.

        An environment that resets some of its rows merges every column in this way at every step.
        """
        mine = self._flat()
        theirs = other._flat() if isinstance(other, Column) else None
        simple = out is None or isinstance(out, Column)
        if not simple or mine is None or theirs is None or condition.shape != self.batch_size:
            return super().where(
                condition, other, out=out, pad=pad, update_batch_size=update_batch_size
            )
        rows = zip(condition.tolist(), mine, theirs, strict=True)
        picked = type(self).of(a if kept else b for kept, a, b in rows)
        if out is None:
            return picked
        out.__dict__.update(_items=picked.__dict__["_items"], _cells=None)
        return out

    def __getitem__(self, index: Any) -> Any:
        items = self.__dict__["_items"]
        if items is None:
            return super().__getitem__(index)
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
        if isinstance(index, Tensor) and index.ndim == 1:
            chosen = index.nonzero().flatten() if index.dtype == torch.bool else index
            index = chosen.tolist()
        elif isinstance(index, Tensor) and index.ndim == 0 and index.dtype != torch.bool:
            index = int(index)
        if isinstance(index, bool):
            return super().__getitem__(index)
        if isinstance(index, int):
            return cell(items[index])
        if isinstance(index, slice):
            return type(self).of(items[index])
        if isinstance(index, (list, range)):
            if index and isinstance(index[0], bool):
                index = [i for i, kept in enumerate(index) if kept]
            if all(isinstance(i, int) for i in index):
                return type(self).of([items[i] for i in index])
        return super().__getitem__(index)

    def unbind(self, dim: int = 0) -> tuple[NonTensorData, ...]:
        """Return the rows as separate cells."""
        if self.__dict__["_items"] is None or dim not in (0, -1):
            return super().unbind(dim)
        return tuple(cell(x) for x in self.__dict__["_items"])

    # A column has no device, no lock of its own, and no names. tensordict reads these for every
    # leaf at every step, and the inherited methods would build the cells.
    @property
    def device(self) -> None:
        """Always ``None``."""
        return None

    @device.setter
    def device(self, value: Any) -> None:
        """Accepted and ignored, as for every non-tensor leaf."""

    @property
    def is_locked(self) -> bool:
        """Whether the enclosing tensordict is locked."""
        return bool(self.__dict__.get("_is_locked"))

    @is_locked.setter
    def is_locked(self, value: bool) -> None:
        self.__dict__["_is_locked"] = bool(value)

    def _propagate_lock(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__["_is_locked"] = True

    def _propagate_unlock(self, *args: Any, **kwargs: Any) -> list:
        self.__dict__["_is_locked"] = False
        return []

    # Setting these has no effect.
    _is_shared = _is_memmap = property(lambda self: False, lambda self, value: None)

    def to(self, *args: Any, **kwargs: Any) -> Column:
        """Return the column itself: objects have no device, no dtype and no dimension names."""
        return self

    rename_ = refine_names = to

    @mapped_with_its_rows
    def _memmap_(self, *args: Any, **kwargs: Any) -> Any:
        return NonTensorStack(*self.tensordicts)._memmap_(*args, **kwargs)

    @property
    def names(self) -> list[None]:
        """Unnamed dimensions."""
        return [None] * self.batch_dims

    @names.setter
    def names(self, value: Any) -> None:
        pass

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    _has_names = _maybe_names = _set_names = _check_dim_name = _nothing


def set_as_column(self: Any, key: str, value: Any, **how: Any) -> Any:
    """Implement ``_set_str`` for tensorclasses of columns: a list of values becomes a column.

    TorchRL's ``step_mdp`` reads a column through its tensorclass, which returns a list, and sets
    that list in place of the column.
    """
    node = self._tensordict
    if isinstance(value, list) and node.batch_dims == 1 and len(value) == node.batch_size[0]:
        value = Column.of(value)
    self._non_tensordict.pop(key, None)
    node._set_str(key, value, **how)
    return self


def _reduce_column(column: Column) -> tuple:
    items = column._flat()
    if items is None:
        return NonTensorStack, tuple(column.tensordicts)
    return rebuild_column, (items,)


def rebuild_column(items: list[Any]) -> Column:
    """Restore a column from its pickle."""
    return Column.of(items)


copyreg.pickle(Column, _reduce_column)
reduction.register(Column, _reduce_column)


# -- building nodes of cells -----------------------------------------------------------------------


def cell_node(chat: Chat) -> TensorDict:
    """Make a tensordict of batch size ``[]`` from one cell."""
    return new_node({"messages": cell(chat)})


def row_node(column: Column) -> TensorDict:
    """Make a tensordict of batch size ``[B]`` from a column of cells."""
    return TensorDict._new_unsafe(source={"messages": column}, batch_size=column.batch_size)


def build_node(fields: dict[str, Any], batch: tuple[int, ...] | None) -> TensorDictBase:
    """Build the tensordict of a message, a conversation, or a batch of conversations.

    Args:
        fields: name to value, to a list of values, or to nested lists.
        batch: the requested batch size; ``None`` derives it from the values.

    Raises:
        DataError: lengths or batch size do not fit.
    """
    role = fields.get("role")
    if not isinstance(role, (list, tuple)):
        node = cell_node(Message.of(fields))
        return node.expand(batch) if batch else node
    if role and isinstance(role[0], (list, tuple)):
        split = _split(fields)
        if role[0] and isinstance(role[0][0], (list, tuple)):
            if batch and batch[0] != len(split):
                raise DataError(f"{len(split)} batches cannot have batch_size {list(batch)}")
            return torch.stack([build_node(row, batch and batch[1:]) for row in split])
        rows = [Chat(_transposed(row, f"chat {k}, message")) for k, row in enumerate(split)]
        if batch is not None and batch not in ((len(rows),), (len(rows), len(rows[0]))):
            raise DataError(f"{len(rows)} conversations cannot have batch_size {list(batch)}")
        return row_node(Column.of(rows))
    messages = _transposed(fields, "message")
    if not batch:
        return cell_node(Chat(messages))
    if batch != (len(messages),):
        raise DataError(f"{len(messages)} messages cannot have batch_size {list(batch)}")
    return row_node(Column.of(Message._of((message,), None) for message in messages))


def _split(fields: dict[str, Any]) -> list[dict[str, Any]]:
    count = len(fields["role"])
    return [{k: _picked(k, v, i, count) for k, v in fields.items()} for i in range(count)]


def _transposed(fields: dict[str, Any], where: str) -> list[dict[str, Any]]:
    return [canonical_message(m, f"{where} {i}") for i, m in enumerate(_split(fields))]


def _picked(name: str, value: Any, index: int, count: int) -> Any:
    if isinstance(value, ContentBase) and value.batch_dims:
        value = value.unbind(0)
    if not isinstance(value, (list, tuple)):
        if name == "is_complete":
            return value
        raise DataError(f"{name} must be a list of {count} values, as role is; got {value!r:.100}")
    if len(value) != count:
        raise DataError(f"{name} has {len(value)} values, role has {count}")
    return value[index]
