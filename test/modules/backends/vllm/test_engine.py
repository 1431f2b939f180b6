"""Many threads on one engine, without vLLM: who steps, who waits, what happens when it breaks."""

from __future__ import annotations

import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
from waiting import in_threads, wait_until

from torchrl_llm.errors import BackendError, ConfigError, WorkerError
from torchrl_llm.modules.backends.vllm.engine_loop import EngineLoop, EngineRequest
from torchrl_llm.modules.backends.vllm.local_engine import SleepState


class FakeEngine:
    """Answers a request after as many steps as its prompt says; keeps watch over its callers."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds
        self.live = {}
        self.steps = 0
        self.most = 0
        self.inside = threading.Lock()
        self.aborted = []
        self.adapters = []

    def add_request(self, name, prompt, params, lora_request=None):
        assert self.inside.acquire(blocking=False), "two threads used the engine at once"
        try:
            if prompt < 0:
                raise ValueError(f"a prompt of {prompt}")
            self.adapters.append(lora_request)
            self.live[name] = [prompt, params]
        finally:
            self.inside.release()

    def step(self):
        assert self.inside.acquire(blocking=False), "two threads used the engine at once"
        try:
            time.sleep(self.seconds)
            self.steps += 1
            self.most = max(self.most, len(self.live))
            for entry in self.live.values():
                entry[0] -= 1
            done = [name for name, (left, _) in self.live.items() if left <= 0]
            return [self.output(name, self.live.pop(name)[1]) for name in done]
        finally:
            self.inside.release()

    def output(self, name, answer):
        return SimpleNamespace(request_id=name, finished=True, answer=answer)

    def abort_request(self, names):
        self.aborted += names
        for name in names:
            self.live.pop(name, None)

    def partial(self, name):
        return self.output(name, ("partial", self.live[name][1]))


def loop_over(engine):
    return EngineLoop(engine, aborted=engine.partial)


def ask(loop, *pairs, **options):
    outputs = loop.run([EngineRequest(steps, answer) for steps, answer in pairs], **options)
    return [output.answer for output in outputs]


def start(call):
    found = []

    def run():
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def test_answers_come_in_the_order_of_the_requests():
    loop = loop_over(FakeEngine())
    assert ask(loop, (5, "a"), (1, "b"), (3, "c")) == ["a", "b", "c"]
    assert loop.steps == 5
    assert loop.dead is None
    assert ask(loop) == []


def test_64_threads_share_steps_and_get_their_own_answers():
    engine = FakeEngine(seconds=0.0005)
    loop = loop_over(engine)

    def call(caller):
        pairs = [[(1 + (caller + i) % 7, (caller, i, k)) for k in range(2)] for i in range(20)]
        return [ask(loop, *pair) for pair in pairs]

    found = in_threads(*(lambda c=c: call(c) for c in range(64)))
    for caller, answers in enumerate(found):
        assert answers == [[(caller, i, 0), (caller, i, 1)] for i in range(20)]
    assert engine.most > 32
    assert engine.steps < 64 * 20  # far fewer steps than calls
    assert loop.num_unfinished == 0


def test_a_refused_request_is_the_error_of_its_caller_alone():
    loop = loop_over(FakeEngine(seconds=0.001))
    good, bad = in_threads(
        lambda: ask(loop, (30, "good")), lambda: ask(loop, (9, "half"), (-1, "bad"))
    )
    assert good == ["good"]
    assert isinstance(bad, ConfigError)
    assert "a prompt of -1" in str(bad)
    assert loop.num_unfinished == 0


def test_when_a_step_fails_every_caller_is_told_and_later_ones_too():
    engine = FakeEngine(seconds=0.001)
    loop = loop_over(engine)
    engine.step = lambda: (_ for _ in ()).throw(RuntimeError("out of blocks"))
    found = in_threads(*(lambda: ask(loop, (50, "x")) for _ in range(8)))
    # Whoever led has the error itself; the others are told of it.
    assert sum(type(error) is RuntimeError for error in found) == 1
    assert all("out of blocks" in str(error) for error in found)
    assert loop.dead == "RuntimeError: out of blocks"
    with pytest.raises(BackendError, match="must be restarted: RuntimeError: out of blocks"):
        ask(loop, (1, "y"))
    with pytest.raises(BackendError, match="must be restarted"), loop.exclusive():
        pass


def test_a_step_that_never_ends_does_not_hold_the_other_callers_for_ever():
    engine, release = FakeEngine(), threading.Event()
    loop = loop_over(engine)
    step = engine.step
    engine.step = lambda: (release.wait(20), step())[1]
    leader, led = start(lambda: ask(loop, (1, "a")))
    wait_until(lambda: loop.num_unfinished == 1)
    began = time.monotonic()
    with pytest.raises(WorkerError, match=r"made no step for .* \(limit 0.3 s\)"):
        ask(loop, (1, "b"), timeout_s=0.3)
    with pytest.raises(WorkerError, match="made no step"), loop.exclusive(timeout_s=0.3):
        pass
    assert time.monotonic() - began < 10
    release.set()
    leader.join(10)
    assert led == [["a"]]
    # Nobody waits for those who gave up.
    assert ask(loop, (2, "c")) == ["c"]
    assert loop.num_unfinished == 0


def test_an_interrupted_follower_is_not_asked_to_lead(monkeypatch):
    engine = FakeEngine(seconds=0.002)
    loop = loop_over(engine)
    leader, led = start(lambda: ask(loop, (60, "leader")))
    wait_until(lambda: engine.steps > 2)
    wait = threading.Event.wait

    def interrupted(self, timeout=None):
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return wait(self, timeout)

    monkeypatch.setattr(threading.Event, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ask(loop, (500, "mine"))
    monkeypatch.undo()
    leader.join(10)
    assert led == [["leader"]]
    assert ask(loop, (1, "next")) == ["next"]
    assert loop.num_unfinished == 0


def test_alone_and_wait_lets_running_requests_end_and_holds_new_ones_back():
    engine = FakeEngine(seconds=0.001)
    loop = loop_over(engine)
    first, a = start(lambda: ask(loop, (60, "first")))
    wait_until(lambda: engine.steps > 2)
    entered, leave = threading.Event(), threading.Event()

    def alone():
        with loop.exclusive("wait"):
            entered.set()
            state = list(engine.live), engine.steps
            assert leave.wait(10)
            assert (list(engine.live), engine.steps) == state
            return state

    holder, held = start(alone)
    wait_until(lambda: loop._alone or entered.is_set())
    second, b = start(lambda: ask(loop, (1, "second")))
    assert entered.wait(10)
    first.join(10)
    assert a == [["first"]]
    time.sleep(0.05)
    assert b == []
    leave.set()
    for thread in (holder, second):
        thread.join(10)
    assert held[0][0] == []
    assert b == [["second"]]


def test_alone_and_keep_stops_between_two_steps():
    engine = FakeEngine(seconds=0.001)
    loop = loop_over(engine)
    callers = [start(lambda: ask(loop, (80, "kept"))) for _ in range(4)]
    wait_until(lambda: len(engine.live) == 4 and engine.steps > 2)
    with loop.exclusive("keep"):
        before = engine.steps
        time.sleep(0.05)
        assert engine.steps == before
        assert len(engine.live) == 4
    for thread, found in callers:
        thread.join(10)
        assert found == [["kept"]]


def test_alone_and_abort_gives_callers_what_there_is():
    engine = FakeEngine(seconds=0.001)
    loop = loop_over(engine)
    callers = [start(lambda k=k: ask(loop, (10**6, k))) for k in range(4)]
    wait_until(lambda: len(engine.live) == 4)
    with loop.exclusive("abort"):
        assert engine.live == {}
    for k, (thread, found) in enumerate(callers):
        thread.join(10)
        assert found == [[("partial", k)]]
    assert len(engine.aborted) == 4


def test_a_cancelled_request_is_aborted_between_two_steps_and_the_others_go_on():
    engine = FakeEngine()
    loop = loop_over(engine)
    questions = [lambda: False, lambda: engine.steps >= 3]
    assert ask(loop, (9, "a"), (10**6, "b"), cancelled=questions) == ["a", ("partial", "b")]
    assert engine.aborted == ["r1"]
    assert engine.steps == 9
    assert ask(loop, (10**6, "c"), cancelled=[lambda: True]) == [("partial", "c")]
    assert engine.steps == 10


def test_a_cancelled_caller_that_steps_the_engine_hands_over():
    engine = FakeEngine(seconds=0.001)
    loop, gone = loop_over(engine), threading.Event()
    first, left = start(lambda: ask(loop, (10**6, "a"), cancelled=[gone.is_set]))
    wait_until(lambda: engine.live)
    second, found = start(lambda: ask(loop, (50, "b")))
    wait_until(lambda: len(engine.live) == 2)
    gone.set()
    first.join(10)
    second.join(10)
    assert (left, found) == ([[("partial", "a")]], [["b"]])


def test_whoever_is_alone_may_enter_again_and_ask():
    loop = loop_over(FakeEngine())
    with loop.exclusive(), loop.exclusive("abort"):
        assert ask(loop, (2, "inside")) == ["inside"]
    assert ask(loop, (2, "outside")) == ["outside"]


def test_an_error_of_whoever_was_alone_leaves_the_engine_usable():
    loop = loop_over(FakeEngine(seconds=0.001))
    with pytest.raises(RuntimeError, match="half a load"), loop.exclusive():
        raise RuntimeError("half a load")
    assert ask(loop, (1, "x")) == ["x"]


def test_many_updates_and_callers_never_wait_for_each_other_in_a_circle():
    engine = FakeEngine(seconds=0.0002)
    loop = loop_over(engine)

    def update(mode):
        for _ in range(15):
            with loop.exclusive(mode):
                pass
            time.sleep(0.001)
        return "updated"

    def call(caller):
        return [ask(loop, (1 + i % 5, (caller, i))) for i in range(30)]

    found = in_threads(
        *(lambda c=c: call(c) for c in range(12)), lambda: update("wait"), lambda: update("keep")
    )
    for caller in range(12):
        assert found[caller] == [[(caller, i)] for i in range(30)]
    assert found[12:] == ["updated"] * 2


def test_another_word_for_what_is_in_flight_is_refused():
    with (
        pytest.raises(ConfigError, match="in_flight must be one of"),
        loop_over(FakeEngine()).exclusive("drop"),
    ):
        pass


def test_each_request_names_the_adapter_of_its_time():
    engine, adapter = FakeEngine(), []
    loop = EngineLoop(engine, adapter=lambda: adapter[-1] if adapter else None)
    ask(loop, (1, "a"))
    adapter.append("lora")
    ask(loop, (1, "b"))
    assert engine.adapters == [None, "lora"]


# -- sleep ----------------------------------------------------------------------------------------


class SleepyEngine:
    """A ``vllm.LLM`` whose scheduler forgets its last requests in two more steps."""

    def __init__(self):
        self.calls, self.batch_queue, self.left = [], ["a batch"], 2
        self.llm_engine = self.engine_core = self.scheduler = self

    def has_requests(self):
        return self.left > 0

    def step(self):
        self.calls.append("step")
        self.left -= 1
        self.batch_queue = [] if self.left < 0 else self.batch_queue

    def sleep(self, level):
        self.calls.append(("sleep", level))

    def release_kv_cache_memory(self):
        self.calls.append("release")

    def wake_up(self, tags):
        self.calls.append(("wake", tags))


def sleepy(**options):
    engine, loop = SleepyEngine(), loop_over(FakeEngine())
    return engine, loop, SleepState(engine, loop, enabled=True, frees_memory=True, **options)


def test_nothing_is_admitted_while_the_engine_sleeps():
    engine, loop, state = sleepy()
    state.fall(1)
    with pytest.raises(BackendError, match=r"the engine is asleep; call wake\(\)"):
        ask(loop, (1, "x"))
    with pytest.raises(BackendError, match="no room for weights"):
        state.check_weights()
    state.wake()
    assert ask(loop, (1, "x")) == ["x"]
    assert engine.calls == [("sleep", 1), ("wake", ["weights", "kv_cache"])]


def test_weights_may_come_before_the_cache():
    engine, loop, state = sleepy()
    state.fall(2)
    state.wake(weights_only=True)
    state.check_weights()
    with pytest.raises(BackendError, match="with its weights only"):
        ask(loop, (1, "x"))
    state.filled()
    with pytest.raises(BackendError, match="with its weights only"):
        ask(loop, (1, "x"))
    state.wake()
    assert ask(loop, (1, "x")) == ["x"]
    assert engine.calls == [("sleep", 2), ("wake", ["weights"]), ("wake", ["kv_cache"])]


def test_after_level_2_full_weights_must_arrive_even_over_a_second_sleep():
    _, loop, state = sleepy()
    state.fall(2)
    state.wake()
    state.fall(1)
    state.wake()
    with pytest.raises(BackendError, match="lost its weights when it slept at level 2"):
        ask(loop, (1, "x"))
    state.filled()
    assert ask(loop, (1, "x")) == ["x"]


def test_steps_that_the_machine_does_not_have_are_refused():
    _, _, state = sleepy()
    with pytest.raises(BackendError, match="already awake"):
        state.wake()
    state.fall(1)
    with pytest.raises(BackendError, match="already asleep"):
        state.fall(1)
    state.wake(weights_only=True)
    with pytest.raises(BackendError, match="weights only"):
        state.wake(weights_only=True)


def test_the_cache_alone_is_given_back_when_the_scheduler_is_empty():
    engine, loop, state = sleepy()
    state.share_weights()
    for _ in range(2):
        state.release_cache()
        state.check_weights()
        with pytest.raises(BackendError, match="with its weights only"):
            ask(loop, (1, "x"))
        with pytest.raises(BackendError, match="already awake with its weights only"):
            state.release_cache()
        state.wake()
        assert ask(loop, (1, "x")) == ["x"]
    first, second = [("sleep", 0), *["step"] * 3, "release"], [("sleep", 0), "release"]
    assert engine.calls == [*first, ("wake", ["kv_cache"]), *second, ("wake", ["kv_cache"])]
    for level in (1, 2):
        with pytest.raises(ConfigError, match="shares its weights with a trainer"):
            state.fall(level)


def test_a_gpu_engine_that_was_not_built_to_sleep_says_how_to():
    loop = loop_over(FakeEngine())
    state = SleepState(SleepyEngine(), loop, enabled=False, frees_memory=True)
    for sleep in (partial(state.fall, 1), state.release_cache):
        with pytest.raises(ConfigError, match="enable_sleep_mode=True"):
            sleep()
    assert ask(loop, (1, "x")) == ["x"]


def test_on_the_cpu_only_the_state_changes():
    engine, loop = SleepyEngine(), loop_over(FakeEngine())
    state = SleepState(engine, loop, enabled=False, frees_memory=False)
    state.fall(1)
    with pytest.raises(BackendError, match="asleep"):
        ask(loop, (1, "x"))
    state.wake()
    assert ask(loop, (1, "x")) == ["x"]
    assert engine.calls == []
