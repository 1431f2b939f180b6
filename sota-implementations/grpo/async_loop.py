"""Training loop over rows that other processes collect, for grpo-async and pipeline-rl."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from grpo_utils import algorithm_metrics, make_algorithm, make_buffer, parts_of
from hydra.core.hydra_config import HydraConfig

from torchrl_llm.recipes.builders import (
    autocast,
    make_eval_env,
    make_evaluation,
    make_policy,
    make_watch,
    max_turns,
    minibatches,
)
from torchrl_llm.recipes.sampling_engine import make_canary
from torchrl_llm.trainers import (
    BatchSource,
    TrainingRun,
    make_optimizer,
    make_scheduler,
    optimize,
    rollout_metrics,
)


def train_async(
    config: Any,
    collection: Callable[[Any], AbstractContextManager[Any]],
    begin: Callable[[Any, Any], None],
) -> None:
    """Train on what the workers deliver, until the run ends.

    Args:
        config: of the recipe.
        collection: makes, from the configuration, the learner's end of the workers' channel.
        begin: ``begin(collector, model)`` gives the workers their first weights; after a resume
            those of the checkpoint.
    """
    policy = make_policy(config, with_values=config.loss.type == "ppo")
    algorithm = make_algorithm(config, policy)
    buffer = make_buffer(config, algorithm)
    optimizer = make_optimizer(policy.parameters(), **config.optimizer.arguments)
    scheduler = make_scheduler(
        optimizer, **config.optimizer.schedule, total_steps=config.num_updates
    )
    with collection(config) as collector:
        source = BatchSource(
            collector,
            buffer,
            credit=algorithm.credit,
            num_rows=config.rows_per_batch,
            truncated=config.filter.truncated,
            max_resamples=config.filter.resamples,
            staleness=config.train.staleness,
            lost=collector.take_lost,
            rows_per_trajectory=max_turns(config),
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
            watch=make_watch(config, reads_reward=config.advantage.type != "constant"),
        )
        if config.weight_sync.verify and config.inference_model.backend == "vllm":
            collector.canary = make_canary(config, policy, "load")
        begin(collector, policy.model)
        for step in run.steps():
            with run.timed("sample"), autocast(config):
                rows = source.fill()
            with run.timed("train"):
                updates = optimize(
                    algorithm.loss,
                    minibatches(buffer, config.train.epochs),
                    optimizer,
                    scheduler,
                    max_norm=config.optimizer.clip_grad_norm,
                    budget=config.train.micro_token_budget,
                    layout=config.train.packing,
                    context=partial(autocast, config),
                )
            if step % config.train.weight_update_frequency == 0:
                with run.timed("sync"):
                    collector.update_policy_weights_(policy.model)
            metrics = rollout_metrics(rows) | updates | source.ledger.metrics()
            metrics |= source.policy_age | algorithm_metrics(algorithm)
            run.record(metrics, rows, source.outcomes())
        run.finish()
