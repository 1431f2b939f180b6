"""TorchRL's names for updaters of vLLM engines, over :mod:`torchrl_llm.weights`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_llm.errors import ConfigError
from torchrl_llm.weights.broadcast import BroadcastSender
from torchrl_llm.weights.buckets import Metadata
from torchrl_llm.weights.remote_engines import BroadcastWeights, fitted
from torchrl_llm.weights.weight_names import engine_weights, get_model_metadata
from torchrl_llm.weights.weight_receiver import backend_of
from torchrl_llm.weights.weight_source import WeightReceipt
from torchrl_llm.weights.whole_model import EngineWeights

Weights = nn.Module | TensorDictBase | Mapping[str, Any]


class vLLMUpdater(BroadcastWeights):
    """Weights to the collector's engine by collective broadcast.

    Args:
        master_address: of this machine, as the engine reaches it; by default this machine alone.
        master_port: where to listen; by default a free port.
        model_metadata: name to ``(dtype, shape)`` of each weight; may come with :meth:`init`.
        vllm_tp_size: processes of one engine that take weights; compared with what the engine says
            (``Backend.num_copies``) at each push. By default whatever it says.
        device: see :class:`~torchrl_llm.weights.BroadcastWeights`.
        timeout_s: see there.

    Raises:
        ConfigError: a tensor-parallel size below 1.

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

    def __init__(
        self,
        master_address: str | None = None,
        master_port: int | None = None,
        model_metadata: Metadata | None = None,
        vllm_tp_size: int | None = None,
        *,
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
        super().__init__(backend_of(vllm_engine))
        self._metadata: Metadata | None = None
        self._broadcast: BroadcastSender | None = None
        self._batch_size: int | None = None

    def init(self, model_metadata: Metadata | None = None) -> None:
        """Say what will be pushed; names and shapes are then checked before anything is sent.

        Args:
            model_metadata: name to ``(dtype, shape)``; weights are cast to these types.
        """
        self._metadata = model_metadata

    def push_weights(
        self, policy_or_weights: Weights | Iterable[tuple[str, Tensor]] | None = None
    ) -> None:
        """Send the weights, and return when they are proven to be there.

        Args:
            policy_or_weights: the trained module, its state dict, a tensordict, or pairs of name
                and tensor.

        Raises:
            ConfigError: nothing to push, or other weights than :meth:`init` was told of.
            WeightUpdateError: they did not arrive, or not as they were sent.
        """
        known = (nn.Module, TensorDictBase, Mapping)
        if policy_or_weights is not None and not isinstance(policy_or_weights, known):
            policy_or_weights = dict(policy_or_weights)
        if policy_or_weights is not None:
            policy_or_weights = fitted(engine_weights(policy_or_weights), self._metadata)
        super().push_weights(policy_or_weights)

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
