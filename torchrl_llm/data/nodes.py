"""Fast construction of the nodes and cells of rows, without checks, and memory of rows.

A row is a plain tensordict without batch dimension. These functions build and read its parts at a
fraction of the cost of tensordict's own functions. :func:`own_rows` gives rows their own memory, so
that they can be stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, is_tensorclass
from torch import Tensor

Path = tuple[str, ...]
# Storages of up to this many bytes may be shared, because copying flags and ids one by one costs
# more than the memory that a stored row can waste.
SHARED_BYTES = 4096
_ROW = torch.Size([])


def plain_node(value: Any) -> Any:
    """Return the tensordict inside a tensorclass, and any other value unchanged.

    Args:
        value: a node of a row or batch.
    """
    return value._tensordict if is_tensorclass(value) else value


def leaf(row: TensorDict, path: Path) -> Any:
    """Return the value at a row's path, or ``None``; costs a tenth of ``row.get(path, None)``.

    Args:
        row: a row of plain tensordicts, with or without tensorclasses in it.
        path: the key as a tuple.
    """
    value: Any = row
    for name in path:
        value = plain_node(value) if type(value) is not TensorDict else value
        value = value._tensordict.get(name)
        if value is None:
            return None
    return value


def typed_node(cls: type, node: TensorDictBase) -> Any:
    """View a node as a tensorclass, without the checks of the public constructor.

    Args:
        cls: a tensorclass.
        node: the tensordict that holds its fields.
    """
    view = cls.__new__(cls)
    view.__dict__.update(_tensordict=node, _non_tensordict={})
    return view


def new_node(source: dict[str, Any]) -> TensorDict:
    """Make a tensordict without batch dimension from given values, unchecked and unconverted.

    Args:
        source: name to tensor, cell or node; the tensordict keeps this dict itself.
    """
    # The same as TensorDict._new_unsafe without its options, at half its cost.
    node = TensorDict.__new__(TensorDict)
    node.__dict__.update(_device=None, _tensordict=source, _batch_size=_ROW, _td_dim_names=None)
    return node


def cell(value: Any) -> NonTensorData:
    """Make ``NonTensorData(value)`` at a quarter of its cost, for an immutable value.

    Args:
        value: a string, a chat, or any other object that never changes.
    """
    new = NonTensorData.__new__(NonTensorData)
    new.__dict__.update(
        _tensordict=new_node({}),
        _non_tensordict={"data": value, "_is_non_tensor": True, "_metadata": None},
        _is_initialized=True,
    )
    return new


def set_copied(row: TensorDict, path: Path, value: Any) -> None:
    """Set a nested key, copying the nodes on its path, because other rows may share them.

    Args:
        row: a row without batch dimension; its root is changed.
        path: the key as a tuple.
        value: a tensor, cell or node.

    Example:
        >>> shared = TensorDict(reward=torch.ones(1))
        >>> row = TensorDict(next=shared)
        >>> set_copied(row, ("next", "reward"), torch.zeros(1))
        >>> row["next", "reward"].item(), shared["reward"].item()
        (0.0, 1.0)
    """
    node = row
    for name in path[:-1]:
        child = node._get_str(name, None)
        inner = new_node({} if child is None else dict(plain_node(child)._tensordict))
        typed = child is not None and is_tensorclass(child)
        node._tensordict[name] = typed_node(type(child), inner) if typed else inner
        node = inner
    node._tensordict[path[-1]] = value


def own_rows(rows: Iterable[TensorDictBase]) -> list[TensorDictBase]:
    """Give each row its own memory; copy only tensors that are parts of a larger storage.

    A row of views keeps its whole batch in memory and in every pickle. Storages of up to 4 KiB may
    stay shared. A ``response`` that is a view of the end of its ``full`` stays a view.

    Args:
        rows: tensordicts without batch dimension; their tensors are replaced in place.

    Returns:
        The same rows as a list.
    """
    rows = list(rows)
    for row in rows:
        _own(row)
    return rows


def _own(node: TensorDict) -> None:
    leaves = node._tensordict
    tail = _tail(leaves) if "response" in leaves else 0
    for name, value in leaves.items():
        # The two common kinds come first, by exact type, because this loop visits every stored
        # tensor.
        kind = type(value)
        if kind is Tensor:
            if value.untyped_storage().nbytes() > value.nbytes + SHARED_BYTES and not (
                tail and name == "response"
            ):
                leaves[name] = value.clone()
        elif kind is TensorDict:
            _own(value)
        elif kind is not NonTensorData and type(getattr(value, "_tensordict", None)) is TensorDict:
            _own(value._tensordict)
    if tail:
        leaves["response"] = leaves["full"][-tail:]


def _tail(leaves: dict[str, Any]) -> int:
    """Return how many values at the end of ``full`` the response views; 0 if it is no view."""
    full, response = leaves.get("full"), leaves["response"]
    if type(full) is not Tensor or type(response) is not Tensor or not response.nbytes:
        return 0
    if full.data_ptr() + full.nbytes != response.data_ptr() + response.nbytes:
        return 0
    flat = full.is_contiguous() and response.is_contiguous()
    if not flat or full.dtype != response.dtype or full.shape[0] < response.shape[0]:
        return 0
    return response.shape[0]
