"""Check of a few groups that the model answers: whether there is anything to learn from."""

from __future__ import annotations

import time
from collections.abc import Iterator
from copy import deepcopy
from statistics import fmean
from typing import Any

import torch

from torchrl_llm.evaluation import evaluate
from torchrl_llm.recipes import builders
from torchrl_llm.recipes.doctor.finding import Finding
from torchrl_llm.recipes.doctor.subject import Subject

NUM_GROUPS = 8
_MOST_TURNS = 4
# Parameters times tokens that are sampled without being asked for: some seconds of two cores, and
# of a GPU.
_MOST_WORK = {"cpu": 1e10, "cuda": 1e14}
_MOST_REWARD_S = 10.0


def groups(subject: Subject) -> Iterator[Finding]:
    """Answers to a prompt differ in their reward, and end by themselves."""
    config = deepcopy(subject.config)
    config.train.prompts_per_batch = NUM_GROUPS
    config.eval.num_prompts = 0
    rows, turns = config.rows_per_batch, min(subject.max_turns, _MOST_TURNS)
    tokens = rows * turns * config.inference_model.max_tokens
    device = builders.device_of(config).type
    if not subject.samples and (
        subject.num_parameters * tokens > _MOST_WORK.get(device, _MOST_WORK["cuda"])
        or subject.reward_seconds * rows > _MOST_REWARD_S
    ):
        yield Finding(
            "ok",
            "model.name",
            f"{NUM_GROUPS} groups of {config.env.repeats} answers would take long here, and were "
            "not sampled; --sample does it all the same",
        )
        return
    builders.seed_everything(config.seed)
    policy = subject.policy
    env = builders.make_train_env(config, policy.tokenizer, seed=config.seed)
    outcomes: list[Any] = []
    begun = time.perf_counter()
    with torch.no_grad(), builders.autocast(config):
        evaluate(
            env,
            policy,
            num_prompts=rows,
            max_turns=turns,
            num_shown=0,
            on_answer=lambda row, outcome: outcomes.append(outcome),
        )
    seconds = (time.perf_counter() - begun) / len(outcomes)
    yield from _ends(config, outcomes)
    if _reads_reward(config):
        yield from _variance(subject, outcomes)
    yield _time(subject, seconds)


def _reads_reward(config: Any) -> bool:
    if hasattr(config, "advantage"):
        return config.advantage.type != "constant"
    return getattr(config.loss, "outcome_coeff", 1) > 0  # of distillation: 0 does not read it


def _ends(config: Any, outcomes: list[Any]) -> Iterator[Finding]:
    limit = config.inference_model.max_tokens
    cut = fmean(outcome.cut for outcome in outcomes)
    level = "warning" if cut > 0.5 else "ok"
    yield Finding(
        level,
        "inference_model.max_tokens",
        f"{cut:.0%} of {len(outcomes)} sampled answers were cut at {limit} tokens"
        + (
            ": a cut answer has no end to learn from. Raise it; if nothing ends however large it "
            "is, the model does not write the end-of-turn token of its chat template"
            if level == "warning"
            else ""
        ),
    )


def _variance(subject: Subject, outcomes: list[Any]) -> Iterator[Finding]:
    config = subject.config
    size = config.env.repeats if config.env.repeats > 1 else len(outcomes)
    parts = [outcomes[at : at + size] for at in range(0, len(outcomes), size)]
    rewards = [[each.reward for each in part if each.valid] for part in parts]
    flat = [max(part, default=0.0) == min(part, default=0.0) for part in rewards]
    right = fmean(outcome.success for outcome in outcomes)
    mean = fmean([reward for part in rewards for reward in part] or [0.0])
    what = f"{sum(flat)} of {len(flat)} sampled groups of {size} have equal rewards"
    about = f"mean {mean:.3g}, {right:.0%} right"
    if all(flat):
        why = "harder prompts are needed" if right == 1 else "the task is too hard for the model, "
        why += "" if right == 1 else "or the reward wants another form than it writes"
        yield Finding(
            "warning",
            "env.dataset" if config.reward.function is None else "reward.function",
            f"{what} ({about}): nothing is learned from comparing them; {why}. See some answers: "
            "torchrl-llm train ... train.max_steps=1",
        )
        return
    signal = subject.config.train.prompts_per_batch * (1 - fmean(flat))
    yield Finding("ok", "env.repeats", f"{what} ({about}); about {signal:.0f} of a step differ")


def _time(subject: Subject, seconds: float) -> Finding:
    rows, reward = subject.rows_per_step, subject.reward_seconds
    share = reward / max(seconds, reward, 1e-9)
    return Finding(
        "ok",
        "train.prompts_per_batch",
        f"sampling the {rows} answers of a step takes about {rows * seconds:.2g} s here, "
        f"{share:.0%} of it for the reward",
    )
