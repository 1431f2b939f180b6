"""What a recipe does where several processes train together: its beginning, shares, what learns.

:mod:`torchrl_llm.trainers.ranks` knows processes and weights, and no configuration.
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

# Between the seeds of two ranks, so that those of runs with neighbouring seeds differ.
_SEED_STEP = 1_000_003


def begin(config: TrainedConfig) -> Ranks:
    """Join the processes that train together; threads and seeds of each, the same for all.

    Models that are built next are equal in all ranks. From :func:`make_learner` on each draws
    random numbers of its own.

    Args:
        config: the recipe's.

    Raises:
        ConfigError: the process was started in another way than ``train.parallel`` says, or ranks
            were told different things.
    """
    set_threads(config)
    name = config.train.device
    # Looking for the device by name would take memory of the first GPU in every process.
    device = device_of(config) if name == "auto" else torch.device(name)
    ranks = begin_ranks(config.train.parallel, device=device, timeout_s=config.train.timeout_s)
    check_equal(config.flat(), ranks)
    if ranks.rank:
        set_process_number(ranks.rank)
        logger.setLevel(logging.ERROR)  # what rank 0 says too
    seed_everything(config.seed)
    return ranks


def of_rank(config: Config, ranks: Ranks) -> Config:
    """The configuration of one rank: its own share of the prompts, and of an optimizer step.

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

    It is ``policy`` itself, except with ``train.parallel=fsdp2``: then it is a twin whose weights
    are spread over the ranks, and ``policy`` gathers them while it runs, so that each rank samples
    and scores with it at a pace of its own.

    Args:
        config: the recipe's ``train`` and ``seed``.
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
    """Copies of modules over the same weights, for :func:`spread`.

    Args:
        *modules: of one model; ``None`` is left as it is.
    """
    every = (each.parameters() for each in modules if each is not None)
    same = {id(parameter): parameter for part in every for parameter in part}
    return copy.deepcopy(modules, same)


def spread(config: TrainedConfig, learner: CausalScorer, scorer: CausalScorer) -> None:
    """Spread the weights of what learns over the ranks; its twin gathers them while it runs.

    Args:
        config: the recipe's ``train``.
        learner: over a :func:`twin_of` the other's model.
        scorer: samples or scores.
    """
    shard(learner, learner.model, device=device_of(config))
    shards, train = list(learner.parameters()), config.train
    given = {"gathers": train.gathers, "timeout_s": train.timeout_s}
    GatheredModel(scorer, scorer.model, sources=shards, **given)


def share_prompts(env: TaskEnv, ranks: Ranks) -> TaskEnv:
    """The environment, which draws every so manieth prompt of an order that all ranks share.

    Args:
        env: at the start of its data.
        ranks: the processes.

    Raises:
        ConfigError: its data comes from a loader of its own.
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
    """The folder of the run: that of rank 0.

    Args:
        folder: of this rank; its name may hold another second.
        ranks: the processes.
    """
    return Path(folder) if ranks.world == 1 else ranks.from_main(Path(folder).absolute())
