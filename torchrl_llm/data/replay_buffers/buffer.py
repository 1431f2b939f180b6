"""A replay buffer for rows of text and ragged tokens.

There are four differences to TorchRL's buffer. Inverse transforms get the rows themselves and not a
clone (cloning cost more than the transforms). A storage that would lose text is rejected. Stored
rows have their own memory. The state is saved through :mod:`torchrl_llm.data.wire`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import LazyStackStorage, ListStorage
from torchrl.data import ReplayBuffer as _ReplayBuffer

from torchrl_llm.data.nodes import new_node, own_rows
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.replay_buffers.grouping import GroupTransform
from torchrl_llm.data.rollouts import row_list, split_rollout, unpadded
from torchrl_llm.data.wire import PackedRows, pack_rows, unpack_row_list
from torchrl_llm.errors import ConfigError

_STATE_FILE = "rows.pt"


class ReplayBuffer(_ReplayBuffer):
    """Stores rows, one per turn or one per joined trajectory.

    Inverse transforms (:class:`~torchrl_llm.objectives.MCAdvantage`, :class:`JoinTurns`, ...) run
    when rows are written. As in TorchRL, **the transform appended last runs first**. Transforms of
    this package add keys to rows and never change existing values. Other transforms get a shallow
    copy, as in TorchRL's buffer.

    Args:
        storage: by default a ``LazyStackStorage`` without limit. A tensor storage accepts only
            dense rows without text, and rejects other rows when they are written.
        **kwargs: as in :class:`torchrl.data.ReplayBuffer`: ``sampler``, ``writer``, ``transform``,
            ``batch_size``, ``prefetch``, ``generator``, ...

    ``extend`` takes a lazy stack of rows, a rollout ``[B, T]`` (which it splits), a list of rows or
    :class:`~torchrl_llm.data.wire.PackedRows`, and returns the indices of the written rows. There
    are none if the rows wait in a transform's queue.

    Example:
        >>> from torchrl_llm.data.ragged import ragged_rows, read_rows
        >>> buffer = ReplayBuffer(batch_size=2)
        >>> buffer.extend(ragged_rows({"ids": [torch.tensor([1, 2]), torch.tensor([3])]})).tolist()
        [0, 1]
        >>> len(read_rows(buffer.sample(), "ids"))
        2
    """

    def __init__(self, *, storage: Any = None, **kwargs: Any) -> None:
        super().__init__(storage=LazyStackStorage() if storage is None else storage, **kwargs)

    def _get_collate_fn(self, collate_fn: Any) -> None:
        # A plain ListStorage returns lists, which could only be stacked if dense.
        if collate_fn is None and type(self._storage) is ListStorage:
            collate_fn = lazy_rows
        super()._get_collate_fn(collate_fn)

    # -- writing ----------------------------------------------------------------------------------

    def extend(self, data: Any, *, update_priority: bool | None = None) -> Tensor:
        """Write rows, through the inverse transforms.

        Args:
            data: rows in any of the forms named above.
            update_priority: must be ``None``; it also has no effect in TorchRL's buffer.

        Returns:
            int64 ``[N]``: indices of the written rows, possibly none.

        Raises:
            ConfigError: the storage does not support such rows.
        """
        if update_priority is not None:
            raise ConfigError("update_priority has no effect in this buffer; leave it out")
        if not self.initialized:
            self._init()
        # Transforms have queues of trajectories, so only one writer at a time may run them.
        with self._replay_lock:
            rows = _as_rows(data)
            if isinstance(self._storage, ListStorage):  # others contain rows of one shape only
                rows = unpadded(rows)
            rows = self._through_transforms(rows)
            if not rows:
                return torch.zeros(0, dtype=torch.int64)
            rows = own_rows(rows)
            if isinstance(self._storage, ListStorage):
                return self._extend(lazy_rows(rows))
            _check_dense(rows, type(self._storage).__name__)
            return self._extend(torch.stack(rows))

    def add(self, data: TensorDictBase) -> Tensor | int:
        """Write one row; return its index, or an empty tensor if it waits in a queue."""
        index = self.extend([data])
        return int(index[0]) if index.numel() == 1 else index

    def _through_transforms(self, rows: list[TensorDict]) -> list[TensorDict]:
        if not rows or not len(self._transform):
            return rows
        data: Any = lazy_rows(rows)
        for transform in reversed(list(self._transform.transforms)):
            if getattr(transform, "adds_keys_only", False):
                data = transform._inv_call(data)
            else:
                data = transform.inv(data)
            if data is None:
                return []
        return row_list(data)

    # -- reading ----------------------------------------------------------------------------------

    def _sample(self, batch_size: int) -> tuple[Any, dict]:
        if not len(self._storage):
            self._say_who_waits()
        plain = self._sample_unit is None and not self._writer.tracks_generations
        writing_only = all(getattr(t, "adds_keys_only", False) for t in self._transform.transforms)
        if not (plain and writing_only) or self._pin_memory:
            return super()._sample(batch_size)
        # Transforms of written rows do nothing in this call, but TorchRL would unlock and lock
        # every node of every row, which would take longer than everything else.
        with self._replay_lock, self._write_lock:
            index, info = self._sampler.sample(self._storage, batch_size)
            data = self._storage.get(index)
        return self._collate_fn(data), {**info, "index": index}

    def _say_who_waits(self) -> None:
        for transform in self._transform.transforms:
            if isinstance(transform, GroupTransform) and len(transform._groups):
                stats, size = transform.get_stats(), transform._groups.size
                raise RuntimeError(
                    f"the buffer is empty: {stats['queued_trajectories']} trajectories wait in "
                    f"{type(transform).__name__} for {stats['queued_groups']} groups of {size} to "
                    f"fill; does the environment repeat each prompt {size} times (repeats={size})?"
                )

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return packed rows, sampler, writer, transforms (including queues) and generator."""
        if not self.initialized:
            self._init()
        if not isinstance(self._storage, ListStorage):
            return super().state_dict()
        with self._replay_lock:
            return {
                "rows": pack_rows(self._storage._storage),
                "sampler": self._sampler.state_dict(),
                "writer": self._writer.state_dict(),
                "transforms": self._transform.state_dict(),
                "batch_size": self._batch_size,
                "generator": None if self._rng is None else self._rng.get_state().clone(),
            }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of :meth:`state_dict`; prefetched batches are dropped.

        Args:
            state_dict: state of a buffer with the same kinds of storage, sampler and transforms.
        """
        if not self.initialized:
            self._init()
        if not isinstance(self._storage, ListStorage):
            super().load_state_dict(state_dict)
            return
        self.synchronize()
        with self._futures_lock, self._replay_lock:
            self._clear_prefetch_queue_locked()
            self._storage._empty()
            self._storage._storage = own_rows(unpack_row_list(state_dict["rows"]))
            self._sampler.load_state_dict(state_dict["sampler"])
            self._writer.load_state_dict(state_dict["writer"])
            self._transform.load_state_dict(state_dict["transforms"])
            self._batch_size = state_dict["batch_size"]
            if state_dict["generator"] is not None:
                generator = torch.Generator()
                generator.set_state(state_dict["generator"])
                self.set_rng(generator)

    def dumps(self, path: str | Path) -> None:
        """Save the state into a folder; if this fails, an earlier state in it is kept.

        Args:
            path: the folder; it is created if missing.
        """
        if not isinstance(self.storage, ListStorage):
            super().dumps(path)
            return
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{_STATE_FILE}.partial"
        torch.save(self.state_dict(), partial)
        os.replace(partial, folder / _STATE_FILE)

    def loads(self, path: str | Path) -> None:
        """Load the state that :meth:`dumps` saved. It is a pickle: load only trusted files."""
        if not isinstance(self.storage, ListStorage):
            super().loads(path)
            return
        self.load_state_dict(torch.load(Path(path) / _STATE_FILE, weights_only=False))


def _as_rows(data: Any) -> list[TensorDict]:
    """Return rows with a separate root, so that new keys appear only in these rows."""
    if isinstance(data, PackedRows):
        return unpack_row_list(data)
    if isinstance(data, LazyStackedTensorDict) and data.batch_dims == 1:
        rows: Iterable[Any] = data.tensordicts
    elif isinstance(data, (list, tuple)):
        rows = data
    else:
        return list(split_rollout(data).tensordicts)
    return [
        new_node(row._tensordict.copy()) if type(row) is TensorDict and not row.batch_dims else row
        for row in rows
    ]


def _check_dense(rows: list[TensorDict], storage: str) -> None:
    first = rows[0]
    for key, value in first.items(True, True, is_leaf=lambda cls: not issubclass(cls, TensorDict)):
        if isinstance(value, NonTensorData) or not isinstance(value, Tensor):
            raise ConfigError(
                f"{storage} would lose the text or object at {key!r}: every row would read back as "
                "the first one. Use storage=LazyStackStorage(...), or select tensor keys first"
            )
        if any(row.get(key).shape != value.shape for row in rows):
            raise ConfigError(
                f"{storage} holds rows of one shape, and {key!r} differs from row to row. Use "
                "storage=LazyStackStorage(...), or pad the rows first"
            )
