"""Shape, indices, operators and functions of torch over batch and messages, as TorchRL's History.

``h.shape`` is ``[*B, T]``, or ``[*B, -1]`` where the number of messages differs; ``h[..., -1]`` is
the last message of each conversation, ``torch.cat([h, g], -1)`` joins messages. The functions that
find which message goes where are in ``message_grid.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorClass
from tensordict._torch_func import _stack as tensordict_stack
from tensordict.utils import _shape as tensordict_shape
from torch import Tensor

from torchrl_llm.compat.mixins import message_grid as grids
from torchrl_llm.errors import DataError

_INSIDE = ("tensordict.", "torchrl.")
_ASKED_SHAPE, _STACKING = tensordict_shape.__code__, tensordict_stack.__code__
_LAZY_STACKING = LazyStackedTensorDict.lazy_stack.__func__.__code__
_METHODS = (
    *("view", "reshape", "flatten", "unflatten", "transpose", "permute", "unsqueeze", "expand"),
    *("repeat", "repeat_interleave", "roll", "flip", "gather", "masked_select", "split", "chunk"),
)
_OTHER_ORDER = frozenset(
    ("movedim", "moveaxis", "narrow", "rot90", "swapaxes", "swapdims", "tile", "fliplr", "flipud")
    + ("broadcast_to", "atleast_1d", "atleast_2d", "atleast_3d")
)


def asked_inside(depth: int = 2) -> bool:
    """Whether tensordict or TorchRL calls what calls this, ``depth`` frames above.

    There is no plain rule. A user of TorchRL reads ``[*B, T]``, five fields and all their values
    from a history. Tensordict and TorchRL read the same attributes at every step, to compare the
    node with its neighbours and to copy its entries: told ``[*B, T]``, they refuse to stack, step
    or reset rows whose conversations differ in length; told ``[*B]``, a program of TorchRL's users
    sees another shape. What the attribute means depends on who asks, and nothing else tells.
    """
    return sys._getframe(depth).f_globals.get("__name__", "").startswith(_INSIDE)


def over_generated(cls: type, mixin: type) -> None:
    """Put a mixin's methods in the place of those that the tensorclass decorator wrote.

    Args:
        cls: the class that takes the mixin.
        mixin: its methods call the generated ones by ``super()``.
    """
    for name, value in vars(mixin).items():
        if name not in ("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__"):
            setattr(cls, name, value)


class HistoryGrid:
    """Mixin of a tensorclass whose node has one immutable cell a conversation under ``"messages"``.

    The class has ``_of_rows(batch, cells)``, which makes one of batch shape and cells.
    """

    # -- shape ------------------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """Batch and messages, -1 where their number differs."""
        # tensordict's stack compares the shapes of its nodes and takes no -1; there, a history is a
        # column of rows, and rows of other lengths stack as any others do.
        asking = sys._getframe(1)
        if asking.f_code is _ASKED_SHAPE and asking.f_back.f_code is _STACKING:
            return self._tensordict.batch_size
        return grids.grid_shape(self._tensordict)

    @property
    def batch_size(self) -> torch.Size:
        """The shape, or that of the rows where the number of messages differs: no size is -1."""
        return self._tensordict.batch_size if asked_inside() else self._real_sizes()

    @batch_size.setter
    def batch_size(self, value: Any) -> None:
        size = torch.Size((value,) if isinstance(value, int) else value)
        if asked_inside(3):  # behind tensordict's __setattr__
            self._tensordict.batch_size = size
        elif size not in (grids.grid_shape(self._tensordict), self._real_sizes()):
            raise DataError(
                f"the batch size of a History is its shape {list(self.shape)} and cannot be set to "
                f"{list(size)}; index or reshape it"
            )

    @property
    def batch_dims(self) -> int:
        """How many dimensions :attr:`batch_size` has."""
        return self._tensordict.batch_dims if asked_inside() else len(self._real_sizes())

    def _real_sizes(self) -> torch.Size:
        shape = grids.grid_shape(self._tensordict)
        return shape[:-1] if -1 in shape else shape

    def dim(self) -> int:
        """How many dimensions :attr:`shape` has."""
        node = self._tensordict
        if node.get("messages", None) is None:
            return node.batch_dims
        return node.batch_dims + grids.is_grid(node)

    ndimension = dim
    ndim = property(dim)

    def size(self, dim: int | None = None) -> Any:
        """The shape, or its size along one dimension."""
        shape = grids.grid_shape(self._tensordict)
        return shape if dim is None else shape[dim]

    def numel(self) -> int:
        """How many messages there are."""
        _, chats = grids.conversations(self._tensordict)
        return max(1, sum(map(len, chats)))  # tensordict counts an empty batch as one, too

    def __len__(self) -> int:
        node = self._tensordict
        stored = None if node.batch_dims else grids.cells_of(node)
        return super().__len__() if stored is None or stored.is_single else len(stored)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    # -- indices ----------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        node = self._tensordict
        dims = node.batch_dims
        take = super().__getitem__
        if type(index) is int and dims:
            return self._linked(take(index), index)
        if isinstance(index, (bool, str)) or not grids.is_grid(node):
            return take(index)
        parts = grids.expanded(index, dims + 1)
        if any(isinstance(part, (bool, str)) for part in parts):
            return take(index)
        parts = [torch.as_tensor(p) if hasattr(p, "__array_interface__") else p for p in parts]
        used = sum(grids.consumed(part) for part in parts)
        if used > dims + 1:
            raise IndexError(f"too many indices for {dims} batch dimensions and messages: {index}")
        if used <= dims:
            return take(tuple(parts))
        last, before = parts[-1], tuple(parts[:-1])
        if isinstance(last, slice) and last == slice(None):
            return take(before) if before else self._from_tensordict(node)
        lists = grids.is_list(last) and any(grids.is_list(part) for part in before)
        if last is None or grids.consumed(last) != 1 or lists or getattr(last, "ndim", 1) > 1:
            return self._placed(tuple(parts), last is None)
        if isinstance(last, Tensor) and not last.ndim:
            last = int(last)
        kept = (take(before) if before else self)._tensordict
        stored = grids.cells_of(kept)
        grids.check_mask(last, grids.flattened(stored, kept.batch_dims))
        picked = grids.flattened(grids.pick_messages(stored, last), kept.batch_dims)
        return self._of_rows(tuple(kept.batch_size), picked)

    def _placed(self, index: tuple, conversations: bool) -> Any:
        how = grids.rearranged if conversations else grids.picked
        if not conversations and -1 in grids.grid_shape(self._tensordict):
            return self._paired(index)
        return self._of_rows(*how(self._tensordict, lambda places: places[index], "this index"))

    def _paired(self, index: tuple) -> Any:
        """One message of each row, where rows differ in length: ``h[[0, 1], [2, 0]]``."""
        rows, places = index if len(index) == 2 else (None, None)
        pairs = grids.is_list(rows) and grids.is_list(places)
        if not pairs or any(grids.consumed(p) != 1 or torch.as_tensor(p).ndim != 1 for p in index):
            raise grids.ragged_error(f"the index {index!r:.60}")
        _, chats = grids.conversations(super().__getitem__(rows)._tensordict)
        chosen = torch.as_tensor(places)
        chosen = (chosen.nonzero().flatten() if chosen.dtype == torch.bool else chosen).tolist()
        if len(chosen) != len(chats):
            raise IndexError(f"{len(chats)} rows and {len(chosen)} messages cannot be paired")
        picked = [
            c.of_message((c.messages[at],), None) for c, at in zip(chats, chosen, strict=True)
        ]
        return self._of_rows((len(picked),), picked)

    def _linked(self, row: Any, index: int) -> Any:
        node = self._tensordict
        below = node.batch_size[1:].numel()
        start = index % node.batch_size[0] * below
        row.__dict__["_link"] = grids.RowLink(node, list(range(start, start + below)))
        return row

    def _tell_batch(self, chats: list[Any]) -> None:
        """Write what has become of this row into the batch that it was taken from."""
        link = self.__dict__.get("_link")
        if link is not None:
            node = self._tensordict
            before = grids.flattened(grids.cells_of(node), node.batch_dims)
            link.write(before, chats, self._of_rows)

    def __setitem__(self, index: Any, value: Any) -> None:
        node = self._tensordict
        if isinstance(value, type(self)) and grids.is_grid(node):
            parts = grids.expanded(index, node.batch_dims + 1)
            used = sum(grids.consumed(part) for part in parts)
            if used == node.batch_dims + 1 and parts[-1] == slice(None):
                parts, used = parts[:-1], used - 1
            if used > node.batch_dims or not parts:
                raise DataError(
                    f"messages do not change in place: h[{index!r:.40}] = ... cannot be done; "
                    "build the conversations anew, h = h[..., :-1].append(messages, "
                    "inplace=False) for another last message, h.replace(content=...) or "
                    "torch.cat([...], -1) for any other"
                )
            index = tuple(parts)
            if not grids.is_grid(value._tensordict):
                value = self._of_rows(*grids.conversations(value._tensordict))
        super().__setitem__(index, value)

    # -- operators --------------------------------------------------------------------------------

    def __eq__(self, other: object) -> Any:
        if not isinstance(other, type(self)):
            return NotImplemented
        return grids.equal_messages(self._tensordict, other._tensordict)

    def __ne__(self, other: object) -> Any:
        same = self.__eq__(other)
        return same if same is NotImplemented else ~same

    __hash__ = None

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """Rows, or with the last dimension the messages at each place."""
        axis = grids.axis(dim, max(1, self.dim()))
        node = self._tensordict
        if axis < node.batch_dims or not grids.is_grid(node):
            rows = super().unbind(axis)
            return rows if axis else tuple(self._linked(row, i) for i, row in enumerate(rows))
        if -1 in grids.grid_shape(node):
            raise grids.ragged_error("unbind over messages")
        return tuple(self[..., at] for at in range(grids.grid_shape(node)[-1]))

    _unbind = unbind

    def squeeze(self, dim: int | None = None) -> Any:
        """Without dimensions of one row or one message."""
        node = self._tensordict
        if not grids.is_grid(node):
            return super().squeeze() if dim is None else super().squeeze(dim)
        shape = grids.grid_shape(node)
        axes = range(len(shape)) if dim is None else [grids.axis(dim, len(shape))]
        drop = shape[-1] == 1 and len(shape) - 1 in axes
        made = (self[..., 0] if drop else self)._tensordict
        for axis in reversed([a for a in axes if a < node.batch_dims and shape[a] == 1]):
            made = made.squeeze(axis)
        return self._from_tensordict(made)

    @staticmethod
    def cat(histories: Sequence[Any], dim: int = 0) -> Any:
        """Join histories along a dimension over batch and messages."""
        nodes, make = [history._tensordict for history in histories], type(histories[0])
        axis = grids.axis(dim, _same_dims("cat", histories))
        forms = {grids.is_grid(node) for node in nodes}
        if len(forms) == 1 and all(axis < node.batch_dims for node in nodes):
            return make._from_tensordict(torch.cat(nodes, axis))
        rows = [grids.conversations(node) for node in nodes]
        if axis < len(rows[0][0]):
            return make.cat([make._of_rows(*row) for row in rows], axis)
        if len({batch for batch, _ in rows}) != 1:
            sizes = [list(batch) for batch, _ in rows]
            raise DataError(f"cat over messages needs equal batches, got {sizes}")
        joined = [sum(chats[1:], chats[0]) for chats in zip(*(c for _, c in rows), strict=True)]
        return make._of_rows(rows[0][0], joined)

    @staticmethod
    def stack(histories: Sequence[Any], dim: int = 0) -> Any:
        """Stack histories along a new dimension over batch and messages."""
        nodes, make = [history._tensordict for history in histories], type(histories[0])
        axis = grids.axis(dim, _same_dims("stack", histories) + 1)
        forms = {grids.is_grid(node) for node in nodes}
        if len(forms) == 2:
            return make.stack([make._of_rows(*grids.conversations(node)) for node in nodes], axis)
        if axis <= nodes[0].batch_dims:
            return make._from_tensordict(torch.stack(nodes, axis))
        return make._of_rows(*grids.stacked(nodes, axis))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func in (torch.cat, torch.concat, torch.stack) and "out" not in kwargs:
            given = args or (kwargs.pop("tensors"),)
            return (cls.stack if func is torch.stack else cls.cat)(*given, **kwargs)
        known = getattr(torch, name, None) is func and name in (*_METHODS, "unbind", "squeeze")
        if known and args and isinstance(args[0], cls):
            return getattr(args[0], name)(*args[1:], **kwargs)
        if name in _OTHER_ORDER and getattr(torch, name, None) is func:
            raise DataError(
                f"torch.{name} of a History is not defined here; write it with transpose, permute, "
                "reshape or an index"
            )
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def _from_tensordict(
        cls, tensordict: Any, non_tensordict: Any = None, safe: bool = True
    ) -> Any:
        # lazy_stack counts a negative dimension on the nodes, which lack that of the messages.
        asking = sys._getframe(1)
        if asking.f_code is _LAZY_STACKING and asking.f_locals["dim"] < 0:
            return cls.stack(asking.f_locals["items"], asking.f_locals["dim"])
        return super()._from_tensordict(tensordict, non_tensordict, safe)

    def _require_history(self, name: str, value: Any) -> None:
        if not isinstance(value, type(self)):
            raise DataError(
                f"{name} takes a History{' or a message dict' if name == 'append' else ''}, got "
                f'{type(value).__name__} {value!r:.60}; write History(role="user", content=...)'
            )


def _same_dims(name: str, histories: Sequence[Any]) -> int:
    make = type(histories[0])
    dims = {history.dim() for history in histories}
    if len(dims) != 1 or not all(isinstance(history, make) for history in histories):
        shapes = [list(grids.grid_shape(history._tensordict)) for history in histories]
        raise DataError(f"{name} needs histories with as many dimensions, got shapes {shapes}")
    return dims.pop()


def _over_grid(name: str) -> Any:
    """An operation of tensors over batch and messages; of single messages, the generated one."""

    def operation(self: Any, *args: Any, **kwargs: Any) -> Any:
        node = self._tensordict
        if node.get("messages", None) is None or not grids.is_grid(node):
            return getattr(super(HistoryGrid, self), name)(*args, **kwargs)
        args = tuple(arg for arg in args if arg is not None)
        made = grids.rearranged(node, lambda places: getattr(places, name)(*args, **kwargs), name)
        if made and isinstance(made[0], tuple) and made[0] and isinstance(made[0][0], tuple):
            return tuple(self._of_rows(*one) for one in made)
        return self._of_rows(*made)

    operation.__name__ = name
    operation.__doc__ = f"``Tensor.{name}`` over batch and messages."
    return operation


for _name in _METHODS:
    if hasattr(TensorClass, _name):
        setattr(HistoryGrid, _name, _over_grid(_name))
