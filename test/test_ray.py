"""Objects in Ray actors: found, called, limited, killed; every wait ends."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import threading
import time
from functools import partial

import pytest

from torchrl_llm._ray import ActorOptions, RemoteObject, check_resources, require_ray
from torchrl_llm.errors import ConfigError, ResourceError, WorkerError

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def times(cluster):
    """The module ``time`` in an actor: something to call that can also sleep."""
    remote = RemoteObject(
        partial(importlib.import_module, "time"),
        ActorOptions(num_cpus=0.5, max_concurrency=4),
        what="a clock",
    )
    yield remote
    remote.shutdown()


def test_without_ray_the_message_says_how_to_start_it():
    assert not ray.is_initialized()
    with pytest.raises(ResourceError, match=r"a clock needs a running Ray: call ray.init"):
        RemoteObject(dict, what="a clock")


def test_calls_attributes_and_errors_are_those_of_the_object(times):
    assert times.call("gmtime", 0).tm_year == 1970
    assert times.read("gmtime.__name__") == "gmtime"
    with pytest.raises(OverflowError):
        times.call("gmtime", 10**30)
    with pytest.raises(AttributeError, match="nonsense"):
        times.call("nonsense")


def test_calls_run_beside_each_other_and_a_sign_of_life_beside_all(cluster):
    # Those who wait at the barrier go on only when the third has come.
    barrier = RemoteObject(
        partial(threading.Barrier, 3), ActorOptions(num_cpus=0, max_concurrency=3), what="a barrier"
    )
    refs = [barrier.submit("wait", 200) for _ in range(2)]
    deadline = time.monotonic() + 200
    while barrier.read("n_waiting") < 2:
        assert time.monotonic() < deadline
    assert barrier.pid(timeout_s=100) != os.getpid()
    refs.append(barrier.submit("wait", 200))
    assert sorted(map(barrier.result, refs)) == [0, 1, 2]
    barrier.shutdown()


def test_a_call_without_an_answer_ends_at_its_limit(times):
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"sleep of a clock: no answer within 0\.3 s"):
        times.call("sleep", 40, timeout_s=0.3)
    assert time.monotonic() - started < 30  # long before the answer


def test_a_pickled_copy_names_the_same_actor(times):
    assert pickle.loads(pickle.dumps(times)).pid() == times.pid()


def test_an_error_of_the_factory_reaches_whoever_asked(cluster):
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        RemoteObject(partial(importlib.import_module, "no_such_module"), ActorOptions(num_cpus=0))


def test_named_actors_are_found_and_built_once(cluster):
    options = ActorOptions(num_cpus=0, name="shared")
    first = RemoteObject(partial(dict, a=1), options)
    second = RemoteObject(partial(dict, a=2), options)
    assert second.pid() == first.pid()
    assert second.call("get", "a") == 1
    first.shutdown()


def test_a_killed_actor_fails_its_calls_with_its_name_and_soon(cluster):
    remote = RemoteObject(
        partial(importlib.import_module, "time"),
        ActorOptions(num_cpus=0, max_concurrency=2, env_vars={"TZ": "UTC-7"}),
        what="clock 3",
    )
    assert remote.call("localtime", 0).tm_hour == 7
    ref = remote.submit("sleep", 60)
    threading.Timer(0.3, os.kill, (remote.pid(), signal.SIGKILL)).start()
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"clock 3.*died"):
        remote.result(ref)
    with pytest.raises(WorkerError, match="a heartbeat of clock 3"):
        remote.pid()
    assert time.monotonic() - started < 50  # and not with the end of the call


def test_what_the_cluster_cannot_give_is_said_before_anything_starts(cluster):
    started = time.monotonic()
    with pytest.raises(ResourceError, match=r"a pool needs 6 CPU \(.* of 2 free\) for 3 actors"):
        check_resources("a pool", [{"CPU": 2.0}] * 3)
    with pytest.raises(ResourceError, match=r"1 GPU \(0 of 0 free\)"):
        RemoteObject(dict, ActorOptions(num_gpus=1))
    # What is too much for the whole cluster is not waited for.
    assert time.monotonic() - started < 10


def test_what_others_hold_is_waited_for_and_then_named(cluster):
    holder = RemoteObject(dict, ActorOptions(num_cpus=1.5))
    with pytest.raises(ResourceError, match=r"1 CPU \(0(\.5)? of 2 free\)"):
        check_resources("more", [{"CPU": 1.0}], settle_s=0.5)
    threading.Timer(0.5, holder.shutdown).start()
    check_resources("more", [{"CPU": 1.0}], settle_s=200)


def test_a_negative_amount_of_a_resource_is_refused_by_its_name():
    with pytest.raises(ConfigError, match="the amount of disk must be at least 0, got -1"):
        ActorOptions(resources={"disk": -1})


def test_ray_is_imported_without_running_where_that_is_enough():
    assert require_ray("a test", running=False) is ray
