"""Specs of a chat environment: columns of objects, and rows of token ids.

TorchRL's own specs describe tensors of one shape. Both classes here have a dynamic last dimension
(-1), so that rollouts and collectors do not stack rows into one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, is_non_tensor, is_tensor_collection
from torch import Tensor
from torchrl.data import Composite, NonTensor, TensorSpec, Unbounded

from torchrl_llm.data.column import Column
from torchrl_llm.data.ragged import ragged_rows


class ColumnSpec(NonTensor):
    """A column of objects, one per row, each with its own length (messages, characters).

    Its shape is ``(B, -1)``; the values have batch size ``[B]``, because the last dimension is
    inside the objects.

    Args:
        shape: ``(B, -1)``.
        example_data: the value of every row in ``zero()`` and ``rand()``. It must be valid input of
            the environment, because ``check_env_specs`` steps with it.
        device: unused; kept for the interface of specs.
        dtype: unused, as above.
        feature_dims: unused, as above.

    Example:
        >>> ColumnSpec((2, -1), example_data="a string").zero().tolist()
        ['a string', 'a string']
    """

    def __init__(
        self,
        shape: Iterable[int],
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        example_data: Any = None,
        feature_dims: int | None = None,
    ) -> None:
        super().__init__(
            shape=torch.Size(shape), device=device, dtype=dtype, example_data=example_data
        )

    def __eq__(self, other: object) -> bool:
        """Whether both allow the same values; examples (a dataset's first row) are ignored."""
        return isinstance(other, ColumnSpec) and self.shape == other.shape

    __hash__ = None

    def rand(self, shape: Iterable[int] | None = None) -> Any:
        """The example in every row; a leading ``shape`` gives plain non-tensor data."""
        sizes = (*(shape or ()), *self.shape[:-1])
        if len(sizes) != 1:
            return NonTensor(torch.Size(sizes), example_data=self.example_data, batched=True).rand()
        return Column.of([self.example_data] * sizes[0])

    zero = one = rand

    def is_in(self, val: Any) -> bool:
        """Whether ``val`` is non-tensor data with one object per row."""
        if not isinstance(val, Tensor) and not is_tensor_collection(val):
            return True  # a tensorclass returns the bare objects
        return is_non_tensor(val) and val.shape[-len(self.shape[:-1]) :] == self.shape[:-1]


class RaggedSpec(Composite):
    """Token-aligned columns of one node, each row with its own length.

    Args:
        columns: name to dtype, or to a spec of shape ``(B, -1, ...)``.
        shape: ``(B,)``.
        device: device of the tensors.
        data_cls: passed to :class:`torchrl.data.Composite`; ragged nodes are plain tensordicts.
        step_mdp_static: as in :class:`torchrl.data.Composite`.
        names: as in :class:`torchrl.data.Composite`.

    Example:
        >>> spec = RaggedSpec({"prompt": torch.int64}, shape=(2,))
        >>> spec.is_in(ragged_rows({"prompt": [torch.tensor([1, 2]), torch.tensor([3])]}))
        True
    """

    def __init__(
        self,
        columns: Mapping[str, torch.dtype | TensorSpec],
        *,
        shape: Iterable[int],
        device: torch.device | None = None,
        data_cls: type | None = None,
        step_mdp_static: bool = False,
        names: list[str] | None = None,
    ) -> None:
        shape = torch.Size(shape)
        leaves = {
            name: leaf
            if isinstance(leaf, TensorSpec)
            else Unbounded(shape=(*shape, -1), dtype=leaf, device=device)
            for name, leaf in columns.items()
        }
        super().__init__(
            leaves,
            shape=shape,
            device=device,
            data_cls=data_cls,
            step_mdp_static=step_mdp_static,
            names=names,
        )

    def zero(self, shape: Iterable[int] | None = None) -> Any:
        """One zero token per row; dense with a leading ``shape`` or without a batch dimension."""
        if shape or len(self.shape) != 1 or not self.shape[0]:
            return super().zero(shape)
        return ragged_rows(
            {
                name: [
                    torch.zeros((1, *spec.shape[2:]), dtype=spec.dtype)
                    for _ in range(self.shape[0])
                ]
                for name, spec in self.items()
            }
        )

    # Token 0 is in every vocabulary, unlike a random integer.
    rand = one = zero

    def is_in(self, val: Any) -> bool:
        """Whether every row has the columns with the right dtypes, ragged or dense."""
        node = getattr(val, "_tensordict", val)
        rows = node.tensordicts if isinstance(node, LazyStackedTensorDict) else [node]
        return all(
            isinstance(leaf := row.get(name, None), Tensor) and leaf.dtype == spec.dtype
            for row in rows
            for name, spec in self.items()
        )

    def project(self, val: Any) -> Any:
        """``val`` itself; there is nothing to clip."""
        return val

    def to(self, dest: torch.dtype | torch.device | str | int | None) -> RaggedSpec:
        """The same spec on another device, as :meth:`torchrl.data.Composite.to`."""
        moved = {name: leaf.to(dest) for name, leaf in self.items()}
        to_device = dest is not None and not isinstance(dest, torch.dtype)
        return type(self)(
            moved,
            shape=self.shape,
            device=dest if to_device else self.device,
            data_cls=self.data_cls,
            step_mdp_static=self.step_mdp_static,
            names=self.names if self._has_names() else None,
        )
