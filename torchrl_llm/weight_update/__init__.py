"""Weight updates: from the trainer's weights to the policy that samples."""

from __future__ import annotations

from torchrl_llm.weight_update.base import WeightUpdater, named_weights
from torchrl_llm.weight_update.in_process import InProcessWeights, SharedWeights
from torchrl_llm.weight_update.names import (
    engine_weights,
    get_model_metadata,
    normalized_name,
)

__all__ = [
    "InProcessWeights",
    "SharedWeights",
    "WeightUpdater",
    "engine_weights",
    "get_model_metadata",
    "named_weights",
    "normalized_name",
]
