"""Weight updates: from the trainer's weights to the policy that samples."""

from __future__ import annotations

from torchrl_llm._imports import lazy

__all__ = [
    "AdapterWeights",
    "BroadcastReceiver",
    "BroadcastSender",
    "BroadcastSource",
    "BroadcastWeights",
    "CanaryCheck",
    "CanaryJudge",
    "CanaryReport",
    "CanaryTarget",
    "DeltaWeights",
    "DoubleBufferReceiver",
    "DoubleBufferSource",
    "DoubleBufferWeights",
    "DoubleBufferWriter",
    "EngineWeights",
    "InProcessWeights",
    "RankZeroWeights",
    "RedisWeightReader",
    "RedisWeightSource",
    "RedisWeightWriter",
    "SharedEngineWeights",
    "SharedWeights",
    "VLLMDoubleBufferSyncScheme",
    "VLLMDoubleBufferWeightReceiver",
    "VLLMDoubleBufferWeightSender",
    "VLLMWeightReceiver",
    "VLLMWeightSender",
    "VLLMWeightSyncScheme",
    "WeightLedger",
    "WeightReceiver",
    "WeightSender",
    "WeightUpdater",
    "engine_weights",
    "get_model_metadata",
    "named_weights",
    "normalized_name",
]

# Lazy, because modules use weights, and what sends weights uses modules.
_LAZY = {
    "torchrl_llm.weights.adapter_weights": "AdapterWeights",
    "torchrl_llm.weights.broadcast": "BroadcastSender",
    "torchrl_llm.weights.broadcast_receiver": "BroadcastReceiver",
    "torchrl_llm.weights.broadcast_source": "BroadcastSource",
    "torchrl_llm.weights.canary": "CanaryCheck",
    "torchrl_llm.weights.canary_rule": "CanaryJudge CanaryReport CanaryTarget",
    "torchrl_llm.weights.delta_weights": "DeltaWeights",
    "torchrl_llm.weights.double_buffer": (
        "DoubleBufferReceiver DoubleBufferSource DoubleBufferWriter "
    ),
    "torchrl_llm.weights.in_process": "InProcessWeights SharedWeights",
    "torchrl_llm.weights.redis_weights": "RedisWeightReader RedisWeightSource RedisWeightWriter",
    "torchrl_llm.weights.remote_engines": "BroadcastWeights DoubleBufferWeights RankZeroWeights",
    "torchrl_llm.weights.shared_engine": "SharedEngineWeights",
    "torchrl_llm.weights.torchrl_schemes": (
        "VLLMDoubleBufferSyncScheme "
        "VLLMDoubleBufferWeightReceiver "
        "VLLMDoubleBufferWeightSender "
        "VLLMWeightReceiver "
        "VLLMWeightSender "
        "VLLMWeightSyncScheme "
        "WeightSender "
    ),
    "torchrl_llm.weights.weight_ledger": "WeightLedger",
    "torchrl_llm.weights.weight_names": "engine_weights get_model_metadata normalized_name",
    "torchrl_llm.weights.weight_receiver": "WeightReceiver",
    "torchrl_llm.weights.weight_updater": "WeightUpdater named_weights",
    "torchrl_llm.weights.whole_model": "EngineWeights",
}
__getattr__ = lazy(__name__, _LAZY)
