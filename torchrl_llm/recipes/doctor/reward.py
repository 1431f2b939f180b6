"""Checks of the reward: on answers that are known to be right or wrong, and how long it takes.

Nothing is sampled here. The environment of the run scores one answer after the other, with its
tools and all parts of its reward; a call that hangs is left behind.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import inf
from statistics import fmean
from typing import Any, NamedTuple

from torchrl_llm.data.failures import Failure
from torchrl_llm.envs import GameEnv
from torchrl_llm.recipes.doctor.finding import Finding
from torchrl_llm.recipes.doctor.subject import Subject, Task
from torchrl_llm.rewards.reward_parser import written_failures
from torchrl_llm.rewards.reward_runner import run_rows

NUM_ROWS = 6
LONGEST_CALL_S = 5.0
"""Seconds after which a reward is not waited for."""

_SLOW_STEP_S = 30.0
_GARBAGE = "kqx zzz 0000"
# Forms in which a row's own answer may be right.
_FORMS = {
    "as it is": "{}",
    "in <answer> tags": "<think>.</think><answer>{}</answer>",
    "behind ####": "#### {}",
    "in \\boxed{}": "$\\boxed{{{}}}$",
}


class Scored(NamedTuple):
    """What came of one answer.

    Attributes:
        kind: a form of the row's own answer, ``another row's``, ``empty`` or ``garbage``.
        reward: NaN where it failed.
        failure: without a kind where all went well.
        seconds: that the reward took.
    """

    kind: str
    reward: float
    failure: Failure
    seconds: float


def known_answers(subject: Subject) -> Iterator[Finding]:
    """The reward tells right answers from wrong ones, fails on none, and is fast."""
    for task in subject.tasks:
        if not isinstance(task.env, GameEnv):  # a world gives it, for what was done in it
            yield from _task(subject, task)


def _task(subject: Subject, task: Task) -> Iterator[Finding]:
    scored = list(_scored(task))
    key, failed = task.reward_key, [each for each in scored if each.failure.kind]
    if scored and scored[-1].failure.kind == "RewardTimeoutError":
        subject.reward_seconds = inf
        yield Finding(
            "error",
            key,
            f"{task.name}: a reward took more than {LONGEST_CALL_S:g} s and was not waited for. "
            f"{_of_step(subject, LONGEST_CALL_S)} Make it faster, or write it as a part of the "
            "reward with a limit and workers: reward.components.NAME.timeout, run and num_workers",
        )
        return
    if failed:
        first = failed[0]
        yield Finding(
            "error" if len(failed) == len(scored) else "warning",
            key,
            f"{task.name}: the reward fails for {len(failed)} of {len(scored)} answers, first for "
            f"the answer {first.kind}:\n{first.failure}",
        )
    fine = [each for each in scored if not each.failure.kind]
    if fine:
        subject.reward_seconds = fmean(each.seconds for each in fine)
        yield from _values(task, fine)
        yield from _speed(subject, task)


def _values(task: Task, scored: list[Scored]) -> Iterator[Finding]:
    means = {
        kind: fmean(each.reward for each in scored if each.kind == kind)
        for kind in dict.fromkeys(each.kind for each in scored)
    }
    own = {kind: mean for kind, mean in means.items() if kind in _FORMS}
    values = {each.reward for each in scored}
    tried = f"{len(scored)} answers ({', '.join(means)})"
    if len(values) > 1:
        best = max(own, key=lambda kind: own[kind], default=None)
        wrong = {kind: mean for kind, mean in means.items() if kind not in _FORMS}
        if best is not None and own[best] < max(wrong.values()):
            worst = max(wrong, key=lambda kind: wrong[kind])
            yield Finding(
                "warning",
                task.reward_key,
                f"{task.name}: wrong answers earn more than right ones: {wrong[worst]:g} for an "
                f"answer {worst}, {own[best]:g} for the row's own {best}",
            )
        else:
            shown = ", ".join(f"{mean:.3g} {kind}" for kind, mean in means.items())
            yield Finding("ok", task.reward_key, f"{task.name}: mean rewards are {shown}")
    elif own and values == {0.0}:
        yield Finding(
            "warning",
            task.reward_key,
            f"{task.name}: the reward is 0 for all of {tried}, the data's own included. Unless it "
            "wants another form, which the prompt must ask for, nothing can be learned: look at "
            "how it reads a response and which column it compares with (data.answer)",
        )
    elif own:
        yield Finding(
            "error",
            task.reward_key,
            f"{task.name}: the reward is {values.pop():g} for all of {tried}: right, wrong and "
            "empty answers earn the same, and nothing can be learned",
        )


def _speed(subject: Subject, task: Task) -> Iterator[Finding]:
    seconds = subject.reward_seconds
    slow = seconds * subject.rows_per_step > _SLOW_STEP_S
    yield Finding(
        "warning" if slow else "ok",
        task.reward_key,
        f"{task.name}: a reward takes {1000 * seconds:.3g} ms. {_of_step(subject, seconds)}"
        + " Give it workers: reward.components.NAME.run and num_workers" * slow,
    )


def _of_step(subject: Subject, seconds: float) -> str:
    rows = subject.rows_per_step
    return f"The {rows} answers of a step take {rows * seconds:.3g} s, one after the other."


def _scored(task: Task) -> Iterator[Scored]:
    """Answers of the first rows and what they earn; ends where one hangs."""
    task.env.reset_dataloader()
    for at in range(min(NUM_ROWS, task.env.primer.num_rows or NUM_ROWS)):
        start = task.env.reset()
        answer = start["answer"][0] if "answer" in start.keys() else None
        texts = {"empty": "", "garbage": _GARBAGE}
        if answer is not None and answer != "":
            written = answer if isinstance(answer, str) else json.dumps(answer, default=str)
            texts = {kind: form.format(written) for kind, form in _FORMS.items()} | texts
        for kind, text in texts.items():
            scored = _score(task.env, start.copy(), text, kind)
            yield scored
            if scored.failure.kind == "RewardTimeoutError":
                return
        if at == 0:
            other = answer
        elif answer != other and other not in (None, ""):
            yield _score(task.env, start.copy(), str(other), "of another row")


def _score(env: Any, td: Any, text: str, kind: str) -> Scored:
    chat = td["history"].prompt.chats[0] + [{"role": "assistant", "content": text}]
    td["history"].full = type(td["history"].prompt).of([chat])
    (outcome,) = run_rows(env.step, [(td,)], num_threads=1, timeout=LONGEST_CALL_S)
    if outcome.value is None:
        return Scored(kind, float("nan"), outcome.failure, outcome.seconds)
    found = outcome.value["next"]
    failure = Failure() if found["reward_valid"].all() else written_failures(found)[0]
    seconds = float(found["reward_seconds"].sum()) if "reward_seconds" in found.keys() else 0.0
    return Scored(kind, float(found["reward"].sum()), failure, seconds)
