"""Weight updates: from the trainer's weights to the policy that samples."""

from __future__ import annotations

from torchrl_llm._imports import lazy

# Lazy, because modules use weights, and what sends weights uses modules.
_LAZY = {
    "torchrl_llm.compat.vllm_weight_sync": (
        "VLLMDoubleBufferSyncScheme VLLMDoubleBufferWeightReceiver VLLMDoubleBufferWeightSender "
        "VLLMWeightReceiver VLLMWeightSender VLLMWeightSyncScheme WeightSender"
    ),
    "torchrl_llm.weights.canary": "CanaryCheck",
    "torchrl_llm.weights.canary_rule": "CanaryJudge CanaryReport CanaryTarget",
    "torchrl_llm.weights.engine_updaters": "AdapterWeights DeltaWeights EngineWeights",
    "torchrl_llm.weights.fingerprint": "WeightLedger",
    "torchrl_llm.weights.gathered": "GatheredWeights RankZeroWeights",
    "torchrl_llm.weights.redis_weights": "RedisWeightReader RedisWeightSource RedisWeightWriter",
    "torchrl_llm.weights.shared_engine": "SharedEngineWeights",
    "torchrl_llm.weights.shared_files": "FileSource FileWeights FileWriter",
    "torchrl_llm.weights.sleeping_engine": "SleepingEngineWeights",
    "torchrl_llm.weights.transfer": "TransferSource TransferWeights VLLMTransfer",
    "torchrl_llm.weights.weight_names": "engine_weights get_model_metadata normalized_name",
    "torchrl_llm.weights.weight_updater": (
        "InProcessWeights JointWeights SharedWeights WeightUpdater named_weights"
    ),
}
__getattr__ = lazy(__name__, _LAZY)
