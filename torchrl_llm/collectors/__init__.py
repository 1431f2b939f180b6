"""Collectors: an environment and a policy, turned into batches or into rows of a buffer."""

from __future__ import annotations

from torchrl_llm._imports import lazy
from torchrl_llm.collectors.agent_shares import AgentShares
from torchrl_llm.collectors.channel_collector import ChannelCollector
from torchrl_llm.collectors.llm_collector import LLMCollector
from torchrl_llm.collectors.ray_collector import RayLLMCollector
from torchrl_llm.collectors.stored_collector import StoredCollector

__all__ = ["AgentShares", "ChannelCollector", "LLMCollector", "RayLLMCollector"]
__all__ += ["StoredCollector", "vLLMUpdater", "vLLMUpdaterV2"]

_LAZY = {"torchrl_llm.compat.vllm_weight_sync": "vLLMUpdater vLLMUpdaterV2"}
__getattr__ = lazy(__name__, _LAZY)
