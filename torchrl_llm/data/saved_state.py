"""State of an object by the names of its attributes, for saving and resuming.

Not for modules and environments, which have torch's ``state_dict``.
:mod:`torchrl_llm.data.safe_state` converts a state to bytes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any, ClassVar

from tensordict import TensorDictBase

from torchrl_llm.data.wire import pack_rows, unpack_row_list

_PACKED, _ROW = "packed", "row of packed"


class SavedState:
    """Gives a class ``state_dict`` and ``load_state_dict``, given the names of attributes.

    Attributes:
        saved: attributes with plain values, tensors, and containers of them, which are copied; or
            with a ``SavedState``.
        saved_rows: attributes with rows in any containers; all rows are packed together.

    Example:
        >>> class Count(SavedState):
        ...     saved = ("_number",)
        ...     def __init__(self, number):
        ...         self._number = number
        >>> count = Count(0)
        >>> count.load_state_dict(Count(3).state_dict())
        >>> count.state_dict()
        {'number': 3}
    """

    saved: ClassVar[tuple[str, ...]] = ()
    saved_rows: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        """The state, for :meth:`load_state_dict`."""
        state = {name.lstrip("_"): _taken(getattr(self, name), None) for name in self.saved}
        rows: list[TensorDictBase] = []
        for name in self.saved_rows:
            state[name.lstrip("_")] = _taken(getattr(self, name), rows)
        return {**state, _PACKED: pack_rows(rows)} if rows else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of :meth:`state_dict`.

        Args:
            state: of an object that was constructed in the same way.
        """
        rows = unpack_row_list(state[_PACKED]) if _PACKED in state else []
        for name in (*self.saved, *self.saved_rows):
            now, value = getattr(self, name), state[name.lstrip("_")]
            if isinstance(now, SavedState):
                now.load_state_dict(value)
            else:
                setattr(self, name, _given(value, now, rows))


def _taken(value: Any, rows: list[TensorDictBase] | None) -> Any:
    """A value with copied containers; rows are moved to the list ``rows``, if given."""
    if isinstance(value, SavedState):
        return value.state_dict()
    if isinstance(value, TensorDictBase):
        if rows is None:
            return value.clone(recurse=False)
        rows.append(value)
        return (_ROW, len(rows) - 1)
    if isinstance(value, Mapping):
        return {key: _taken(inner, rows) for key, inner in value.items()}
    if isinstance(value, (list, deque)):
        return [_taken(inner, rows) for inner in value]
    return tuple(_taken(inner, rows) for inner in value) if type(value) is tuple else value


def _given(value: Any, now: Any, rows: list[TensorDictBase]) -> Any:
    """The value from :func:`_taken`, in containers of the same types as in ``now``."""
    if type(value) is tuple:
        if len(value) == 2 and value[0] == _ROW:
            return rows[value[1]]
        return tuple(_given(inner, None, rows) for inner in value)
    if isinstance(value, TensorDictBase):
        return value.clone(recurse=False)
    if isinstance(value, Mapping):
        before = now if isinstance(now, Mapping) else {}
        found = {key: _given(inner, before.get(key), rows) for key, inner in value.items()}
        return Counter(found) if isinstance(now, Counter) else found
    if isinstance(value, list):
        listed = [_given(inner, None, rows) for inner in value]
        return deque(listed) if isinstance(now, deque) else listed
    return value
