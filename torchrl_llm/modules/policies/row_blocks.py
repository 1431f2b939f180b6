"""Splits any batch shape into one-dimensional blocks of rows, and restores it for results.

Ragged columns can be read only from one-dimensional batches. This module converts ``[]``, ``[B]``
and ``[B, n]`` inputs to blocks, so that readers and writers do not depend on the batch shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensorclass,
)
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_llm.data.ragged import lazy_rows, read_rows


def flat_blocks(td: TensorDictBase) -> list[TensorDictBase]:
    """Return one-dimensional blocks that contain the rows of a batch in row-major order.

    Args:
        td: rows of any batch size; the blocks are views.
    """
    if td.batch_dims == 0:
        return [lazy_rows([td])]
    if td.batch_dims == 1:
        return [td]
    return [block for part in td.unbind(0) for block in flat_blocks(part)]


def tensor_rows(blocks: Sequence[TensorDictBase], key: NestedKey) -> list[Tensor] | None:
    """Return the tensors of a column, one per row; ``None`` if a block lacks it."""
    return _joined([read_rows(block, key, None) for block in blocks])


def object_rows(blocks: Sequence[TensorDictBase], key: tuple[str, ...]) -> list[Any] | None:
    """Return the Python objects of a column, one per row; ``None`` if a block lacks it."""
    return _joined([_objects(block, key) for block in blocks])


def _joined(parts: Sequence[list[Any] | None]) -> list[Any] | None:
    """Return the rows of all parts; ``None`` if a part has none."""
    return None if any(p is None for p in parts) else [row for part in parts for row in part]


def _objects(node: Any, key: tuple[str, ...]) -> list[Any] | None:
    node = node._tensordict if is_tensorclass(node) and not is_non_tensor(node) else node
    if not key:
        return _leaf_values(node)
    if isinstance(node, LazyStackedTensorDict) and not is_non_tensor(node):
        return _joined([_objects(row, key) for row in node.tensordicts])
    if not isinstance(node, TensorDictBase):
        return None
    child = node._get_str(key[0], None)
    return None if child is None else _objects(child, key[1:])


def _leaf_values(leaf: Any) -> list[Any]:
    if not isinstance(leaf, NonTensorData):
        # TorchRL's step_mdp reads a column through its tensorclass, and replaces the column by a
        # list.
        return list(leaf) if isinstance(leaf, list) else leaf.tolist()
    count = leaf.batch_size.numel() if leaf.batch_size else 1
    # With set_list_to_stack(False), one cell contains a list for the whole batch.
    if leaf.batch_size and isinstance(leaf.data, (list, np.ndarray)) and len(leaf.data) == count:
        return list(leaf.data if isinstance(leaf.data, list) else leaf.data.tolist())
    return [leaf.data] * count


def chat_rows(blocks: Sequence[TensorDictBase], key: tuple[str, ...]) -> list[Any] | None:
    """Return the conversations of a ``History``, one per row; ``None`` if a block lacks it."""
    return object_rows(blocks, (*key, "messages"))


def deliver(target: TensorDictBase, flat: TensorDict, *, merge: bool) -> None:
    """Write the rows of a flat result into a batch of any shape.

    Args:
        target: batch to write into; its rows, in row-major order, correspond to the rows of
            ``flat``.
        flat: one-dimensional result: dense root, nodes of columns.
        merge: set only the columns of each node. Otherwise a node replaces the existing node.
    """
    if target.batch_dims == 0:
        _set(target, flat[0], merge=merge)
    elif isinstance(target, LazyStackedTensorDict) and target.batch_dims == 1:
        for row, values in zip(target.tensordicts, flat.unbind(0), strict=True):
            _set(row, values, merge=merge)
    elif isinstance(target, LazyStackedTensorDict):
        order = torch.arange(flat.batch_size[0]).view(target.batch_size).unbind(target.stack_dim)
        for part, rows in zip(target.tensordicts, order, strict=True):
            deliver(part, flat[rows.reshape(-1)], merge=merge)
    elif target.batch_dims == 1:
        _set(target, flat, merge=merge)
    else:
        # Rows of a dense batch are copies, so its nodes are set as a whole.
        _set_nested(target, flat, merge=merge)


def _set(target: TensorDictBase, values: TensorDictBase, *, merge: bool) -> None:
    for name in values.keys():
        value = values.get(name)
        present = target.get(name, None) if merge else None
        if present is None or isinstance(value, Tensor):
            target.set(name, value)
            continue
        node, new = _plain(present), _plain(value)
        if isinstance(new, LazyStackedTensorDict) and not isinstance(node, LazyStackedTensorDict):
            # A dense node cannot contain ragged columns, so the rows of both are joined in a new
            # node.
            target.set(name, _as(present, _joined_rows(node, new)))
        else:
            _merge(node, new)


def _set_nested(target: TensorDictBase, flat: TensorDict, *, merge: bool) -> None:
    for name in flat.keys():
        value, present = flat.get(name), target.get(name, None)
        if isinstance(value, Tensor):
            target.set(name, value.reshape(*target.batch_size, *value.shape[1:]))
            continue
        joins = merge and present is not None
        node = _joined_rows(_plain(present), _plain(value)) if joins else _plain(value)
        # TensorDict stacks nested ragged rows of tensordicts, but not of tensorclasses, so the
        # class wraps the stack. TorchRL's step_mdp pairs the parts of old and new nodes, for any
        # dimension.
        shaped = nest(node, target.batch_size, like=_plain(present))
        target.set(name, _as(present if joins else value, shaped))


def _as(like: Any, node: TensorDictBase) -> Any:
    """Return a node in the class of ``like``."""
    return type(like)._from_tensordict(node) if is_tensorclass(like) else node


def _plain(node: Any) -> Any:
    return node._tensordict if is_tensorclass(node) else node


def _joined_rows(node: TensorDictBase, values: TensorDictBase) -> TensorDictBase:
    """Join the columns of a node of any shape with those of a flat node, row by row."""
    held = [row for block in flat_blocks(node) for row in block.unbind(0)]
    return lazy_rows(
        [row.copy().update(new) for row, new in zip(held, values.unbind(0), strict=True)]
    )


def _merge(node: TensorDictBase, values: TensorDictBase) -> None:
    """Add columns to those of a node."""
    if isinstance(node, LazyStackedTensorDict) and isinstance(values, LazyStackedTensorDict):
        for row, new in zip(node.tensordicts, values.tensordicts, strict=True):
            row.update(new)
        return
    for name, column in values.items():
        node.set(name, column)


def nest(flat: Any, shape: torch.Size, like: Any = None) -> Any:
    """Give a flat result a batch shape; dimensions after the first are lazy stacks of blocks.

    Args:
        flat: batch size ``[N]``.
        shape: its product is ``N``.
        like: node whose structure of stacks is copied, if it is a lazy stack of this shape.
    """
    if len(shape) == 0:
        return flat[0]
    if len(shape) == 1:
        return flat
    lazy = isinstance(like, LazyStackedTensorDict) and like.batch_size == shape
    dim = like.stack_dim if lazy else 0
    order = torch.arange(flat.batch_size[0]).view(shape).unbind(dim)
    inner = like.tensordicts if lazy else [None] * len(order)
    parts = [
        nest(flat[rows.reshape(-1)], rows.shape, _plain(part))
        for rows, part in zip(order, inner, strict=True)
    ]
    return LazyStackedTensorDict(*parts, stack_dim=dim)
