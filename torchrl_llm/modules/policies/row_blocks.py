"""Any batch shape as a list of one-dimensional blocks of rows, and results back into that shape.

Ragged columns can be read from one-dimensional batches only; ``[]``, ``[B]`` and ``[B, n]`` inputs
all become blocks here, so that readers and writers never see a batch shape.
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
    """One-dimensional blocks that hold the rows of a batch in row-major order.

    Args:
        td: any batch size; views, nothing is copied.
    """
    if td.batch_dims == 0:
        return [lazy_rows([td])]
    if td.batch_dims == 1:
        return [td]
    return [block for part in td.unbind(0) for block in flat_blocks(part)]


def tensor_rows(blocks: Sequence[TensorDictBase], key: NestedKey) -> list[Tensor] | None:
    """The tensors of a column, one per row; ``None`` when a block lacks it."""
    return _joined([read_rows(block, key, None) for block in blocks])


def object_rows(blocks: Sequence[TensorDictBase], key: tuple[str, ...]) -> list[Any] | None:
    """The Python objects of a column, one per row; ``None`` when a block lacks it."""
    return _joined([_objects(block, key) for block in blocks])


def _joined(parts: Sequence[list[Any] | None]) -> list[Any] | None:
    """The rows of all parts, ``None`` where a part has none."""
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
        # TorchRL's step_mdp reads a column through its tensorclass, and leaves a list in its place.
        return list(leaf) if isinstance(leaf, list) else leaf.tolist()
    count = leaf.batch_size.numel() if leaf.batch_size else 1
    # With set_list_to_stack(False) a list stands in one cell for the whole batch.
    if leaf.batch_size and isinstance(leaf.data, (list, np.ndarray)) and len(leaf.data) == count:
        return list(leaf.data if isinstance(leaf.data, list) else leaf.data.tolist())
    return [leaf.data] * count


def chat_rows(blocks: Sequence[TensorDictBase], key: tuple[str, ...]) -> list[Any] | None:
    """The conversations of a ``History`` column, one per row; ``None`` when a block lacks it."""
    return object_rows(blocks, (*key, "messages"))


def deliver(target: TensorDictBase, flat: TensorDict, *, merge: bool) -> None:
    """Write the rows of a flat result into a batch of any shape.

    Args:
        target: where to; its rows in row-major order are those of ``flat``.
        flat: one-dimensional result: dense root, nodes of columns.
        merge: set only the columns of each node; otherwise a node replaces what it meets.
    """
    blocks = flat_blocks(target)
    start = 0
    for block in blocks:
        size = block.batch_size[0]
        part = flat if len(blocks) == 1 else flat[start : start + size]
        start += size
        if isinstance(block, LazyStackedTensorDict):
            for row, values in zip(block.tensordicts, part.unbind(0), strict=True):
                _set(row, values, merge=merge)
        else:
            _set(block, part, merge=merge)


def _set(target: TensorDictBase, values: TensorDictBase, *, merge: bool) -> None:
    for name in values.keys():
        value = values.get(name)
        present = target.get(name, None) if merge else None
        if present is None or isinstance(value, Tensor):
            target.set(name, value)
            continue
        node = present._tensordict if is_tensorclass(present) else present
        _merge(node, value._tensordict if is_tensorclass(value) else value)


def _merge(node: TensorDictBase, values: TensorDictBase) -> None:
    """Add columns to those of a node."""
    if isinstance(node, LazyStackedTensorDict) and isinstance(values, LazyStackedTensorDict):
        for row, new in zip(node.tensordicts, values.tensordicts, strict=True):
            row.update(new)
        return
    for name, column in values.items():
        node.set(name, column)


def nest(flat: TensorDict, shape: torch.Size) -> TensorDictBase:
    """A flat result in a batch shape; dimensions beyond the first are lazy stacks over blocks.

    Args:
        flat: batch size ``[N]``.
        shape: its product is ``N``.
    """
    if len(shape) == 0:
        return flat[0]
    if len(shape) == 1:
        return flat
    step = flat.batch_size[0] // shape[0]
    parts = [nest(flat[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]
    return LazyStackedTensorDict(*parts, stack_dim=0)
