"""TorchRL's names for a process group of a trainer and vLLM's workers, on CUDA devices.

Weights sent one by one through such a group are not verified; use
:class:`~torchrl_llm.weights.TransferWeights` to send whole models. It is not yet tested on a GPU.
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
    """Make an NCCL group that is independent of other groups of the processes.

    Args:
        master_address: address of rank 0; ``None`` for this machine.
        master_port: port of rank 0.
        rank: rank of this process.
        world_size: number of processes.
        device: CUDA device, by its index or name; by default the first one.

    Returns:
        vLLM's communicator, with ``broadcast(tensor, src)``.

    Raises:
        MissingExtraError: vLLM is not installed.
        ConfigError: the port is missing, or the rank is out of range.
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
    """:func:`stateless_init_process_group` that does not block the event loop."""
    return await asyncio.to_thread(stateless_init_process_group, *args, **kwargs)


class vLLMWorker:
    """Extension of vLLM's worker that receives single weights from a process group.

    Do not instantiate it: pass its name when an engine is built,
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
            master_address: address of the trainer; ``None`` for this machine.
            master_port: port of the trainer.
            rank_offset: rank of the first worker of this engine.
            world_size: number of processes of the group.

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

        The engine's prefix cache is not dropped: drop it after the last weight.

        Args:
            name: name in the Hugging Face model.
            dtype: dtype, such as ``"float32"``.
            shape: shape of the weight.

        Returns:
            The digest of the received weight.

        Raises:
            ConfigError: the worker is not in a group.
            WeightUpdateError: the model has no such weight.
        """
        group = self._torchrl_llm_group
        if group is None:
            raise ConfigError("call init_weight_update_group before update_weight")
        buffer = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=self.device)
        group.broadcast(buffer, src=0)
        source = TensorSource({name: buffer}, kind="delta")
        source.recounted = True  # weights sent one by one have no versions
        receipt = load_into_vllm_model(self.model_runner.get_model(), source, version=0)
        self._torchrl_llm_changes += 1
        return receipt.digest

    def check_weights_changed(self) -> bool:
        """Whether a weight arrived since the last call."""
        changed, self._torchrl_llm_changes = self._torchrl_llm_changes > 0, 0
        return changed
