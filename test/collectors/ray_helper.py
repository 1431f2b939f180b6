"""Environments and policies that are built in the actors of Ray: importable there by name."""

from __future__ import annotations

import functools
import time

from collectors.collecting import QUESTIONS, Ending, make_env, make_policy
from conftest import _make_tiny_model, _make_tokenizer

from torchrl_llm.modules import TransformersWrapper

__all__ = ["QUESTIONS", "Ending", "HangingPolicy", "fake_policy", "make_env", "model_policy"]

tokenizer = functools.cache(_make_tokenizer)


def fake_policy():
    return make_policy(tokenizer())


def model_policy(max_new_tokens=4):
    return TransformersWrapper(
        _make_tiny_model(),
        tokenizer=tokenizer(),
        generate_kwargs={"max_new_tokens": max_new_tokens},
    )


class HangingPolicy:
    """Answers a number of calls, and then never again; or slowly."""

    def __init__(self, policy, after=1, seconds=10_000.0):
        self.policy, self.after, self.seconds = policy, after, seconds

    def __call__(self, td):
        self.after -= 1
        if self.after < 0:
            time.sleep(self.seconds)
        return self.policy(td)


def hanging_policy(after=1, seconds=10_000.0):
    return HangingPolicy(fake_policy(), after, seconds)
