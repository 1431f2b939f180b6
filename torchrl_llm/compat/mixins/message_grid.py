"""Conversations as a grid of messages: TorchRL's shape, with one immutable cell per conversation.

A grid of shape ``[*B, T]`` has ``T`` messages in each row, a grid ``[*B, -1]`` different numbers.
Tensor operations run on a tensor of positions, which gives the message at each position of the
result; rows that stay whole keep their cell with its token record.

A node is a tensordict ``[*B]`` with cells under ``"messages"``. A cell is a conversation, or a
single message if ``cell.is_single``; it has ``messages``. ``cell.of_messages(messages, record)``
makes a conversation from a tuple, ``cell.of_message`` a single message from a tuple of one. Batches
of single messages count as conversations along their last dimension, as stacked messages do in
TorchRL.

Next: :mod:`torchrl_llm.compat.mixins.history_grid` provides these operations to users.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import Tensor

from torchrl_llm.errors import DataError

_RAGGED_WIDTH = 1009  # placeholder for rows of different lengths; results contain only whole rows
Grid = tuple[tuple[int, ...], list[Any]]


def grid_shape(node: TensorDictBase) -> torch.Size:
    """Shape of batch and messages: ``[]`` for a message, ``[T]``, ``[*B, T]`` or ``[*B, -1]``."""
    batch = node.batch_size
    if node.get("messages", None) is None:
        return batch
    stored = cells_of(node)
    if not _holds_chats(stored):
        return batch
    sizes = {len(chat) for chat in flattened(stored, len(batch))}
    return torch.Size([*batch, sizes.pop() if len(sizes) == 1 else -1])


def is_grid(node: TensorDictBase) -> bool:
    """Whether the node holds conversations, which have one more dimension, not messages."""
    return _holds_chats(cells_of(node))


def rearranged(node: TensorDictBase, change: Callable[[Tensor], Any], name: str) -> Any:
    """Apply a change of positions to a grid.

    Args:
        node: conversations of batch ``[*B]``.
        change: function from positions, int64 ``[*B, T]``, to those of the result, or a tuple of
            them.
        name: name of the operation, for errors.

    Returns:
        Batch shape and cells, or a tuple of such pairs; the cells are messages if ``change`` leaves
        no dimension.

    Raises:
        DataError: rows of different lengths would have to be cut or mixed.
    """
    batch, chats = tuple(node.batch_size), flattened(cells_of(node), node.batch_dims)
    sizes = {len(chat) for chat in chats}
    ragged = len(sizes) != 1 or 0 in sizes
    width = _RAGGED_WIDTH if ragged else sizes.pop()
    places = torch.arange(len(chats) * width).view(*batch, width)
    made = change(places)
    if isinstance(made, (tuple, list)):
        return tuple(_gathered(chats, width, one, ragged, name) for one in made)
    return _gathered(chats, width, made, ragged, name)


def picked(node: TensorDictBase, places: Callable[[Tensor], Tensor], name: str) -> Grid:
    """Like :func:`rearranged`, for a result of single messages."""
    batch, chats = rearranged(node, lambda grid: places(grid).unsqueeze(-1), name)
    return batch, [chat.of_message((chat.messages[0],), None) for chat in chats]


def stacked(nodes: list[TensorDictBase], dim: int) -> Grid:
    """Stack conversations of equal shapes along a new dimension after the messages."""
    grids = [conversations(node) for node in nodes]
    sizes = {(batch, len(chat)) for batch, chats in grids for chat in chats}
    if len(sizes) != 1:
        raise ragged_error("stack behind the messages")
    batch, width = sizes.pop()
    chats = [chat for _, rows in grids for chat in rows]
    places = torch.arange(len(chats) * width).view(-1, *batch, width)
    return _gathered(chats, width, torch.stack(list(places.unbind(0)), dim), False, "stack")


def equal_messages(mine: TensorDictBase, other: TensorDictBase) -> Tensor:
    """Equality of messages, bool ``[*B, T]``; of rows, ``[*B]``, if lengths differ.

    A single message is compared with each message; grids of different shapes are unequal as a
    whole.
    """
    for one, many in ((other, mine), (mine, other)):
        if not one.batch_dims and is_message(cells_of(one)):
            shape = grid_shape(many)
            batch, chats = conversations(many)
            if -1 not in shape:
                message = cells_of(one).messages[0]
                same = [m == message for chat in chats for m in chat.messages]
                return torch.tensor(same, dtype=torch.bool).reshape(shape)
    batch, chats = conversations(mine)
    other_batch, others = conversations(other)
    if batch != other_batch:
        return torch.tensor(False)
    sizes = {len(chat) for chat in chats}
    if len(sizes) == 1 and sizes == {len(chat) for chat in others}:
        pairs = [
            zip(a.messages, b.messages, strict=True) for a, b in zip(chats, others, strict=True)
        ]
        same = [one == two for row in pairs for one, two in row]
        return torch.tensor(same, dtype=torch.bool).reshape(*batch, sizes.pop())
    rows = [a == b for a, b in zip(chats, others, strict=True)]
    return torch.tensor(rows, dtype=torch.bool).reshape(batch)


def ragged_error(name: str) -> DataError:
    """The error of an operation that needs rows of equal length."""
    return DataError(
        f"{name} needs conversations with equally many messages, these differ; pick messages "
        "first (h[..., -1] is the last of each, h[..., :2] the first two), or go through the "
        "rows with h.unbind(0)"
    )


def expanded(index: Any, dims: int) -> list[Any]:
    """The parts of an index over ``dims`` dimensions, ``...`` written out as full slices."""
    parts = list(index) if isinstance(index, tuple) else [index]
    dots = [at for at, part in enumerate(parts) if part is Ellipsis]
    if not dots:
        return parts
    if len(dots) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    missing = dims - sum(consumed(part) for part in parts if part is not Ellipsis)
    return [*parts[: dots[0]], *[slice(None)] * missing, *parts[dots[0] + 1 :]]


def consumed(part: Any) -> int:
    """Number of dimensions that a part of an index consumes."""
    if part is None:
        return 0
    return part.ndim if isinstance(part, Tensor) and part.dtype == torch.bool else 1


def is_list(part: Any) -> bool:
    """Whether a part of an index is a list of positions or a mask."""
    return isinstance(part, (list, range)) or (isinstance(part, Tensor) and part.ndim > 0)


def axis(dim: int, count: int) -> int:
    """A dimension over batch and messages, counted from the front."""
    if not -count <= dim < count:
        raise ValueError(f"dim over batch and messages must be in [{-count}, {count}), got {dim}")
    return dim % count


def check_mask(part: Any, chats: list[Any]) -> None:
    """Raise for a mask whose length differs from the conversation."""
    if isinstance(part, list) and part and isinstance(part[0], bool):
        part = torch.tensor(part)
    if isinstance(part, Tensor) and part.dtype == torch.bool:
        for chat in chats:
            if len(chat) != len(part):
                raise IndexError(
                    f"a mask of {len(part)} for a conversation of {len(chat)} messages"
                )


class RowLink:
    """Link from a row to its batch, so that messages appended to the row reach the batch.

    It does not keep the batch alive; copies and pickles do not contain it.
    """

    __slots__ = ("parent", "places")

    def __init__(self, parent: TensorDictBase, places: list[int]) -> None:
        self.parent, self.places = weakref.ref(parent), places

    def write(self, before: list[Any], after: list[Any], made: Callable[[Any, Any], Any]) -> None:
        """Put grown conversations into the batch.

        Args:
            before: the conversations of the row when it was taken.
            after: the changed conversations.
            made: function from batch shape and conversations to a history.

        Raises:
            DataError: these rows of the batch have changed since.
        """
        parent = self.parent()
        if parent is None:
            return
        batch = tuple(parent.batch_size)
        chats = flattened(cells_of(parent), len(batch))
        now = [chats[place] if place < len(chats) else None for place in self.places]
        if any(a is not b for a, b in zip(now, before, strict=True)):
            raise DataError(
                "this row was taken before its batch was changed; take it again (h[0]) and append "
                "to that, or append to row.clone(), which has no batch"
            )
        for place, chat in zip(self.places, after, strict=True):
            chats[place] = chat
        parent.set("messages", made(batch, chats)._tensordict.get("messages"))


def _first(stored: Any) -> Any:
    while isinstance(stored, list) and stored:
        stored = stored[0]
    return stored


def _holds_chats(stored: Any) -> bool:
    return not getattr(_first(stored), "is_single", True)


def _gathered(chats: list[Any], width: int, places: Tensor, ragged: bool, name: str) -> Grid:
    if not places.ndim:
        chat = chats[int(places) // width]
        return (), [chat.of_message((chat.messages[int(places) % width],), None)]
    batch, count = tuple(places.shape[:-1]), places.shape[-1]
    rows = places.reshape(-1, count)
    if not count:
        return batch, [chats[0].of_messages((), None) for _ in range(rows.shape[0])]
    starts = rows[:, :1]
    runs = (rows == starts + torch.arange(count)).all(1) & (starts[:, 0] % width == 0)
    whole = bool(runs.all()) and count <= width
    if ragged and not (whole and count == width):
        raise ragged_error(name)
    owners = (starts[:, 0] // width).tolist()
    if whole:
        kept = [chats[owner] for owner in owners]
        return batch, kept if count == width else [chat[:count] for chat in kept]
    messages = [message for chat in chats for message in chat.messages]
    return batch, [
        chats[0].of_messages(tuple(messages[i] for i in row), None) for row in rows.tolist()
    ]


# -- reading cells ---------------------------------------------------------------------------------


def cells_of(node: TensorDictBase) -> Any:
    """The cells of a node: one, or lists nested along the batch dimensions.

    Raises:
        DataError: the node has no cells.
    """
    if isinstance(node, LazyStackedTensorDict) and node.stack_dim == 0:
        return [cells_of(row) for row in node.tensordicts]
    value = node.get("messages", None)
    if value is None:
        raise DataError("this History has no messages; it is an empty view")
    # TorchRL's step_mdp reads a column through its tensorclass, and replaces it by a list.
    return value if isinstance(value, list) or hasattr(value, "messages") else value.tolist()


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
    return getattr(_first(cells), "is_single", False)


def conversations(node: TensorDictBase) -> tuple[tuple[int, ...], list[Any]]:
    """Batch shape and conversations; single messages are joined along the last batch dimension."""
    cells, batch = cells_of(node), tuple(node.batch_size)
    flat = flattened(cells, len(batch))
    if not is_message(cells):
        return batch, flat
    count = batch[-1] if batch else 1
    rows = [flat[i : i + count] for i in range(0, len(flat), count)]
    return batch[:-1], [
        row[0].of_messages(tuple(m for c in row for m in c.messages), None) for row in rows
    ]


def single_messages(node: TensorDictBase) -> list[Any] | None:
    """Single messages, or the messages of one conversation; ``None`` if there are more."""
    cells, dims = cells_of(node), node.batch_dims
    flat = flattened(cells, dims)
    if is_message(cells):
        return flat
    if not dims:
        return [cells.of_messages((message,), None) for message in cells.messages]
    return flat if all(len(chat) == 1 for chat in flat) else None


def read_messages(cells: Any, value: Callable[[Mapping[str, Any]], Any]) -> Any:
    """``value`` of each message, nested like the cells."""
    if isinstance(cells, list):
        return [read_messages(cell, value) for cell in cells]
    if cells.is_single:
        return value(cells.messages[0])
    return [value(message) for message in cells.messages]


def without_placeholders(chat: Any) -> Any:
    """A chat without its messages of role ``"<none>"``, TorchRL's filler of ragged rows."""
    if all(message["role"] != "<none>" for message in chat.messages):
        return chat
    return chat.of_messages(tuple(m for m in chat.messages if m["role"] != "<none>"), None)


def pick_messages(cells: Any, index: Any) -> Any:
    """The messages at ``index`` of each conversation; a single message for an integer."""
    if isinstance(cells, list):
        return [pick_messages(cell, index) for cell in cells]
    if isinstance(index, slice):
        return cells[index]
    if isinstance(index, Tensor):
        index = (index.nonzero().flatten() if index.dtype == torch.bool else index).tolist()
    if isinstance(index, (list, range)):
        return cells.of_messages(tuple(cells.messages[i] for i in index), None)
    return cells.of_message((cells.messages[index],), None)
