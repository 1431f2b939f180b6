"""Checks of the reward: on known correct and wrong answers, and on sampled answers.

The environment of the run scores the answers, with its tools and all components of its reward. A
call that hangs is abandoned.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from copy import deepcopy
from math import inf, nan
from statistics import fmean
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.failures import Failure
from torchrl_llm.envs.world import WorldEnv
from torchrl_llm.evaluation import evaluate
from torchrl_llm.evaluation.evaluate import Outcome
from torchrl_llm.recipes import builders
from torchrl_llm.recipes.doctor.finding import Finding, error, ok, warning
from torchrl_llm.recipes.doctor.subject import Subject, Task
from torchrl_llm.rewards.reward_parser import written_failures
from torchrl_llm.rewards.reward_runner import run_rows

LONGEST_S = 5.0
"""Two limits in seconds: a reward call is abandoned; no further call starts."""

_NUM_ROWS = 6
_SLOW_STEP_S = 30.0
# Forms of a row's own answer that a reward may accept as correct.
_OWN = {
    "as it is": "{}",
    "in <answer> tags": "<think>.</think><answer>{}</answer>",
    "behind ####": "#### {}",
    "in \\boxed{}": "$\\boxed{{{}}}$",
}
_WRONG = {"empty": "", "garbage": "kqx zzz 0000"}
_STOP = torch.tensor([FinishReason.STOP], dtype=torch.int8)
_HINT = "A part of the reward (reward.components.NAME) may have timeout, run and num_workers"

_NUM_GROUPS = 8
_MOST_TURNS = 4
# Largest product of parameters and tokens that is sampled without ``--sample``: it takes seconds.
_MOST_WORK = {"cpu": 1e10, "cuda": 1e14}
_MOST_REWARD_S = 5.0


class _Scored(NamedTuple):
    kind: str  # of the answer
    reward: float
    failure: Failure  # empty after success
    seconds: float


def known_answers(subject: Subject) -> Iterator[Finding]:
    """Check that the reward distinguishes correct from wrong answers, never fails, and is fast."""
    for task in subject.tasks:
        if isinstance(task.env, WorldEnv):  # the world returns the reward of actions
            continue
        scored = list(_scored(subject, task))
        key, failed = task.reward_key, [each for each in scored if each.failure.kind]
        fine = [each for each in scored if not each.failure.kind]
        if failed and failed[-1].seconds >= LONGEST_S:
            subject.reward_seconds = inf
            what = f"{task.name}: a reward took more than {LONGEST_S:g} s and was not waited for"
            yield error(key, f"{what}; a step has {subject.rows_per_step} answers. {_HINT}")
        elif failed and not fine and subject.has_program:
            yield ok(key, f"{task.name}: the program has to return the reward")
        elif failed:
            yield (warning if fine else error)(
                key,
                f"{task.name}: the reward fails for {len(failed)} of {len(scored)} answers, first "
                f"for an answer {failed[0].kind}:\n{failed[0].failure}",
            )
        if fine:
            yield from _values(task, fine)
            yield from _speed(subject, task, fmean(each.seconds for each in fine))


def _values(task: Task, scored: list[_Scored]) -> Iterator[Finding]:
    means = {
        kind: fmean(each.reward for each in scored if each.kind == kind)
        for kind in dict.fromkeys(each.kind for each in scored)
    }
    own = max((mean for kind, mean in means.items() if kind in _OWN), default=None)
    values = {each.reward for each in scored}
    shown = f"{task.name}: mean rewards of {len(scored)} answers are " + ", ".join(
        f"{mean:.3g} {kind}" for kind, mean in means.items()
    )
    shipped = type(task.env).__module__.startswith("torchrl_llm.")
    if own is None or (own == 0 and shipped and task.reward_key in ("env.dataset", "tasks")):
        return  # the task has no known correct answers
    if values == {0.0}:
        yield warning(
            task.reward_key,
            f"{shown}: always 0, for the data's own answers too. Unless it wants another form, "
            "look at how it reads a response, and which column it compares with (data.answer)",
        )
    elif len(values) == 1:
        yield error(task.reward_key, f"{shown}: right, wrong and empty answers earn the same")
    elif own < max(mean for kind, mean in means.items() if kind not in _OWN):
        yield warning(task.reward_key, f"{shown}: wrong answers earn more than right ones")
    else:
        yield ok(task.reward_key, shown)


def _speed(subject: Subject, task: Task, seconds: float) -> Iterator[Finding]:
    subject.reward_seconds = max(subject.reward_seconds, seconds)
    rows = subject.rows_per_step
    what = f"{task.name}: a reward takes {1000 * seconds:.3g} ms, the {rows} of a step "
    what += f"{rows * seconds:.3g} s one after the other"
    slow = rows * seconds > _SLOW_STEP_S
    yield warning(task.reward_key, f"{what}. {_HINT}") if slow else ok(task.reward_key, what)


def _scored(subject: Subject, task: Task) -> Iterator[_Scored]:
    """Answers of the first rows and their rewards; stops if they take too long."""
    task.env.reset_dataloader()
    before, spent = None, 0.0
    for _ in range(min(_NUM_ROWS, task.env.primer.num_rows or _NUM_ROWS)):
        start = task.env.reset()
        answer = start["answer"][0] if "answer" in start.keys() else None
        if answer is not None and not isinstance(answer, str):
            answer = json.dumps(answer, default=str)
        texts = dict(_WRONG)
        if answer:
            texts = {kind: form.format(answer) for kind, form in _OWN.items()} | texts
        if before not in (None, "", answer):
            texts["of another row"] = before
        for kind, text in texts.items():
            ids = subject.tokenizer.encode(text, add_special_tokens=False)
            ids += subject.formatter.stop_token_ids[:1]
            scored = _score(task.env, start.copy(), text, ids, kind)
            yield scored
            spent += scored.seconds
            if spent > LONGEST_S:
                return
        before = answer


def _score(env: Any, td: Any, text: str, ids: list[int], kind: str) -> _Scored:
    chat = td["history"].prompt.chats[0] + [{"role": "assistant", "content": text}]
    td["history"].full = type(td["history"].prompt).of([chat])
    tokens = {"response": torch.tensor([ids]), "finish_reason": _STOP}
    td["tokens"] = TensorDict(tokens, batch_size=[1])
    (outcome,) = run_rows(env.step, [(td,)], num_threads=1, timeout=LONGEST_S)
    if outcome.value is None:
        return _Scored(kind, nan, outcome.failure, outcome.seconds)
    found = outcome.value["next"]
    failure = Failure() if found["reward_valid"].all() else written_failures(found)[0]
    # A reward of several components does not report its time; the rest of a step takes little time.
    seconds = found.get("reward_seconds", torch.tensor(outcome.seconds)).sum()
    return _Scored(kind, float(found["reward"].sum()), failure, float(seconds))


def groups(subject: Subject) -> Iterator[Finding]:
    """Check that answers to a prompt differ in their reward, and end before the token limit."""
    config = deepcopy(subject.config)
    config.train.prompts_per_batch = _NUM_GROUPS
    rows, turns = config.rows_per_batch, min(subject.max_turns, _MOST_TURNS)
    work = subject.num_parameters * rows * turns * config.inference_model.max_tokens
    long = work > _MOST_WORK.get(builders.device_of(config).type, 0)
    if not subject.samples and (long or subject.reward_seconds * rows > _MOST_REWARD_S):
        what = f"{_NUM_GROUPS} groups of {config.env.repeats} answers"
        yield ok("env.repeats", f"{what} were not sampled, as it would take long: --sample does it")
        return
    builders.seed_everything(config.seed)
    policy = subject.policy
    env = builders.make_train_env(config, policy.tokenizer, seed=config.seed)
    outcomes: list[Outcome] = []
    begun = time.perf_counter()
    with torch.no_grad(), builders.autocast(config):
        sizes = {"num_prompts": rows, "max_turns": turns, "num_shown": 0}
        evaluate(env, policy, **sizes, on_answer=lambda row, outcome: outcomes.append(outcome))
    env.close()
    seconds = (time.perf_counter() - begun) / len(outcomes)
    yield _ends(config.inference_model.max_tokens, outcomes)
    # Distillation reads the reward only with a coefficient.
    coefficient = subject.flat.get("loss.outcome_coeff", 1)
    # If every answer was cut, equal rewards are not the reward's fault.
    ended = not all(each.cut for each in outcomes)
    if ended and subject.flat.get("advantage.type") != "constant" and coefficient > 0:
        yield _variance(subject, outcomes)
    share = subject.reward_seconds / max(seconds, subject.reward_seconds)
    whole = f"the {subject.rows_per_step} answers of a step take about"
    whole += f" {subject.rows_per_step * seconds:.2g} s here, {share:.0%} of it their reward"
    yield ok("train.prompts_per_batch", whole)


def _ends(limit: int, outcomes: list[Outcome]) -> Finding:
    cut = fmean(outcome.cut for outcome in outcomes)
    what = f"{cut:.0%} of {len(outcomes)} sampled answers were cut at {limit} tokens"
    advice = "raise it; if still nothing ends, the model does not write its template's end of turn"
    level, text = (ok, what) if cut <= 0.5 else (warning, f"{what}: {advice}")
    return level("inference_model.max_tokens", text)


def _variance(subject: Subject, outcomes: list[Outcome]) -> Finding:
    config = subject.config
    size = config.env.repeats if config.env.repeats > 1 else len(outcomes)
    parts = [outcomes[at : at + size] for at in range(0, len(outcomes), size)]
    rewards = [[each.reward for each in part if each.valid] or [0.0] for part in parts]
    flat = [max(part) == min(part) for part in rewards]
    right = fmean(outcome.success for outcome in outcomes)
    mean = fmean(reward for part in rewards for reward in part)
    what = f"{sum(flat)} of {len(flat)} sampled groups of {size} have equal rewards (mean "
    what += f"{mean:.3g}, {right:.0%} right)"
    if not all(flat):
        signal = config.train.prompts_per_batch * (1 - fmean(flat))
        return ok("env.repeats", f"{what}; about {signal:.0f} of a step differ")
    why = "the prompts are too easy" if right == 1 else "they are too hard for the model, or the "
    why += "" if right == 1 else "reward wants another form: logging.samples=1 shows answers"
    return warning(subject.tasks[0].reward_key, f"{what}: nothing is learned from them; {why}")
