"""Parts of the expert-iteration recipe: its configuration and its buffer.

Policy, environments and evaluation are built by :mod:`torchrl_llm.recipes.builders`, as those of
every recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from tensordict import LazyStackedTensorDict

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
from torchrl_llm.trainers.ranks import ALONE, Ranks
from torchrl_llm.trainers.run_config import LoggingConfig


class SelectConfig(Group, key="select"):
    """Which answers are imitated.

    Attributes:
        topk_size: most answers to a prompt; they must be above the median of their group too, so
            that a prompt which is solved, or never solved, teaches nothing.
        truncated: answers cut by ``inference_model.max_tokens`` or ``train.max_seq_len``: ``drop``
            leaves them out of their group, ``keep`` treats them as any other.
    """

    topk_size: int = 4
    truncated: Literal["keep", "drop"] = "drop"


class EIConfig(SampledConfig):
    """Everything that ``sota-implementations/expert-iteration`` can be told."""

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
        """Most optimizer steps of the whole run, for the schedule."""
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
