"""The configuration of the GRPO recipe: groups, defaults, and what cannot go together.

A key exists only where it has an effect, and no two keys mean the same. ``load_config`` turns what
Hydra composed (or any nested mapping) into :class:`GRPOConfig`; TorchRL's old names are refused
with the new one.
"""

from __future__ import annotations

from torchrl_llm.recipes.engine_groups import (
    AsyncTrainConfig,
    AsyncTrainModelConfig,
    AsyncWeightSyncConfig,
    EngineConfig,
    RayConfig,
    WeightSyncConfig,
)
from torchrl_llm.recipes.groups import (
    EnvConfig,
    InferenceModelConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RefModelConfig,
    TrainConfig,
    TrainModelConfig,
)
from torchrl_llm.recipes.grpo_config import (
    RENAMED,
    AsyncGRPOConfig,
    GRPOConfig,
    GRPOGroups,
    check_arguments,
    load_config,
)
from torchrl_llm.recipes.objective_groups import (
    AdvantageConfig,
    CorrectionConfig,
    FilterConfig,
    LossConfig,
    RewardComponentsConfig,
    RewardConfig,
)

__all__ = [
    "RENAMED",
    "AdvantageConfig",
    "AsyncGRPOConfig",
    "AsyncTrainConfig",
    "AsyncTrainModelConfig",
    "AsyncWeightSyncConfig",
    "CorrectionConfig",
    "EngineConfig",
    "EnvConfig",
    "FilterConfig",
    "GRPOConfig",
    "GRPOGroups",
    "InferenceModelConfig",
    "LoraConfig",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RayConfig",
    "RefModelConfig",
    "RewardComponentsConfig",
    "RewardConfig",
    "TrainConfig",
    "TrainModelConfig",
    "WeightSyncConfig",
    "check_arguments",
    "load_config",
]
