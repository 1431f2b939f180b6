"""Parts of the expert-iteration recipe: its configuration and its buffer.

Policy, environments and evaluation are built by :mod:`torchrl_llm.recipes.builders`, as those of
every recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from tensordict import LazyStackedTensorDict

from torchrl_llm.data import TopKRewardSelector
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.envs.transforms import RetrieveLogProb
from torchrl_llm.modules import TransformersWrapper
from torchrl_llm.recipes import (
    AgentConfig,
    EnvConfig,
    InferenceModelConfig,
    ModelConfig,
    OptimizerConfig,
    RefModelConfig,
    RewardComponentsConfig,
    SFTLossConfig,
    TrainConfig,
    TrainModelConfig,
)
from torchrl_llm.recipes.builders import make_reference, make_step_buffer
from torchrl_llm.recipes.data_config import DataConfig, check_data
from torchrl_llm.recipes.strict_config import dotted, ensure, from_mapping
from torchrl_llm.trainers.ranks import ALONE, Ranks
from torchrl_llm.trainers.run import CheckpointConfig, EvalConfig, LoggingConfig


@dataclass(kw_only=True)
class SelectConfig:
    """Which answers are imitated.

    Attributes:
        topk_size: most answers to a prompt; they must be above the median of their group too, so
            that a prompt which is solved, or never solved, teaches nothing.
        truncated: answers cut by ``inference_model.max_tokens`` or ``train.max_seq_len``: ``drop``
            leaves them out of their group, ``keep`` treats them as any other.
    """

    topk_size: int = 4
    truncated: Literal["keep", "drop"] = "drop"


@dataclass(kw_only=True)
class EIConfig:
    """Everything that ``sota-implementations/expert-iteration`` can be told.

    Attributes:
        seed: seeds weights of adapters, prompts and sampling.
    """

    agent: ClassVar[AgentConfig] = AgentConfig.of()
    env: EnvConfig = field(default_factory=EnvConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    train_model: TrainModelConfig = field(default_factory=TrainModelConfig)
    inference_model: InferenceModelConfig = field(default_factory=InferenceModelConfig)
    ref_model: RefModelConfig = field(default_factory=RefModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    reward: RewardComponentsConfig = field(default_factory=RewardComponentsConfig)
    select: SelectConfig = field(default_factory=SelectConfig)
    loss: SFTLossConfig = field(default_factory=SFTLossConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    seed: int = 0

    @property
    def rows_per_batch(self) -> int:
        """Responses collected in a step."""
        return self.train.prompts_per_batch * self.env.repeats

    @property
    def num_updates(self) -> int:
        """Most optimizer steps of the whole run, for the schedule."""
        kept = self.train.prompts_per_batch * self.select.topk_size
        updates = -(-kept // (self.train.optim_batch_size or kept))
        return self.train.max_steps * self.train.epochs * updates

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads the log-probs of a reference."""
        return self.loss.needs_reference(self.train.kl_to_ref_coeff)

    def flat(self) -> dict[str, Any]:
        """Dotted key to value, for the record of a run."""
        return dotted(asdict(self))

    def __post_init__(self) -> None:
        check_data(self)
        self.optimizer.settle(self.model, self.train_model)
        self.optimizer.check_warmup(self.num_updates)
        ensure(
            1 <= self.select.topk_size <= self.env.repeats,
            f"select.topk_size must be between 1 and env.repeats={self.env.repeats}, got "
            f"{self.select.topk_size}",
        )
        self.loss.check_reference(self.train.kl_to_ref_coeff, self.ref_model)


def load_config(values: Mapping[str, Any]) -> EIConfig:
    """Validate a composed configuration; an unknown key names the nearest valid one."""
    return from_mapping(EIConfig, values)


def make_buffer(
    config: EIConfig, policy: TransformersWrapper
) -> tuple[ReplayBuffer, TopKRewardSelector]:
    """A buffer of one step's best answers, and the transform in it that selects them."""
    selector = TopKRewardSelector(config.env.repeats, config.select.topk_size, verbose=False)
    buffer = make_step_buffer(config)
    # The transform appended last sees the rows first: selection, one row per trajectory, reference.
    if config.needs_reference:
        buffer.append_transform(RetrieveLogProb(make_reference(config, policy)))
    buffer.append_transform(JoinTurns())
    buffer.append_transform(selector)
    return buffer, selector


def selection_metrics(
    buffer: ReplayBuffer, rows: LazyStackedTensorDict, ranks: Ranks = ALONE
) -> dict[str, float]:
    """The share of a step's trajectories that were selected; rank 0 has the rows of all ranks."""
    return {"train/selected": sum(ranks.gather(len(buffer))) / len(rows)}
