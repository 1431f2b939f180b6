"""State of a run as plain values and tensors, for files that can be read without running code.

A state consists of nested dicts, lists, tuples and sets of tensors, plain values, NumPy arrays,
rows (packed or as tensordicts), chats and the enums of :mod:`torchrl_llm.data.enums`. It is
converted to JSON and tensors, to which the JSON refers by name. Rows become byte tensors with the
result of :func:`~torchrl_llm.data.wire.encode`.

A tensor that is sharded over ranks (a DTensor) is not included: the state has its name only, and
reading returns a :class:`Spread`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase, is_tensorclass
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchrl_llm.data.nodes import new_node
from torchrl_llm.data.safe_bytes import MALFORMED
from torchrl_llm.data.safe_values import ValueReader, ValueWriter
from torchrl_llm.data.wire import PackedRows, encode, pack_rows
from torchrl_llm.errors import CheckpointError, DamagedCheckpointError, DataError


class Spread(NamedTuple):
    """A tensor of a state that all ranks read together.

    Attributes:
        name: its name in the files of the ranks.
        shape: its global shape.
        dtype: its dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class PlainState(NamedTuple):
    """A state in the form for files.

    Attributes:
        plain: values that JSON can represent.
        tensors: on any device, by the names used in ``plain``.
        spread: sharded tensors, by name.
    """

    plain: Any
    tensors: dict[str, Tensor]
    spread: dict[str, DTensor]


def state_to_plain(state: Any) -> PlainState:
    """Turn a state into plain values and tensors.

    Args:
        state: nested dicts and so on, see above.

    Raises:
        CheckpointError: it contains an object of an unsupported type; the message has its location.

    Example:
        >>> plain, tensors, _ = state_to_plain({"count": 3, "weights": torch.ones(2)})
        >>> plain, len(tensors)
        (['dict', ['count', 3], ['weights', ['tensor', '#0']]], 1)
        >>> state_from_plain(plain, tensors)
        {'count': 3, 'weights': tensor([1., 1.])}
    """
    writer = _StateWriter()
    return PlainState(writer.value(state), writer.tensors, writer.spread)


def state_from_plain(plain: Any, tensors: dict[str, Tensor]) -> Any:
    """Convert plain values back to a state, with the given tensors.

    Args:
        plain: from :func:`state_to_plain`, untrusted.
        tensors: as in :class:`PlainState`.

    Raises:
        DamagedCheckpointError: the values are not a state.
    """
    try:
        return _StateReader(tensors).value(plain)
    except (*MALFORMED, DataError) as error:
        said = f"{type(error).__name__}: {error}"[:200]
        raise DamagedCheckpointError(f"this is not the state of a run: {said}") from None


class _StateWriter(ValueWriter):
    def __init__(self) -> None:
        super().__init__()
        self.spread: dict[str, DTensor] = {}
        self.path: list[str] = []

    def value(self, value: Any) -> Any:
        if isinstance(value, dict):
            return ["dict", *([self.value(k), self._at(str(k), v)] for k, v in value.items())]
        if type(value) in (list, tuple):
            items = [self._at(str(i), item) for i, item in enumerate(value)]
            return [type(value).__name__, *items]
        if isinstance(value, DTensor):
            name = ".".join(self.path)
            self.spread[name] = value
            return ["spread", name, list(value.shape), str(value.dtype).removeprefix("torch.")]
        if isinstance(value, torch.Size):
            return ["tuple", *value]
        try:
            if isinstance(value, PackedRows):
                return ["rows", self._bytes(value)]
            if isinstance(value, TensorDictBase) or is_tensorclass(value):
                return ["node", self._bytes(pack_rows([new_node({"value": value})]))]
            return super().value(value)
        except DataError as error:
            raise CheckpointError(
                f"the state of {'.'.join(self.path)} cannot be saved: {error}. What a part of a "
                "run keeps must be plain where it is saved: let its state_dict() return numbers, "
                "strings, tensors, and lists or dicts of them (as vars(board) or a text), and "
                "make its own class of them again in load_state_dict()"
            ) from None

    def _at(self, name: str, value: Any) -> Any:
        self.path.append(name)
        written = self.value(value)
        self.path.pop()
        return written

    def _bytes(self, rows: PackedRows) -> str:
        return self.tensor(torch.frombuffer(bytearray(encode(rows)), dtype=torch.uint8))


class _StateReader(ValueReader):
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors, 1 << 60)

    def tensor(self, name: Any) -> Tensor:
        return self.view(name)  # each tensor is used once, and weights are large

    def value(self, value: Any) -> Any:
        match value:
            case ["spread", str(name), list(shape), str(dtype)]:
                kind = getattr(torch, dtype)
                if not isinstance(kind, torch.dtype):
                    raise ValueError(f"{dtype} is not a dtype of tensors")
                return Spread(name, tuple(map(int, shape)), kind)
            case ["rows", place]:
                return self._rows(place)
            case ["node", place]:
                (row,) = self._rows(place)
                return row._tensordict["value"]
        return super().value(value)

    def _rows(self, place: Any) -> PackedRows:
        return PackedRows.open(self.tensor(place).numpy().tobytes())
