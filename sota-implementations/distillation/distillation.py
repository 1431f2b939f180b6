"""On-policy distillation in one process: the student answers, a teacher scores every token.

    python sota-implementations/distillation/distillation.py
    python sota-implementations/distillation/distillation.py teacher.by_domain=true
    python sota-implementations/distillation/distillation.py teacher.name=folder

The student is the model that ships with the package. The teacher is the same model after short
fine-tuning on correct answers, or a model in a folder. With ``teacher.by_domain=true`` there are
two teachers, one for each half of the problems, and the student learns both halves. Every key is in
config/distillation.yaml. Ctrl-C saves after the step; ``checkpoint.resume=auto`` resumes.
"""

from __future__ import annotations

from torchrl_llm.recipes import launch

if __name__ == "__main__":  # rejects wrong keys before imports that take seconds
    launch.begin(__file__, "distillation")

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import hydra
from distillation_utils import (
    DistillationConfig,
    accuracies,
    load_config,
    make_algorithm,
    make_buffer,
    make_problems,
    make_teachers,
    measure,
)
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from torchrl_llm.collectors import LLMCollector
from torchrl_llm.recipes.builders import (
    autocast,
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
    say,
    show,
)


def train(config: DistillationConfig, folder: str | Path) -> Iterator[TrainingRun]:
    """Train in a folder; yields the run before the first step and after each step."""
    ranks = begin(config)  # the processes started by torchrun, or this process
    own = of_rank(config, ranks)  # the share of the prompts of this process
    folder = folder_of(folder, ranks)

    policy = make_policy(config)
    if ranks.is_main:
        make_teachers(config, folder / "teachers", say)
    ranks.barrier()
    teachers = make_teachers(config, folder / "teachers", say)
    if ranks.is_main:
        say(accuracies("held-out greedy accuracy of the teachers", measure(config, teachers)))
    env, eval_env = make_problems(own, policy)
    learner = make_learner(config, policy, ranks)  # shards with fsdp2, else the policy itself
    collector = LLMCollector(
        share_prompts(env, ranks),
        policy=policy,
        yield_completed_trajectories=True,
        reset_at_each_iter=True,
    )
    algorithm = make_algorithm(config, learner, teachers)
    buffer = make_buffer(own, algorithm)
    source = BatchSource(
        collector,
        buffer,
        credit=algorithm.credit,
        num_rows=own.rows_per_batch,
        length=config.train.length_rule,
        rows_per_trajectory=max_turns(config),
        ranks=ranks,
    )
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
        watch=make_watch(config, reads_reward=config.loss.outcome_coeff > 0),
        ranks=ranks,
    )
    yield run
    for _ in run.steps():
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
                ranks=ranks,
            )
        with run.timed("sync"):
            collector.update_policy_weights_()
        metrics = rollout_metrics(rows) | updates | source.ledger.metrics() | source.overlong
        metrics |= ranks.sums(overlong_metrics(policy))
        run.record(metrics, rows, source.outcomes())
        yield run
    run.finish()
    if ranks.is_main:
        show(accuracies("held-out greedy accuracy", measure(config, {"student": policy})))


@hydra.main(version_base="1.3", config_path="config", config_name="distillation")
@launch.tells_errors
def main(cfg: DictConfig) -> None:
    for _ in train(load_config(cfg), HydraConfig.get().runtime.output_dir):
        pass


if __name__ == "__main__":
    main()
