from torchrl_llm.collectors.agent_shares import AgentShares as AgentShares
from torchrl_llm.collectors.channel_collector import ChannelCollector as ChannelCollector
from torchrl_llm.collectors.llm_collector import LLMCollector as LLMCollector
from torchrl_llm.collectors.ray_collector import RayLLMCollector as RayLLMCollector
from torchrl_llm.collectors.stored_collector import StoredCollector as StoredCollector
from torchrl_llm.compat.vllm_weight_sync import (
    vLLMUpdater as vLLMUpdater,
    vLLMUpdaterV2 as vLLMUpdaterV2,
)
