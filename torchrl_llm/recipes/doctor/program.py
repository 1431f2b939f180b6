"""Check of a program that owns its loop: one session shows problems for training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, NamedTuple

import torch

from torchrl_llm.gateway.session import Pending
from torchrl_llm.modules import FakeWrapper
from torchrl_llm.recipes import builders
from torchrl_llm.recipes.doctor.finding import Finding, error, note, ok, warning
from torchrl_llm.recipes.doctor.subject import Subject
from torchrl_llm.rewards.reward_parser import written_failures

KEY = "agent.program"
# With more parameters, a small model answers instead, because it is fast.
_MOST_PARAMETERS = 5_000_000
_PATIENCE_S = 60.0
_ANSWER = "I do not know."


class _Session(NamedTuple):
    """The calls of a program in one rollout."""

    calls: list[Pending]
    last: Any  # its last row


def session(subject: Subject) -> Iterator[Finding]:
    """Check that a program ends, leaves sampling to the run, and keeps earlier messages."""
    calls, last = _run(subject)
    [failure] = written_failures(last["next"])
    if failure.kind:
        yield error(KEY, f"the program failed after {len(calls)} calls:\n{failure}")
        return
    reward = last["next", "reward"].item()
    yield ok(KEY, f"the program made {len(calls)} calls for one row; its reward is {reward:.3g}")
    yield from _sampling(subject, calls)
    causes = Counter(call.chat.record.fork_cause for call in calls if call.chat.record.fork_cause)
    if causes:
        told = ", ".join(f"{cause} {count} times" for cause, count in causes.items())
        yield warning(
            KEY,
            f"{sum(causes.values())} of {len(calls)} calls do not go on with what the model has "
            f"said before ({told}): each begins a row of its own, which costs memory and time. "
            "Send earlier messages back as they came",
        )
    fresh = sum(not call.chat.record.num_turns for call in calls)
    if fresh > 1:
        yield note(
            KEY,
            f"{fresh} of {len(calls)} calls begin a conversation: those of sub-agents do, but a "
            "program does as well that writes its first message anew for each call",
        )
    if texts := sum(call.is_text for call in calls):
        yield warning(
            KEY,
            f"{texts} of {len(calls)} calls bring a prompt that the program has written itself, "
            "by a template of its own: it must be the model's to the letter. Send messages",
        )


def _sampling(subject: Subject, calls: list[Pending]) -> Iterator[Finding]:
    wanted = subject.config.inference_model.arguments
    for name, what in (
        ("temperature", "what is learned at another temperature is not what is evaluated"),
        ("seed", "each such call is sampled alone, and its group samples the same again"),
    ):
        set_to = [call.sampling[name] for call in calls if name in call.sampling]
        if set_to and set(set_to) != {wanted.get(name)}:
            shown = ", ".join(sorted({f"{value}" for value in set_to}))
            yield warning(
                KEY,
                f"the program sets {name}={shown} in {len(set_to)} of {len(calls)} calls: {what}. "
                "Leave it out, so that the run decides",
            )


def _run(subject: Subject) -> _Session:
    """One rollout of the program."""
    config = deepcopy(subject.config)
    config.train.prompts_per_batch = config.env.repeats = 1
    config.agent.timeout_s = min(config.agent.timeout_s, _PATIENCE_S)
    if subject.num_parameters <= _MOST_PARAMETERS:
        policy = subject.policy
    else:
        options = builders.wrapper_options(config)
        policy = FakeWrapper(_ANSWER, tokenizer=subject.tokenizer, **options)
    env = builders.make_train_env(config, subject.tokenizer, seed=config.seed)
    calls: list[Pending] = []
    try:
        with torch.no_grad(), builders.autocast(config):
            td = env.reset()
            while True:
                [rollout] = env.sessions.rollouts
                calls += [] if rollout.asked is None else [rollout.asked]
                td = env.step(policy(td))
                if td["next", "done"].any():
                    return _Session(calls, td)
                td = env.step_mdp(td)
    finally:
        env.close()
