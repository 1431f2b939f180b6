"""Updaters for engines in other processes; a collector calls them in ``update_policy_weights_``.

Both hand their engines a small source that says where the weights are; the engines may be reached
in any way that carries it (Ray, a pipe, a call in this process). For receivers that cannot be
called, see :mod:`torchrl_llm.compat.vllm_weight_sync`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from torchrl_llm.errors import ConfigError
from torchrl_llm.modules.backends.backend_port import Backend
from torchrl_llm.weights.broadcast import BroadcastSender
from torchrl_llm.weights.broadcast_source import Metadata
from torchrl_llm.weights.canary import CanaryCheck
from torchrl_llm.weights.double_buffer import DoubleBufferSource, DoubleBufferWriter
from torchrl_llm.weights.engine_updaters import EngineWeights, Sender
from torchrl_llm.weights.fingerprint import WeightLedger
from torchrl_llm.weights.weight_names import Weights, engine_weights
from torchrl_llm.weights.weight_source import WeightReceipt
from torchrl_llm.weights.weight_updater import WeightUpdater


def fitted(weights: dict[str, Tensor], metadata: Metadata | None) -> dict[str, Tensor]:
    """Weights in the types that receivers expect.

    Args:
        weights: name to tensor.
        metadata: what was agreed on; ``None`` for anything.

    Raises:
        ConfigError: names or shapes are others than agreed on.
    """
    if metadata is None:
        return weights
    shapes = {name: value.shape for name, value in weights.items()}
    wrong = {n for n in set(shapes) | set(metadata) if shapes.get(n) != metadata.get(n, (0, 0))[1]}
    if wrong:
        raise ConfigError(
            f"{len(wrong)} weights are not those that the metadata announced: {sorted(wrong)[:3]}; "
            "give get_model_metadata(model) of the model that is pushed"
        )
    return {name: value.to(metadata[name][0]) for name, value in weights.items()}


class BroadcastWeights(EngineWeights):
    """Sends weights to engines by one collective broadcast (gloo on the CPU, NCCL on CUDA).

    A learner that dies leaves its engines with the weights that they have; an engine that dies
    fails the push within ``timeout_s``, and the next push makes a group of those that are there.

    Args:
        *backends: see :class:`~torchrl_llm.weights.EngineWeights`.
        model: see there.
        canary: see there.
        ledger: see there.
        metadata: names, types and shapes that are sent (``get_model_metadata(model)``); the weights
            are cast to these types. By default those of the weights.
        address: of this machine, as the engines reach it.
        port: where to listen; 0 for a free port.
        device: ``"cpu"`` for gloo, a CUDA device or its index for NCCL; by default the first CUDA
            device where there is one.
        timeout_s: most seconds of one push.
        bucket_bytes: most bytes of one buffer.

    Attributes:
        metadata: as given.

    Example:
        >>> from torchrl_llm.modules.backends import FakeBackend
        >>> trained = FakeBackend(vocab_size=16, eos_token_ids=(2,), seed=1).module
        >>> sampler = FakeBackend(vocab_size=16, eos_token_ids=(2,))
        >>> updater = BroadcastWeights(sampler, device="cpu")
        >>> updater.push_weights(trained)
        >>> torch.equal(sampler.module.head, trained.head), updater.receipts[0].num_tensors
        (True, 2)
    """

    def __init__(
        self,
        *backends: Backend,
        model: Weights | None = None,
        canary: CanaryCheck | None = None,
        ledger: WeightLedger | None = None,
        metadata: Metadata | None = None,
        address: str = "127.0.0.1",
        port: int = 0,
        device: torch.device | str | int | None = None,
        timeout_s: float = 120.0,
        bucket_bytes: int = 256 << 20,
    ) -> None:
        super().__init__(*backends, model=model, canary=canary, ledger=ledger)
        self.metadata = metadata
        self._broadcast = BroadcastSender(
            address=address,
            port=port,
            device=device,
            timeout_s=timeout_s,
            bucket_bytes=bucket_bytes,
        )

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._broadcast.port

    def close(self) -> None:
        """Leave the group and stop listening."""
        self._broadcast.close()

    def _deliver(self, weights: Weights, version: int, receipts: list[WeightReceipt]) -> None:
        sent = fitted(engine_weights(weights), self.metadata)
        self._broadcast.push(sent, self.backends, version=version, arrived=receipts)


class DoubleBufferWeights(EngineWeights):
    """Writes weights to a shared folder, and has engines read them from there.

    An engine that is built again later may read the same source again.

    Args:
        folder: of the two slots; ``/dev/shm/...`` on one machine, a shared disc between machines.
        *backends: see :class:`~torchrl_llm.weights.EngineWeights`.
        model: see there.
        canary: see there.
        ledger: see there.
        dtype: see there.
        reader_folder: the same folder as the engines see it; by default by the same name.
        num_threads: copy so many tensors at once.

    Example:
        >>> import tempfile
        >>> from torchrl_llm.modules.backends import FakeBackend
        >>> trained = FakeBackend(vocab_size=16, eos_token_ids=(2,), seed=1).module
        >>> sampler = FakeBackend(vocab_size=16, eos_token_ids=(2,))
        >>> DoubleBufferWeights(tempfile.mkdtemp(), sampler).push_weights(trained)
        >>> torch.equal(sampler.module.head, trained.head)
        True
    """

    def __init__(
        self,
        folder: str | Path,
        *backends: Backend,
        model: Weights | None = None,
        canary: CanaryCheck | None = None,
        ledger: WeightLedger | None = None,
        dtype: torch.dtype | None = None,
        reader_folder: str | Path | None = None,
        num_threads: int = 1,
    ) -> None:
        super().__init__(*backends, model=model, canary=canary, ledger=ledger, dtype=dtype)
        self._writer = DoubleBufferWriter(folder, num_threads=num_threads)
        self._reader_folder = Path(folder if reader_folder is None else reader_folder)
        self._num_threads = num_threads

    def close(self) -> None:
        """Let another run write to the folder."""
        self._writer.close()

    def _sender(self, weights: Weights, version: int) -> Sender:
        header = self._writer.write(engine_weights(weights, dtype=self._dtype), version=version)
        source = DoubleBufferSource(
            self._reader_folder, sequence=header.sequence, num_threads=self._num_threads
        )
        return partial(_update, source=source, version=version)


def _update(backend: Backend, *, source: DoubleBufferSource, version: int) -> list[WeightReceipt]:
    return backend.update_weights(source, version=version)


class RankZeroWeights(WeightUpdater):
    """Only the first of several training processes sends; all must push, to gather shards.

    Args:
        make: builds the updater that sends; called once, in rank 0, by the first push.

    Attributes:
        inner: the updater; ``None`` before the first push and in other ranks.
    """

    def __init__(self, make: Callable[[], WeightUpdater]) -> None:
        self._make = make
        self.inner: WeightUpdater | None = None

    def push_weights(self, policy_or_weights: Weights | None = None) -> None:
        """Gather the weights, and send them from rank 0.

        Args:
            policy_or_weights: the trained module, the same in every rank.

        Raises:
            ConfigError: none was given.
            WeightUpdateError: they did not arrive; raised in rank 0 alone.
        """
        if policy_or_weights is None:
            raise ConfigError("RankZeroWeights needs the trained module in every rank")
        weights = engine_weights(policy_or_weights)
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        if self.inner is None:
            self.inner = self._make()
            if self.collector is not None:
                self.inner.register_collector(self.collector)
        self.inner.push_weights(weights)
