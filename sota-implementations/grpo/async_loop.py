"""Training loop over rows from other processes, for grpo-async and pipeline-rl.

If several ranks learn, the first rank has the collectors and the rows: it groups them, writes
advantages and keeps the ledger, like a single process. Each optimizer step is spread over all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from grpo_utils import algorithm_metrics, make_algorithm, make_buffer, make_curriculum, parts_of
from hydra.core.hydra_config import HydraConfig

from torchrl_llm.recipes.builders import (
    autocast,
    make_eval_env,
    make_evaluation,
    make_policy,
    make_watch,
    max_turns,
    minibatches,
    num_rows,
)
from torchrl_llm.recipes.parallel import begin, folder_of, make_learner
from torchrl_llm.recipes.sampling_engine import make_canary
from torchrl_llm.trainers import (
    BatchSource,
    TrainingRun,
    make_optimizer,
    make_scheduler,
    optimize,
    rollout_metrics,
)
from torchrl_llm.trainers.gathered_model import whole_weights
from torchrl_llm.trainers.ranks import scattered


def train_async(
    config: Any,
    collection: Callable[[Any], AbstractContextManager[Any]],
    start: Callable[[Any, Any], None],
) -> None:
    """Train on the workers' rows until the run ends.

    Args:
        config: configuration of the recipe.
        collection: makes the learner's end of the workers' channel from the configuration.
        start: ``start(collector, model)`` sends the workers their first weights (after a resume,
            the weights of the checkpoint).
    """
    ranks = begin(config)  # the processes started by torchrun, or this process
    policy = make_policy(config, with_values=config.loss.type == "ppo")
    learner = make_learner(config, policy, ranks)  # shards with fsdp2, else the policy itself
    algorithm = make_algorithm(config, policy, learner)
    buffer = make_buffer(config, algorithm)
    optimizer = make_optimizer(learner, **config.optimizer.arguments)
    scheduler = make_scheduler(
        optimizer, **config.optimizer.schedule, total_steps=config.num_updates
    )
    parts = {"optimizer": optimizer, "scheduler": scheduler, **parts_of(learner)}
    with collection(config) if ranks.is_main else nullcontext() as collector:
        if ranks.is_main:
            curriculum = make_curriculum(config, algorithm, collector.primer)
            source = BatchSource(
                collector,
                buffer,
                credit=algorithm.credit,
                num_rows=config.rows_per_batch,
                length=config.train.length_rule,
                truncated=config.filter.truncated,
                max_resamples=config.filter.resamples,
                staleness=config.train.staleness,
                lost=collector.take_lost,
                rows_per_trajectory=max_turns(config),
            )
            parts |= curriculum.parts
            if collector.primer is not None:
                parts["prompts"] = collector.primer
            parts |= {"collector": collector, "buffer": buffer, "source": source}
        eval_env = make_eval_env(config, policy.tokenizer)
        run = TrainingRun(
            folder_of(HydraConfig.get().runtime.output_dir, ranks),
            max_steps=config.train.max_steps,
            model=learner.model,
            tokenizer=policy.tokenizer,
            parts=parts,
            evaluate=make_evaluation(config, eval_env, policy),
            config=config.flat(),
            tools=policy.options.tools,
            num_rows=num_rows(config, None, eval_env),
            logging=config.logging,
            checkpoint=config.checkpoint,
            evaluation=config.eval,
            watch=make_watch(config, reads_reward=config.advantage.type != "constant"),
            ranks=ranks,
            ended=curriculum.ended if ranks.is_main else None,
        )
        if ranks.is_main:
            if config.weight_sync.verify and config.inference_model.backend == "vllm":
                collector.canary = make_canary(config, policy, "load")
            with whole_weights(policy):  # weights of the checkpoint
                start(collector, policy.model)
        for step in run.steps():
            metrics, rows = {}, None
            with run.timed("sample"), autocast(config):
                if ranks.is_main:
                    rows = source.fill()
            with run.timed("train"):
                updates = optimize(
                    algorithm.loss,
                    scattered(minibatches(buffer, config.train.epochs), ranks),
                    optimizer,
                    scheduler,
                    max_norm=config.optimizer.clip_grad_norm,
                    budget=config.train.micro_token_budget,
                    layout=config.train.packing,
                    context=partial(autocast, config),
                    ranks=ranks,
                )
            with run.timed("sync"):
                if ranks.is_main and step % config.train.weight_update_frequency == 0:
                    with whole_weights(policy):
                        collector.update_policy_weights_(policy.model)
            outcomes = None
            if ranks.is_main:
                metrics = rollout_metrics(rows) | updates | source.ledger.metrics()
                metrics |= source.overlong | source.policy_age | algorithm_metrics(algorithm)
                metrics |= curriculum.see(rows)  # results may change the order of the prompts
                outcomes = source.outcomes()
            run.record(metrics, rows, outcomes)
        run.finish()
