"""Code that runs inside the Ray actor of a :class:`~torchrl_llm.collectors.RayLLMCollector`."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDictBase, lazy_stack

from torchrl_llm._ray import ActorOptions
from torchrl_llm.collectors.collecting_worker import CollectorWorker
from torchrl_llm.collectors.llm_collector import LLMCollector
from torchrl_llm.collectors.transport.channel import RowChannel
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.rollouts import split_rollout
from torchrl_llm.data.wire import PackedRows, pack_rows, unpack_row_list
from torchrl_llm.envs.ids import set_process_number
from torchrl_llm.errors import ConfigError
from torchrl_llm.weights.weight_source import WeightReceipt, WeightSource

_THREADS = 4
_PLACEMENT = ("memory", "scheduling_strategy", "accelerator_type", "runtime_env")
# Number of possible first ids of a process, and number of ids between two of them.
_STARTS, _APART = 2**13, 2**21

InFlight = Literal["wait", "keep", "abort"]


class PackedBatch(NamedTuple):
    """A batch for sending: its packed rows, and its shape.

    Attributes:
        rows: packed rows in the order of ``batch.reshape(-1)``.
        shape: batch size of the batch.
    """

    rows: PackedRows
    shape: torch.Size

    @classmethod
    def of(cls, batch: TensorDictBase) -> PackedBatch:
        """Pack a batch of shape ``[N]`` or ``[B, T]``."""
        return cls(pack_rows(split_rollout(batch)), batch.batch_size)

    def unpack(self) -> TensorDictBase:
        """Restore the batch: a lazy stack ``[N]``, or lazy stacks along the last dimension."""
        return _stacked(unpack_row_list(self.rows), self.shape)


def _stacked(rows: list[Any], shape: torch.Size) -> TensorDictBase:
    if len(shape) == 1:
        return lazy_rows(rows)
    # Stacked step by step, in the same way as in a collector.
    steps = [_stacked(rows[t :: shape[-1]], shape[:-1]) for t in range(shape[-1])]
    return lazy_stack(steps, -1)


class CollectorHost:
    """A collector in an actor, with or without a channel.

    Args:
        env: see :class:`~torchrl_llm.collectors.LLMCollector`.
        options: other arguments of the collector.
        number: number that makes the ids of this process unique.
        channel: channel for the rows of :meth:`run`.
        name: name of this worker in the channel.
        claim_rows: see :class:`~torchrl_llm.collectors.collecting_worker.CollectorWorker`.
    """

    def __init__(
        self,
        env: Any,
        options: Mapping[str, Any],
        *,
        number: int,
        channel: RowChannel | None = None,
        name: str = "",
        claim_rows: int | None = None,
    ) -> None:
        set_process_number(number, first=secrets.randbelow(_STARTS) * _APART)
        self.collector = LLMCollector(env, **options)
        self.worker: CollectorWorker | None = None
        if channel is not None:
            self.worker = CollectorWorker(self.collector, channel, name=name, claim_rows=claim_rows)
        self._stopping = threading.Event()
        self._batches = iter(self.collector)

    def next(self) -> tuple[bool, PackedBatch | None]:
        """Return whether there was a next batch, and the batch, unless the actor wrote it."""
        for batch in self._batches:
            return True, None if batch is None else PackedBatch.of(batch)
        return False, None

    def run(self) -> str:
        """Collect until :meth:`stop` or the end; return the reason of the end."""
        if self.worker is not None:
            return self.worker.run()
        for _ in self._batches:
            if self._stopping.is_set():
                return "it was stopped"
        return "it has collected all its turns"

    def stop(self) -> None:
        """End :meth:`run` after the current batch."""
        self._stopping.set()
        if self.worker is not None:
            self.worker.stop()

    def close(self) -> None:
        """Close the environment."""
        self.collector.shutdown(timeout=0, raise_on_error=False)

    def load_weights(
        self, source: WeightSource | None, version: int, in_flight: InFlight
    ) -> list[WeightReceipt]:
        """Load weights, or set the version of weights that another process changed.

        Args:
            source: source of the weights; ``None`` if they are already in place.
            version: their number.
            in_flight: see :meth:`~torchrl_llm.collectors.LLMCollector.load_weights`.
        """
        if source is None:
            self.collector.set_policy_version(version)
            return []
        if self.worker is not None:
            return self.worker.load_weights(source, version, in_flight)
        return self.collector.load_weights(source, version=version, in_flight=in_flight)


def actor_options(
    remote_config: Mapping[str, Any] | None, **given: Any
) -> tuple[ActorOptions, dict[str, Any]]:
    """Read the options of an actor from TorchRL's ``remote_config``.

    Args:
        remote_config: fields of ``ActorOptions``, and ``memory``,
            ``scheduling_strategy``, ``accelerator_type``, ``runtime_env`` of Ray.
        given: fields that override it; ``None`` if not given.

    Returns:
        The options, and the remaining arguments for Ray.

    Raises:
        ConfigError: a key is unknown.

    Example:
        >>> actor_options({"num_cpus": 2, "memory": 2**30}, num_cpus=0.5)[0].num_cpus
        0.5
    """
    config = dict(remote_config or {})
    placement = {name: config.pop(name) for name in _PLACEMENT if name in config}
    known = {field.name for field in fields(ActorOptions)}
    unknown = sorted(set(config) - known)
    if unknown:
        raise ConfigError(
            f"remote_config has {unknown[0]!r}; it may have {sorted(known | set(_PLACEMENT))}"
        )
    config |= {name: value for name, value in given.items() if value is not None}
    options = ActorOptions(**config)
    return replace(options, max_concurrency=max(options.max_concurrency, _THREADS)), placement
