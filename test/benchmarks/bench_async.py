"""Asynchronous against synchronous GRPO where a step of the environment takes its time.

    taskset -c 0,1 python test/benchmarks/bench_async.py [steps] [max_policy_age]

The embedded model, 16 prompts x 8 responses of exactly 16 tokens a step. First a few steps without
any wait: ``G`` seconds to sample a batch, ``T`` to train on it. Then every step of the environment
waits ``G + T`` (a tool, a judge, a compiler). Both sides make the same number of steps on the same
number of tokens; the clock of the asynchronous side runs from the first claim to the last update.
Wall-clock time, for that is what a wait costs: run it on a machine that does nothing else.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
RECIPE = Path(__file__).resolve().parents[2] / "sota-implementations" / "grpo"
sys.path.insert(0, str(RECIPE))

from grpo_utils import make_algorithm, make_buffer
from torchrl.envs import Transform

from torchrl_llm.collectors import LLMCollector
from torchrl_llm.recipes.builders import make_policy, make_train_env, minibatches, seed_everything
from torchrl_llm.recipes.ray_collection import (
    make_collecting_env,
    make_collecting_policy,
    ray_collection,
)
from torchrl_llm.trainers import (
    AsyncGRPOConfig,
    BatchSource,
    clipped_step,
    load_config,
    make_optimizer,
    make_scheduler,
    micro_batches,
)

TOKENS = 16
AIM = 1.7


class Wait(Transform):
    """Every step of the environment takes so many seconds, for all its rows at once."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def _step(self, tensordict, next_tensordict):
        time.sleep(self.seconds)
        return next_tensordict


def fixed_length(policy):
    """The same policy, whose responses all have the same number of tokens."""
    return policy.get_new_version(generate_kwargs={"max_new_tokens": TOKENS, "ignore_eos": True})


def waiting_env(seconds, config):
    return make_collecting_env(config).append_transform(Wait(seconds))


def fixed_policy(config):
    return fixed_length(make_collecting_policy(config))


class Trainer:
    """What both sides do with a batch."""

    def __init__(self, config: AsyncGRPOConfig) -> None:
        seed_everything(config.seed)
        self.config = config
        self.policy = make_policy(config)
        self.algorithm = make_algorithm(config, self.policy)
        self.buffer = make_buffer(config, self.algorithm)
        self.optimizer = make_optimizer(self.policy.parameters(), **config.optimizer.arguments)
        self.scheduler = make_scheduler(self.optimizer, **config.optimizer.schedule, total_steps=1)
        self.sampling_s = self.training_s = 0.0
        self.tokens = 0
        self.ages: list[float] = []

    def run(self, collector: Iterable, steps: int, **options) -> float:
        """Seconds of so many steps; what each part took is added up beside."""
        source = BatchSource(
            collector,
            self.buffer,
            credit=self.algorithm.credit,
            num_rows=self.config.rows_per_batch,
            **options,
        )
        loss_module, started = self.algorithm.loss, time.perf_counter()
        for _ in range(steps):
            begun = time.perf_counter()
            source.fill()
            sampled = time.perf_counter()
            for minibatch in minibatches(self.buffer, 1):
                normalizer = loss_module.normalizer(minibatch)
                for micro_batch in micro_batches(
                    minibatch, budget=self.config.train.micro_token_budget, layout="auto"
                ):
                    loss_module(micro_batch, normalizer=normalizer).total_loss().backward()
                clipped_step(self.optimizer, self.scheduler, max_norm=1.0)
            collector.update_policy_weights_(self.policy.model)
            self.sampling_s += sampled - begun
            self.training_s += time.perf_counter() - sampled
            self.tokens += source.ledger.totals["trained"]
            self.ages.append(source.policy_age.get("train/policy_age_max", 0))
        return time.perf_counter() - started


def synchronous(config: AsyncGRPOConfig, steps: int, wait_s: float) -> tuple[float, Trainer]:
    trainer = Trainer(config)
    env = make_train_env(config, trainer.policy.tokenizer, seed=config.seed)
    collector = LLMCollector(
        env.append_transform(Wait(wait_s)),
        policy=fixed_length(trainer.policy),
        dialog_turns_per_batch=config.rows_per_batch,
        yield_completed_trajectories=True,
    )
    return trainer.run(collector, steps), trainer


def asynchronous(config: AsyncGRPOConfig, steps: int, wait_s: float) -> tuple[float, Trainer]:
    trainer = Trainer(config)
    parts = {"make_env": partial(waiting_env, wait_s), "make_policy": fixed_policy}
    with ray_collection(config, **parts) as collector:
        started = time.perf_counter()
        collector.start(trainer.policy.model)
        trainer.run(collector, steps, staleness=config.train.staleness, lost=collector.take_lost)
        return time.perf_counter() - started, trainer


def main(steps: int = 30, age: int = 2) -> None:
    config = load_config(
        {
            "train": {
                "prompts_per_batch": 16,
                "max_policy_age": age,
                "num_threads": 1,
                "device": "cpu",
            },
            # Each collector samples whole batches: while one waits, the other one samples.
            "ray": {"num_collectors": 2, "prompts_per_claim": 16},
            "inference_model": {"max_tokens": TOKENS},
        },
        AsyncGRPOConfig,
    )
    synchronous(config, 3, 0.0)
    gc.freeze()  # as the recipes do
    _, bare = synchronous(config, 8, 0.0)
    sampling_s, training_s = bare.sampling_s / 8, bare.training_s / 8
    wait_s = sampling_s + training_s
    print(f"G {sampling_s:.3f} s, T {training_s:.3f} s; the environment waits {wait_s:.3f} s")
    sync_s, sync = synchronous(config, steps, wait_s)
    async_s, beside = asynchronous(config, steps, wait_s)
    for name, seconds, trainer in (("sync", sync_s, sync), ("async", async_s, beside)):
        print(
            f"{name:<6} {seconds:7.2f} s   {trainer.tokens} tokens trained   "
            f"oldest {max(trainer.ages):g}"
        )
    print(f"sync / async {sync_s / async_s:.2f} over {steps} steps   aim {AIM}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
