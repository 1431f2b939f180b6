"""Scorers that the tests of components use, in processes too."""

from __future__ import annotations

import os
import threading
import time

from torchrl_llm.rewards.reward_scorer import BatchScorer, RewardScore, Scorer


class Scripted(Scorer):
    """Does what the response says."""

    def score(self, sample):
        word, _, rest = sample.response.partition(" ")
        if word == "raise":
            raise ZeroDivisionError("by zero")
        if word == "sleep":
            time.sleep(float(rest))
            return 1.0
        if word == "power":
            return float(9**9**9)
        if word == "die":
            os._exit(4)
        if word == "score":
            return RewardScore(0.5, success=False, has_answer=False, has_think=True)
        return float(word)


class Constant(Scorer):
    def __init__(self, value):
        self.value = value

    def score(self, sample):
        return self.value


class Fails(Scorer):
    """Fails where the response asks for it."""

    def score(self, sample):
        if "fail" in sample.response:
            raise ConnectionError("nobody there")
        return 1.0


class PerToken(Scorer):
    per_token = True

    def score(self, sample):
        if "short" in sample.response:
            return [1.0]
        if "nan" in sample.response:
            return [float("nan")] * sample.num_tokens
        return [0.25 * (n + 1) for n in range(sample.num_tokens)]


class Batch(BatchScorer):
    def __init__(self):
        self.sizes = []

    def score_batch(self, samples):
        self.sizes.append(len(samples))
        if any(sample.response == "all" for sample in samples):
            raise TimeoutError("the model is gone")
        if any(sample.response == "few" for sample in samples):
            return []
        if any(sample.response == "none" for sample in samples):
            return None
        return [
            ValueError("no verdict") if "fail" in sample.response else 0.5 for sample in samples
        ]


class Meets(Scorer):
    """Returns only where as many as the barrier wants are at work at the same time."""

    def __init__(self, barrier: threading.Barrier):
        self.barrier = barrier

    def score(self, sample):
        self.barrier.wait()
        return 1.0
