"""GRPO in one process: collect a batch, train on it, repeat.

    python sota-implementations/grpo/grpo-sync.py
    python sota-implementations/grpo/grpo-sync.py env=gsm8k env.data_files=train.jsonl
    python sota-implementations/grpo/grpo-sync.py loss=gspo advantage=leave_one_out
    python sota-implementations/grpo/grpo-sync.py inference_model.backend=vllm

Every key is in config/common.yaml, config/grpo.yaml, and the files of config/loss,
config/advantage and config/env.
Ctrl-C saves after the step; ``checkpoint.resume=auto`` goes on.
"""

from __future__ import annotations

import gc
import sys

import hydra
from grpo_utils import algorithm_metrics, make_algorithm, make_buffer, parts_of
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from torchrl_llm.collectors import LLMCollector
from torchrl_llm.recipes.builders import (
    autocast,
    make_envs,
    make_evaluation,
    make_policy,
    max_turns,
    minibatches,
    overlong_metrics,
    seed_everything,
    set_threads,
)
from torchrl_llm.recipes.sampling_engine import canary_metrics, make_sampler
from torchrl_llm.trainers import (
    BatchSource,
    LossMeter,
    TrainingRun,
    check_arguments,
    clipped_step,
    load_config,
    make_optimizer,
    make_scheduler,
    micro_batches,
    rollout_metrics,
)


@hydra.main(version_base="1.3", config_path="config", config_name="grpo")
def main(cfg: DictConfig) -> None:
    config = load_config(cfg)
    set_threads(config)
    seed_everything(config.seed)

    policy = make_policy(config, with_values=config.loss.type == "ppo")
    env, eval_env = make_envs(config, policy)
    sampler, weight_updater = make_sampler(config, policy)
    collector = LLMCollector(
        env,
        policy=sampler,
        yield_completed_trajectories=True,
        reset_at_each_iter=True,
        weight_updater=weight_updater,
    )
    algorithm = make_algorithm(config, policy)
    buffer = make_buffer(config, algorithm)
    source = BatchSource(
        collector,
        buffer,
        credit=algorithm.credit,
        num_rows=config.rows_per_batch,
        truncated=config.filter.truncated,
        max_resamples=config.filter.resamples,
        rows_per_trajectory=max_turns(config),
    )
    loss_module = algorithm.loss
    optimizer = make_optimizer(policy.parameters(), **config.optimizer.arguments)
    scheduler = make_scheduler(
        optimizer, **config.optimizer.schedule, total_steps=config.num_updates
    )

    run = TrainingRun(
        HydraConfig.get().runtime.output_dir,
        max_steps=config.train.max_steps,
        model=policy.model,
        tokenizer=policy.tokenizer,
        parts={
            "optimizer": optimizer,
            "scheduler": scheduler,
            "collector": collector,
            "buffer": buffer,
            "source": source,
            **parts_of(policy),
        },
        evaluate=make_evaluation(config, eval_env, sampler),
        config=config.flat(),
        logging=config.logging,
        checkpoint=config.checkpoint,
        evaluation=config.eval,
    )
    if sampler is not policy:
        collector.update_policy_weights_()  # an engine has none yet, or not those of the checkpoint
    # Half a million objects of the imports need not be searched for garbage at every step.
    gc.freeze()
    for _ in run.steps():
        with autocast(config):
            rows = source.fill()
        meter = LossMeter()
        for minibatch in minibatches(buffer, config.train.epochs):
            normalizer = loss_module.normalizer(minibatch)
            for micro_batch in micro_batches(
                minibatch, budget=config.train.micro_token_budget, layout=config.train.packing
            ):
                with autocast(config):
                    output = loss_module(micro_batch, normalizer=normalizer)
                output.total_loss().backward()
                meter.add(output)
            norm = clipped_step(optimizer, scheduler, max_norm=config.optimizer.clip_grad_norm)
            meter.close(grad_norm=norm, lr=scheduler.get_last_lr()[0])
        collector.update_policy_weights_()
        metrics = rollout_metrics(rows) | meter.metrics() | source.ledger.metrics()
        metrics |= overlong_metrics(sampler) | algorithm_metrics(algorithm)
        run.record(metrics | canary_metrics(getattr(weight_updater, "canary", None)))
    run.finish()


if __name__ == "__main__":
    sys.argv[1:] = check_arguments(sys.argv[1:])
    main()
