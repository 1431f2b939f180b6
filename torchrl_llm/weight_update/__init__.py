"""Weight updates: from the trainer's weights to the policy that samples."""

from __future__ import annotations

from torchrl_llm.weight_update.adapter import AdapterWeights
from torchrl_llm.weight_update.base import WeightUpdater, named_weights
from torchrl_llm.weight_update.broadcast import BroadcastSender
from torchrl_llm.weight_update.broadcast_receiver import BroadcastReceiver
from torchrl_llm.weight_update.broadcast_source import BroadcastSource
from torchrl_llm.weight_update.canary import CanaryCheck
from torchrl_llm.weight_update.canary_rule import CanaryJudge, CanaryReport, CanaryTarget
from torchrl_llm.weight_update.delta import DeltaWeights
from torchrl_llm.weight_update.double_buffer import (
    DoubleBufferReceiver,
    DoubleBufferSource,
    DoubleBufferWriter,
)
from torchrl_llm.weight_update.elsewhere import (
    BroadcastWeights,
    DoubleBufferWeights,
    RankZeroWeights,
)
from torchrl_llm.weight_update.engine import EngineWeights
from torchrl_llm.weight_update.in_process import InProcessWeights, SharedWeights
from torchrl_llm.weight_update.ledger import WeightLedger
from torchrl_llm.weight_update.names import (
    engine_weights,
    get_model_metadata,
    normalized_name,
)
from torchrl_llm.weight_update.receive import WeightReceiver
from torchrl_llm.weight_update.redis import (
    RedisWeightReader,
    RedisWeightSource,
    RedisWeightWriter,
)
from torchrl_llm.weight_update.schemes import (
    VLLMDoubleBufferSyncScheme,
    VLLMDoubleBufferWeightReceiver,
    VLLMDoubleBufferWeightSender,
    VLLMWeightReceiver,
    VLLMWeightSender,
    VLLMWeightSyncScheme,
    WeightSender,
)
from torchrl_llm.weight_update.shared import SharedEngineWeights

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
