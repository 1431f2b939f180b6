"""Scripted models that misbehave, for tests."""

from __future__ import annotations

import hashlib
import threading
import time

from torchrl_llm.langmarl import scripted_world


def fickle(messages):
    """An optimizer whose advice helps, unless the policy has advice: then it is noise."""
    if any(
        advice in messages[-1]["content"].partition("valuation")[0]
        for advice in scripted_world.ADVICE
    ):
        return scripted_world.noise(messages)
    return scripted_world.optimizer(messages)


def refuses_some(messages):
    """An actor who, as the second agent, does not answer some of the questions."""
    digest = hashlib.blake2b(messages[-1]["content"].encode(), digest_size=1).digest()[0]
    if "agent 2 of" in messages[0]["content"] and digest % 3 == 0:
        raise RuntimeError("no")
    return scripted_world.actor(messages)


def judge(messages):
    """A judge who likes short texts, and says nothing of mute ones."""
    text = messages[-1]["content"].rpartition("<text>")[2] or messages[-1]["content"]
    answer = text.rpartition("<answer>")[2] or text
    if "Mute" in answer:
        return "Hm."
    return "VERDICT: CORRECT" if "Short" in answer else "VERDICT: INCORRECT"


class Watched:
    """How many calls of a model were under way at once, at most."""

    def __init__(self, function):
        self.function, self.lock, self.active, self.most = function, threading.Lock(), 0, 0

    def __call__(self, messages):
        with self.lock:
            self.active += 1
            self.most = max(self.most, self.active)
        time.sleep(0.02)
        with self.lock:
            self.active -= 1
        return self.function(messages)


watched_actor = Watched(scripted_world.actor)
watched_critic = Watched(scripted_world.critic)
watched_optimizer = Watched(scripted_world.optimizer)
