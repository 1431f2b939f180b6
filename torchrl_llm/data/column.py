"""Conversations as immutable cells, and columns of cells that are cheap to clone and step.

TorchRL's environments copy every non-tensor leaf at each step. A :class:`Chat` is opaque to them
and never changes, so a copy is the same object; a :class:`Column` keeps its cells in one Python
list and only builds per-row ``NonTensorData`` when an operation asks for them.

Next: :mod:`torchrl_llm.data.history` wraps a column of chats for people,
:mod:`torchrl_llm.data.record` holds the tokens that a chat carries.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing import reduction
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack
from torch import Tensor

from torchrl_llm.data.record import TokenRecord

Message = dict[str, Any]


class Chat:
    """One conversation: an immutable tuple of messages, and the record of its tokens if it has one.

    Args:
        messages: mappings with at least ``role`` and ``content``; each is copied.
        record: the tokens of the first ``record.num_messages`` messages.

    ``chat + [message]`` appends and keeps the record, for the record names the messages that it
    covers. Equality compares messages only.

    Example:
        >>> chat = Chat([{"role": "user", "content": "Hi"}])
        >>> longer = chat + [{"role": "assistant", "content": "Hello"}]
        >>> len(chat), len(longer), longer[-1]["content"]
        (1, 2, 'Hello')
    """

    __slots__ = ("messages", "record")
    messages: tuple[Message, ...]
    record: TokenRecord | None

    def __init__(
        self, messages: Iterable[Mapping[str, Any]] = (), record: TokenRecord | None = None
    ) -> None:
        object.__setattr__(self, "messages", tuple(dict(message) for message in messages))
        object.__setattr__(self, "record", record)

    @classmethod
    def _of(cls, messages: tuple[Message, ...], record: TokenRecord | None) -> Chat:
        # Messages that already belong to a Chat are shared, not copied.
        self = cls.__new__(cls)
        object.__setattr__(self, "messages", messages)
        object.__setattr__(self, "record", record)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Chat is immutable; build a new one instead of setting {name!r}")

    __delattr__ = __setattr__  # type: ignore[assignment]

    def with_record(self, record: TokenRecord | None) -> Chat:
        """The same messages with another record (``None`` takes it off)."""
        return Chat._of(self.messages, record)

    def __add__(self, more: Chat | Iterable[Mapping[str, Any]]) -> Chat:
        tail = more.messages if isinstance(more, Chat) else Chat(more).messages
        return Chat._of(self.messages + tail, self.record)

    def __getitem__(self, index: int | slice) -> Any:
        if not isinstance(index, slice):
            return dict(self.messages[index])
        messages = self.messages[index]
        covered = self.record is not None and self.record.num_messages
        keeps = covered and messages[:covered] == self.messages[:covered]
        return Chat._of(messages, self.record if keeps else None)

    def __len__(self) -> int:
        return len(self.messages)

    def __iter__(self) -> Iterator[Message]:
        return (dict(message) for message in self.messages)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chat) and other.messages == self.messages

    __hash__ = None  # type: ignore[assignment]

    def __copy__(self) -> Chat:
        return self

    def __deepcopy__(self, memo: dict) -> Chat:
        return self

    def __reduce__(self) -> tuple:
        return rebuild_chat, (Chat, self.messages, self.record)

    def __repr__(self) -> str:
        shown = ", ".join(f"{m.get('role')}: {str(m.get('content'))[:40]!r}" for m in self.messages)
        return f"Chat([{shown}])"


def rebuild_chat(cls: type[Chat], messages: tuple[Message, ...], record: Any) -> Chat:
    """A chat from its pickle: a function, since a class method is pickled as a ``getattr``."""
    return cls._of(messages, record)


class Column(NonTensorStack):
    """A one-dimensional column of Python objects: chats, strings, anything immutable.

    It behaves as tensordict's ``NonTensorStack`` and is an instance of it; what is not overridden
    here builds cells and is correct, only slower. Never assign items in place (rows may share
    cells): build a new column and ``set`` it.

    Example:
        >>> column = Column.of(["a", "b", "c"])
        >>> column.tolist(), column[torch.tensor([True, False, True])].tolist()
        (['a', 'b', 'c'], ['a', 'c'])
    """

    @classmethod
    def of(cls, items: Iterable[Any]) -> Column:
        """A column of the given objects, one a row."""
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
        """The cells; built on demand, and from then on they are the truth."""
        state = self.__dict__
        if state["_cells"] is None:
            state["_cells"], state["_items"] = [NonTensorData(x) for x in state["_items"]], None
        return state["_cells"]

    @tensordicts.setter
    def tensordicts(self, cells: Sequence[NonTensorData]) -> None:
        self.__dict__.update(_cells=list(cells), _items=None)
        self.__dict__.setdefault("_is_locked", None)

    def _flat(self) -> list[Any] | None:
        """The objects of a one-dimensional column, ``None`` for a column of columns."""
        items, cells = self.__dict__["_items"], self.__dict__["_cells"]
        if items is not None:
            return items
        if all(isinstance(cell, NonTensorData) and not cell.batch_dims for cell in cells):
            return [cell.data for cell in cells]
        return None

    def tolist(self, **kwargs: Any) -> list[Any]:
        """The objects, one a row, as a new list."""
        items = None if kwargs else self._flat()
        return super().tolist(**kwargs) if items is None else list(items)

    def _clone(self, recurse: bool = True, **kwargs: Any) -> NonTensorStack:
        items = self._flat()
        if items is None:
            return super()._clone(recurse, **kwargs)
        return type(self).of(items)

    def clone(self, recurse: bool = True, **kwargs: Any) -> NonTensorStack:
        """A new column over the same immutable objects."""
        return self._clone(recurse, **kwargs)

    def copy(self) -> NonTensorStack:
        """A new column over the same immutable objects."""
        return self._clone(False)

    def empty(self, recurse: bool = False, **kwargs: Any) -> NonTensorStack:
        """The same column: objects are no entries that could be left out."""
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
        """Rows of this column where ``condition`` holds, of ``other`` where it does not.

        An environment that resets some of its rows merges every column this way at every step.
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
            return NonTensorData(items[index])
        if isinstance(index, slice):
            return type(self).of(items[index])
        if isinstance(index, (list, range)):
            if index and isinstance(index[0], bool):
                index = [i for i, kept in enumerate(index) if kept]
            if all(isinstance(i, int) for i in index):
                return type(self).of([items[i] for i in index])
        return super().__getitem__(index)

    def unbind(self, dim: int = 0) -> tuple[NonTensorData, ...]:
        """The rows as separate cells."""
        if self.__dict__["_items"] is None or dim not in (0, -1):
            return super().unbind(dim)
        return tuple(NonTensorData(x) for x in self.__dict__["_items"])

    # A column has no device, no lock of its own over immutable cells, and no names: tensordict asks
    # each of these for every leaf at every step, and the inherited answers build the cells.
    @property
    def device(self) -> None:
        """Always ``None``."""
        return None

    @device.setter
    def device(self, value: Any) -> None:
        """Accepted and without meaning, as for every non-tensor leaf."""

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

    @property
    def _is_shared(self) -> bool:
        return False

    @_is_shared.setter
    def _is_shared(self, value: bool) -> None:
        pass

    @property
    def _is_memmap(self) -> bool:
        return False

    @_is_memmap.setter
    def _is_memmap(self, value: bool) -> None:
        pass

    def to(self, *args: Any, **kwargs: Any) -> Column:
        """Itself: objects have no device and no dtype."""
        return self

    def _memmap_(self, *args: Any, **kwargs: Any) -> Any:
        return NonTensorStack(*self.tensordicts)._memmap_(*args, **kwargs)

    @property
    def names(self) -> list[None]:
        """Unnamed dimensions."""
        return [None] * self.batch_dims

    @names.setter
    def names(self, value: Any) -> None:
        pass

    def _has_names(self) -> bool:
        return False

    def _maybe_names(self) -> None:
        return None

    def _set_names(self, *args: Any, **kwargs: Any) -> None:
        return None

    def rename_(self, *args: Any, **kwargs: Any) -> Column:
        """Itself: columns carry no dimension names."""
        return self

    def refine_names(self, *args: Any) -> Column:
        """Itself: columns carry no dimension names."""
        return self

    def _check_dim_name(self, name: Any) -> None:
        return None


def set_as_column(self: Any, key: str, value: Any, **how: Any) -> Any:
    """``_set_str`` of tensorclasses whose fields are columns: a list, a value a row, becomes one.

    TorchRL's ``step_mdp`` reads a column through its tensorclass, which gives it as a list, and
    sets that list where the column should be.
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
    """A column from its pickle."""
    return Column.of(items)


copyreg.pickle(Column, _reduce_column)
reduction.register(Column, _reduce_column)
