"""Stacking of tensordicts whose tensors differ in length: padded or as jagged nested tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection
from torch import Tensor

from torchrl_llm.data.column import Column
from torchrl_llm.errors import ConfigError, DataError


def as_nested_tensor(list_of_tensordicts: list[TensorDictBase]) -> TensorDict:
    """Stack tensordicts whose tensors differ in length into jagged nested tensors.

    Args:
        list_of_tensordicts: ``B`` tensordicts without batch dimension.

    Returns:
        A tensordict of batch size ``[B]``; other values become columns of ``B`` values.

    Raises:
        DataError: for tensordicts with batch dimensions or different keys.
    """
    return _stacked(
        list_of_tensordicts, lambda parts: torch.nested.nested_tensor(parts, layout=torch.jagged)
    )


def as_padded_tensor(
    list_of_tensordicts: list[TensorDictBase], dim: int = 0, stack_dim: int = 0
) -> TensorDict:
    """Stack tensordicts whose tensors differ in length, padded with zeros on the left.

    Args:
        list_of_tensordicts: ``B`` tensordicts without batch dimension.
        dim: the dimension of the tensors that is padded.
        stack_dim: must be 0, the batch dimension.

    Returns:
        A tensordict of batch size ``[B]``; other values become columns of ``B`` values.

    Raises:
        ConfigError: for a negative ``dim``, or a ``stack_dim`` other than 0.
        DataError: for tensordicts with batch dimensions or different keys, and for tensors that
            differ in a dimension other than ``dim``.

    Example:
        >>> rows = [TensorDict(a=torch.ones(1)), TensorDict(a=torch.ones(2))]
        >>> as_padded_tensor(rows)["a"].tolist()
        [[0.0, 1.0], [1.0, 1.0]]
    """
    if dim < 0:
        raise ConfigError(f"dim counts from the front, from 0, got {dim}")
    if stack_dim != 0:
        raise ConfigError(
            f"stack_dim must be 0, got {stack_dim}: the batch dimension of a tensordict is its "
            "first; transpose the padded tensors instead"
        )

    def padded(tensors: list[Tensor]) -> Tensor:
        longest = max(tensor.shape[dim] for tensor in tensors) if tensors[0].ndim else 0
        return torch.stack([_filled_up(tensor, longest, dim) for tensor in tensors])

    return _stacked(list_of_tensordicts, padded)


def _filled_up(tensor: Tensor, length: int, dim: int) -> Tensor:
    if not tensor.ndim or tensor.shape[dim] == length:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = length - shape[dim]
    return torch.cat((tensor.new_zeros(shape), tensor), dim)


def _stacked(rows: Sequence[TensorDictBase], stack: Callable[[list[Tensor]], Tensor]) -> TensorDict:
    if rows[0].batch_dims:
        raise DataError(
            f"rows to stack must be tensordicts without batch dimension, got batch size "
            f"{tuple(rows[0].batch_size)}; pass td.unbind(0)"
        )
    if any(row.keys() != rows[0].keys() for row in rows):
        raise DataError(f"rows to stack must have the same keys, got {sorted(rows[0].keys())}")
    result = TensorDict(batch_size=[len(rows)])
    for key in rows[0].keys():
        parts = [row.get(key) for row in rows]
        if isinstance(parts[0], Tensor):
            try:
                result.set(key, stack(parts))
            except (RuntimeError, IndexError) as error:
                shapes = sorted({tuple(part.shape) for part in parts})
                raise DataError(
                    f"the tensors {key!r} of the rows have shapes {shapes} and cannot be stacked: "
                    f"they may differ in one dimension only ({error})"
                ) from error
        elif is_tensor_collection(parts[0]) and not is_non_tensor(parts[0]):
            result.set(key, _stacked(parts, stack))
        else:
            result.set(key, Column.of(getattr(part, "data", part) for part in parts))
    return result
