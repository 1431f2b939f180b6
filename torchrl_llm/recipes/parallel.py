"""Parallel training of a recipe: start of the processes, their shares, and the learner.

:mod:`torchrl_llm.trainers.ranks` handles processes and weights, independent of configurations.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torchrl._utils import logger

from torchrl_llm.data.row_files import RowLoader
from torchrl_llm.envs import TaskEnv
from torchrl_llm.envs.ids import set_process_number
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules import TransformersBackend, TransformersWrapper
from torchrl_llm.modules.backends.token_scorer import CausalScorer
from torchrl_llm.recipes.builders import device_of, seed_everything, set_threads
from torchrl_llm.recipes.shared_keys import TrainedConfig
from torchrl_llm.trainers.gathered_model import GatheredModel
from torchrl_llm.trainers.ranks import Ranks, begin_ranks, check_equal, shard

Config = TypeVar("Config", bound=TrainedConfig)

# Distance between the seeds of two ranks, so that runs with neighboring seeds share none.
_SEED_STEP = 1_000_003


def begin(config: TrainedConfig) -> Ranks:
    """Join the processes that train together; sets threads and seeds, the same for all.

    Models that are built next are equal in all ranks. From :func:`make_learner` on, each process
    has its own random numbers.

    Args:
        config: configuration of the recipe.

    Raises:
        ConfigError: the process was not started as ``train.parallel`` requires, or ranks have
            different settings.
    """
    set_threads(config)
    name = config.train.device
    # Checking the device by name would use memory of the first GPU in every process.
    device = device_of(config) if name == "auto" else torch.device(name)
    ranks = begin_ranks(config.train.parallel, device=device, timeout_s=config.train.timeout_s)
    check_equal(config.flat(), ranks)
    if ranks.rank:
        set_process_number(ranks.rank)
        logger.setLevel(logging.ERROR)  # rank 0 reports it as well
    seed_everything(config.seed)
    return ranks


def of_rank(config: Config, ranks: Ranks) -> Config:
    """The configuration of one rank: its share of the prompts and of an optimizer step.

    Args:
        config: the recipe's, whose numbers count all ranks.
        ranks: the processes.

    Raises:
        ConfigError: the ranks cannot have equally many whole groups.
    """
    if ranks.world == 1:
        return config
    train = config.train
    prompts = ranks.share(train.prompts_per_batch, "train.prompts_per_batch", what="prompts")
    size = train.optim_batch_size
    if size is not None:
        size = ranks.share(size, "train.optim_batch_size", what="responses")
    return replace(config, train=replace(train, prompts_per_batch=prompts, optim_batch_size=size))


def make_learner(
    config: TrainedConfig, policy: TransformersWrapper, ranks: Ranks
) -> TransformersWrapper:
    """The policy whose weights are trained.

    It is ``policy`` itself, except with ``train.parallel=fsdp2``: then it is a copy whose weights
    are sharded over the ranks, and ``policy`` gathers them while it runs, so that each rank samples
    and scores at its own pace.

    Args:
        config: configuration with ``train`` and ``seed``.
        policy: the same in all ranks.
        ranks: the processes.
    """
    learner = policy
    if config.train.parallel == "fsdp2":
        model, head = twin_of(policy.model, policy.value_head)
        backend = TransformersBackend(
            model,
            tokenizer=policy.tokenizer,
            chunk_size=policy.backend.scorer.chunk_size,
            layout=policy.layout,
            value_head=head,
        )
        learner = policy.get_new_version(model=backend)
        spread(config, learner.backend.scorer, policy.backend.scorer)
    if ranks.rank:
        seed_everything(config.seed + ranks.rank * _SEED_STEP)
    return learner


def twin_of(*modules: Any) -> Any:
    """Copies of modules that share their weights, for :func:`spread`.

    Args:
        *modules: modules of one model; ``None`` is returned unchanged.
    """
    every = (each.parameters() for each in modules if each is not None)
    same = {id(parameter): parameter for part in every for parameter in part}
    return copy.deepcopy(modules, same)


def spread(config: TrainedConfig, learner: CausalScorer, scorer: CausalScorer) -> None:
    """Shard the learner's weights over the ranks; the scorer gathers them while it runs.

    Args:
        config: configuration with ``train``.
        learner: over a :func:`twin_of` the scorer's model.
        scorer: samples or scores.
    """
    shard(learner, learner.model, device=device_of(config))
    shards, train = list(learner.parameters()), config.train
    given = {"gathers": train.gathers, "timeout_s": train.timeout_s}
    GatheredModel(scorer, scorer.model, sources=shards, **given)


def share_prompts(env: TaskEnv, ranks: Ranks) -> TaskEnv:
    """The environment, changed to draw this rank's part of an order that all ranks share.

    Args:
        env: environment at the start of its data.
        ranks: the processes.

    Raises:
        ConfigError: its data comes from its own loader.
    """
    if ranks.world > 1:
        loader = env.primer.dataloader
        if not isinstance(loader, RowLoader):
            raise ConfigError(
                f"{type(env).__name__} reads its rows from a {type(loader).__name__} of its own, "
                "which cannot be shared by several ranks: give rows, or train.parallel=none"
            )
        if len(loader.rows) < ranks.world:
            raise ConfigError(f"{len(loader.rows)} rows are not enough for {ranks.world} ranks")
        loader.part = (ranks.rank, ranks.world)
        env.reset_dataloader()
    return env


def folder_of(folder: str | Path, ranks: Ranks) -> Path:
    """The folder of the run: rank 0's folder.

    Args:
        folder: folder of this rank; the time in its name may differ by a second.
        ranks: the processes.
    """
    return Path(folder) if ranks.world == 1 else ranks.from_main(Path(folder).absolute())
