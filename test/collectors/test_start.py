"""LLMCollector beside training, in real threads: nothing hangs, no error is lost."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from collectors.collecting import Failing, Gated, make_env, make_policy

from torchrl_llm._threads import BackgroundLoop, PauseGate
from torchrl_llm.collectors import LLMCollector
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.errors import ConfigError
from torchrl_llm.objectives import MCAdvantage


def _collector(env, policy, buffer, **options):
    options.setdefault("dialog_turns_per_batch", 2)
    return LLMCollector(env, policy=policy, replay_buffer=buffer, **options)


def _threads():
    return [thread for thread in threading.enumerate() if thread.name == "LLMCollector"]


@pytest.fixture(autouse=True)
def _nothing_is_left_running():
    yield
    assert not _threads()


def test_a_buffer_is_filled_while_it_is_sampled(policy):
    buffer = ReplayBuffer(batch_size=4, transform=MCAdvantage(2))
    buffer.append_transform(JoinTurns())
    collector = _collector(
        make_env(4, repeats=2), policy, buffer, yield_completed_trajectories=True
    )
    collector.start()
    collector.wait_for_rows(8, timeout_s=60)
    assert collector.is_running
    for _ in range(5):
        assert buffer.sample()["advantage"].shape == (4, 1, 1)
    collector.shutdown()
    assert not collector.is_running
    groups = [row["group_id"].item() for row in buffer[:].unbind(0)]
    assert all(groups.count(g) % 2 == 0 for g in groups)


def test_the_thread_ends_with_the_budget(policy):
    buffer = ReplayBuffer()
    collector = _collector(make_env(2, 1), policy, buffer, total_dialog_turns=6)
    collector.start()
    collector.wait_for_rows(6, timeout_s=60)
    collector.shutdown()
    assert len(buffer) == collector.dialog_turns == 6


def test_waiting_for_rows_that_never_come_is_an_error(policy):
    collector = _collector(make_env(2, 1), policy, ReplayBuffer(), total_dialog_turns=2)
    with pytest.raises(ConfigError, match="does not run"):
        collector.wait_for_rows(1)
    collector.start()
    with pytest.raises(ConfigError, match="2 of 3 rows"):
        collector.wait_for_rows(3, timeout_s=60)
    collector.shutdown()


def test_waiting_has_a_limit(policy):
    gated = Gated(policy)
    collector = _collector(make_env(2, 1), gated, ReplayBuffer())
    collector.start()
    with pytest.raises(TimeoutError, match="0 of 1 rows"):
        collector.wait_for_rows(1, timeout_s=0.1)
    gated.permits.release()
    collector.wait_for_rows(2, timeout_s=60)
    gated.permits.release(100)
    collector.shutdown()


@pytest.mark.parametrize("where", ["wait_for_rows", "update", "state_dict", "shutdown"])
def test_an_error_of_the_policy_reaches_the_user(policy, where):
    collector = _collector(make_env(2, 1), Failing(policy, 2), ReplayBuffer())
    collector.start()
    while collector.is_running:
        time.sleep(0.01)
    with pytest.raises(ValueError, match="the policy is broken"):
        {
            "wait_for_rows": lambda: collector.wait_for_rows(100),
            "update": collector.update_policy_weights_,
            "state_dict": collector.state_dict,
            "shutdown": collector.shutdown,
        }[where]()
    collector.shutdown()  # said once


def test_an_error_of_the_environment_reaches_the_user(policy):
    env = make_env(2, 1)
    calls = []

    def step(tensordict, next_tensordict):
        calls.append(1)
        if len(calls) > 2:
            raise OSError("the environment is broken")
        return original(tensordict, next_tensordict)

    original = env.transform[-1]._step
    env.transform[-1]._step = step
    collector = _collector(env, policy, ReplayBuffer())
    collector.start()
    with pytest.raises(OSError, match="environment is broken"):
        collector.wait_for_rows(1000, timeout_s=60)
    collector.shutdown()


def test_an_error_of_a_transform_of_the_buffer_reaches_the_user(policy):
    buffer = ReplayBuffer(transform=MCAdvantage(2, prompt_key="nothing"))
    collector = _collector(make_env(2, 1), policy, buffer)
    collector.start()
    with pytest.raises(ValueError, match="nothing"):
        collector.wait_for_rows(2, timeout_s=60)
    collector.shutdown()


def test_an_error_of_the_block_is_not_hidden_by_one_of_the_thread(policy):
    def block():
        with _collector(make_env(2, 1), Failing(policy, 0), ReplayBuffer()) as collector:
            collector.start()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        block()


def test_a_full_queue_that_nobody_empties_does_not_keep_it_from_stopping(policy):
    small = queue.Queue(maxsize=1)
    collector = LLMCollector(make_env(2, 1), policy=policy, dialog_turns_per_batch=2, queue=small)
    collector.start()
    while not small.full():
        time.sleep(0.01)
    collector.shutdown(timeout=30)
    assert small.get().batch_size == (2,)


def test_shutdown_waits_for_the_call_under_way_and_has_a_limit(policy, monkeypatch):
    gated, closed = Gated(policy), []
    collector = _collector(make_env(2, 1), gated, ReplayBuffer())
    monkeypatch.setattr(collector.env, "close", lambda **options: closed.append(options))
    collector.start()
    assert gated.waiting.wait(30)
    with pytest.raises(TimeoutError, match="after the call"):
        collector.shutdown(timeout=0.1)
    assert not closed  # the thread is still in it
    gated.permits.release(10)
    collector.shutdown(timeout=30)
    assert closed == [{"raise_if_closed": False}]


def test_weights_do_not_change_within_a_policy_call(policy):
    gated = Gated(policy)
    collector = _collector(make_env(2, 1), gated, ReplayBuffer())
    collector.start()
    assert gated.waiting.wait(30)
    updated = threading.Event()

    def update():
        collector.update_policy_weights_()
        updated.set()

    thread = threading.Thread(target=update)
    thread.start()
    assert not updated.wait(0.2)  # the policy is being called
    gated.permits.release(1000)
    assert updated.wait(30)
    thread.join()
    collector.shutdown()


def test_paused_collection_leaves_state_alone(policy):
    buffer = ReplayBuffer()
    collector = _collector(make_env(2, 1), policy, buffer)
    collector.start()
    collector.wait_for_rows(4, timeout_s=60)
    with collector.pause():
        turns = collector.dialog_turns
        state = collector.state_dict()
        time.sleep(0.2)
        assert collector.dialog_turns == turns == state["rollout"]["turns"]
    collector.shutdown()


def test_two_collectors_fill_one_buffer(tokenizer):
    buffer = ReplayBuffer(transform=MCAdvantage(2))
    collectors = [
        _collector(make_env(2, 1, repeats=2), make_policy(tokenizer), buffer, total_dialog_turns=20)
        for _ in range(2)
    ]
    for collector in collectors:
        collector.start()
    for collector in collectors:
        while collector.is_running:
            time.sleep(0.01)
        collector.shutdown()
    assert len(buffer) == 40
    groups = [row["group_id"].item() for row in buffer[:].unbind(0)]
    assert all(groups.count(g) == 2 for g in groups)


def test_starting_needs_somewhere_to_write_and_happens_once(policy):
    with pytest.raises(ConfigError, match="replay_buffer or a queue"):
        LLMCollector(make_env(2, 1), policy=policy, dialog_turns_per_batch=2).start()
    collector = _collector(make_env(2, 1), policy, ReplayBuffer())
    collector.start()
    with pytest.raises(ConfigError, match="before"):
        collector.start()
    with pytest.raises(ConfigError, match="by itself"):
        next(iter(collector))
    collector.async_shutdown()


def test_a_loop_that_was_never_started_can_be_stopped():
    loop = BackgroundLoop(lambda: True, name="LLMCollector")
    loop.stop()
    assert not loop.is_running


def test_a_gate_is_fair_to_who_wants_to_close_it():
    """A loop that takes a plain lock again at once keeps others out."""
    gate, stop = PauseGate(), threading.Event()

    def busy():
        while not stop.is_set():
            with gate.work(stop):
                time.sleep(0.001)

    thread = threading.Thread(target=busy)
    thread.start()
    start = time.monotonic()
    for _ in range(20):
        with gate.pause(), gate.pause():
            pass
    elapsed = time.monotonic() - start
    stop.set()
    thread.join()
    assert elapsed < 10


def test_who_pauses_may_work_and_stop(policy):
    buffer = ReplayBuffer()
    collector = _collector(make_env(2, 1), policy, buffer)
    collector.start()
    collector.wait_for_rows(2, timeout_s=60)
    with collector.pause():
        held = len(buffer)
        assert collector.rollout().batch_size == (2,)
        assert len(buffer) == held
        collector.shutdown(timeout=30)


def test_what_is_saved_in_a_pause_belongs_together(policy):
    buffer = ReplayBuffer()
    collector = _collector(make_env(2, 1), policy, buffer)
    collector.start()
    for _ in range(20):
        with collector.pause():
            assert len(buffer) == collector.dialog_turns
    collector.shutdown()


_SCRIPT = textwrap.dedent(
    """
    import sys, time
    sys.path[:0] = [{folder!r}]
    from collectors.collecting import make_env, make_policy
    from models_helper import make_tokenizer as _make_tokenizer
    from torchrl_llm.collectors import LLMCollector
    from torchrl_llm.data.replay_buffers import ReplayBuffer

    collector = LLMCollector(
        make_env(2, 1),
        policy=make_policy(_make_tokenizer()),
        dialog_turns_per_batch=2,
        replay_buffer=ReplayBuffer(),
    )
    collector.start()
    collector.wait_for_rows(2)
    print("running", flush=True)
    time.sleep(600)
    """
)


@pytest.mark.full
@pytest.mark.slow
def test_ctrl_c_ends_a_process_that_never_shut_its_collector_down():
    folder = Path(__file__).parents[1]
    script = _SCRIPT.format(folder=str(folder))
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout.readline().strip() == "running", process.stderr.read()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in errors
    assert process.returncode in (1, 130, -signal.SIGINT)


def test_sampling_beside_collection_never_sees_half_a_row(policy):
    buffer = ReplayBuffer(batch_size=8)
    collector = _collector(make_env(4, 1), policy, buffer, total_dialog_turns=80)
    collector.start()
    collector.wait_for_rows(8, timeout_s=60)
    while collector.is_running:
        for row in buffer.sample().unbind(0):
            assert len(row["tokens", "full"]) == len(row["log_probs", "full"])
            assert torch.isfinite(row["next", "reward"]).all()
    collector.shutdown()
