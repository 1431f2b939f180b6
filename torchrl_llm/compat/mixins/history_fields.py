"""Message fields as keys of a History, with the values that TorchRL stores under them.

A conversation is stored as one cell under ``"messages"``; the functions here provide the view of
its fields for TorchRL's ``keys``, ``items``, ``to_dict``, ``to_tensordict`` and nested keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, lazy_stack

from torchrl_llm.compat.mixins import message_grid as grids
from torchrl_llm.compat.mixins.history_grid import asked_inside
from torchrl_llm.errors import DataError

FIELDS = ("role", "content", "is_complete", "tool_calls", "tool_responses")


def read_field(
    name: str, about: str, *, default: Any = None, change: Callable[[Any], Any] | None = None
) -> property:
    """Make a read-only attribute for one field of the messages.

    Args:
        name: the field.
        about: docstring of the attribute.
        default: value for messages without the field; with ``None``, the attribute is ``None`` if
            no message has the field.
        change: function from the stored value to the returned value.
    """

    def value(message: Mapping[str, Any]) -> Any:
        stored = message.get(name, default)
        return stored if change is None else change(stored)

    def read(self: Any) -> Any:
        values = grids.read_messages(grids.cells_of(self._tensordict), value)
        return _found(values) if name.startswith("tool_") else values

    def refuse(self: Any, value: Any) -> None:
        raise fixed(name, value)

    return property(read, refuse, doc=about)


class HistoryFields:
    """Mixin for a class with :class:`~torchrl_llm.compat.mixins.history_grid.HistoryGrid`.

    The class has ``_of_rows`` and ``_canonical(message)``, which brings a message into canonical
    form.
    """

    def keys(self, *args: Any, **kwargs: Any) -> Any:
        """The fields present in the messages."""
        if asked_inside():
            return self._tensordict.keys(*args, **kwargs)
        return dict.fromkeys(_present(self)).keys()

    def items(self, *args: Any, **kwargs: Any) -> Any:
        """Fields and their values, in tensordict's form for non-tensor values."""
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
        """The fields in a tensordict of this shape; a lazy stack if rows differ."""
        if asked_inside():
            return self._tensordict.to_tensordict(**kwargs)
        if -1 in self.shape:
            return lazy_stack([row.to_tensordict() for row in self])
        fields = {name: _leaf(self, name) for name in _present(self)}
        return TensorDict(fields, batch_size=self.shape)

    @classmethod
    def from_dict(cls, input_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Make a history from a dict of fields."""
        if "role" in input_dict:
            return cls(**read_fields(input_dict))
        return super().from_dict(input_dict, *args, **kwargs)

    def set(self, key: Any, *args: Any, **kwargs: Any) -> Any:
        """Raise for a field, because messages are immutable.

        Raises:
            AttributeError: the key is a field.
        """
        if key in FIELDS:
            raise fixed(key, args[0] if args else None)
        return super().set(key, *args, **kwargs)

    def replace(self, **fields: Any) -> Any:
        """The same messages with new values of some fields, nested like the fields.

        Token records are dropped.

        Raises:
            DataError: a field is unknown, or the numbers of values and messages differ.
        """
        node = self._tensordict
        return self._of_rows(tuple(node.batch_size), _replaced(node, fields, self._canonical))

    @classmethod
    def from_tensordict(cls, tensordict: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a history from a tensordict of fields, or from a node with conversations."""
        if tensordict is not None and "role" in tensordict.keys():
            return cls(**read_fields(tensordict))
        return cls._from_tensordict(tensordict, *args, **kwargs)

    def _get_tuple(self, key: Any, default: Any, **kwargs: Any) -> Any:
        if len(key) == 1 and key[0] in FIELDS:
            found = _leaf(self, key[0])
            return default if found is None else found
        return super()._get_tuple(key, default, **kwargs)


def fixed(name: str, value: Any) -> AttributeError:
    """The error for setting a field."""
    return AttributeError(
        f"messages do not change: {name} cannot be set to {value!r:.60}; h.replace({name}=...) "
        "gives the conversation with other values, and h = h[..., :-1].append(message, "
        "inplace=False) with another last message"
    )


def _found(values: Any) -> Any:
    pending = [values]
    while pending:
        value = pending.pop()
        if value is None:
            continue
        if not isinstance(value, list) or (value and isinstance(value[0], Mapping)):
            return values
        pending += value
    return None


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
    """The fields of a tensordict or dict, as plain values for the constructor.

    Raises:
        DataError: there are other keys.
    """
    if unknown := {key for key in source.keys() if key not in FIELDS}:
        raise DataError(f"a History has the fields {FIELDS}, got also {sorted(map(str, unknown))}")
    found = {name: source.get(name) for name in FIELDS if source.get(name, None) is not None}
    return {k: v.tolist() if hasattr(v, "tolist") else v for k, v in found.items()}


def _replaced(
    node: TensorDictBase, fields: Mapping[str, Any], canonical: Callable[[dict], dict]
) -> list[Any]:
    unknown = [name for name in fields if name not in FIELDS]
    if unknown:
        raise DataError(f"a History has the fields {FIELDS}, got {unknown}")
    stored = grids.flattened(grids.cells_of(node), node.batch_dims)
    alone = not grids.is_grid(node)
    columns = {}
    for name, values in fields.items():
        rows = grids.flattened(values, node.batch_dims)
        columns[name] = [[row] for row in rows] if alone else rows
        if [len(row) for row in columns[name]] != [len(chat) for chat in stored]:
            raise DataError(f"{name} needs one value a message, got {values!r:.80}")
    made = []
    for at, chat in enumerate(stored):
        rows = [
            canonical({**message, **{name: columns[name][at][i] for name in columns}})
            for i, message in enumerate(chat.messages)
        ]
        made.append(type(chat)._of(tuple(rows), None))
    return made
