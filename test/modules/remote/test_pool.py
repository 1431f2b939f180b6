"""Pools of replicas in real Ray actors: answers, weights, deaths; every wait ends."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from collectors.ray_helper import start_ray
from conformance.backends import BackendConformance
from waiting import wait_until

from torchrl_llm.data import FinishReason
from torchrl_llm.data.scoring import ScoreExtras
from torchrl_llm.errors import (
    BackendError,
    ConfigError,
    DataError,
    ResourceError,
    WeightUpdateError,
    WorkerError,
)
from torchrl_llm.modules.backends import BigramModel, SamplingParams, TensorSource
from torchrl_llm.modules.remote import ActorOptions, EnginePool
from torchrl_llm.modules.remote import pool as pool_module
from torchrl_llm.modules.remote.pool_wire import ObjectStoreSource
from torchrl_llm.weights.fingerprint import weights_digest

from . import engines
from .engines import greedy

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.ray

LIGHT = ActorOptions(num_cpus=0.01, max_concurrency=64, timeout_s=60.0, start_timeout_s=180.0)


@pytest.fixture(scope="module")
def cluster():
    start_ray(ray, num_cpus=2)
    # Workers cannot import the modules of tests.
    ray.cloudpickle.register_pickle_by_value(engines)
    yield
    ray.shutdown()


def make_pool(factory=engines.fake, number=2, **settings):
    settings = {"options": LIGHT, "interval_s": 0.2, "timeout_s": 60.0, **settings}
    return EnginePool(factory, number, **settings)


@pytest.fixture(scope="module")
def shared(cluster):
    """One pool of two for the tests that break nothing; its weights change."""
    pool = make_pool(options=replace(LIGHT, num_cpus=0.25)).start()
    yield pool
    pids = pool.replica_pids()
    pool.shutdown()
    pool.shutdown()
    # Nothing of it is left.
    wait_until(lambda: not any(_alive(pid) for pid in pids.values()), 300.0)


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def trouble(cluster, tmp_path_factory):
    """One pool of two whose replicas die; it holds version 5 of the weights at the start."""
    folder = tmp_path_factory.mktemp("trouble")
    # Long enough that a replica on a busy machine is not taken for dead.
    settings = {"stall_timeout_s": 15.0, "health_timeout_s": 15.0, "max_failures": 9}
    with make_pool(partial(engines.TroubledBackend, folder), **settings) as pool:
        pool.update_weights(TensorSource(weights(5)), version=5)
        pool.folder = folder
        yield pool


@pytest.fixture
def whole(trouble):
    """The same, after what earlier tests broke was built again."""
    wait_until(lambda: trouble.stats()["serving"] == 2, 300.0)
    return trouble


def weights(seed):
    return dict(BigramModel(engines.VOCAB, seed=seed).state_dict())


def expected(seed, **options):
    return greedy(engines.fake(seed=seed), **options)


class TestPoolAsBackend(BackendConformance):
    @pytest.fixture(autouse=True)
    def _pools(self, shared):
        self.shared, self.made = shared, []
        yield
        for pool in self.made:
            pool.shutdown()

    def make_backend(self, max_length=None):
        if max_length is None:
            return self.shared
        self.made.append(make_pool(partial(engines.fake, max_length=max_length), 1).start())
        return self.made[-1]


# -- answers ----------------------------------------------------------------------------------


def test_rows_come_back_in_order_from_all_replicas(shared):
    prompts = [(5 + k % 20,) for k in range(40)]
    assert greedy(shared, prompts) == expected(shared_seed(shared), prompts=prompts)


def shared_seed(pool):
    """Which seed's weights the shared pool holds: version v holds seed v."""
    return pool.version


def test_scores_of_many_rows_are_put_together_in_order(shared):
    rows = [torch.tensor([3 + k, 5, 6 + k]) for k in range(7)]
    masks = [torch.tensor([False, True, k % 2 == 0]) for k in range(7)]
    at = torch.linspace(0.5, 2, 7)
    found = shared.token_scores(rows, masks, temperature=at, entropy=True)
    wanted = engines.fake(seed=shared_seed(shared)).token_scores(
        rows, masks, temperature=at, entropy=True
    )
    torch.testing.assert_close(found.log_probs, wanted.log_probs.detach())
    torch.testing.assert_close(found.entropy, wanted.entropy.detach())


def test_many_threads_get_their_own_answers(shared):
    wanted = {k: greedy(shared, [(k,)])[0] for k in range(3, 31)}

    def ask(k):
        return greedy(shared, [(k,)])[0] == wanted[k]

    with ThreadPoolExecutor(32) as threads:
        assert all(threads.map(ask, [3 + k % 28 for k in range(512)]))


def test_a_copy_in_another_process_uses_the_same_replicas(shared):
    elsewhere = ray.remote(num_cpus=0.1)(engines.seen_from_elsewhere)
    pids, answers = ray.get(elsewhere.remote(shared), timeout=90)
    assert pids == sorted(shared.replica_pids().values())
    assert answers == greedy(shared)


def test_errors_of_the_caller_come_back_at_once_and_break_nothing(shared):
    before = shared.replica_pids()
    with pytest.raises(DataError, match="first token"):
        shared.token_scores([torch.tensor([5, 6])], [torch.tensor([True, True])])
    row, mask = torch.tensor([5, 6]), torch.tensor([False, True])
    with pytest.raises(ConfigError, match="no hidden states"):
        shared.token_scores([row], [mask], extras=ScoreExtras(values=True))
    with pytest.raises(ConfigError, match="there is no replica 7 of 2"):
        greedy(shared, replica=7)
    assert shared.replica_pids() == before


def test_the_supports_that_were_recorded_come_back(shared):
    params = SamplingParams(max_new_tokens=5, top_k=3, record_support=True, seed=1, num_samples=2)
    prompts = [torch.tensor([5, 6]), torch.tensor([7])]
    local = engines.fake(seed=shared_seed(shared)).generate(prompts, params)
    for mine, theirs in zip(shared.generate(prompts, params), local, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a.token_ids, b.token_ids)
            assert torch.equal(a.support.token_ids, b.support.token_ids)
            assert torch.equal(a.support.counts, b.support.counts)


# -- weights ----------------------------------------------------------------------------------


def test_new_weights_reach_every_replica_and_their_version_every_token(shared):
    version = shared.version + 1
    sent = weights(version)
    receipts = shared.update_weights(TensorSource(sent), version=version)
    assert [receipt.version for receipt in receipts] == [version] * 2
    assert {receipt.digest for receipt in receipts} == {weights_digest(sent)} == {shared.digest}
    for replica in (0, 1):
        assert greedy(shared, replica=replica) == expected(version)
    params = SamplingParams(max_new_tokens=3)
    for [completion] in shared.generate([torch.tensor([5])] * 4, params):
        assert set(completion.versions.tolist()) == {version}


def test_weights_that_are_not_those_that_were_sent_change_nothing(shared):
    version, before = shared.version, greedy(shared)
    bad = TensorSource(weights(9), digest="0" * 32)
    with pytest.raises(WeightUpdateError, match="was sent as 0000"):
        shared.update_weights(bad, version=version + 1)
    assert shared.version == version
    assert greedy(shared) == before
    with pytest.raises(ConfigError, match=f"version {version - 1} .* comes after"):
        shared.update_weights(TensorSource(weights(9)), version=version - 1)


def test_a_version_is_the_number_of_one_set_of_weights(shared):
    version = shared.version + 1
    first = shared.update_weights(TensorSource(weights(2)), version=version)
    with pytest.raises(WeightUpdateError, match=f"holds version {version} already"):
        shared.update_weights(TensorSource(weights(3)), version=version)
    assert (shared.version, shared.digest) == (version, first[0].digest)
    assert greedy(shared) == expected(2)
    again = shared.update_weights(TensorSource(weights(2)), version=version)
    assert [one.digest for one in again] == [one.digest for one in first]
    assert shared.stats()["serving"] == 2


def test_a_request_for_other_weights_is_never_answered_by_these(shared):
    version = shared.version
    assert greedy(shared, version=version) == expected(version)
    params = SamplingParams(max_new_tokens=2)
    [[completion]] = shared.generate(
        [torch.tensor([5])], params, version=version + 1, timeout_s=0.5
    )
    assert completion.finish_reason == FinishReason.ABORT
    if version:
        with pytest.raises(ConfigError, match="was replaced"):
            shared.generate([torch.tensor([5])], params, version=version - 1)


def test_the_object_store_keeps_every_dtype_to_the_bit(cluster):
    sent = {
        "a": torch.randn(3, 5).bfloat16(),
        "b": torch.arange(7, dtype=torch.int8),
        "c": torch.randn(()),
        "d": torch.randn(4, 4).t(),
        "empty": torch.zeros(0, 3),
    }
    source = ObjectStoreSource.put(sent, timeout_s=20.0)
    got = dict(source.receive())
    assert got.keys() == sent.keys()
    for name, tensor in sent.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor)
    assert source.digest == weights_digest(got)


# -- deaths -----------------------------------------------------------------------------------


def test_a_replica_killed_under_64_requests_loses_none_and_comes_back_with_its_weights(whole):
    pids, before = whole.replica_pids(), whole.stats()["rebuilt"]
    asked = [(engines.SLOW, 4 + k % 16) for k in range(64)]
    wanted = expected(5, prompts=asked)
    threading.Timer(0.25, os.kill, (pids[1], signal.SIGKILL)).start()
    started = time.monotonic()
    with ThreadPoolExecutor(64) as threads:
        answers = list(threads.map(lambda prompt: greedy(whole, [prompt])[0], asked))
    assert time.monotonic() - started < 180
    assert answers == wanted
    wait_until(lambda: whole.stats()["serving"] == 2, 300.0)
    assert whole.stats()["rebuilt"] > before
    after = whole.replica_pids()
    assert after[0] == pids[0]
    assert after[1] != pids[1]
    # What was built again holds the weights that were sent before it existed.
    assert greedy(whole, replica=1) == expected(5)
    params = SamplingParams(max_new_tokens=1)
    [[completion]] = whole.generate([torch.tensor([5])], params, replica=1)
    assert completion.versions.tolist() == [5]


@pytest.mark.parametrize("deed", [engines.DIE, engines.RAISE, engines.HANG])
def test_requests_of_a_replica_that_fails_run_elsewhere(whole, deed):
    prompt = (engines.TROUBLE, deed)
    started = time.monotonic()
    assert greedy(whole, [prompt]) == expected(5, prompts=[prompt])
    assert time.monotonic() - started < 180
    bad = int((whole.folder / str(deed)).read_text())
    wait_until(lambda: bad not in whole.replica_pids().values(), 300.0)
    wait_until(lambda: whole.stats()["serving"] == 2, 300.0)


def test_a_process_that_gives_no_sign_of_life_is_replaced(whole):
    stopped, before = whole.replica_pids()[0], whole.stats()["rebuilt"]
    os.kill(stopped, signal.SIGSTOP)
    wait_until(lambda: whole.stats()["rebuilt"] > before, 300.0)
    wait_until(lambda: whole.stats()["serving"] == 2, 300.0)
    assert stopped not in whole.replica_pids().values()
    assert greedy(whole) == expected(5)


def test_without_an_answer_in_time_rows_are_aborted_or_the_call_raises(whole):
    params = SamplingParams(max_new_tokens=4, num_samples=2)
    slow = [torch.tensor([engines.SLOW, 5])]
    started = time.monotonic()
    [group] = whole.generate(slow, params, timeout_s=0.2)
    assert [c.finish_reason for c in group] == [FinishReason.ABORT] * 2
    assert [len(c.token_ids) for c in group] == [0, 0]
    strict = pickle.loads(pickle.dumps(whole))
    strict._on_failure = "error"
    with pytest.raises(WorkerError, match=r"1 rows got no answer within 0\.2 s"):
        strict.generate(slow, params, timeout_s=0.2)
    assert time.monotonic() - started < 5


def test_a_request_that_breaks_every_engine_is_raised_and_the_pool_lives_on(whole):
    with pytest.raises(BackendError, match="stopped, as always"):
        greedy(whole, [(engines.TROUBLE, engines.ALWAYS_RAISE)])
    assert greedy(whole) == expected(5)


def test_updates_while_a_replica_is_built_again_are_not_missed(whole):
    before, first = whole.stats()["rebuilt"], whole.version + 1
    killed = whole.replica_pids()[0]
    os.kill(killed, signal.SIGKILL)
    whole.update_weights(TensorSource(weights(first)), version=first)
    for version in range(first + 1, first + 12):
        changed = TensorSource({"head": weights(version)["head"]}, kind="delta")
        whole.update_weights(changed, version=version)
    wait_until(lambda: whole.stats()["serving"] == 2, 300.0)
    # Not only once where the machine is so busy that the other one seemed dead, too.
    assert whole.stats()["rebuilt"] > before
    assert killed not in whole.replica_pids().values()
    model = engines.fake()
    model.module.load_state_dict({**weights(first), "head": weights(first + 11)["head"]})
    for replica in (0, 1):
        assert greedy(whole, replica=replica) == greedy(model)


def test_replicas_that_cannot_be_built_again_are_given_up_with_a_reason(cluster, tmp_path):
    factory = partial(engines.built_once, tmp_path / "mark")
    with make_pool(factory, 1, max_failures=2) as pool:
        os.kill(pool.replica_pids()[0], signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"every replica was given up.*no second engine"):
            greedy(pool)
        os.kill(pool._started()[0].supervisor.pid(), signal.SIGKILL)
        time.sleep(1.0)
        with pytest.raises(WorkerError, match="supervisor of a pool of engines"):
            greedy(pool)


# -- starting ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, "shared-place"])
def test_a_supervisor_that_is_killed_leaves_no_place_reserved(cluster, name):
    before = {one["placement_group_id"] for one in placement_groups()}
    pool = make_pool(number=1, name=name).start()
    assert {one["placement_group_id"] for one in placement_groups()} > before
    supervisor = pool._dispatcher.supervisor
    os.kill(supervisor.pid(), signal.SIGKILL)
    # Nobody calls the pool.
    wait_until(lambda: {one["placement_group_id"] for one in placement_groups()} <= before, 60.0)
    pool.shutdown()
    with make_pool(number=1, name=name) as again:
        assert greedy(again) == expected(0)
    wait_until(lambda: {one["placement_group_id"] for one in placement_groups()} <= before, 60.0)


def test_a_pool_that_is_shut_down_makes_no_further_call_of_ray(cluster, monkeypatch):
    """``ray.shutdown()`` may come next, and a call after it starts another Ray."""
    freed, free = [], pool_module.free_place

    def slow(place):
        time.sleep(0.3)
        free(place)
        freed.append(place)

    monkeypatch.setattr(pool_module, "free_place", slow)
    make_pool(number=1).start().shutdown()
    assert len(freed) == 1


def placement_groups():
    """Those that hold something of the cluster."""
    found = ray.util.placement_group_table().values()
    return [one for one in found if one["state"] != "REMOVED"]


def test_replicas_of_the_whole_pool_are_counted_before_one_starts(cluster):
    started = time.monotonic()
    pool = EnginePool(engines.fake, 3, options=ActorOptions(num_cpus=1))
    with pytest.raises(ResourceError, match=r"needs 3 CPU \(.* of 2 free\) for 3 actors"):
        pool.start()
    with pytest.raises(ConfigError, match="not started"):
        greedy(pool)
    assert time.monotonic() - started < 5


def test_an_engine_that_cannot_be_built_says_why(cluster):
    with pytest.raises(ValueError, match="no such model"):
        make_pool(engines.broken, 1).start()
    with pytest.raises(WorkerError, match="start of replica"):
        make_pool(engines.dies_when_built, 1).start()
