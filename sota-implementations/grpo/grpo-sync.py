"""GRPO in one process: collect a batch, train on it, repeat.

A step collects rows, writes them with their advantages into the buffer, makes one update for each
mini-batch, sends the new weights to the sampler, and logs. An update
(:func:`torchrl_llm.trainers.optimize`) runs forward and backward on each micro-batch. The loss is
divided by the counts of the whole mini-batch, so that the gradients add up. Then the update takes
one clipped step of optimizer and schedule.

    python sota-implementations/grpo/grpo-sync.py
    python sota-implementations/grpo/grpo-sync.py env=gsm8k env.data_files=train.jsonl
    python sota-implementations/grpo/grpo-sync.py loss=gspo advantage=leave_one_out
    python sota-implementations/grpo/grpo-sync.py inference_model.backend=vllm

Every key is in config/common.yaml, config/grpo.yaml, and the files of config/loss,
config/advantage and config/env.
Ctrl-C saves after the step; ``checkpoint.resume=auto`` resumes.
"""

from __future__ import annotations

from torchrl_llm.recipes import launch

if __name__ == "__main__":  # rejects wrong keys before imports that take seconds
    launch.begin(__file__, "grpo", siblings={"grpo-async": "grpo-async.py"})

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import hydra
from grpo_utils import algorithm_metrics, make_algorithm, make_buffer, make_curriculum, parts_of
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from torchrl_llm.collectors import LLMCollector
from torchrl_llm.recipes import GRPOConfig, load_config
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
from torchrl_llm.recipes.sampling_engine import canary_metrics, make_sampler
from torchrl_llm.trainers import (
    BatchSource,
    TrainingRun,
    make_optimizer,
    make_scheduler,
    optimize,
    rollout_metrics,
)


def train(config: GRPOConfig, folder: str | Path) -> Iterator[TrainingRun]:
    """Train in a folder; yields the run before the first step and after each step."""
    ranks = begin(config)  # the processes started by torchrun, or this process
    own = of_rank(config, ranks)  # the share of the prompts of this process
    folder = folder_of(folder, ranks)

    policy = make_policy(config, with_values=config.loss.type == "ppo")
    env, eval_env = make_envs(own, policy, **config.curriculum.arguments)
    learner = make_learner(config, policy, ranks)  # shards with fsdp2, else the policy itself
    sampler, weight_updater = make_sampler(config, policy, learner)
    collector = LLMCollector(
        share_prompts(env, ranks),
        policy=sampler,
        yield_completed_trajectories=True,
        reset_at_each_iter=True,
        weight_updater=weight_updater,
    )
    algorithm = make_algorithm(config, policy, learner)
    if config.num_players > 1:
        algorithm.credit.whole_groups = True  # not every player acts; absent players add no rows
    buffer = make_buffer(own, algorithm)
    source = BatchSource(
        collector,
        buffer,
        credit=algorithm.credit,
        num_rows=own.rows_per_batch,
        length=config.train.length_rule,
        truncated=config.filter.truncated,
        max_resamples=config.filter.resamples,
        rows_per_trajectory=max_turns(config),
        ranks=ranks,
    )
    curriculum = make_curriculum(config, algorithm, env.primer, ranks)
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
            **curriculum.parts,
            "collector": collector,
            "buffer": buffer,
            "source": source,
            **parts_of(learner),
        },
        evaluate=make_evaluation(config, eval_env, sampler),
        config=config.flat(),
        tools=policy.options.tools,
        num_rows=num_rows(config, env, eval_env),
        logging=config.logging,
        checkpoint=config.checkpoint,
        evaluation=config.eval,
        watch=make_watch(config, reads_reward=config.advantage.type != "constant"),
        ranks=ranks,
        ended=curriculum.ended,
    )
    yield run
    if sampler is not policy:
        collector.publish()  # the sampler has no weights yet, or old weights after a resume
    for _ in run.steps():
        with run.timed("sample"), autocast(config):
            rows = source.fill()  # sample, reward, group, write advantages
        if config.inference_model.sleep:
            weight_updater.sleep()  # the sampler frees its memory for the trainer until the sync
        with run.timed("train"):
            updates = optimize(  # forward, backward and a clipped step for each mini-batch
                algorithm.loss,
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
            collector.update_policy_weights_()  # the sampler continues with new weights
        metrics = rollout_metrics(rows) | updates | source.ledger.metrics() | source.overlong
        metrics |= ranks.sums(overlong_metrics(sampler)) | algorithm_metrics(algorithm)
        metrics |= curriculum.see(rows)  # results may change the order of the prompts
        metrics |= canary_metrics(getattr(weight_updater, "canary", None))
        run.record(metrics, rows, source.outcomes())
        yield run
    run.finish()


@hydra.main(version_base="1.3", config_path="config", config_name="grpo")
@launch.tells_errors
def main(cfg: DictConfig) -> None:
    for _ in train(load_config(cfg), HydraConfig.get().runtime.output_dir):
        pass


if __name__ == "__main__":
    main()
