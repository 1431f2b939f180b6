"""One policy, many threads, one row each: every answer finds its own caller."""

from __future__ import annotations

import itertools
import threading

import pytest
from modules.policies.rows_helper import tokens_td
from waiting import in_threads

from torchrl_llm.data.ragged import read_rows
from torchrl_llm.modules import vLLMWrapper
from torchrl_llm.modules.backends import Answer, FakeBackend

NUM_THREADS = 64


class CountingBackend(FakeBackend):
    """Answers a prompt with its own ids, and counts how often it is called."""

    def __init__(self):
        super().__init__(lambda ids: Answer([*ids, 3]), vocab_size=256, eos_token_ids=(2,))
        self.calls = itertools.count()
        self.largest = 0

    def generate(self, prompts, params):
        next(self.calls)
        self.largest = max(self.largest, len(prompts))
        return super().generate(prompts, params)


def number(n):
    return [4 + n % 250, 4 + n // 250]


@pytest.mark.parametrize(
    "num_requests", [1_000, pytest.param(10_000, marks=[pytest.mark.full, pytest.mark.slow])]
)
def test_requests_from_64_threads_return_to_their_own_callers(num_requests):
    backend = CountingBackend()
    policy = vLLMWrapper(
        backend,
        input_mode="tokens",
        inplace=False,
        batching=True,
        min_batch_size=1,
        max_batch_size=32,
        generate_kwargs={"max_new_tokens": 8},
    )
    todo, wrong = iter(range(num_requests)), []
    lock = threading.Lock()

    def ask():
        answered = 0
        while True:
            with lock:
                n = next(todo, None)
            if n is None:
                return answered
            [response] = read_rows(policy(tokens_td(number(n))), ("tokens", "response"))
            answered += 1
            if response.tolist() != [*number(n), 3, 2]:
                wrong.append((n, response.tolist()))

    done = in_threads(*[ask] * NUM_THREADS, seconds=200)
    assert wrong == []
    assert sum(done) == num_requests
    # They ran together, and no batch was larger than allowed.
    assert 1 < backend.largest <= 32
    assert next(backend.calls) < num_requests
    state = policy.get_batching_state()
    assert (state["queued_items"], state["running_items"]) == (0, 0)
