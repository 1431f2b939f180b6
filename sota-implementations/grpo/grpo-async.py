"""GRPO beside its collectors: while one batch is trained, the next ones are collected.

    python sota-implementations/grpo/grpo-async.py
    python sota-implementations/grpo/grpo-async.py train.max_policy_age=2 train.on_stale=drop
    python sota-implementations/grpo/grpo-async.py ray.address=auto ray.num_collectors=8

Collectors are actors of Ray (``pip install -e ".[ray]"``), each with environments and a sampler of
its own; new weights reach them through Ray's object store. Every key is in config/common.yaml,
config/grpo-async.yaml, and the files of config/loss, config/advantage and config/env. Ctrl-C saves
after the step; ``checkpoint.resume=auto`` goes on.
"""

from __future__ import annotations

import gc
import sys

import hydra
from grpo_utils import algorithm_metrics, make_algorithm, make_buffer, parts_of
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from torchrl_llm.trainers import (
    AsyncGRPOConfig,
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
from torchrl_llm.trainers.ray_collection import ray_collection
from torchrl_llm.trainers.recipe import (
    autocast,
    make_eval_env,
    make_evaluation,
    make_policy,
    minibatches,
    seed_everything,
    set_threads,
)


@hydra.main(version_base="1.3", config_path="config", config_name="grpo-async")
def main(cfg: DictConfig) -> None:
    config = load_config(cfg, AsyncGRPOConfig)
    set_threads(config)
    seed_everything(config.seed)

    policy = make_policy(config, with_values=config.loss.type == "ppo")
    algorithm = make_algorithm(config, policy)
    buffer = make_buffer(config, algorithm)
    loss_module = algorithm.loss
    optimizer = make_optimizer(policy.parameters(), **config.optimizer.arguments)
    scheduler = make_scheduler(
        optimizer, **config.optimizer.schedule, total_steps=config.num_updates
    )
    with ray_collection(config) as collector:
        source = BatchSource(
            collector,
            buffer,
            credit=algorithm.credit,
            num_rows=config.rows_per_batch,
            truncated=config.filter.truncated,
            max_resamples=config.filter.resamples,
            staleness=config.train.staleness,
            lost=collector.take_lost,
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
            evaluate=make_evaluation(config, make_eval_env(config, policy.tokenizer), policy),
            config=config.flat(),
            logging=config.logging,
            checkpoint=config.checkpoint,
            evaluation=config.eval,
        )
        collector.start(policy.model)
        # Half a million objects of the imports need not be searched for garbage at every step.
        gc.freeze()
        for step in run.steps():
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
            if step % config.train.weight_update_frequency == 0:
                collector.update_policy_weights_(policy.model)
            metrics = rollout_metrics(rows) | meter.metrics() | source.ledger.metrics()
            run.record(metrics | source.policy_age | algorithm_metrics(algorithm))
        run.finish()


if __name__ == "__main__":
    check_arguments(sys.argv[1:], AsyncGRPOConfig)
    main()
