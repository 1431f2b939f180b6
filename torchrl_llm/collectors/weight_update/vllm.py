"""TorchRL's names for updaters of vLLM engines; this version has no vLLM engine to update."""

from __future__ import annotations

from typing import Any

from torchrl_llm._imports import require
from torchrl_llm.errors import MissingExtraError

__all__ = ["vLLMUpdater", "vLLMUpdaterV2"]


def _refuse(name: str) -> None:
    require("vllm", extra="vllm", feature=name)
    raise MissingExtraError(
        f"{name} updates vLLM engines, which this version of torchrl_llm does not run yet. With "
        "TransformersWrapper no updater is needed: weights are shared, or loaded by "
        "torchrl_llm.weight_update.InProcessWeights"
    )


class vLLMUpdater:
    """Weights to vLLM workers by collective broadcast; needs the extra ``vllm``.

    Args:
        master_address: address of the first process of the group.
        master_port: its port.
        model_metadata: name to ``(dtype, shape)`` of each weight.
        vllm_tp_size: tensor-parallel size of the engine.

    Raises:
        MissingExtraError: always, in this version.
    """

    def __init__(
        self,
        master_address: str | None = None,
        master_port: int | None = None,
        model_metadata: dict[str, Any] | None = None,
        vllm_tp_size: int | None = None,
    ) -> None:
        _refuse("vLLMUpdater")


class vLLMUpdaterV2:
    """Weights to an engine that updates itself; needs the extra ``vllm``.

    Args:
        vllm_engine: the engine.

    Raises:
        MissingExtraError: always, in this version.
    """

    def __init__(self, vllm_engine: Any) -> None:
        _refuse("vLLMUpdaterV2")
