"""Replay-buffer rows as a dataset for trainers of PyTorch, Hugging Face and TRL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import torch
from tensordict import NonTensorData, TensorDictBase, is_tensor_collection
from tensordict.utils import NestedKey
from torch import Tensor
from torch.utils.data import IterableDataset
from torchrl.data import ReplayBuffer

from torchrl_llm._checked import Ge, checked
from torchrl_llm._imports import require
from torchrl_llm.data.chat import Chat
from torchrl_llm.data.nodes import plain_node
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.errors import ConfigError, DataError


class TorchRLBufferDataset(IterableDataset):
    """A replay buffer as an iterable dataset of flat dicts, one per row.

    A nested key becomes one name with dots, ``"tokens.full"``. Tensors keep their own lengths, a
    text is a ``str``, a conversation a list of message dicts.

    Args:
        replay_buffer: the buffer to sample from.
        batch_size: rows drawn at once; the iterator returns them one by one.
        keys: the columns to return; all by default.
        device: device of the tensors; not changed by default.
        num_batches: draws per iterator; ``None`` for an endless one.

    Raises:
        ConfigError: the object is not a buffer, or a size is below 1.
        DataError: during iteration, if a row lacks one of ``keys``.

    Example:
        >>> from torchrl_llm.data.ragged import ragged_rows
        >>> from torchrl_llm.data.replay_buffers import ReplayBuffer
        >>> buffer = ReplayBuffer()
        >>> rows = ragged_rows({"input_ids": [torch.tensor([1, 2]), torch.tensor([3])]})
        >>> buffer.extend(rows).tolist()
        [0, 1]
        >>> data = TorchRLBufferDataset(buffer, batch_size=3)
        >>> sorted({len(row["input_ids"]) for row in data}) in ([1], [2], [1, 2])
        True
    """

    @checked
    def __init__(
        self,
        replay_buffer: ReplayBuffer,
        batch_size: Annotated[int, Ge(1)],
        *,
        keys: Sequence[NestedKey] | None = None,
        device: torch.device | str | None = None,
        num_batches: Annotated[int, Ge(1)] | None = 1,
    ) -> None:
        if not isinstance(replay_buffer, ReplayBuffer):
            raise ConfigError(
                f"replay_buffer must be a ReplayBuffer, got {type(replay_buffer).__name__}"
            )
        self.replay_buffer = replay_buffer
        self.batch_size = batch_size
        self.keys = None if keys is None else list(keys)
        self.device = None if device is None else torch.device(device)
        self.num_batches = num_batches

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over newly drawn rows."""
        drawn = 0
        while self.num_batches is None or drawn < self.num_batches:
            for row in row_list(self.replay_buffer.sample(self.batch_size)):
                yield self._flat(row)
            drawn += 1

    def as_hf_dataset(self) -> Any:
        """A ``datasets.IterableDataset`` over the same rows, as needed by TRL's trainers.

        The rows must have the columns of the trainer, such as ``"prompt"``.

        Raises:
            MissingExtraError: the package ``datasets`` is not installed.
        """
        datasets = require("datasets", extra="data", feature="as_hf_dataset")
        return datasets.IterableDataset.from_generator(self.__iter__)

    def _flat(self, row: TensorDictBase) -> dict[str, Any]:
        if self.keys is None:
            return {".".join(path): self._plain(value) for path, value in _leaves(row, ())}
        flat = {}
        for key in self.keys:
            value = row.get(key, None)
            if value is None:
                present = sorted(".".join(path) for path, _ in _leaves(row, ()))
                raise DataError(f"a row has no {key!r}; it has {present}")
            flat[key if isinstance(key, str) else ".".join(key)] = self._plain(value)
        return flat

    def _plain(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if self.device is None else value.to(self.device)
        value = value.data if isinstance(value, NonTensorData) else value
        if isinstance(value, Chat):
            return [dict(message) for message in value.messages]
        return value


def _leaves(row: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in plain_node(row).items():
        here = (*path, name)
        if isinstance(value, NonTensorData) or not is_tensor_collection(value):
            yield here, value
        else:
            yield from _leaves(value, here)
