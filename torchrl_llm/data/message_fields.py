"""Fields of messages as keys of a History: what TorchRL stores under them, ours reads and builds.

A conversation is stored as one cell under ``"messages"``; the functions here give the view of its
fields that ``keys``, ``items``, ``to_dict``, ``to_tensordict`` and nested keys of TorchRL have.

Next: :mod:`torchrl_llm.data.history` gives these operations to people.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, lazy_stack

from torchrl_llm.data import column as cells
from torchrl_llm.data import message_grid as grids
from torchrl_llm.data.column import Chat
from torchrl_llm.data.messages import canonical_message
from torchrl_llm.errors import DataError

_INSIDE = ("tensordict.", "torchrl.")
FIELDS = ("role", "content", "is_complete", "tool_calls", "tool_responses")


def asked_inside(depth: int = 2) -> bool:
    """Whether tensordict or TorchRL calls what calls this, ``depth`` frames above.

    They take a history for what it is stored as, a node of rows with one entry: they compare its
    batch size with that of other nodes, and copy its entries, at every step.
    """
    return sys._getframe(depth).f_globals.get("__name__", "").startswith(_INSIDE)


class MessageFields:
    """Fields of messages as keys, part of :class:`~torchrl_llm.data.history.History`."""

    def keys(self, *args: Any, **kwargs: Any) -> Any:
        """The fields that the messages have."""
        if asked_inside():
            return self._tensordict.keys(*args, **kwargs)
        return dict.fromkeys(_present(self)).keys()

    def items(self, *args: Any, **kwargs: Any) -> Any:
        """Fields and their values, as tensordict stores values that are no tensors."""
        if asked_inside():
            return self._tensordict.items(*args, **kwargs)
        return {name: _leaf(self, name) for name in _present(self)}.items()

    def values(self, *args: Any, **kwargs: Any) -> Any:
        """The values of :meth:`items`."""
        if asked_inside():
            return self._tensordict.values(*args, **kwargs)
        return dict(self.items()).values()

    def to_dict(self, **_: Any) -> dict[str, Any]:
        """The five fields of TorchRL as plain values, ``None`` where no message has one."""
        return {name: getattr(self, name) for name in FIELDS}

    def to_tensordict(self, **kwargs: Any) -> TensorDictBase:
        """The fields in a tensordict of this shape, a lazy stack where rows differ."""
        if asked_inside():
            return self._tensordict.to_tensordict(**kwargs)
        if -1 in self.shape:
            return lazy_stack([row.to_tensordict() for row in self])
        fields = {name: _leaf(self, name) for name in _present(self)}
        return TensorDict(fields, batch_size=self.shape)

    @classmethod
    def from_dict(cls, input_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """A history of the fields that a dict has."""
        if "role" in input_dict:
            return cls(**read_fields(input_dict))
        return super().from_dict(input_dict, *args, **kwargs)

    def set(self, key: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuses a field, for messages do not change.

        Raises:
            AttributeError: the key is a field.
        """
        if key in FIELDS:
            raise fixed(key, args[0] if args else None)
        return super().set(key, *args, **kwargs)

    def replace(self, **fields: Any) -> Any:
        """The same messages with other values of some fields, nested as the fields read.

        Token records are left behind.

        Raises:
            DataError: an unknown field, or another number of values than of messages.
        """
        node = self._tensordict
        chats = _replaced(node, fields)
        made = cells.row_node(cells.Column.of(chats)) if node.batch_dims else None
        if made is None:
            return self._from_tensordict(cells.cell_node(chats[0]))
        return self._from_tensordict(made if node.batch_dims == 1 else made.reshape(node.shape))

    def _get_tuple(self, key: Any, default: Any, **kwargs: Any) -> Any:
        if len(key) == 1 and key[0] in FIELDS:
            found = _leaf(self, key[0])
            return default if found is None else found
        return super()._get_tuple(key, default, **kwargs)


def fixed(name: str, value: Any) -> AttributeError:
    """The error of a field that is set."""
    return AttributeError(
        f"messages do not change: {name} cannot be set to {value!r:.60}; h.replace({name}=...) "
        "gives the conversation with other values, and h = h[..., :-1].append(message, "
        "inplace=False) with another last message"
    )


def _present(history: Any) -> list[str]:
    return [name for name in FIELDS if getattr(history, name) is not None]


def _leaf(history: Any, name: str) -> Any:
    value = getattr(history, name)
    if not isinstance(value, list):
        return value if value is None or hasattr(value, "batch_dims") else NonTensorData(value)
    return NonTensorStack.from_list(_cells(value, len(history.shape)))


def _cells(value: Any, dims: int) -> Any:
    return [_cells(part, dims - 1) for part in value] if dims else NonTensorData(value)


def read_fields(source: TensorDictBase | Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a tensordict or dict has, as plain values for the constructor.

    Raises:
        DataError: it has other keys.
    """
    if unknown := {key for key in source.keys() if key not in FIELDS}:
        raise DataError(f"a History has the fields {FIELDS}, got also {sorted(map(str, unknown))}")
    found = {name: source.get(name) for name in FIELDS if source.get(name, None) is not None}
    return {k: v.tolist() if hasattr(v, "tolist") else v for k, v in found.items()}


def _replaced(node: TensorDictBase, fields: Mapping[str, Any]) -> list[Chat]:
    unknown = [name for name in fields if name not in FIELDS]
    if unknown:
        raise DataError(f"a History has the fields {FIELDS}, got {unknown}")
    stored = cells.flattened(cells.cells_of(node), node.batch_dims)
    alone = not grids.is_grid(node)
    columns = {}
    for name, values in fields.items():
        rows = cells.flattened(values, node.batch_dims)
        columns[name] = [[row] for row in rows] if alone else rows
        if [len(row) for row in columns[name]] != [len(chat) for chat in stored]:
            raise DataError(f"{name} needs one value a message, got {values!r:.80}")
    made = []
    for at, chat in enumerate(stored):
        rows = [
            canonical_message({**message, **{name: columns[name][at][i] for name in columns}})
            for i, message in enumerate(chat.messages)
        ]
        made.append(type(chat)._of(tuple(rows), None))
    return made
