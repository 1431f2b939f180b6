"""Processes that call a function: stopped in time, replaced when they die, gone with the pool."""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sandbox.workers.remote_functions import behave
from waiting import wait_until

from torchrl_llm.errors import ConfigError
from torchrl_llm.rewards.reward_runner import run_rows
from torchrl_llm.sandbox.workers import (
    RemoteCallError,
    RemoteDiedError,
    RemoteRaisedError,
    RemoteTimeoutError,
    WorkerPool,
)


@pytest.fixture(scope="module")
def pool():
    pool = WorkerPool(behave, num_workers=2, memory_bytes=6 << 30)
    yield pool
    pool.close()


@pytest.mark.parametrize("value", [0.5, -3, True, None, "text", [1.0, [2.0]], math.inf])
def test_values_come_back_as_they_are(pool, value):
    assert pool.call("return", value) == value


def test_scores_and_arrays_come_back_by_value(pool):
    assert pool.call("score") == {"reward": 0.5, "success": True}
    assert pool.call("tensor") == [0.5, 1.0]
    assert math.isnan(pool.call("return", math.nan))


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [("raise", "ZeroDivisionError", "by zero"), ("exit", "SystemExit", "enough")],
)
def test_what_is_raised_there_is_raised_here_and_the_process_goes_on(pool, how, kind, message):
    with pytest.raises(RemoteRaisedError, match=message) as caught:
        pool.call(how)
    assert caught.value.kind == kind
    assert pool.call("return", 1.0) == 1.0


def test_a_value_that_is_no_number_is_an_error(pool):
    with pytest.raises(RemoteRaisedError, match="float"):
        pool.call("object")


def test_what_a_reward_prints_is_no_answer(pool):
    assert pool.call("print", 100_000) == 1.0


def test_a_large_argument_arrives(pool):
    assert pool.call("return", "x" * 20_000_000) == "x" * 20_000_000


def test_a_computation_that_looks_at_no_signal_is_stopped_in_time_and_replaced(pool):
    pool.call("return", 1)
    start = time.monotonic()
    with pytest.raises(RemoteTimeoutError, match=r"within 0\.5 s"):
        pool.call("power", 9, timeout=0.5)
    assert time.monotonic() - start < 2.5
    assert pool.call("return", 1.0) == 1.0


def test_a_process_that_dies_is_an_error_and_is_replaced(pool):
    with pytest.raises(RemoteDiedError, match="exit status 3") as caught:
        pool.call("die")
    assert caught.value.exit_code == 3
    assert pool.call("return", 1.0) == 1.0


def test_memory_is_limited(pool):
    with pytest.raises(RemoteRaisedError) as caught:
        pool.call("memory", 8 << 30)
    assert caught.value.kind == "MemoryError"


def test_children_of_a_stopped_process_are_stopped_too():
    pool = WorkerPool(behave, num_workers=1)
    group = pool.call("pid")
    with pytest.raises(RemoteTimeoutError):
        pool.call("child", timeout=1.0)
    wait_until(lambda: not members(group))
    pool.close()


def members(group):
    """Living processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state not in "ZX":
            found.append(stat)
    return found


def test_close_ends_the_processes_and_the_next_call_starts_new_ones():
    pool = WorkerPool(behave, num_workers=1)
    first = pool.call("pid")
    assert pool.call("pid") == first
    pool.close()
    assert members(first) == []
    assert pool.call("pid") != first
    pool.close()
    pool.close()


def test_processes_end_with_the_pool_and_with_the_program():
    pool = WorkerPool(behave, num_workers=1)
    pid = pool.call("pid")
    del pool
    assert members(pid) == []
    code = (
        "import os\n"
        "from torchrl_llm.sandbox.workers import WorkerPool\n"
        f"pool = WorkerPool(({str(Path(__file__).with_name('remote_functions.py'))!r}, 'behave'))\n"
        "print(pool.call('pid'), flush=True)\n"
        "os._exit(0)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    deadline = time.monotonic() + 20
    while members(int(out.stdout)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert members(int(out.stdout)) == []


def test_several_processes_work_at_once(pool):
    outcomes = run_rows(pool.call, [("pid",)] * 20, num_threads=2)
    assert len({outcome.value for outcome in outcomes}) <= 2
    assert not any(outcome.error for outcome in outcomes)


def test_a_pool_is_pickled_without_its_processes(pool):
    pid = pool.call("pid")
    copy = pickle.loads(pickle.dumps(pool))
    assert copy.call("pid") != pid
    copy.close()
    assert pool.call("return", 1) == 1


def test_a_fork_starts_processes_of_its_own(pool):
    mine = pool.call("pid")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if pool.call("pid", timeout=60) != mine else 2
            pool.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.call("return", 1) == 1


def test_what_another_process_cannot_import_is_refused_at_once():
    with pytest.raises(ConfigError, match="top of a module"):
        WorkerPool(lambda: 1.0)
    with pytest.raises(ConfigError, match="at least 1"):
        WorkerPool(behave, num_workers=0)


def test_what_prepares_a_file_is_called_once_and_in_nobody_s_time(tmp_path):
    path = tmp_path / "slow.py"
    path.write_text(
        "import os, time\n"
        "prepared = []\n"
        "def prepare():\n"
        "    time.sleep(4.0)\n"
        "    prepared.append(os.getpid())\n"
        "def score():\n"
        "    return [*prepared, os.getpid()]\n"
    )
    pool = WorkerPool((path, "score"), num_workers=1, prepare="prepare")
    prepared, own = pool.call(timeout=3.9)
    assert prepared != own  # it is inherited
    with pytest.raises(ConfigError, match="file and a name"):
        WorkerPool(behave, prepare="prepare")


def test_a_file_that_cannot_be_loaded_says_so(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import no_such_package\n")
    pool = WorkerPool((path, "score"), num_workers=1)
    for _ in range(2):
        with pytest.raises(RemoteCallError, match="no_such_package"):
            pool.call()
