"""TorchRL's names for a group of a trainer and vLLM's workers: vLLM's own, on CUDA devices.

A program that sends weights one by one through such a group does without our proofs; whole models
go by :class:`~torchrl_llm.weights.TransferWeights`. Never run on a GPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch

from torchrl_llm._imports import require
from torchrl_llm.errors import ConfigError
from torchrl_llm.weights.vllm_loading import load_into_vllm_model
from torchrl_llm.weights.weight_source import TensorSource


def stateless_init_process_group(
    master_address: str | None,
    master_port: int | str | None,
    rank: int,
    world_size: int,
    device: torch.device | str | int | None = None,
) -> Any:
    """A group of its own over NCCL, next to any other that the processes are in.

    Args:
        master_address: of rank 0; ``None`` for this machine.
        master_port: where rank 0 listens.
        rank: of this process.
        world_size: number of processes.
        device: CUDA device, by its index or name; by default the first one.

    Returns:
        vLLM's communicator, with ``broadcast(tensor, src)``.

    Raises:
        MissingExtraError: vLLM is not installed.
        ConfigError: no port, or a rank outside the world.
    """
    if master_port is None:
        raise ConfigError("master_port is needed: all members must know where rank 0 listens")
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank must be in [0, {world_size}), got {rank}")
    module = "vllm.distributed.weight_transfer.nccl_common"
    vllm = require(module, extra="vllm", feature="stateless_init_process_group")
    return vllm.stateless_init_process_group(
        master_address or "127.0.0.1", int(master_port), rank, world_size, device or 0
    )


@wraps(stateless_init_process_group, assigned=())
async def stateless_init_process_group_async(*args: Any, **kwargs: Any) -> Any:
    """:func:`stateless_init_process_group` without holding up the event loop."""
    return await asyncio.to_thread(stateless_init_process_group, *args, **kwargs)


class vLLMWorker:
    """What vLLM's worker is extended by to take single weights from a group of processes.

    Never built by itself: name it when an engine is built,
    ``worker_extension_cls="torchrl_llm.compat.vllm_group.vLLMWorker"``, and call its methods by
    ``collective_rpc``.
    """

    _torchrl_llm_group: Any = None
    _torchrl_llm_changes: int = 0

    def init_weight_update_group(
        self, master_address: str | None, master_port: int, rank_offset: int, world_size: int
    ) -> int:
        """Join the group of a trainer, which is rank 0.

        Args:
            master_address: of the trainer; ``None`` for this machine.
            master_port: where the trainer listens.
            rank_offset: rank of the first worker of this engine.
            world_size: processes of the group.

        Returns:
            The rank of this worker.
        """
        rank = rank_offset + self.rank
        self._torchrl_llm_group = stateless_init_process_group(
            master_address, master_port, rank, world_size, self.device
        )
        return rank

    def update_weight(self, name: str, dtype: str, shape: Sequence[int]) -> str:
        """Receive one weight by broadcast from rank 0 and load it.

        The engine's prefix cache is not dropped: do that after the last one.

        Args:
            name: that of the Hugging Face model.
            dtype: as ``"float32"``.
            shape: of the weight.

        Returns:
            The digest of what arrived.

        Raises:
            ConfigError: the worker is in no group.
            WeightUpdateError: the model has no such weight.
        """
        group = self._torchrl_llm_group
        if group is None:
            raise ConfigError("call init_weight_update_group before update_weight")
        buffer = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=self.device)
        group.broadcast(buffer, src=0)
        source = TensorSource({name: buffer}, kind="delta")
        source.recounted = True  # whoever sends one by one counts no versions
        receipt = load_into_vllm_model(self.model_runner.get_model(), source, version=0)
        self._torchrl_llm_changes += 1
        return receipt.digest

    def check_weights_changed(self) -> bool:
        """Whether a weight arrived since this was asked last."""
        changed, self._torchrl_llm_changes = self._torchrl_llm_changes > 0, 0
        return changed
