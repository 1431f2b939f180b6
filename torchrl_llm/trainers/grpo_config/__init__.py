"""The configuration of the GRPO recipe: groups, defaults, and what cannot go together.

A key exists only where it has an effect, and no two keys mean the same. ``load_config`` turns what
Hydra composed (or any nested mapping) into :class:`GRPOConfig`; TorchRL's old names are refused
with the new one.
"""

from __future__ import annotations

from torchrl_llm.trainers.grpo_config.engines import (
    AsyncTrainConfig,
    AsyncTrainModelConfig,
    AsyncWeightSyncConfig,
    EngineConfig,
    RayConfig,
    WeightSyncConfig,
)
from torchrl_llm.trainers.grpo_config.groups import (
    EnvConfig,
    InferenceModelConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RefModelConfig,
    TrainConfig,
    TrainModelConfig,
)
from torchrl_llm.trainers.grpo_config.objective import (
    AdvantageConfig,
    CorrectionConfig,
    FilterConfig,
    LossConfig,
    RewardComponentsConfig,
    RewardConfig,
)
from torchrl_llm.trainers.grpo_config.schema import (
    RENAMED,
    AsyncGRPOConfig,
    GRPOConfig,
    GRPOGroups,
    check_arguments,
    load_config,
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
