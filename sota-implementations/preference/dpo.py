"""Preference optimization: a model learns which of two answers is the better one.

    torchrl-llm train dpo data=pairs.jsonl model.name=Qwen/Qwen2.5-0.5B-Instruct
    torchrl-llm train dpo data=pairs.jsonl loss=simpo train_model.lora.enabled=true
    torchrl-llm train dpo data=thumbs.csv loss=kto data.completion=answer data.label=liked

A row has a prompt, a chosen answer and a rejected answer, as texts, messages, or whole
conversations. With ``loss=kto`` it may have one answer with a label. The first row is shown before
training. Some rows are held out, to measure how often the model prefers the chosen answer. The
log-probs of the reference are computed once and kept with the checkpoint.

Every key is in config/dpo.yaml and config/loss. Ctrl-C saves after the step;
``checkpoint.resume=auto`` resumes.
"""

from __future__ import annotations

from torchrl_llm.recipes import launch

if __name__ == "__main__":  # rejects wrong keys before imports that take seconds
    launch.begin(__file__, "dpo")

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from preference_utils import (
    SHOWN,
    PreferenceConfig,
    Preparation,
    load_config,
    load_data,
    make_evaluation,
)

from torchrl_llm.data.row_files import RowLoader
from torchrl_llm.recipes.builders import autocast, load_policy, make_tokenizer
from torchrl_llm.recipes.parallel import begin, folder_of, make_learner
from torchrl_llm.recipes.supervised import batch_metrics, batches
from torchrl_llm.trainers import TrainingRun, make_optimizer, make_scheduler, optimize


def train(config: PreferenceConfig, folder: str | Path) -> Iterator[TrainingRun]:
    """Train in a folder; yields the run before the first step and after each step."""
    ranks = begin(config)  # the processes started by torchrun, or this process
    ranks.share_at_least_one(config.train.batch_size, "train.batch_size", what="rows")
    tokenizer = make_tokenizer(config.model.name, 1)
    data = load_data(config, tokenizer)
    policy = load_policy(config, tokenizer, **config.model.template)
    num_steps = config.train.num_steps(len(data.train))
    config.optimizer.check_warmup(num_steps)
    learner = make_learner(config, policy, ranks)  # shards with fsdp2, else the policy itself
    loss = config.loss.build(learner)
    prepare = Preparation.of(config, policy, data.train, ranks)
    loader = RowLoader(
        data.train, seed=config.seed, batch_size=config.train.batch_size, collate_fn=list
    )
    loader.part = (ranks.rank, ranks.world)
    optimizer = make_optimizer(learner, **config.optimizer.arguments)
    scheduler = make_scheduler(optimizer, **config.optimizer.schedule, total_steps=num_steps)
    parts = {"optimizer": optimizer, "scheduler": scheduler, "rows": loader}
    if prepare.references is not None:
        parts["references"] = prepare.references

    run = TrainingRun(
        folder_of(folder, ranks),
        max_steps=num_steps,
        model=learner.model,
        tokenizer=policy.tokenizer,
        parts=parts,
        evaluate=make_evaluation(config, data.held_out, policy, prepare),
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
            ready = prepare(batch)
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


@hydra.main(version_base="1.3", config_path="config", config_name="dpo")
@launch.tells_errors
def main(cfg: DictConfig) -> None:
    for _ in train(load_config(cfg), HydraConfig.get().runtime.output_dir):
        pass


if __name__ == "__main__":
    main()
