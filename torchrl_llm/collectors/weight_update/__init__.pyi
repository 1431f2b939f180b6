from torchrl_llm.compat.vllm_weight_sync import (
    vLLMUpdater as vLLMUpdater,
    vLLMUpdaterV2 as vLLMUpdaterV2,
)
