"""Parts of the expert-iteration recipe: its configuration and its buffer.

:mod:`torchrl_llm.recipes.builders` builds policy, environments and evaluation, as for every recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torchrl_llm._settings import Group, ensure, naming, own
from torchrl_llm.data import TopKRewardSelector
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.envs.transforms import RetrieveLogProb
from torchrl_llm.modules import TransformersWrapper
from torchrl_llm.recipes import (
    AgentConfig,
    EnvConfig,
    OptimizerConfig,
    RefModelConfig,
    SFTLossConfig,
    TrainConfig,
)
from torchrl_llm.recipes.builders import make_reference, make_step_buffer
from torchrl_llm.recipes.shared_keys import SampledConfig
from torchrl_llm.recipes.strict_config import from_mapping
from torchrl_llm.trainers.run_config import LoggingConfig


class SelectConfig(Group, key="select"):
    """Selection of the imitated answers.

    Attributes:
        topk_size: maximum number of answers per prompt; they must also be above the median of their
            group, so a prompt that is always or never solved adds no answers.
        truncated: treatment of answers cut by ``inference_model.max_tokens`` or
            ``train.max_seq_len``: ``drop`` removes them from their group; ``keep`` treats them like
            the others.
    """

    topk_size: int = 4
    truncated: Literal["keep", "drop"] = "drop"


class EIConfig(SampledConfig):
    """All settings of ``sota-implementations/expert-iteration``."""

    env: EnvConfig = own(repeats=16)
    train: TrainConfig = own(epochs=2)
    ref_model: RefModelConfig
    agent: AgentConfig
    optimizer: OptimizerConfig = own(weight_decay=0.01, scheduler="cosine")
    select: SelectConfig
    loss: SFTLossConfig
    logging: LoggingConfig = own(experiment_name="expert-iteration")

    @property
    def num_updates(self) -> int:
        """Upper bound on the optimizer steps of the run, for the schedule."""
        kept = self.train.prompts_per_batch * self.select.topk_size
        updates = -(-kept // (self.train.optim_batch_size or kept))
        return self.train.max_steps * self.train.epochs * updates

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads the log-probs of a reference."""
        return self.loss.needs_reference(self.train.kl_to_ref_coeff)

    def __post_init__(self) -> None:
        super().__post_init__()
        with naming(f"agent={self.agent.type}"):
            self.agent.build()
        ensure(
            1 <= self.select.topk_size <= self.env.repeats,
            f"select.topk_size must be between 1 and env.repeats={self.env.repeats}, got "
            f"{self.select.topk_size}",
        )
        self.loss.check_reference(self.train.kl_to_ref_coeff, self.ref_model)


def load_config(values: Mapping[str, Any]) -> EIConfig:
    """Validate a composed configuration; errors for unknown keys name the nearest valid key."""
    return from_mapping(EIConfig, values)


def make_buffer(
    config: EIConfig, policy: TransformersWrapper
) -> tuple[ReplayBuffer, TopKRewardSelector]:
    """Make a buffer for one step's best answers, and its transform that selects them."""
    selector = TopKRewardSelector(config.env.repeats, config.select.topk_size, verbose=False)
    buffer = make_step_buffer(config)
    # The last transform runs first: selection, one row per trajectory, reference.
    if config.needs_reference:
        buffer.append_transform(RetrieveLogProb(make_reference(config, policy)))
    buffer.append_transform(JoinTurns())
    buffer.append_transform(selector)
    return buffer, selector
