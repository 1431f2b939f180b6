"""TorchRL's names for sending weights to vLLM engines, based on :mod:`torchrl_llm.weights`.

Engines on a GPU in other processes get them by vLLM's own transfer
(:mod:`torchrl_llm.weights.transfer`); engines on the CPU or in this process get all weights in one
call. A scheme contains only settings, the same in both processes: its sender is for the trainer,
its receiver for an engine. A collector calls an updater.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_llm._checked import Ge, checked
from torchrl_llm._imports import require
from torchrl_llm._log import tell_once
from torchrl_llm.errors import ConfigError, WeightUpdateError
from torchrl_llm.modules.backends.backend_port import Backend
from torchrl_llm.modules.policies.llm_wrapper import LLMWrapperBase
from torchrl_llm.modules.remote import EnginePool
from torchrl_llm.weights.engine_updaters import EngineWeights
from torchrl_llm.weights.shared_files import FileWriter, newest_update
from torchrl_llm.weights.transfer import TransferWeights, free_port
from torchrl_llm.weights.weight_names import engine_weights, get_model_metadata
from torchrl_llm.weights.weight_source import WeightReceipt

Metadata = Mapping[str, tuple[torch.dtype, torch.Size]]
Strategy = Literal["tensordict", "state_dict"]
Weights = nn.Module | TensorDictBase | Mapping[str, Any]

_POLL_S = 0.05
_TRIES = 3


def backend_of(engine: Any) -> Backend:
    """Backend of an engine.

    Args:
        engine: a backend, a policy around one, or a ``vllm.LLM`` of this process that no other
            thread steps during an update.

    Raises:
        MissingExtraError: vLLM is required but not installed.
        ConfigError: the object is not an engine.
    """
    if isinstance(engine, Backend):
        return engine
    if isinstance(engine, LLMWrapperBase):
        return engine.backend
    vllm = require("vllm", extra="vllm", feature=f"an engine given as {type(engine).__name__}")
    if not isinstance(engine, vllm.LLM):
        raise ConfigError(
            f"a {type(engine).__name__} is no engine: give a vllm.LLM, a policy, or a backend"
        )
    from torchrl_llm.modules.backends.vllm import VLLMBackend

    return VLLMBackend(engine)


def _fitted(weights: dict[str, Tensor], metadata: Metadata | None) -> dict[str, Tensor]:
    """Weights cast to the announced types; ``ConfigError`` for other names or shapes."""
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


def _tell_port(master_port: int | None) -> None:
    if master_port is not None:
        tell_once("master_port has no effect: each update listens on a port that is free then")


class WeightSender(ABC):
    """The trainer's end of a scheme.

    Attributes:
        version: version of the last sent weights; 0 before the first.
    """

    def __init__(self) -> None:
        self.version = 0
        self._model: Weights | None = None
        self._collectors: list[Any] = []

    def register_model(self, model: Weights) -> None:
        """Register the model whose weights :meth:`update_weights` sends.

        Args:
            model: the trained module, wrapped or not, or a policy around it.
        """
        self._model = model

    def register_collector(self, collector: Any) -> None:
        """Register a collector that counts a new version after each update.

        Args:
            collector: a collector with ``increment_version()``.
        """
        self._collectors.append(collector)

    def update_weights(self, weights: Weights | None = None) -> None:
        """Send weights.

        Args:
            weights: a module, its state dict or a tensordict; by default the registered model.

        Raises:
            ConfigError: there is nothing to send.
            WeightUpdateError: the weights did not arrive, or arrived changed.
        """
        self.publish(weights, self.version + 1)
        for collector in self._collectors:
            collector.increment_version()

    def publish(self, weights: Weights | None, version: int) -> str:
        """Send weights under a version that the caller counts.

        Pass it as ``publish`` to :class:`~torchrl_llm.collectors.ChannelCollector`.

        Args:
            weights: as in :meth:`update_weights`.
            version: version of the weights.

        Returns:
            The digest of the sent weights.

        Raises:
            ConfigError: there is nothing to send.
            WeightUpdateError: the weights did not arrive, or arrived changed.
        """
        source = self._model if weights is None else weights
        if source is None:
            raise ConfigError("register_model(model) first, or pass the weights")
        digest = self._send(engine_weights(source), version)
        self.version = version
        return digest

    @abstractmethod
    def _send(self, weights: dict[str, Tensor], version: int) -> str:
        """Send one version; returns its digest."""

    def shutdown(self) -> None:
        """Release the resources; receivers keep their weights."""
        return


class VLLMWeightSyncScheme:
    """Weights for an engine that can be called; sent over NCCL if it is on other GPUs.

    Args:
        master_address: address of the trainer as seen by the engines; this machine by default.
        master_port: accepted for TorchRL's programs, with a warning; each update chooses a free
            port.
        gpus_per_replica: receiving processes per engine.
        num_replicas: number of engines.
        strategy: ``"tensordict"`` and ``"state_dict"`` send the same bytes; both are accepted, as
            in TorchRL.
        device: CUDA device of the trainer. With ``"cpu"``, all weights are sent in one call; an
            index does the same if there is no CUDA.
        timeout_s: most seconds of one update.

    Example:
        >>> from torchrl_llm.modules.backends import FakeBackend
        >>> scheme = VLLMWeightSyncScheme(device="cpu")
        >>> engine = FakeBackend(vocab_size=8, eos_token_ids=(2,))
        >>> trained = FakeBackend(vocab_size=8, eos_token_ids=(2,), seed=1).module
        >>> sender = scheme.create_sender()
        >>> sender.init_all_workers_group(get_model_metadata(trained), vllm_engine=engine)
        >>> sender.update_weights(trained)
        >>> sender.version, torch.equal(engine.module.head, trained.head)
        (1, True)
    """

    @checked
    def __init__(
        self,
        master_address: str | None = None,
        master_port: int | None = None,
        gpus_per_replica: Annotated[int, Ge(1)] = 1,
        num_replicas: Annotated[int, Ge(1)] = 1,
        strategy: Strategy = "tensordict",
        device: torch.device | str | int = 0,
        *,
        timeout_s: float = 120.0,
    ) -> None:
        _tell_port(master_port)
        self.master_address = master_address or "127.0.0.1"
        self.master_port = master_port or free_port()
        self.gpus_per_replica, self.num_replicas = gpus_per_replica, num_replicas
        self.device, self.timeout_s = device, timeout_s

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
    """The trainer's side of :class:`VLLMWeightSyncScheme`.

    Args:
        scheme: its settings.
    """

    def __init__(self, scheme: VLLMWeightSyncScheme) -> None:
        super().__init__()
        self._scheme = scheme
        self._updater: vLLMUpdater | None = None

    def init_all_workers_group(
        self, model_metadata: Metadata | None = None, vllm_engine: Any = None
    ) -> None:
        """Register the engine that gets the weights; each update connects by itself.

        Args:
            model_metadata: metadata of the weights (:func:`get_model_metadata`); weights are cast
                to its types.
            vllm_engine: an engine that can be called: a backend, an object with a backend, or a
                ``vllm.LLM`` of this process.

        Raises:
            ConfigError: there is no engine.
        """
        if vllm_engine is None:
            raise ConfigError(
                "init_all_workers_group needs vllm_engine=..., which is called for each update; "
                "engines that cannot be called read files (VLLMDoubleBufferSyncScheme)"
            )
        scheme = self._scheme
        self._updater = vLLMUpdater(
            scheme.master_address,
            model_metadata=model_metadata,
            device=scheme.device,
            timeout_s=scheme.timeout_s,
            engines=(backend_of(vllm_engine),),
        )

    def _send(self, weights: dict[str, Tensor], version: int) -> str:
        if self._updater is None:
            raise ConfigError("call init_all_workers_group(metadata, vllm_engine=...) first")
        self._updater.version = version - 1
        self._updater.push_weights(weights)
        return self._updater.receipts[0].digest


class VLLMWeightReceiver:
    """An engine's side of :class:`VLLMWeightSyncScheme`; it does nothing, as in TorchRL.

    Args:
        scheme: its settings.
        vllm_engine: the engine; it gets the weights by calls of the sender.
    """

    def __init__(self, scheme: VLLMWeightSyncScheme, vllm_engine: Any) -> None:
        self.scheme, self.backend = scheme, backend_of(vllm_engine)

    def init_all_workers_group(self, model_metadata: Metadata | None = None) -> None:
        """Nothing to connect: the sender does it in each update."""

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Nothing to apply: weights are loaded as they arrive."""

    def poll_and_apply(self, timeout: float = 0.1) -> bool:
        """Nothing to poll: always returns ``False``."""
        return False


class VLLMDoubleBufferSyncScheme:
    """Weights through a folder shared by the trainer and the engines.

    Neither side waits: the trainer writes, and the engines read at their next poll. See
    :mod:`torchrl_llm.weights.shared_files`.

    Args:
        remote_addr: path of the folder for the trainer.
        local_addr: path of the folder for the engines; the same by default.
        num_threads: has no effect, and gives a warning if it is not 1: each file is written by one
            thread.
        strategy: ``"tensordict"`` and ``"state_dict"`` write the same bytes; both are accepted, as
            in TorchRL.

    Example:
        >>> import tempfile
        >>> from torchrl_llm.modules.backends import FakeBackend
        >>> scheme = VLLMDoubleBufferSyncScheme(tempfile.mkdtemp())
        >>> sender = scheme.create_sender()
        >>> sender.register_model(FakeBackend(vocab_size=8, eos_token_ids=(2,), seed=1).module)
        >>> sender.update_weights()
        >>> receiver = scheme.create_receiver(FakeBackend(vocab_size=8, eos_token_ids=(2,)))
        >>> receiver.poll_and_apply(), receiver.version
        (True, 1)
    """

    @checked
    def __init__(
        self,
        remote_addr: str | Path,
        local_addr: str | Path | None = None,
        num_threads: Annotated[int, Ge(1)] = 1,
        strategy: Strategy = "tensordict",
    ) -> None:
        if num_threads != 1:
            tell_once("num_threads has no effect: a file of weights is written in one go")
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
    """The trainer's side of :class:`VLLMDoubleBufferSyncScheme`.

    Its version continues after the folder's last one, so that a restarted trainer does not send
    version 1 a second time.

    Args:
        scheme: its settings.
    """

    def __init__(self, scheme: VLLMDoubleBufferSyncScheme) -> None:
        super().__init__()
        self._writer = FileWriter(scheme.remote_addr)
        self.version = self._writer.last_version

    def _send(self, weights: dict[str, Tensor], version: int) -> str:
        return self._writer.write(weights, version=version).digest

    def shutdown(self) -> None:
        """See :meth:`WeightSender.shutdown`."""
        self._writer.close()


class VLLMDoubleBufferWeightReceiver:
    """An engine's side of :class:`VLLMDoubleBufferSyncScheme`.

    Args:
        scheme: its settings.
        vllm_engine: the engine that gets the weights.

    Attributes:
        version: version of the last loaded weights; ``None`` before the first.
        receipts: receipts of the last loaded weights.
    """

    def __init__(self, scheme: VLLMDoubleBufferSyncScheme, vllm_engine: Any) -> None:
        self._folder, self.backend = scheme.local_addr, backend_of(vllm_engine)
        self.version: int | None = None
        self.receipts: list[WeightReceipt] = []
        self._seen: tuple[Path, str] | None = None

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Load weights of this process, under the next version.

        Args:
            weights: a module, its state dict or a tensordict.
            inplace: must be ``True``, as in TorchRL.
        """
        if not inplace:
            raise ConfigError("weights are applied in place: an engine has one copy of them")
        updater = vLLMUpdaterV2(self.backend)
        updater.version = self.version or 0
        updater.push_weights(weights)
        self.version, self.receipts = updater.version, updater.receipts

    def poll_and_apply(self, timeout: float = 180.0) -> bool:
        """Wait for new weights and load them.

        Args:
            timeout: most seconds to wait for weights.

        Returns:
            Whether new weights were loaded.

        Raises:
            WeightUpdateError: the new weights did not arrive complete; the old ones stay.
        """
        end, tries = time.monotonic() + timeout, 0
        while True:
            seen = self._seen
            try:
                found = newest_update(self._folder)
                # A different writer counts its files from 1 in an empty folder.
                seen = found and (found[1].path, found[1].counter)
                if seen != self._seen and found is not None:
                    version, source = found
                    self.receipts = self.backend.update_weights(source, version=version)
                    self._seen, self.version = seen, version
                    return True
            except WeightUpdateError:
                # The sender replaced the file, or the file system was late: try again.
                tries += 1
                if tries == _TRIES:
                    self._seen = seen
                    raise
            else:
                if time.monotonic() >= end:
                    return False
            time.sleep(_POLL_S)


class vLLMUpdater(EngineWeights):
    """Sends weights to the collector's engine.

    With engines on Ray and a trainer on a GPU, weights are sent over NCCL by vLLM's own transfer
    (:class:`~torchrl_llm.weights.TransferWeights`). In all other cases, one call sends all weights.

    Args:
        master_address: address of this machine as seen by the engine; by default only for engines
            on this machine.
        master_port: accepted for TorchRL's programs, with a warning; each push chooses a free port.
        model_metadata: name to ``(dtype, shape)`` of each weight; may also be passed to
            :meth:`init`.
        vllm_tp_size: number of processes per engine that load weights; compared with the engine's
            value (``Backend.num_copies``) at each push. By default the engine's value.
        v2: create a :class:`vLLMUpdaterV2` for a ``vllm_engine``, which is then the only argument.
        device: device of the trained weights; by default the first CUDA device if there is one,
            else the CPU.
        timeout_s: most seconds of one push over NCCL.
        engines: engines that get the weights; by default the engine of the collector's policy.

    Raises:
        ConfigError: the tensor-parallel size is below 1, or ``v2`` is combined with other
            arguments.

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
        """Create the updater that ``v2`` selects."""
        if not v2:
            return super().__new__(cls)
        if args or options.keys() != {"vllm_engine"}:
            raise ConfigError(
                f"v2=True takes vllm_engine=... alone, got {len(args)} positional arguments and "
                f"{sorted(options)}: the engine knows the rest"
            )
        return vLLMUpdaterV2(**options)

    @checked
    def __init__(
        self,
        master_address: str | None = None,
        master_port: int | None = None,
        model_metadata: Metadata | None = None,
        vllm_tp_size: Annotated[int, Ge(1)] | None = None,
        *,
        v2: bool = False,
        device: torch.device | str | int | None = None,
        timeout_s: float = 120.0,
        engines: Iterable[Backend] = (),
    ) -> None:
        super().__init__(*engines)
        _tell_port(master_port)
        self.master_address = master_address or "127.0.0.1"
        self.master_port = master_port or free_port()
        self.model_metadata, self.vllm_tp_size = model_metadata, vllm_tp_size
        self._on_cpu = device == torch.device("cpu") or not torch.cuda.is_available()
        self._timeout_s = timeout_s

    def init(self, model_metadata: Metadata | None = None) -> None:
        """Announce the weights.

        Args:
            model_metadata: name to ``(dtype, shape)``; weights are cast to these types.
        """
        if model_metadata is not None:
            self.model_metadata = model_metadata

    def maybe_init_group(self) -> None:
        """Nothing to connect: each push connects by itself."""

    def _deliver(self, weights: Weights, version: int, receipts: list[WeightReceipt]) -> None:
        copies = sum(backend.num_copies for backend in self.backends)
        if self.vllm_tp_size is not None and copies % self.vllm_tp_size:
            raise ConfigError(
                f"vllm_tp_size is {self.vllm_tp_size} and the collector's engines take weights in "
                f"{copies} processes; leave it out, or set what the engines were started with"
            )
        fitted = _fitted(engine_weights(weights), self.model_metadata)
        remote = all(isinstance(backend, EnginePool) for backend in self.backends)
        if self._on_cpu or not remote:
            super()._deliver(fitted, version, receipts)
            return
        address, limit = self.master_address, self._timeout_s
        transfer = TransferWeights(*self.backends, address=address, timeout_s=limit)
        transfer._deliver(fitted, version, receipts)

    get_model_metadata = staticmethod(get_model_metadata)


class vLLMUpdaterV2(EngineWeights):
    """Sends weights to an engine that can load them itself.

    Args:
        vllm_engine: a ``vllm.LLM`` of this process, an
            :class:`~torchrl_llm.modules.AsyncVLLM`, a policy, or any backend.

    Raises:
        MissingExtraError: vLLM is required but not installed.

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

    def init(self, model_metadata: Metadata | None = None) -> None:
        """Announce the weights; names and shapes are then checked before anything is sent.

        Args:
            model_metadata: name to ``(dtype, shape)``; weights are cast to these types.
        """
        self.model_metadata = model_metadata

    def get_tp_size(self) -> int:
        """Number of processes of the engine that load weights."""
        return self.vllm_engine.num_copies

    def push_weights(self, weights: Weights | Iterable[tuple[str, Tensor]] | None = None) -> None:
        """Send the weights, and return after their arrival is verified.

        Args:
            weights: the trained module, its state dict, a tensordict, or pairs of name and tensor.

        Raises:
            ConfigError: there is nothing to push, or the weights differ from the announced weights
                (:meth:`init`).
            WeightUpdateError: the weights did not arrive, or arrived changed.
        """
        known = (nn.Module, TensorDictBase, Mapping)
        if weights is not None and not isinstance(weights, known):
            weights = dict(weights)
        if weights is not None:
            weights = _fitted(engine_weights(weights), self.model_metadata)
        super().push_weights(weights)

    def push_weights_from_transformers(self, transformers_model: nn.Module) -> None:
        """Send the weights of a Hugging Face model, with its adapters merged.

        Args:
            transformers_model: the model, or a policy around it.
        """
        self.push_weights(transformers_model)

    @checked
    def push_weights_from_transformers_optimized(
        self, transformers_model: nn.Module, batch_size: Annotated[int, Ge(0)] = 50
    ) -> None:
        """Same as without ``_optimized``: all weights are sent in one piece.

        Args:
            transformers_model: the model, or a policy around it.
            batch_size: has no effect. In TorchRL it is the number of weights per push, which
                changes neither the result nor the memory use: all weights are on the GPU by then.
        """
        self.push_weights(transformers_model)

    get_model_metadata = staticmethod(get_model_metadata)
