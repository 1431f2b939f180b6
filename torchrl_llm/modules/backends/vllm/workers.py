"""Weights for the workers of an engine over several devices, each a process of this machine.

What arrives is written to a file once, every worker takes its part out of it, and all have to
answer with the same digest. Tensors in the arguments of vLLM's own calls would not survive.

Next: :mod:`torchrl_llm.modules.backends.vllm.receiver`, the workers' end.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchrl_llm._imports import require
from torchrl_llm.errors import BackendError, ConfigError, WeightUpdateError
from torchrl_llm.modules.backends.server import EXTENSION
from torchrl_llm.modules.backends.vllm.slots import is_spread
from torchrl_llm.weights.weight_source import (
    WeightReceipt,
    WeightSource,
    open_source,
)

_MEMORY = "/dev/shm"


def num_workers(llm: Any) -> int:
    """Processes that an engine's model is spread over; 1 where it is in one piece.

    Args:
        llm: a ``vllm.LLM``.
    """
    return int(llm.llm_engine.vllm_config.parallel_config.world_size)


def agree(model: nn.Module, error: Exception | None) -> None:
    """Let the workers of an engine go on together, or not at all; each has to call it.

    Args:
        model: this worker's model.
        error: why this worker cannot go on; ``None`` when it can.

    Raises:
        Exception: ``error``.
        WeightUpdateError: another worker cannot go on.
    """
    if is_spread(model):
        from vllm.distributed import get_world_group

        failed = torch.tensor(int(error is not None))
        torch.distributed.all_reduce(failed, group=get_world_group().cpu_group)
        if error is None and failed:
            error = WeightUpdateError(f"{int(failed)} other workers of this engine refused")
    if error is not None:
        raise error


def load_into_workers(llm: Any, source: WeightSource, version: int) -> WeightReceipt:
    """Take new weights into every worker of an engine, or into none.

    Args:
        llm: a ``vllm.LLM`` of this process that ``build_engine`` built.
        source: all weights or a delta, by Hugging Face names.
        version: their number.

    Returns:
        The receipt that all workers gave.

    Raises:
        ConfigError: the workers were built without the extension that takes weights.
        WeightUpdateError: the weights did not arrive, or a worker refused them; all keep the old
            ones.
        BackendError: a worker died, and the engine with it.
    """
    extension = llm.llm_engine.vllm_config.parallel_config.worker_extension_cls
    if not extension:
        raise ConfigError(
            "this engine's workers take no weights: build it by VLLMBackend(model, num_devices=...)"
            f", or with worker_extension_cls={EXTENSION!r}"
        )
    safetensors = require("safetensors.torch", extra="vllm", feature="load_into_workers")
    incoming = open_source(source, version=version)
    order = incoming.order
    # Copies where two names share memory, which the format does not know.
    tensors = {
        name: value.detach().cpu().contiguous().clone() for name, value in incoming.weights.items()
    }
    with tempfile.TemporaryDirectory(prefix="weights-", dir=_place(incoming.receipt)) as folder:
        order["path"] = str(Path(folder, "weights.safetensors"))
        try:
            safetensors.save_file(tensors, order["path"])
        except Exception as error:  # a full disk is one of the format's own
            raise WeightUpdateError(f"could not write {order['path']}: {error}") from error
        try:
            answers = llm.collective_rpc("torchrl_llm_load", args=(json.dumps(order),))
        except Exception as error:  # vLLM raises whatever ended a worker
            raise BackendError(
                f"a worker of this engine failed while it took version {version} of the weights, "
                f"and what the others hold is unknown: build the engine again ({error})"
            ) from error
    errors = [answer["error"] for answer in answers if "error" in answer]
    if errors:
        # Those that had nothing against the weights say only that another one had.
        told = [text for text in errors if "other workers of this engine" not in text]
        raise WeightUpdateError(
            f"the {len(answers)} workers of the engine keep the weights that they had: "
            f"{(told or errors)[0]}"
        )
    receipts = [WeightReceipt(**answer) for answer in answers]
    if len({receipt[:-1] for receipt in receipts}) != 1:
        raise WeightUpdateError(f"the workers of the engine took different weights: {receipts}")
    return receipts[0]._replace(seconds=incoming.receipt.seconds + receipts[0].seconds)


def _place(receipt: WeightReceipt) -> str | None:
    """Memory where there is room, else the folder for temporary files."""
    room = Path(_MEMORY).is_dir() and shutil.disk_usage(_MEMORY).free > 2 * receipt.num_bytes
    return _MEMORY if room else None
