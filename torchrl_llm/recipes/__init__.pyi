from torchrl_llm.recipes.agent_group import AgentConfig as AgentConfig
from torchrl_llm.recipes.curriculum_config import CurriculumConfig as CurriculumConfig
from torchrl_llm.recipes.data_config import DataConfig as DataConfig
from torchrl_llm.recipes.groups import (
    AsyncTrainConfig as AsyncTrainConfig,
    AsyncTrainModelConfig as AsyncTrainModelConfig,
    AsyncWeightSyncConfig as AsyncWeightSyncConfig,
    EngineConfig as EngineConfig,
    EnvConfig as EnvConfig,
    ForwardConfig as ForwardConfig,
    InferenceModelConfig as InferenceModelConfig,
    LoraConfig as LoraConfig,
    ModelConfig as ModelConfig,
    ModelNameConfig as ModelNameConfig,
    OptimizerConfig as OptimizerConfig,
    RayConfig as RayConfig,
    RefModelConfig as RefModelConfig,
    SleepingEngineConfig as SleepingEngineConfig,
    TrainConfig as TrainConfig,
    TrainModelConfig as TrainModelConfig,
    WeightSyncConfig as WeightSyncConfig,
)
from torchrl_llm.recipes.grpo_config import (
    AsyncGRPOConfig as AsyncGRPOConfig,
    GRPOConfig as GRPOConfig,
    GRPOGroups as GRPOGroups,
    load_config as load_config,
)
from torchrl_llm.recipes.objective_groups import (
    AdvantageConfig as AdvantageConfig,
    CorrectionConfig as CorrectionConfig,
    FilterConfig as FilterConfig,
    LossConfig as LossConfig,
    PreferenceLossConfig as PreferenceLossConfig,
    RewardComponentsConfig as RewardComponentsConfig,
    RewardConfig as RewardConfig,
    SFTLossConfig as SFTLossConfig,
)
from torchrl_llm.recipes.other_names import RENAMED as RENAMED
