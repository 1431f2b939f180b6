"""The cells behind a history: single messages and conversations, and the nodes that hold them.

A cell is a :class:`~torchrl_llm.data.column.Chat`; a :class:`Message` is one that stands for a
single message rather than for a conversation of one. Batches of single messages count as
conversations along their last dimension, as stacked messages do in TorchRL. Everything here works
on tensordicts; :mod:`torchrl_llm.data.history` is the class around them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase
from torch import Tensor

from torchrl_llm.data.column import Chat, Column, rebuild_chat
from torchrl_llm.data.messages import canonical_message
from torchrl_llm.errors import DataError

_ROW = torch.Size([])


class Message(Chat):
    """A cell that is one message rather than a conversation of one message."""

    __slots__ = ()

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Message:
        """The cell of one message, which is brought into its canonical form."""
        return cls._of((canonical_message(message),), None)

    def __reduce__(self) -> tuple:
        return rebuild_chat, (Message, self.messages, self.record)


# -- building -------------------------------------------------------------------------------------


def cell_node(cell: Chat) -> TensorDict:
    """A tensordict of batch size ``[]`` around one cell."""
    return TensorDict._new_unsafe(source={"messages": NonTensorData(cell)}, batch_size=_ROW)


def row_node(column: Column) -> TensorDict:
    """A tensordict of batch size ``[B]`` around a column of cells."""
    return TensorDict._new_unsafe(source={"messages": column}, batch_size=column.batch_size)


def chat_of(messages: Chat | Sequence[Mapping[str, Any]], where: str) -> Chat:
    """A conversation of canonical messages.

    Args:
        messages: message dicts; a chat is returned as it is.
        where: names a message in errors.

    Raises:
        DataError: a message has the wrong form.
    """
    if isinstance(messages, Chat):
        return messages
    if isinstance(messages, (str, Mapping)):
        raise DataError(f"{where}: expected a list of messages, got {messages!r:.100}")
    made = tuple(canonical_message(m, f"{where} {i}") for i, m in enumerate(messages))
    return Chat._of(made, None)


def build_node(fields: dict[str, Any], batch: tuple[int, ...] | None) -> TensorDictBase:
    """The tensordict of a message, a conversation, or a batch of conversations.

    Args:
        fields: name to value, to a list of values, or to nested lists.
        batch: the wanted batch size, ``None`` for the one that the values imply.

    Raises:
        DataError: lengths or batch size do not fit.
    """
    role = fields.get("role")
    if not isinstance(role, (list, tuple)):
        node = cell_node(Message.of(fields))
        return node.expand(batch) if batch else node
    if role and isinstance(role[0], (list, tuple)):
        split = _split(fields)
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
    if not isinstance(value, (list, tuple)):
        if name == "is_complete":
            return value
        raise DataError(f"{name} must be a list of {count} values, as role is; got {value!r:.100}")
    if len(value) != count:
        raise DataError(f"{name} has {len(value)} values, role has {count}")
    return value[index]


# -- reading --------------------------------------------------------------------------------------


def cells_of(node: TensorDictBase) -> Any:
    """The cells of a node: one, or lists nested along the batch dimensions.

    Raises:
        DataError: the node has none.
    """
    if isinstance(node, LazyStackedTensorDict) and node.stack_dim == 0:
        return [cells_of(row) for row in node.tensordicts]
    value = node.get("messages", None)
    if value is None:
        raise DataError("this History has no messages; it is an empty view")
    # TorchRL's step_mdp reads a column through its tensorclass, and leaves a list in its place.
    return value if isinstance(value, (Chat, list)) else value.tolist()


def flattened(values: Any, dims: int) -> list[Any]:
    """Lists nested ``dims`` deep as one list in row-major order (a bare value as a list of one)."""
    if not dims:
        return [values]
    for _ in range(dims - 1):
        values = [value for row in values for value in row]
    return list(values)


def nested(values: list[Any], batch: tuple[int, ...]) -> Any:
    """The inverse of :func:`flattened` for a batch shape."""
    if not batch:
        return values[0]
    for size in reversed(batch[1:]):
        values = [values[i : i + size] for i in range(0, len(values), size)]
    return values


def is_message(cells: Any) -> bool:
    """Whether nested cells are single messages."""
    while isinstance(cells, list) and cells:
        cells = cells[0]
    return isinstance(cells, Message)


def conversations(node: TensorDictBase) -> tuple[tuple[int, ...], list[Chat]]:
    """Batch shape and conversations; single messages join along the last batch dimension."""
    cells, batch = cells_of(node), tuple(node.batch_size)
    flat = flattened(cells, len(batch))
    if not is_message(cells):
        return batch, flat
    count = batch[-1] if batch else 1
    rows = [flat[i : i + count] for i in range(0, len(flat), count)]
    return batch[:-1], [Chat._of(tuple(m for c in row for m in c.messages), None) for row in rows]


def single_messages(node: TensorDictBase) -> list[Chat] | None:
    """Single messages: as they are, or those of one conversation; ``None`` if there are more."""
    cells, dims = cells_of(node), node.batch_dims
    flat = flattened(cells, dims)
    if is_message(cells):
        return flat
    if not dims:
        return [Chat._of((message,), None) for message in cells.messages]
    return flat if all(len(chat) == 1 for chat in flat) else None


def virtual_shape(node: TensorDictBase) -> list[Any]:
    """Batch size, with ``"messages"`` for the message dimension that conversations have."""
    shape: list[Any] = list(node.batch_size)
    return shape if is_message(cells_of(node)) else [*shape, "messages"]


def read_messages(cells: Any, value: Callable[[Mapping[str, Any]], Any]) -> Any:
    """``value`` of each message, nested as the cells are."""
    if isinstance(cells, list):
        return [read_messages(cell, value) for cell in cells]
    if isinstance(cells, Message):
        return value(cells.messages[0])
    return [value(message) for message in cells.messages]


def pick_messages(cells: Any, index: Any) -> Any:
    """The messages at ``index`` of each conversation: a :class:`Message` for an integer."""
    if isinstance(cells, list):
        return [pick_messages(cell, index) for cell in cells]
    if isinstance(index, slice):
        return cells[index]
    if isinstance(index, Tensor):
        index = (index.nonzero().flatten() if index.dtype == torch.bool else index).tolist()
    if isinstance(index, (list, range)):
        return Chat._of(tuple(cells.messages[i] for i in index), None)
    return Message._of((cells.messages[index],), None)
