"""Configuration of the GRPO recipes: groups, defaults, and what cannot go together.

A key exists only where it has an effect, and no two keys mean the same. ``load_config`` turns what
Hydra composed (or any nested mapping) into :class:`GRPOConfig`; TorchRL's old names are refused
with the new one.
"""

from __future__ import annotations

from torchrl_llm._imports import lazy

_GROUPS = (
    "AsyncTrainConfig AsyncTrainModelConfig AsyncWeightSyncConfig EngineConfig EnvConfig "
    "ForwardConfig InferenceModelConfig LoraConfig ModelConfig ModelNameConfig OptimizerConfig "
    "RayConfig RefModelConfig SleepingEngineConfig TrainConfig TrainModelConfig WeightSyncConfig"
)
_OBJECTIVE = (
    "AdvantageConfig CorrectionConfig FilterConfig LossConfig RewardComponentsConfig RewardConfig "
    "SFTLossConfig"
)
_WHOLE = "AsyncGRPOConfig GRPOConfig GRPOGroups check_arguments load_config"

__all__ = f"{_GROUPS} {_OBJECTIVE} AgentConfig CurriculumConfig DataConfig {_WHOLE} RENAMED".split()
__getattr__ = lazy(
    __name__,
    {
        "torchrl_llm.recipes.agent_group": "AgentConfig",
        "torchrl_llm.recipes.groups": _GROUPS,
        "torchrl_llm.recipes.objective_groups": _OBJECTIVE,
        "torchrl_llm.recipes.curriculum_config": "CurriculumConfig",
        "torchrl_llm.recipes.data_config": "DataConfig",
        "torchrl_llm.recipes.grpo_config": _WHOLE,
        "torchrl_llm.recipes.other_names": "RENAMED",
    },
)
