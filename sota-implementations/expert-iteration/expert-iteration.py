"""Expert iteration in one process: sample, keep the best answers, imitate them, repeat.

    python sota-implementations/expert-iteration/expert-iteration.py
    python sota-implementations/expert-iteration/expert-iteration.py loss.function=minor_sft

The answers to a prompt with the highest rewards are kept if they are better than the group's
median. Then the policy is fine-tuned on them (arXiv:1705.08439; for language models
arXiv:2312.06585). Every key is in config/expert-iteration.yaml. Ctrl-C saves after the step;
``checkpoint.resume=auto`` resumes.
"""

from __future__ import annotations

from torchrl_llm.recipes import launch

if __name__ == "__main__":  # rejects wrong keys before imports that take seconds
    launch.begin(__file__, "expert-iteration")

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import hydra
from ei_utils import EIConfig, load_config, make_buffer
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from torchrl_llm.collectors import LLMCollector
from torchrl_llm.recipes.builders import (
    autocast,
    make_envs,
    make_evaluation,
    make_policy,
    make_watch,
    max_turns,
    minibatches,
    num_rows,
    overlong_metrics,
)
from torchrl_llm.recipes.parallel import begin, folder_of, make_learner, of_rank, share_prompts
from torchrl_llm.trainers import (
    BatchSource,
    TrainingRun,
    make_optimizer,
    make_scheduler,
    optimize,
    rollout_metrics,
)


def train(config: EIConfig, folder: str | Path) -> Iterator[TrainingRun]:
    """Train in a folder; yields the run before the first step and after each step."""
    ranks = begin(config)  # the processes started by torchrun, or this process
    own = of_rank(config, ranks)  # the share of the prompts of this process
    folder = folder_of(folder, ranks)

    policy = make_policy(config)
    env, eval_env = make_envs(own, policy)
    learner = make_learner(config, policy, ranks)  # shards with fsdp2, else the policy itself
    collector = LLMCollector(
        share_prompts(env, ranks),
        policy=policy,
        yield_completed_trajectories=True,
        reset_at_each_iter=True,
    )
    buffer, selector = make_buffer(own, policy)
    source = BatchSource(
        collector,
        buffer,
        credit=selector,
        num_rows=own.rows_per_batch,
        length=config.train.length_rule,
        truncated=config.select.truncated,
        rows_per_trajectory=max_turns(config),
        ranks=ranks,
    )
    loss = config.loss.build(learner, config.train.kl_to_ref_coeff)
    optimizer = make_optimizer(learner, **config.optimizer.arguments)
    scheduler = make_scheduler(
        optimizer, **config.optimizer.schedule, total_steps=config.num_updates
    )

    run = TrainingRun(
        folder,
        max_steps=config.train.max_steps,
        model=learner.model,
        tokenizer=policy.tokenizer,
        parts={
            "optimizer": optimizer,
            "scheduler": scheduler,
            "collector": collector,
            "buffer": buffer,
            "source": source,
        },
        evaluate=make_evaluation(config, eval_env, policy),
        config=config.flat(),
        tools=policy.options.tools,
        num_rows=num_rows(config, env, eval_env),
        logging=config.logging,
        checkpoint=config.checkpoint,
        evaluation=config.eval,
        watch=make_watch(config),
        ranks=ranks,
    )
    yield run
    for _ in run.steps():
        with run.timed("sample"), autocast(config):
            rows = source.fill()
        with run.timed("train"):
            updates = optimize(
                loss,
                minibatches(buffer, config.train.epochs),
                optimizer,
                scheduler,
                max_norm=config.optimizer.clip_grad_norm,
                budget=config.train.micro_token_budget,
                layout=config.train.packing,
                context=partial(autocast, config),
                ranks=ranks,
            )
        with run.timed("sync"):
            collector.update_policy_weights_()
        metrics = rollout_metrics(rows) | updates | source.ledger.metrics() | source.overlong
        metrics |= ranks.sums(overlong_metrics(policy))
        metrics["train/selected"] = sum(ranks.gather(len(buffer))) / len(rows)  # rows of all ranks
        run.record(metrics, rows, source.outcomes())
        yield run
    run.finish()


@hydra.main(version_base="1.3", config_path="config", config_name="expert-iteration")
@launch.tells_errors
def main(cfg: DictConfig) -> None:
    for _ in train(load_config(cfg), HydraConfig.get().runtime.output_dir):
        pass


if __name__ == "__main__":
    main()
