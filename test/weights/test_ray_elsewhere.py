"""Files on a shared disc to replicas on Ray, also when one of them is killed."""

import os
import signal
import time

import pytest
from collectors.ray_helper import start_ray
from modules.remote import engines
from modules.remote.engines import fake, greedy

from torchrl_llm.errors import WorkerError
from torchrl_llm.modules.remote import ActorOptions, EnginePool
from torchrl_llm.weights import FileWeights

ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.ray, pytest.mark.slow]

OPTIONS = ActorOptions(num_cpus=0.1, timeout_s=30.0, start_timeout_s=180.0)


@pytest.fixture(scope="module")
def pool():
    start_ray(ray, num_cpus=2)
    # By value: workers then need not find the modules of tests.
    ray.cloudpickle.register_pickle_by_value(engines)
    try:
        with EnginePool(fake, 2, options=OPTIONS, interval_s=0.2, timeout_s=60.0) as pool:
            yield pool
    finally:
        ray.shutdown()


def rebuilt(pool, pid):
    """Whether another process serves in the place of one that was killed."""
    try:
        return pool.num_copies == 2 and pid not in pool.replica_pids()
    except WorkerError:  # it is dead, and the pool has not missed it yet
        return False


@pytest.fixture
def updater(pool, tmp_path):
    updater = FileWeights(pool, folder=tmp_path)
    updater.version = pool.version
    yield updater
    updater.close()


def test_all_replicas_take_every_version(pool, updater):
    for seed in (1, 2, 3):
        updater.push_weights(fake(seed=seed).module)
        assert [receipt.version for receipt in updater.receipts] == [updater.version] * 2
        # Enough requests for both replicas.
        assert all(greedy(pool) == greedy(fake(seed=seed)) for _ in range(4))


def test_a_replica_that_was_killed_reads_the_version_that_the_others_have(pool, updater):
    updater.push_weights(fake(seed=4).module)
    pid = pool.replica_pids()[0]
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    while not rebuilt(pool, pid):
        assert time.monotonic() - started < 240, "the replica was not built again"
        assert greedy(pool) == greedy(fake(seed=4))
        time.sleep(0.2)
    assert all(greedy(pool) == greedy(fake(seed=4)) for _ in range(4))
    updater.push_weights(fake(seed=5).module)
    assert len(updater.receipts) == 2
    assert all(greedy(pool) == greedy(fake(seed=5)) for _ in range(4))
