"""Weight updates: from the trainer's weights to the policy that samples."""

from __future__ import annotations

from torchrl_llm.weight_update.adapter import AdapterWeights
from torchrl_llm.weight_update.base import WeightUpdater, named_weights
from torchrl_llm.weight_update.canary import CanaryCheck, CanaryReport
from torchrl_llm.weight_update.delta import DeltaWeights
from torchrl_llm.weight_update.engine import EngineWeights
from torchrl_llm.weight_update.in_process import InProcessWeights, SharedWeights
from torchrl_llm.weight_update.ledger import WeightLedger
from torchrl_llm.weight_update.names import (
    engine_weights,
    get_model_metadata,
    normalized_name,
)
from torchrl_llm.weight_update.shared import SharedEngineWeights

__all__ = [
    "AdapterWeights",
    "CanaryCheck",
    "CanaryReport",
    "DeltaWeights",
    "EngineWeights",
    "InProcessWeights",
    "SharedEngineWeights",
    "SharedWeights",
    "WeightLedger",
    "WeightUpdater",
    "engine_weights",
    "get_model_metadata",
    "named_weights",
    "normalized_name",
]
