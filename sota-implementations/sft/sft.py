"""Supervised fine-tuning on your own conversations: a model learns the assistant's turns.

    torchrl-llm train sft data=chats.jsonl model.name=Qwen/Qwen2.5-0.5B-Instruct
    torchrl-llm train sft data=qa.csv data.prompt=question data.completion=answer reward=exact
    python sota-implementations/sft/sft.py data=chats.jsonl train_model.lora.enabled=true

The model learns the tokens of every assistant turn, including the token that ends the turn. The
first row is shown before training, with its trained tokens. Some rows are held out, to measure a
loss and, with ``reward=``, the accuracy of the model's answers.

Every key is in config/sft.yaml and config/common.yaml. Ctrl-C saves after the step;
``checkpoint.resume=auto`` resumes.
"""

from __future__ import annotations

from torchrl_llm.recipes import launch

if __name__ == "__main__":  # rejects wrong keys before imports that take seconds
    launch.begin(__file__, "sft")

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from sft_utils import (
    SHOWN,
    Preparation,
    SFTConfig,
    SFTGroups,
    load_config,
    load_data,
    make_evaluation,
    make_policy,
)

from torchrl_llm.data.demonstrations import Demonstrations
from torchrl_llm.data.row_files import RowLoader
from torchrl_llm.modules import TransformersWrapper
from torchrl_llm.recipes.builders import autocast, make_tokenizer
from torchrl_llm.recipes.parallel import begin, folder_of, make_learner
from torchrl_llm.recipes.supervised import batch_metrics, batches
from torchrl_llm.trainers import Ranks, TrainingRun, make_optimizer, make_scheduler, optimize
from torchrl_llm.trainers.run_results import EvalResult


def train(config: SFTConfig, folder: str | Path) -> Iterator[TrainingRun]:
    """Train in a folder; yields the run before the first step and after each step."""
    ranks = begin(config)  # the processes started by torchrun, or this process
    tokenizer = make_tokenizer(config.model.name, config.eval.max_tokens, key="eval.max_tokens")
    data = load_data(config, tokenizer)
    policy = make_policy(config, tokenizer)
    evaluate = make_evaluation(config, data.held_out, policy)
    folder, num_held_out = folder_of(folder, ranks), len(data.held_out or ())
    yield from fine_tune(config, folder, policy, data.train, evaluate, ranks, num_held_out)


def fine_tune(
    config: SFTGroups,
    folder: str | Path,
    policy: TransformersWrapper,
    demonstrations: Demonstrations,
    evaluate: Callable[[], EvalResult] | None,
    ranks: Ranks,
    num_held_out: int,
) -> Iterator[TrainingRun]:
    """Learn demonstrations, in a different order in each epoch; also used by ``imitate.py``."""
    ranks.share_at_least_one(config.train.batch_size, "train.batch_size", what="rows")
    num_steps = config.train.num_steps(len(demonstrations))
    config.optimizer.check_warmup(num_steps)
    learner = make_learner(config, policy, ranks)  # shards with fsdp2, else the policy itself
    loss = config.loss.build(learner, config.train.kl_to_ref_coeff)
    prepare = Preparation(config, policy)
    loader = RowLoader(
        demonstrations, seed=config.seed, batch_size=config.train.batch_size, collate_fn=list
    )
    loader.part = (ranks.rank, ranks.world)
    optimizer = make_optimizer(learner, **config.optimizer.arguments)
    scheduler = make_scheduler(optimizer, **config.optimizer.schedule, total_steps=num_steps)

    run = TrainingRun(
        folder,
        max_steps=num_steps,
        model=learner.model,
        tokenizer=policy.tokenizer,
        parts={"optimizer": optimizer, "scheduler": scheduler, "rows": loader},
        evaluate=evaluate,
        num_rows=(len(demonstrations), num_held_out),
        config=config.flat(),
        logging=config.logging,
        checkpoint=config.checkpoint,
        evaluation=config.eval,
        shown=SHOWN,
        ranks=ranks,
    )
    run.say(demonstrations.show(0))
    yield run
    rows = batches(loader)
    for _ in run.steps():
        batch = next(rows)
        with run.timed("train"):
            updates = optimize(  # forward and backward in micro-batches, and a clipped step
                loss,
                prepare(batch),
                optimizer,
                scheduler,
                max_norm=config.optimizer.clip_grad_norm,
                budget=config.train.micro_token_budget,
                layout=config.train.packing,
                context=partial(autocast, config),
                ranks=ranks,
            )
        run.record(updates | batch_metrics(batch, loader, ranks))
        yield run
    run.finish()


@hydra.main(version_base="1.3", config_path="config", config_name="sft")
@launch.tells_errors
def main(cfg: DictConfig) -> None:
    for _ in train(load_config(cfg), HydraConfig.get().runtime.output_dir):
        pass


if __name__ == "__main__":
    main()
