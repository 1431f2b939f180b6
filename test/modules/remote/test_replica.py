"""One replica without Ray: versions, and who waits for whom."""

from __future__ import annotations

import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from torchrl_llm.data import FinishReason
from torchrl_llm.data.ragged import RaggedColumn
from torchrl_llm.data.scoring import Support
from torchrl_llm.errors import ConfigError, WeightUpdateError, WorkerError
from torchrl_llm.modules.backends import (
    BigramModel,
    Completion,
    EngineStatus,
    FakeBackend,
    SamplingParams,
    TensorSource,
)
from torchrl_llm.modules.remote import PoolSpec
from torchrl_llm.modules.remote.pool_wire import PackedCompletions
from torchrl_llm.modules.remote.replica import Replica, VersionMismatch, Versions

PARAMS = SamplingParams(max_new_tokens=4, temperature=0, ignore_eos=True)
IDS = RaggedColumn.of([torch.tensor([5, 6])])
ANY = Versions()


class Gated(FakeBackend):
    """Answers when it is let go."""

    def __init__(self):
        super().__init__(vocab_size=16, eos_token_ids=(2,))
        self.begun, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self.steps = 0

    def generate(self, prompts, params):
        self.begun.release()
        assert self.go.acquire(timeout=20)
        return super().generate(prompts, params)

    def status(self):
        return EngineStatus(0.25, self.steps)


@pytest.fixture
def gated():
    return Replica(Gated, timeout_s=5.0)


def weights(seed=1):
    return TensorSource(dict(BigramModel(16, seed=seed).state_dict()))


def ask(replica, versions=ANY):
    found = []
    thread = threading.Thread(
        target=lambda: found.append(replica.generate(IDS, PARAMS, versions).groups()[0][0])
    )
    thread.start()
    return thread, found


def test_weights_wait_for_requests_that_run_and_new_requests_for_the_weights(gated):
    first, early = ask(gated)
    assert gated.backend.begun.acquire(timeout=5)
    update = threading.Thread(target=gated.update_weights, args=(weights(), 1, 5.0))
    update.start()
    time.sleep(0.1)
    second, late = ask(gated)
    time.sleep(0.1)
    # The second has not reached the backend: it waits behind the weights.
    assert not gated.backend.begun.acquire(timeout=0)
    gated.backend.go.release(2)
    for thread in (first, update, second):
        thread.join(5)
    assert early[0].versions is None
    assert late[0].versions.tolist() == [1] * 4


def test_weights_give_up_when_requests_run_on_and_the_old_ones_stay(gated):
    thread, found = ask(gated)
    assert gated.backend.begun.acquire(timeout=5)
    with pytest.raises(WeightUpdateError, match=r"1 requests ran on for 0\.1 s"):
        gated.update_weights(weights(), 1, 0.1)
    gated.backend.go.release()
    thread.join(5)
    assert found[0].versions is None
    assert gated.status().version == 0


def test_requests_give_up_when_an_update_does_not_end():
    replica = Replica(Gated, timeout_s=0.1)
    with replica._gate.pause(), ThreadPoolExecutor(1) as threads:
        asked = threads.submit(replica.generate, IDS, PARAMS, ANY)
        with pytest.raises(WorkerError, match=r"went on for 0\.1 s"):
            asked.result(10)


def test_a_request_is_answered_by_the_weights_that_it_asks_for_or_not():
    replica = Replica(partial(FakeBackend, vocab_size=16, eos_token_ids=(2,)))
    replica.update_weights(weights(), 4, 1.0)
    for versions in (Versions(4), Versions(0), Versions(2, 4)):
        [[done]] = replica.generate(IDS, PARAMS, versions).groups()
        assert done.versions.tolist() == [4] * 4
    for versions in (Versions(5), Versions(0, 3), Versions(0, 5)):
        with pytest.raises(VersionMismatch, match="holds version 4"):
            replica.generate(IDS, PARAMS, versions)
    assert replica.status().requests == 0


class Counting(FakeBackend):
    """Changes its weights within a response, and says so."""

    counts_versions = True

    def generate(self, prompts, params):
        return [
            [one._replace(versions=torch.tensor([1, 1, 2, 2], dtype=torch.int32)) for one in group]
            for group in super().generate(prompts, params)
        ]


def test_a_backend_that_counts_versions_itself_is_believed():
    replica = Replica(partial(Counting, vocab_size=16, eos_token_ids=(2,)))
    [[done]] = replica.generate(IDS, PARAMS, ANY).groups()
    assert done.versions.tolist() == [1, 1, 2, 2]
    replica._version = 1
    with pytest.raises(VersionMismatch, match="replaced within the request"):
        replica.generate(IDS, PARAMS, Versions(0, 1))


def test_progress_is_what_ends_or_what_the_engine_steps(gated):
    assert gated.status()[:3] == (0, 0, 0)
    assert gated.status().cache_usage == 0.25
    thread, _ = ask(gated)
    assert gated.backend.begun.acquire(timeout=5)
    time.sleep(0.2)
    status = gated.status()
    assert status.requests == 1
    assert status.idle_s >= 0.2
    gated.backend.steps += 1
    assert gated.status().idle_s < 0.1
    gated.backend.go.release()
    thread.join(5)
    assert gated.status()[:3] == (0, 0, 1)


def test_completions_travel_to_the_bit():
    def completion(size, reason, support):
        kept = Support(torch.arange(2 * size).int(), torch.full((size,), 2).int())
        return Completion(
            torch.arange(size),
            torch.randn(size),
            reason,
            kept if support else None,
            torch.full((size,), 7, dtype=torch.int32),
        )

    for support in (False, True):
        stop, length, abort = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT
        groups = [
            [completion(3, stop, support), completion(0, abort, support)],
            [completion(5, length, support), completion(1, stop, support)],
        ]
        packed = PackedCompletions.of(groups, version=3)
        buffers = []
        data = pickle.dumps(packed, protocol=5, buffer_callback=buffers.append)
        # Ray's object store gives arrays that cannot be written to.
        back = pickle.loads(data, buffers=[bytes(buffer) for buffer in buffers])
        assert len(buffers) >= len(packed.columns)
        for mine, theirs in zip(back.groups(), groups, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                assert torch.equal(a.token_ids, b.token_ids)
                assert torch.equal(a.log_probs, b.log_probs)
                assert torch.equal(a.versions, b.versions)
                assert a.finish_reason is b.finish_reason
                assert (a.support is None) == (b.support is None)
                if support:
                    assert torch.equal(a.support.token_ids, b.support.token_ids)
                    assert torch.equal(a.support.counts, b.support.counts)
    assert PackedCompletions.of([], version=0).groups() == []


def test_a_pool_without_a_function_that_makes_its_backend_is_refused():
    with pytest.raises(ConfigError, match="needs a function that makes a backend"):
        PoolSpec(factory=3)
