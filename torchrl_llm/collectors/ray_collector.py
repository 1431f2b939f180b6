"""The collector in a Ray actor; its name is here, the actor comes with the Ray support."""

from __future__ import annotations

from typing import Any

from torchrl_llm._imports import require
from torchrl_llm.errors import MissingExtraError

__all__ = ["RayLLMCollector"]


class RayLLMCollector:
    """An :class:`~torchrl_llm.collectors.LLMCollector` in an actor; needs the extra ``ray``.

    Args:
        env: as in :class:`~torchrl_llm.collectors.LLMCollector`.
        **kwargs: its other arguments, and ``ray_init_config``, ``remote_config``, ``sync_iter``,
            ``num_cpus``, ``num_gpus``.

    Raises:
        MissingExtraError: always, in this version.
    """

    def __init__(self, env: Any, **kwargs: Any) -> None:
        require("ray", extra="ray", feature="RayLLMCollector")
        raise MissingExtraError(
            "RayLLMCollector is not in this version of torchrl_llm yet. To collect beside training "
            "in one process, use LLMCollector(..., replay_buffer=buffer).start()"
        )
