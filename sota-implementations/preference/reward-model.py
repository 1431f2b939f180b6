"""Reward model: a number for each answer, learned from pairs of a better and a worse answer.

    torchrl-llm train reward data=pairs.jsonl model.name=Qwen/Qwen2.5-0.5B-Instruct
    torchrl-llm train reward data=pairs.jsonl data.margin=stars loss.centering=0.01

A row has a prompt, a chosen answer and a rejected answer, as texts, messages, or whole
conversations. The model gets a head with one number, which is read at the end of a conversation
(Bradley-Terry). Some rows are held out, to measure the share of correctly ordered pairs and the
calibration of the scores. ``AutoModelForSequenceClassification`` can open a checkpoint (adapters
merged), and ``train grpo`` uses it as a reward with ``reward.components.model.name=FOLDER``.

Every key is in config/reward.yaml. Ctrl-C saves after the step; ``checkpoint.resume=auto`` resumes.
"""

from __future__ import annotations

from torchrl_llm.recipes import launch

if __name__ == "__main__":  # rejects wrong keys before imports that take seconds
    launch.begin(__file__, "reward")

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from reward_utils import (
    SHOWN,
    RewardTrainingConfig,
    load_config,
    load_data,
    make_evaluation,
    make_learner,
    make_scorer,
)

from torchrl_llm.data.preferences import preference_rows
from torchrl_llm.data.row_files import RowLoader
from torchrl_llm.objectives import RewardLoss
from torchrl_llm.recipes.builders import autocast, make_tokenizer
from torchrl_llm.recipes.parallel import begin, folder_of
from torchrl_llm.recipes.supervised import batch_metrics, batches
from torchrl_llm.trainers import TrainingRun, make_optimizer, make_scheduler, optimize


def train(config: RewardTrainingConfig, folder: str | Path) -> Iterator[TrainingRun]:
    """Train in a folder; yields the run before the first step and after each step."""
    ranks = begin(config)  # the processes started by torchrun, or this process
    ranks.share_at_least_one(config.train.batch_size, "train.batch_size", what="rows")
    tokenizer = make_tokenizer(config.model.name, 1)
    data = load_data(config, tokenizer)
    scorer = make_scorer(config, tokenizer)
    learner = make_learner(config, scorer)
    num_steps = config.train.num_steps(len(data.train))
    config.optimizer.check_warmup(num_steps)
    loss = RewardLoss(learner, centering=config.loss.centering)
    loader = RowLoader(
        data.train, seed=config.seed, batch_size=config.train.batch_size, collate_fn=list
    )
    loader.part = (ranks.rank, ranks.world)
    optimizer = make_optimizer(learner.model, **config.optimizer.arguments)
    scheduler = make_scheduler(optimizer, **config.optimizer.schedule, total_steps=num_steps)

    run = TrainingRun(
        folder_of(folder, ranks),
        max_steps=num_steps,
        model=learner.model,
        tokenizer=tokenizer,
        parts={"optimizer": optimizer, "scheduler": scheduler, "rows": loader},
        evaluate=make_evaluation(config, data.held_out, scorer),
        config=config.flat(),
        logging=config.logging,
        checkpoint=config.checkpoint,
        evaluation=config.eval,
        shown=SHOWN,
        num_rows=(len(data.train), len(data.held_out or ())),
        ranks=ranks,
    )
    run.say(data.train.show(0))
    yield run
    rows = batches(loader)
    for _ in run.steps():
        batch = next(rows)
        with run.timed("train"):
            ready = preference_rows(batch)
            updates = optimize(  # forward and backward in micro-batches, and a clipped step
                loss,
                [] if ready is None else [ready],
                optimizer,
                scheduler,
                max_norm=config.optimizer.clip_grad_norm,
                budget=config.train.micro_token_budget,
                layout=config.train.packing,
                context=partial(autocast, config),
                ranks=ranks,
            )
        answers = [answer for row in batch for answer in row.answers]
        run.record(updates | batch_metrics(answers, loader, ranks))
        yield run
    run.finish()


@hydra.main(version_base="1.3", config_path="config", config_name="reward")
@launch.tells_errors
def main(cfg: DictConfig) -> None:
    for _ in train(load_config(cfg), HydraConfig.get().runtime.output_dir):
        pass


if __name__ == "__main__":
    main()
