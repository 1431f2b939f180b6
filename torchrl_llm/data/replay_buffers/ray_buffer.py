"""A replay buffer in a Ray actor: many processes write, one or many sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import Tensor

from torchrl_llm._ray import ActorOptions, RemoteObject, require_ray
from torchrl_llm.data.nodes import own_rows
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.replay_buffers.buffer import ReplayBuffer
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.data.wire import PackedRows, pack_rows, unpack_row_list
from torchrl_llm.errors import ConfigError


class _Host:
    """The object in the actor."""

    def __init__(self, cls: type[ReplayBuffer], options: Mapping[str, Any]) -> None:
        options = dict(options)
        factories = options.pop("transform_factory", None)
        factories = factories if isinstance(factories, (list, tuple)) else [factories]
        self.buffer = cls(**options)
        for factory in factories:
            if factory is not None:
                self.buffer.append_transform(factory())

    def sample(self, batch_size: int | None) -> PackedRows:
        return pack_rows(row_list(self.buffer.sample(batch_size)))

    def rows(self, index: Any) -> PackedRows:
        return pack_rows(row_list(self.buffer[index]))

    def size(self) -> int:
        return len(self.buffer)

    def stats(self) -> dict[str, dict[str, Any]]:
        return {
            type(transform).__name__: transform.get_stats()
            for transform in self.buffer._transform.transforms
            if hasattr(transform, "get_stats")
        }


class RayReplayBuffer:
    """A :class:`~torchrl_llm.data.replay_buffers.ReplayBuffer` in a Ray actor.

    The buffer can be pickled, and copies refer to the same buffer. Pass it to several
    :class:`~torchrl_llm.collectors.RayLLMCollector` as their ``replay_buffer``, and sample from it
    in the training process. Rows are sent as packed rows. Transforms also run in the actor, so a
    group may contain conversations from different collectors.

    Args:
        replay_buffer_cls: class of the buffer in the actor.
        ray_init_config: arguments of ``ray.init``, which is called if Ray is not running yet.
        remote_config: resources and limits of the actor, fields of ``ActorOptions``.
        timeout_s: most seconds of a call.
        **options: arguments of the buffer: ``storage``, ``sampler``, ``batch_size``, ...;
            ``transform_factory`` makes the transform in the actor, or a list of transforms, which
            are appended in order (the last one runs first).

    Raises:
        ConfigError: the buffer rejects an argument.
        MissingExtraError: Ray is not installed.
        ResourceError: Ray is not running, or has too few resources.
        WorkerError: the actor did not start or answer in time, or died.
    """

    def __init__(
        self,
        *,
        replay_buffer_cls: type[ReplayBuffer] = ReplayBuffer,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_config: Mapping[str, Any] | None = None,
        timeout_s: float = 300.0,
        **options: Any,
    ) -> None:
        ray = require_ray("RayReplayBuffer", running=ray_init_config is None)
        if "transform" in options:
            raise ConfigError(
                "a transform would be sent to the actor as a copy: pass transform_factory, which "
                "makes it there"
            )
        if not ray.is_initialized():
            ray.init(**(ray_init_config or {}))
        self._remote = RemoteObject(
            partial(_Host, replay_buffer_cls, options),
            ActorOptions(timeout_s=timeout_s, **(remote_config or {})),
            what="RayReplayBuffer",
        )
        self.batch_size: int | None = options.get("batch_size")

    def extend(self, data: Any, *, update_priority: bool | None = None) -> Tensor:
        """Write rows through the transforms in the actor; see :meth:`ReplayBuffer.extend`."""
        packed = data if isinstance(data, PackedRows) else pack_rows(_rows(data))
        return self._remote.call("buffer.extend", packed, update_priority=update_priority)

    def add(self, data: TensorDictBase) -> Tensor | int:
        """Write one row; return its index, or an empty tensor if it waits in a queue."""
        index = self.extend([data])
        return int(index[0]) if index.numel() == 1 else index

    def sample(self, batch_size: int | None = None) -> LazyStackedTensorDict:
        """Return rows drawn by the sampler in the actor.

        Args:
            batch_size: number of rows; the buffer's batch size by default.

        Raises:
            RuntimeError: the buffer is empty.
        """
        return _unpacked(self._remote.call("sample", batch_size))

    def __iter__(self) -> Iterator[LazyStackedTensorDict]:
        """Yield batches without end, drawn by the sampler in the actor."""
        if self.batch_size is None:
            raise ConfigError("give the buffer a batch_size to iterate over it")
        while True:
            yield self.sample()

    def __len__(self) -> int:
        return self._remote.call("size")

    def __getitem__(self, index: Any) -> TensorDictBase:
        if isinstance(index, int):
            (row,) = _unpacked(self._remote.call("rows", torch.tensor([index]))).unbind(0)
            return row
        return _unpacked(self._remote.call("rows", index))

    def empty(self) -> None:
        """Remove all rows."""
        self._remote.call("buffer.empty")

    def transform_stats(self) -> dict[str, dict[str, Any]]:
        """Return the counts of the transforms, by class name."""
        return self._remote.call("stats")

    def state_dict(self) -> dict[str, Any]:
        """Return the buffer's state in the actor, including the queues of its transforms."""
        return self._remote.call("buffer.state_dict")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of :meth:`state_dict`."""
        self._remote.call("buffer.load_state_dict", state_dict)

    def shutdown(self) -> None:
        """Stop the actor; its rows are lost."""
        self._remote.shutdown()


def _rows(data: Any) -> Iterable[TensorDictBase]:
    return data if isinstance(data, (list, tuple)) else row_list(data)


def _unpacked(packed: PackedRows) -> LazyStackedTensorDict:
    return lazy_rows(own_rows(unpack_row_list(packed)))
