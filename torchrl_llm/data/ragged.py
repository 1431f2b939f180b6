"""Rows of different length: one-dimensional lazy stacks of plain tensordicts.

A ragged column is stored as one tensor per row. Only these functions build, read, write or pad such
columns. The design page of the docs has the measurements that led to this design.

Shape legend: ``B`` rows, ``T_b`` tokens of row ``b``, ``T`` the longest row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

import numpy
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_tensorclass
from tensordict.utils import NestedKey
from torch import Tensor

_ROW = torch.Size([])
# NumPy has no bfloat16 and no 8-bit floats, so these are pickled as integers with the same bits.
_FLOATS = (torch.float16, torch.float32, torch.float64)
_BITS = {1: torch.uint8, 2: torch.int16}


@dataclass(slots=True, eq=False)
class RaggedColumn:
    """Tensors of one dtype, stored in one tensor; each can be read without the others.

    Pickling a tensor costs some 20 microseconds and 400 bytes regardless of its size; in one
    column, a thousand tensors cost as much as one.

    Args:
        values: ``[B, ...]`` if ``lengths`` is ``None``, else all tensors joined along their first
            dimension.
        lengths: size of the first dimension of each.

    Example:
        >>> column = RaggedColumn.of([torch.tensor([5, 6]), torch.tensor([7])])
        >>> column.values.tolist(), column.lengths, column[1].tolist()
        ([5, 6, 7], [2, 1], [7])
    """

    values: Tensor
    lengths: list[int] | None = None
    _ends: list[int] | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> RaggedColumn:
        """Copy tensors that differ only in their first dimension into one column."""
        if not tensors:
            return cls(torch.zeros(0), [])
        # Reading the shape of each tensor takes longer than copying all tensors.
        lengths = [t.size(0) for t in tensors] if tensors[0].dim() else []
        if len(set(lengths)) < 2:
            return cls(torch.stack(list(tensors)))
        return cls(torch.cat(list(tensors)), lengths)

    def __reduce__(self) -> tuple:
        values, dtype = self.values.detach(), self.values.dtype
        if values.device.type != "cpu":
            return _rebuilt, (values, self.lengths, dtype)
        if values.is_floating_point() and dtype not in _FLOATS:
            values = values.view(_BITS[dtype.itemsize])
        # As an array, this takes a tenth of the time.
        return _rebuilt, (values.numpy(), self.lengths, dtype)

    def __len__(self) -> int:
        return self.values.shape[0] if self.lengths is None else len(self.lengths)

    def split(self) -> Sequence[Tensor]:
        """Return all tensors, as views of ``values``."""
        return self.values.unbind(0) if self.lengths is None else self.values.split(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        if self.lengths is None:
            return self.values[index]
        if self._ends is None:
            self._ends = [0, *accumulate(self.lengths)]
        return self.values[self._ends[index] : self._ends[index + 1]]


def _rebuilt(values: Any, lengths: list[int] | None, dtype: torch.dtype) -> RaggedColumn:
    if isinstance(values, numpy.ndarray):
        # Arrays of Ray's object store are read-only, and torch would warn about that.
        values = torch.from_numpy(values if values.flags.writeable else values.copy())
    return RaggedColumn(values.view(dtype), lengths)


def lazy_rows(rows: Sequence[TensorDictBase]) -> LazyStackedTensorDict:
    """Make a one-dimensional lazy stack of the given rows, without a copy.

    Args:
        rows: at least one tensordict, all with the same batch size.

    Example:
        >>> lazy_rows([TensorDict(a=torch.ones(2)), TensorDict(a=torch.ones(3))]).batch_size
        torch.Size([2])
    """
    return LazyStackedTensorDict(*rows, stack_dim=0)


def ragged_rows(columns: Mapping[str, Sequence[Tensor]]) -> LazyStackedTensorDict:
    """Make rows from columns of tensors of any lengths.

    Args:
        columns: flat name to ``B`` tensors (``[T_b]`` or scalars), ``B`` at least one and the same
            for all names.

    Returns:
        A lazy stack of batch size ``[B]``; the tensors are referenced, not copied.

    Example:
        >>> node = ragged_rows({"full": [torch.tensor([1, 2]), torch.tensor([3])]})
        >>> [row.tolist() for row in read_rows(node, "full")]
        [[1, 2], [3]]
    """
    names = tuple(columns)
    rows = [
        # The public constructor checks every value and costs four times as much.
        TensorDict._new_unsafe(source=dict(zip(names, values, strict=True)), batch_size=_ROW)
        for values in zip(*columns.values(), strict=True)
    ]
    return lazy_rows(rows)


def _plain(td: Any) -> TensorDictBase:
    return td._tensordict if is_tensorclass(td) else td


def read_rows(td: Any, key: NestedKey, default: Any = ...) -> list[Tensor]:
    """Read the tensors of one column, one per row.

    Args:
        td: a tensordict or tensorclass with one batch dimension, ragged (lazy) or dense.
        key: name of the column.
        default: returned when the column is missing; without it a ``KeyError`` is raised.

    Returns:
        ``B`` tensors: ``[T_b]`` for ragged columns, ``[T]`` views for dense ones (padding included;
        see :func:`unpad_rows`).
    """
    path = (key,) if isinstance(key, str) else tuple(key)
    node = _plain(td)
    for depth, name in enumerate(path):
        if isinstance(node, LazyStackedTensorDict) and node.batch_dims == 1:
            rest = path[depth:]
            return _read_lazy(node, rest if len(rest) > 1 else rest[0], key, default)
        value = node._get_str(name, None)
        if value is None:
            return _missing(key, default)
        node = _plain(value)
    return list(node.unbind(0))


def row_values(
    td: Any, key: NestedKey, reduce: Callable[[Tensor], Tensor], default: Any = ...
) -> Tensor:
    """Read one number per row.

    Args:
        td: as of :func:`read_rows`.
        key: name of the column.
        reduce: function from a row's tensor to a scalar, such as ``torch.sum``. For one element it
            must return that element, because it is not called if all rows have one element.
        default: as of :func:`read_rows`.

    Returns:
        ``[B]``.

    Example:
        >>> import torch
        >>> rows = ragged_rows({"r": [torch.tensor([[1.0]]), torch.tensor([2.0, 3.0])]})
        >>> row_values(rows, "r", torch.sum)
        tensor([1., 5.])
    """
    values = read_rows(td, key, default)
    if values is default:
        return default
    try:  # reducing row by row would take ten times as long
        return torch.cat([value.view(1) for value in values])
    except RuntimeError:  # a row with more elements, or none
        return torch.stack([reduce(value) for value in values])


def _read_lazy(
    node: LazyStackedTensorDict, rest: NestedKey, key: NestedKey, default: Any
) -> list[Tensor]:
    path = (rest,) if isinstance(rest, str) else rest
    values = []
    for row in node.tensordicts:
        # TensorDict.get would take five times as long, and a loss reads nine columns of every row.
        value: Any = row
        for name in path:
            if type(value) is not TensorDict:
                if isinstance(value, Tensor):
                    return _missing(key, default)
                value = _plain(value)
            value = value._get_str(name, None)
            if value is None:
                return _missing(key, default)
        values.append(value if isinstance(value, Tensor) else row.get(rest))
    return values


def _missing(key: NestedKey, default: Any) -> Any:
    if default is ...:
        raise KeyError(f"column {key!r} is missing")
    return default


def write_rows(td: Any, key: NestedKey, values: Sequence[Tensor]) -> None:
    """Set one tensor per row; the column may be ragged.

    Args:
        td: a tensordict or tensorclass with one batch dimension ``[B]``. If it is dense, it gets a
            lazy node at the first level of ``key``, which must be nested.
        key: name of the column.
        values: ``B`` tensors.

    Raises:
        KeyError: for a top-level key of a dense tensordict, which cannot hold ragged values.
    """
    path = (key,) if isinstance(key, str) else tuple(key)
    td = _plain(td)
    node: Any = td
    for depth, name in enumerate(path):
        if isinstance(node, LazyStackedTensorDict):
            rest = path[depth:]
            for row, value in zip(node.tensordicts, values, strict=True):
                row.set(rest if len(rest) > 1 else rest[0], value)
            return
        child = node._get_str(name, None) if name in node.keys() else None
        if child is None or isinstance(child, Tensor):
            break
        node = _plain(child)
    if len(path) == 1:
        raise KeyError(f"{key!r}: a dense tensordict holds ragged columns in a nested node only")
    td.set(path[:-1] if len(path) > 2 else path[0], ragged_rows({path[-1]: list(values)}))


def pad_rows(
    rows: Sequence[Tensor], value: float | int | bool, *, side: Literal["left", "right"] = "right"
) -> Tensor:
    """Pad rows to the longest.

    Args:
        rows: ``B`` tensors ``[T_b]``.
        value: fills the padding.
        side: side of the padding.

    Returns:
        ``[B, T]`` of the rows' dtype.

    Example:
        >>> pad_rows([torch.tensor([1, 2]), torch.tensor([3])], 0, side="left").tolist()
        [[1, 2], [0, 3]]
    """
    return torch.nn.utils.rnn.pad_sequence(
        list(rows), batch_first=True, padding_value=value, padding_side=side
    )


def are_aligned(columns: Sequence[Tensor], rows: Sequence[Tensor]) -> bool:
    """Return whether a column has one entry per entry (an id, for example) of each row.

    Args:
        columns: ``B`` tensors ``[T_b, ...]``.
        rows: ``B`` tensors ``[T_b]``.
    """
    return all(a.shape[:1] == b.shape for a, b in zip(columns, rows, strict=True))


def unpad_rows(dense: Tensor, mask: Tensor) -> list[Tensor]:
    """Return the valid entries of each padded row.

    Args:
        dense: ``[B, T, ...]``.
        mask: bool ``[B, T]``, true at valid positions.

    Returns:
        ``B`` tensors ``[T_b, ...]``.

    Example:
        >>> unpad_rows(torch.tensor([[1, 2], [0, 3]]), torch.tensor([[1, 1], [0, 1]]).bool())
        [tensor([1, 2]), tensor([3])]
    """
    return list(dense[mask].split(mask.sum(1).tolist()))


def spread_rows(rows: Sequence[Tensor], mask: Tensor, value: float | int | bool = 0) -> Tensor:
    """Pad rows at the given positions: the inverse of :func:`unpad_rows`.

    Args:
        rows: ``B`` tensors ``[T_b, ...]``.
        mask: bool ``[B, T]``, true at the positions of a row's entries.
        value: fills the padding.

    Returns:
        ``[B, T, ...]`` of the rows' dtype and device.

    Example:
        >>> mask = torch.tensor([[1, 1], [0, 1]]).bool()
        >>> spread_rows([torch.tensor([1, 2]), torch.tensor([3])], mask)
        tensor([[1, 2],
                [0, 3]])
    """
    values = torch.cat(list(rows))
    dense = values.new_full((*mask.shape, *values.shape[1:]), value)
    dense[mask.to(values.device)] = values
    return dense
