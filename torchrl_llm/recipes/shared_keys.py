"""Shared keys of all recipes that train a model, and of the recipes that learn from samples.

A recipe is a subclass with its own groups; it redeclares a group that has different defaults or
more keys.
"""

from __future__ import annotations

from torchrl_llm._settings import Group, ensure
from torchrl_llm.recipes import groups
from torchrl_llm.recipes.agent_group import AgentConfig
from torchrl_llm.recipes.data_config import DataConfig, check_data
from torchrl_llm.recipes.objective_groups import RewardComponentsConfig
from torchrl_llm.trainers.run_config import (
    CheckpointConfig,
    EvalConfig,
    LoggingConfig,
    SampledEvalConfig,
)


class TrainedConfig(Group):
    """Settings of every recipe that trains a model.

    Attributes:
        seed: seeds weights of adapters, prompts and sampling.
    """

    rates = groups.REINFORCEMENT_RATES

    seed: int = 0
    model: groups.ModelNameConfig
    train: groups.ForwardConfig
    train_model: groups.TrainModelConfig
    optimizer: groups.OptimizerConfig
    logging: LoggingConfig
    checkpoint: CheckpointConfig
    eval: EvalConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        self.train_model.lora.settle(self.model)
        self.optimizer.settle(self.model, self.train_model, self.rates)
        bits = f"model.quantization={self.model.quantization}"
        ensure(
            self.model.quantization is None or self.train_model.lora.enabled,
            f"{bits} needs train_model.lora.enabled=true: rounded weights are not trained",
        )
        spread = self.train.parallel == "fsdp2"
        for is_set, what in (
            (self.model.quantization is not None, bits),
            (self.train_model.offload_activations, "train_model.offload_activations=true"),
            (self.optimizer.on_cpu, "optimizer.on_cpu=true"),
            (self.optimizer.name in ("Muon", "torch.optim:Muon"), "optimizer.name=Muon"),
        ):
            ensure(
                not (spread and is_set),
                f"{what} does not go with train.parallel=fsdp2, which spreads weights over "
                "processes; choose ddp or none",
            )


class SampledConfig(TrainedConfig):
    """Settings of every recipe whose model learns from its samples."""

    agent = AgentConfig.of()

    env: groups.EnvConfig
    data: DataConfig
    model: groups.ModelConfig
    train: groups.TrainConfig
    inference_model: groups.InferenceModelConfig
    reward: RewardComponentsConfig
    eval: SampledEvalConfig

    @property
    def rows_per_batch(self) -> int:
        """Responses collected in a step."""
        return self.train.prompts_per_batch * self.env.repeats

    @property
    def rows_per_policy(self) -> int:
        """Responses per step on which one policy is trained."""
        return self.rows_per_batch

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps of a policy on its rows of one step."""
        size = self.train.optim_batch_size or self.rows_per_policy
        return self.train.epochs * -(-self.rows_per_policy // size)

    @property
    def num_updates(self) -> int:
        """Optimizer steps of the whole run, for the schedule."""
        return self.train.max_steps * self.updates_per_batch

    def __post_init__(self) -> None:
        super().__post_init__()
        check_data(self)
        self.optimizer.check_warmup(self.num_updates)
