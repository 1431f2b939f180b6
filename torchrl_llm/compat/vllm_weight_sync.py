"""TorchRL's names for bringing weights to vLLM engines, over :mod:`torchrl_llm.weights`.

A scheme is only settings, the same in both processes: its sender is for the trainer, its receiver
for an engine. The receiver's process either polls for updates between its own work, or calls
``receiver.listen()`` once and gets them in a thread. An updater is called by a collector.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_llm.errors import ConfigError
from torchrl_llm.modules.backends.backend_port import Backend
from torchrl_llm.weights.broadcast import BroadcastSender
from torchrl_llm.weights.broadcast_source import BroadcastReceiver, Metadata
from torchrl_llm.weights.double_buffer import DoubleBufferReceiver, DoubleBufferWriter
from torchrl_llm.weights.engine_updaters import EngineWeights
from torchrl_llm.weights.process_group import free_port
from torchrl_llm.weights.remote_engines import BroadcastWeights, fitted
from torchrl_llm.weights.weight_names import engine_weights, get_model_metadata
from torchrl_llm.weights.weight_receiver import backend_of
from torchrl_llm.weights.weight_source import WeightReceipt

Strategy = Literal["tensordict", "state_dict"]
Weights = nn.Module | TensorDictBase | Mapping[str, Any]


def _check_strategy(strategy: str) -> None:
    if strategy not in ("tensordict", "state_dict"):
        raise ConfigError(f"strategy must be 'tensordict' or 'state_dict', got {strategy!r}")


class WeightSender(ABC):
    """The trainer's end of a scheme.

    Attributes:
        version: of the last weights that were sent; 0 before the first.
    """

    def __init__(self) -> None:
        self.version = 0
        self._model: Weights | None = None
        self._collectors: list[Any] = []

    def register_model(self, model: Weights) -> None:
        """Name the model whose weights :meth:`update_weights` sends.

        Args:
            model: the trained module, in any of its wrappings, or a policy around it.
        """
        self._model = model

    def register_collector(self, collector: Any) -> None:
        """Have a collector count a new version after each update.

        Args:
            collector: has ``increment_version()``.
        """
        self._collectors.append(collector)

    def update_weights(self, weights: Weights | None = None) -> list[WeightReceipt]:
        """Send weights.

        Args:
            weights: a module, its state dict or a tensordict; by default the registered model.

        Returns:
            What receivers said that they loaded, as far as this sender hears of it.

        Raises:
            ConfigError: there is nothing to send.
            WeightUpdateError: they did not arrive, or not as they were sent.
        """
        receipts, _ = self._send(self._weights(weights), self.version + 1)
        self.version += 1
        for collector in self._collectors:
            collector.increment_version()
        return receipts

    def publish(self, weights: Weights | None, version: int) -> str:
        """Send weights under a version that the caller counts.

        What :class:`~torchrl_llm.collectors.ChannelCollector` takes as ``publish``.

        Args:
            weights: as in :meth:`update_weights`.
            version: their number.

        Returns:
            The digest of what was sent.

        Raises:
            ConfigError: there is nothing to send.
            WeightUpdateError: they did not arrive, or not as they were sent.
        """
        _, digest = self._send(self._weights(weights), version)
        self.version = version
        return digest

    def _weights(self, weights: Weights | None) -> dict[str, Tensor]:
        source = self._model if weights is None else weights
        if source is None:
            raise ConfigError("register_model(model) first, or pass the weights")
        return engine_weights(source)

    @abstractmethod
    def _send(self, weights: dict[str, Tensor], version: int) -> tuple[list[WeightReceipt], str]:
        """Bring one version over; the receipts that are known, and the digest."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release what it holds; receivers keep the weights that they have."""


class VLLMWeightSyncScheme:
    """Weights by collective broadcast: gloo on the CPU, NCCL on CUDA.

    Args:
        master_address: of the trainer, as the engines reach it; this machine by default.
        master_port: where the trainer listens, the same in all processes; ``None`` chooses a free
            one here, for schemes that are then pickled to the receivers.
        gpus_per_replica: processes of one engine that receive.
        num_replicas: engines.
        strategy: ``"tensordict"`` and ``"state_dict"`` send the same bytes; both are accepted, as
            in TorchRL.
        device: CUDA device of the trainer for NCCL, by its index or name; ``"cpu"`` for gloo, which
            an index also means where there is no CUDA.
        timeout_s: most seconds of one update.
        bucket_bytes: most bytes of one buffer.

    Example:
        >>> from torchrl_llm.modules.backends import FakeBackend
        >>> scheme = VLLMWeightSyncScheme(device="cpu")
        >>> engine = FakeBackend(vocab_size=8, eos_token_ids=(2,))
        >>> receiver, sender = scheme.create_receiver(engine), scheme.create_sender()
        >>> receiver.listen()
        >>> sender.register_model(FakeBackend(vocab_size=8, eos_token_ids=(2,), seed=1).module)
        >>> [receipt.version for receipt in sender.update_weights()]
        [1]
        >>> receiver.shutdown(), sender.shutdown()
        (None, None)
    """

    def __init__(
        self,
        master_address: str | None = None,
        master_port: int | None = None,
        gpus_per_replica: int = 1,
        num_replicas: int = 1,
        strategy: Strategy = "tensordict",
        device: torch.device | str | int = 0,
        *,
        timeout_s: float = 120.0,
        bucket_bytes: int = 256 << 20,
    ) -> None:
        _check_strategy(strategy)
        if gpus_per_replica < 1 or num_replicas < 1:
            raise ConfigError(
                "gpus_per_replica and num_replicas must be at least 1, got "
                f"{gpus_per_replica} and {num_replicas}"
            )
        self.master_address = master_address or "127.0.0.1"
        self.master_port = master_port or free_port()
        self.gpus_per_replica, self.num_replicas = gpus_per_replica, num_replicas
        self.device, self.timeout_s, self.bucket_bytes = device, timeout_s, bucket_bytes

    @property
    def num_receivers(self) -> int:
        """Processes that take part in each update without the trainer."""
        return self.gpus_per_replica * self.num_replicas

    def create_sender(self) -> VLLMWeightSender:
        """The trainer's end."""
        return VLLMWeightSender(self)

    def create_receiver(self, vllm_engine: Any) -> VLLMWeightReceiver:
        """An engine's end, in its process.

        Args:
            vllm_engine: a ``vllm.LLM``, a wrapper, or any backend.
        """
        return VLLMWeightReceiver(self, vllm_engine)


class VLLMWeightSender(WeightSender):
    """The trainer's end of :class:`VLLMWeightSyncScheme`.

    Args:
        scheme: its settings.
    """

    def __init__(self, scheme: VLLMWeightSyncScheme) -> None:
        super().__init__()
        self._scheme = scheme
        self._metadata: Metadata | None = None
        self._engine: Backend | None = None
        self._broadcast = BroadcastSender(
            address=scheme.master_address,
            port=scheme.master_port,
            device=scheme.device,
            timeout_s=scheme.timeout_s,
            bucket_bytes=scheme.bucket_bytes,
        )

    def init_all_workers_group(
        self, model_metadata: Metadata | None = None, vllm_engine: Any = None
    ) -> None:
        """Begin to listen for receivers; does not wait for them.

        Args:
            model_metadata: of what will be sent (:func:`get_model_metadata`); weights are cast to
                its types.
            vllm_engine: a remote engine that can be called (a backend, or what has one): it is
                then told of each update, and needs no receiver.
        """
        self._metadata = model_metadata
        self._engine = None if vllm_engine is None else backend_of(vllm_engine)
        _ = self._broadcast.port

    def _send(self, weights: dict[str, Tensor], version: int) -> tuple[list[WeightReceipt], str]:
        weights = fitted(weights, self._metadata)
        if self._engine is not None:
            receipts = self._broadcast.push(weights, [self._engine], version=version)
        else:
            receipts = self._broadcast.publish(
                weights, version=version, num_receivers=self._scheme.num_receivers
            )
        return receipts, receipts[0].digest

    def shutdown(self) -> None:
        """See :meth:`WeightSender.shutdown`."""
        self._broadcast.close()


class VLLMWeightReceiver(BroadcastReceiver):
    """An engine's end of :class:`VLLMWeightSyncScheme`.

    Args:
        scheme: its settings.
        vllm_engine: gets the weights.
    """

    def __init__(self, scheme: VLLMWeightSyncScheme, vllm_engine: Any) -> None:
        super().__init__(
            backend_of(vllm_engine),
            address=scheme.master_address,
            port=scheme.master_port,
            timeout_s=scheme.timeout_s,
        )

    def init_all_workers_group(self, model_metadata: Metadata | None = None) -> None:
        """Begin to listen in a thread, as TorchRL's receivers do from here on.

        Args:
            model_metadata: not needed, for the sender's is fetched; checked by the load.
        """
        self.listen()


class VLLMDoubleBufferSyncScheme:
    """Weights through a folder that the trainer and the engines share.

    Nobody waits for anybody: the trainer writes, the engines read when they look next. See
    :mod:`torchrl_llm.weights.double_buffer`.

    Args:
        remote_addr: the folder as the trainer sees it.
        local_addr: the folder as the engines see it; by default by the same name.
        num_threads: copy so many tensors at once.
        strategy: ``"tensordict"`` and ``"state_dict"`` write the same bytes; both are accepted, as
            in TorchRL.

    Example:
        >>> import tempfile
        >>> from torchrl_llm.modules.backends import FakeBackend
        >>> scheme = VLLMDoubleBufferSyncScheme(tempfile.mkdtemp())
        >>> sender = scheme.create_sender()
        >>> sender.register_model(FakeBackend(vocab_size=8, eos_token_ids=(2,), seed=1).module)
        >>> _ = sender.update_weights()
        >>> receiver = scheme.create_receiver(FakeBackend(vocab_size=8, eos_token_ids=(2,)))
        >>> receiver.poll_and_apply(), receiver.version
        (True, 1)
    """

    def __init__(
        self,
        remote_addr: str | Path,
        local_addr: str | Path | None = None,
        num_threads: int = 1,
        strategy: Strategy = "tensordict",
    ) -> None:
        _check_strategy(strategy)
        if num_threads < 1:
            raise ConfigError(f"num_threads must be at least 1, got {num_threads}")
        self.remote_addr = str(remote_addr)
        self.local_addr = str(remote_addr if local_addr is None else local_addr)
        self.num_threads = num_threads

    def create_sender(self) -> VLLMDoubleBufferWeightSender:
        """The trainer's end."""
        return VLLMDoubleBufferWeightSender(self)

    def create_receiver(self, vllm_engine: Any) -> VLLMDoubleBufferWeightReceiver:
        """An engine's end, in its process.

        Args:
            vllm_engine: a ``vllm.LLM``, a wrapper, or any backend.
        """
        return VLLMDoubleBufferWeightReceiver(self, vllm_engine)


class VLLMDoubleBufferWeightSender(WeightSender):
    """The trainer's end of :class:`VLLMDoubleBufferSyncScheme`.

    Its version goes on where the folder's last one ended, so that a trainer that is started again
    does not send version 1 a second time.

    Args:
        scheme: its settings.
    """

    def __init__(self, scheme: VLLMDoubleBufferSyncScheme) -> None:
        super().__init__()
        self._writer = DoubleBufferWriter(scheme.remote_addr, num_threads=scheme.num_threads)
        self.version = self._writer.last_version

    def _send(self, weights: dict[str, Tensor], version: int) -> tuple[list[WeightReceipt], str]:
        header = self._writer.write(weights, version=version)
        return list(self._writer.receipts().values()), header.digest

    def receipts(self) -> dict[str, WeightReceipt]:
        """What receivers said that they loaded last, by their names."""
        return self._writer.receipts()

    def shutdown(self) -> None:
        """See :meth:`WeightSender.shutdown`."""
        self._writer.close()


class VLLMDoubleBufferWeightReceiver(DoubleBufferReceiver):
    """An engine's end of :class:`VLLMDoubleBufferSyncScheme`.

    Args:
        scheme: its settings.
        vllm_engine: gets the weights.
    """

    def __init__(self, scheme: VLLMDoubleBufferSyncScheme, vllm_engine: Any) -> None:
        super().__init__(backend_of(vllm_engine), scheme.local_addr, num_threads=scheme.num_threads)


Weights = nn.Module | TensorDictBase | Mapping[str, Any]


class vLLMUpdater(BroadcastWeights):
    """Weights to the collector's engine by collective broadcast.

    Args:
        master_address: of this machine, as the engine reaches it; by default this machine alone.
        master_port: where to listen; by default a free port.
        model_metadata: name to ``(dtype, shape)`` of each weight; may come with :meth:`init`.
        vllm_tp_size: processes of one engine that take weights; compared with what the engine says
            (``Backend.num_copies``) at each push. By default whatever it says.
        v2: make a :class:`vLLMUpdaterV2` of a ``vllm_engine``, which is then the only argument.
        device: see :class:`~torchrl_llm.weights.BroadcastWeights`.
        timeout_s: see there.

    Raises:
        ConfigError: a tensor-parallel size below 1, or other arguments with ``v2``.

    Example:
        >>> from types import SimpleNamespace
        >>> from torchrl_llm.modules import FakeBackend, FakeWrapper
        >>> backend = FakeBackend(vocab_size=16, eos_token_ids=(2,))
        >>> trained = FakeBackend(vocab_size=16, eos_token_ids=(2,), seed=1).module
        >>> updater = vLLMUpdater(device="cpu")
        >>> updater.register_collector(SimpleNamespace(policy=SimpleNamespace(backend=backend)))
        >>> updater.init(model_metadata=updater.get_model_metadata(trained))
        >>> updater.push_weights(trained)
        >>> torch.equal(backend.module.head, trained.head)
        True
    """

    def __new__(cls, *args: Any, v2: bool = False, **options: Any) -> Any:
        """The updater that ``v2`` asks for."""
        if not v2:
            return super().__new__(cls)
        if args or options.keys() != {"vllm_engine"}:
            raise ConfigError(
                f"v2=True takes vllm_engine=... alone, got {len(args)} positional arguments and "
                f"{sorted(options)}: the engine knows the rest"
            )
        return vLLMUpdaterV2(**options)

    def __init__(
        self,
        master_address: str | None = None,
        master_port: int | None = None,
        model_metadata: Metadata | None = None,
        vllm_tp_size: int | None = None,
        *,
        v2: bool = False,
        device: torch.device | str | int | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        super().__init__(
            metadata=model_metadata,
            address=master_address or "127.0.0.1",
            port=master_port or 0,
            device=device,
            timeout_s=timeout_s,
        )
        self.master_address = master_address or "127.0.0.1"
        if vllm_tp_size is not None and vllm_tp_size < 1:
            raise ConfigError(f"vllm_tp_size must be at least 1, got {vllm_tp_size}")
        self.vllm_tp_size = vllm_tp_size

    def init(self, model_metadata: Metadata | None = None) -> None:
        """Say what will be sent, and begin to listen.

        Args:
            model_metadata: name to ``(dtype, shape)``; weights are cast to these types.
        """
        if model_metadata is not None:
            self.metadata = model_metadata
        _ = self.port

    def maybe_init_group(self) -> None:
        """Begin to listen; the group itself is made by each push that needs one."""
        self.init()

    @property
    def master_port(self) -> int:
        """Where it listens."""
        return self.port

    @property
    def model_metadata(self) -> Metadata | None:
        """What will be sent, as far as it was said."""
        return self.metadata

    def _deliver(self, weights: Weights, version: int, receipts: list[WeightReceipt]) -> None:
        copies = sum(backend.num_copies for backend in self.backends)
        if self.vllm_tp_size is not None and copies % self.vllm_tp_size:
            raise ConfigError(
                f"vllm_tp_size is {self.vllm_tp_size} and the collector's engines take weights in "
                f"{copies} processes; leave it out, or set what the engines were started with"
            )
        super()._deliver(weights, version, receipts)

    @staticmethod
    def get_model_metadata(model: Weights) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """See :func:`torchrl_llm.weights.get_model_metadata`."""
        return get_model_metadata(model)


class vLLMUpdaterV2(EngineWeights):
    """Weights to an engine that knows how to take them.

    Args:
        vllm_engine: a ``vllm.LLM`` of this process, an
            :class:`~torchrl_llm.modules.AsyncVLLM`, a policy, or any backend.

    Raises:
        MissingExtraError: vLLM is needed and not installed.

    Example:
        >>> from torchrl_llm.modules import FakeBackend
        >>> engine = FakeBackend(vocab_size=16, eos_token_ids=(2,))
        >>> updater = vLLMUpdaterV2(engine)
        >>> updater.push_weights([("embedding", torch.ones(16, 8)), ("head", torch.ones(16, 8))])
        >>> engine.module.head.unique()
        tensor([1.], grad_fn=<Unique2Backward0>)
    """

    def __init__(self, vllm_engine: Any) -> None:
        self.vllm_engine = backend_of(vllm_engine)
        super().__init__(self.vllm_engine)
        self.model_metadata: Metadata | None = None
        self._broadcast: BroadcastSender | None = None
        self._batch_size: int | None = None

    def init(self, model_metadata: Metadata | None = None) -> None:
        """Say what will be pushed; names and shapes are then checked before anything is sent.

        Args:
            model_metadata: name to ``(dtype, shape)``; weights are cast to these types.
        """
        self.model_metadata = model_metadata

    def get_tp_size(self) -> int:
        """Processes of the engine that take weights."""
        return self.vllm_engine.num_copies

    def push_weights(self, weights: Weights | Iterable[tuple[str, Tensor]] | None = None) -> None:
        """Send the weights, and return when they are proven to be there.

        Args:
            weights: the trained module, its state dict, a tensordict, or pairs of name and tensor.

        Raises:
            ConfigError: nothing to push, or other weights than :meth:`init` was told of.
            WeightUpdateError: they did not arrive, or not as they were sent.
        """
        known = (nn.Module, TensorDictBase, Mapping)
        if weights is not None and not isinstance(weights, known):
            weights = dict(weights)
        if weights is not None:
            weights = fitted(engine_weights(weights), self.model_metadata)
        super().push_weights(weights)

    def push_weights_from_transformers(self, transformers_model: nn.Module) -> None:
        """Send the weights of a Hugging Face model; its adapters are merged into what is sent.

        Args:
            transformers_model: the model, or a policy around it.
        """
        self.push_weights(transformers_model)

    def push_weights_from_transformers_optimized(
        self, transformers_model: nn.Module, batch_size: int = 50
    ) -> None:
        """Send them by a collective broadcast in flat buffers, as one version.

        Args:
            transformers_model: the model, or a policy around it.
            batch_size: most tensors in one buffer; 0 for as many as fit.
        """
        model, self._batch_size = transformers_model, batch_size
        try:
            self.push_weights(model)
        finally:
            self._batch_size = None

    def _deliver(self, weights: Weights, version: int, receipts: list[WeightReceipt]) -> None:
        if self._batch_size is None:
            super()._deliver(weights, version, receipts)
            return
        if self._broadcast is None:
            self._broadcast = BroadcastSender()
        self._broadcast.push(
            weights,
            self.backends,
            version=version,
            bucket_tensors=self._batch_size,
            arrived=receipts,
        )

    @staticmethod
    def get_model_metadata(model: Weights) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """See :func:`torchrl_llm.weights.get_model_metadata`."""
        return get_model_metadata(model)
