"""Single vLLM engines: built here or in an actor, and what their workers can be extended by."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from torchrl_llm.errors import ConfigError
from torchrl_llm.modules.backends.vllm.async_engine import AsyncVLLM
from torchrl_llm.modules.backends.vllm.build import build_engine
from torchrl_llm.weights.process_group import WeightGroup, stateless_init_process_group
from torchrl_llm.weights.weight_source import TensorSource


class vLLMWorker:
    """What vLLM's worker is extended by to take single weights from a group of processes.

    Never built by itself: name it when an engine is built,
    ``worker_extension_cls="torchrl_llm.modules.backends.vllm.worker_class.vLLMWorker"``, and call
    its methods by ``collective_rpc``. For whole models use
    :class:`~torchrl_llm.weights.BroadcastWeights`, which needs no extension, sends few large
    buffers and proves what arrived.
    """

    _torchrl_llm_group: WeightGroup | None = None
    _torchrl_llm_changes: int = 0

    def init_weight_update_group(
        self,
        master_address: str | None,
        master_port: int,
        rank_offset: int,
        world_size: int,
        timeout_s: float = 60.0,
    ) -> int:
        """Join the group of a trainer, which is rank 0.

        Args:
            master_address: of the trainer; ``None`` for this machine.
            master_port: where the trainer listens.
            rank_offset: rank of the first worker of this engine.
            world_size: processes of the group.
            timeout_s: most seconds to wait for the others.

        Returns:
            The rank of this worker.

        Raises:
            WorkerError: the others did not come in time.
        """
        rank = rank_offset + self.rank
        self._torchrl_llm_group = stateless_init_process_group(
            master_address, master_port, rank, world_size, self.device, timeout_s=timeout_s
        )
        return rank

    def update_weight(
        self, name: str, dtype: str, shape: Sequence[int], timeout_s: float = 60.0
    ) -> str:
        """Receive one weight by broadcast from rank 0 and load it.

        The engine's prefix cache is not dropped: do that after the last one.

        Args:
            name: that of the Hugging Face model.
            dtype: as ``"float32"``.
            shape: of the weight.
            timeout_s: most seconds to wait for it.

        Returns:
            The digest of what arrived.

        Raises:
            ConfigError: the worker is in no group.
            WorkerError: the trainer died or was late.
            WeightUpdateError: the model has no such weight.
        """
        from torchrl_llm.modules.backends.vllm.weight_loading import load_into_vllm_model

        group = self._torchrl_llm_group
        if group is None:
            raise ConfigError("call init_weight_update_group before update_weight")
        buffer = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=group.device)
        group.broadcast(buffer, timeout_s=timeout_s)
        source = TensorSource({name: buffer}, kind="delta")
        source.recounted = True  # whoever sends one by one counts no versions
        receipt = load_into_vllm_model(self.model_runner.get_model(), source, version=0)
        self._torchrl_llm_changes += 1
        return receipt.digest

    def check_weights_changed(self) -> bool:
        """Whether a weight arrived since this was asked last."""
        changed, self._torchrl_llm_changes = self._torchrl_llm_changes > 0, 0
        return changed


def make_vllm_worker(
    *,
    model_name: str | os.PathLike[str],
    devices: Sequence[int] | None = None,
    num_devices: int | None = None,
    make_ray_worker: bool = True,
    enforce_eager: bool = False,
    enable_fp32_output: bool = False,
    **options: Any,
) -> Any:
    """One engine: in a Ray actor, or in this process.

    Args:
        model_name: name or folder of a model.
        devices: CUDA devices of an engine in this process; Ray chooses those of its actors itself.
        num_devices: how many GPUs; by default one where there is any, or as many as ``devices``.
        make_ray_worker: whether it runs in an actor.
        enforce_eager: no CUDA graphs and no compilation.
        enable_fp32_output: compute logits in float32 whatever the dtype of the weights.
        **options: further ones of :class:`~torchrl_llm.modules.AsyncVLLM` for an actor, else of
            :func:`~torchrl_llm.modules.backends.vllm.build_engine`.

    Returns:
        An :class:`~torchrl_llm.modules.AsyncVLLM` of one replica, or a ``vllm.LLM``; a
        :class:`~torchrl_llm.modules.vLLMWrapper` takes both.

    Raises:
        MissingExtraError: vLLM or Ray is not installed.
        ConfigError: for devices where they have no effect, or that contradict ``num_devices``.
        ResourceError: Ray is not running or has too little, or the model does not fit.
    """
    if devices is not None and num_devices not in (None, len(devices)):
        raise ConfigError(f"num_devices={num_devices} contradicts devices={list(devices)}")
    if make_ray_worker:
        if devices is not None:
            raise ConfigError("Ray chooses the devices of its actors: give num_devices instead")
        return AsyncVLLM.from_pretrained(
            model_name,
            num_devices=num_devices,
            compile=not enforce_eager,
            enable_fp32_output=enable_fp32_output,
            **options,
        )
    if devices is not None:
        if torch.cuda.is_initialized():
            raise ConfigError(
                "devices= must be chosen before this process uses CUDA; set CUDA_VISIBLE_DEVICES"
            )
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    return build_engine(
        model_name,
        num_devices=num_devices or (1 if devices is None else len(devices)),
        enforce_eager=enforce_eager,
        enable_fp32_lm_head=enable_fp32_output,
        **options,
    )
