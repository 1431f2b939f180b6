"""Collectors: an environment and a policy, turned into batches or into rows of a buffer."""

from __future__ import annotations

from torchrl_llm.collectors.base import LLMCollector
from torchrl_llm.collectors.channel_collector import ChannelCollector
from torchrl_llm.collectors.ray_collector import RayLLMCollector
from torchrl_llm.collectors.weight_update import vLLMUpdater, vLLMUpdaterV2

__all__ = ["ChannelCollector", "LLMCollector", "RayLLMCollector", "vLLMUpdater", "vLLMUpdaterV2"]
