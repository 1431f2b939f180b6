"""PythonExecutorService: many callers, fresh or kept interpreters, one limit."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchrl_llm.errors import ConfigError, MissingExtraError, ResourceError
from torchrl_llm.sandbox import Limits, make_sandbox
from torchrl_llm.sandbox.interface import Sandbox, SandboxResult, SandboxSession
from torchrl_llm.tools.python_interpreter import (
    PythonExecutorService,
    PythonInterpreter,
    PythonTool,
    RayPythonExecutor,
)
from torchrl_llm.tools.tool_call import ToolCall


@pytest.fixture
def make_service():
    made = []

    def make(*args, **kwargs):
        made.append(PythonExecutorService(*args, **kwargs))
        return made[-1]

    yield make
    for service in made:
        service.close()


class CountingSandbox(Sandbox):
    """Runs nothing: counts how many runs and sessions there are at a time."""

    python, missing = "python", ()

    def __init__(self, status="ok"):
        super().__init__()
        self.status = status
        self.running = self.most = self.opened = self.closed = 0
        self.lock, self.go = threading.Lock(), threading.Event()

    def run(self, argv, **kwargs):
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        self.go.wait(30)
        with self.lock:
            self.running -= 1
        return SandboxResult(status=self.status, stderr="/secret/path is missing")

    def open_session(self, limits=None):
        self.opened += 1
        return CountingSession(self, limits)


class CountingSession(SandboxSession):
    alive = True

    def __init__(self, sandbox, limits):
        self.sandbox, self.limits = sandbox, limits

    def run(self, code, *, wall_s=None):
        self.alive = code != "die"
        return SandboxResult(status="ok", stdout=f"{self.limits.cpu_s} {wall_s}")

    def close(self):
        self.sandbox.closed += 1


def test_a_run_says_everything_that_came_of_it(make_service):
    result = make_service().execute("import sys; print('a'); print('b', file=sys.stderr); exit(3)")
    assert result.pop("seconds") > 0
    assert result == {
        "success": False,
        "stdout": "a\n",
        "stderr": "b\n",
        "returncode": 3,
        "status": "error",
        "truncated": False,
        "restarted": False,
    }


def test_callers_keep_their_names_apart_and_fresh_runs_have_none(make_service):
    service = make_service()
    service.execute("x = 1", session="a")
    service.execute("x = 2", session="b")
    assert service.execute("print(x)", session="a")["stdout"] == "1\n"
    assert service.execute("print(x)", session="b")["stdout"] == "2\n"
    assert "NameError" in service.execute("print(x)")["stderr"]
    service.end_session("a")
    service.end_session("a")
    assert "NameError" in service.execute("print(x)", session="a")["stderr"]


def test_no_more_than_pool_size_run_at_a_time(make_service):
    sandbox = CountingSandbox()
    service = make_service(3, sandbox=sandbox)
    with ThreadPoolExecutor(12) as threads:
        results = [threads.submit(service.execute, "x") for _ in range(12)]
        sandbox.go.set()
        assert all(result.result()["success"] for result in results)
    assert sandbox.most <= 3


def test_many_real_runs_at_once_all_answer(make_service):
    service = make_service(16)
    with ThreadPoolExecutor(16) as threads:
        outputs = list(threads.map(lambda i: service.execute(f"print({i})")["stdout"], range(32)))
    assert outputs == [f"{i}\n" for i in range(32)]


def test_the_least_recently_used_interpreter_is_ended_beyond_the_limit(make_service):
    sandbox = CountingSandbox()
    service = make_service(2, sandbox=sandbox, max_sessions=2)
    for session in ("a", "b", "a", "c"):
        service.execute("x", session=session)
    assert (sandbox.opened, sandbox.closed, service.num_sessions) == (3, 1, 2)
    service.execute("x", session="a")
    assert sandbox.opened == 3
    service.close()
    assert (sandbox.closed, service.num_sessions) == (3, 0)


def test_a_caller_whose_interpreter_was_crowded_out_is_told(make_service):
    service = make_service(2, sandbox=CountingSandbox(), max_sessions=1)
    for session, restarted in (("a", False), ("b", False), ("a", True), ("a", False), ("b", True)):
        assert service.execute("x", session=session)["restarted"] == restarted
    service.end_session("a")  # which was crowded out, too: what comes now is a new conversation
    assert not service.execute("x", session="a")["restarted"]


def test_a_tool_that_is_closed_leaves_none_of_its_interpreters_in_a_service_of_many():
    class Shared(PythonExecutorService):
        def close(self):
            """Nothing: others may use it."""

    service = Shared(2, sandbox=CountingSandbox())
    one, two = (PythonTool(persistent=True, executor=service) for _ in range(2))
    for tool, session in ((one, 1), (one, 2), (two, 1)):
        tool.run(ToolCall("python", {"code": "x"}, session=session))
    one.end_session(2)
    one.close()
    assert service.num_sessions == 1
    assert not service.execute("x", session=(two._owner, 1))["restarted"]
    two.close()
    assert service.num_sessions == 0


def test_an_interpreter_that_ended_is_opened_again_and_the_caller_told(make_service):
    service = make_service(2, sandbox=CountingSandbox())
    assert not service.execute("die", session="a")["restarted"]
    assert service.execute("x", session="a")["restarted"]
    assert not service.execute("x", session="a")["restarted"]


def test_a_kept_interpreter_may_use_the_processor_longer_than_one_piece(make_service):
    service = make_service(2, 7.0, sandbox=CountingSandbox())
    assert service.execute("x", session="a")["stdout"] == "3600.0 7.0"


def test_what_the_sandbox_says_of_the_machine_is_not_shown_to_the_model():
    sandbox = CountingSandbox(status="sandbox_error")
    sandbox.go.set()
    output = PythonTool(sandbox=sandbox).run(ToolCall("python", {"code": "x"}))
    assert output.error == "SandboxError"
    assert output.content == "The code could not be run; this is no fault of the code.\n"


def test_a_service_can_be_sent_elsewhere_and_used_again_after_close(make_service):
    service = make_service(2, 3.0)
    service.execute("x = 1", session="a")
    again = pickle.loads(pickle.dumps(service))
    assert (again.pool_size, again.timeout, again.num_sessions) == (2, 3.0, 0)
    assert again.execute("print(1)")["success"]
    again.close()
    service.close()
    assert service.execute("print(1)", session="a")["success"]


def test_a_given_sandbox_keeps_its_limits_but_for_the_time(make_service):
    sandbox = make_sandbox(limits=Limits(memory_bytes=300 << 20, wall_s=50.0))
    service = make_service(1, 2.0, sandbox=sandbox)
    assert (service.limits.memory_bytes, service.limits.wall_s) == (300 << 20, 2.0)
    assert service.execute("x = bytearray(10**9)")["status"] in ("memory", "error")
    assert service.execute("while True: pass")["status"] == "timeout"


def test_limits_beside_those_of_a_sandbox_are_refused():
    with pytest.raises(ConfigError, match="limits would have no effect"):
        PythonExecutorService(sandbox=CountingSandbox(), limits=Limits())


def test_a_service_on_ray_says_what_is_missing():
    with pytest.raises((MissingExtraError, ResourceError), match=r"ray|Ray"):
        PythonInterpreter(services="ray")


@pytest.mark.ray
def test_environments_share_a_service_on_ray(queries, answer):
    ray = pytest.importorskip("ray")
    from collectors.ray_helper import start_ray

    from torchrl_llm.envs import ChatEnv

    start_ray(ray, num_cpus=2)
    try:
        made = RayPythonExecutor("shared", namespace="tools", pool_size=2, timeout=5.0)
        found = RayPythonExecutor("shared", namespace="tools")
        assert found.execute("print(2)")["stdout"] == "2\n"
        kwargs = {"services": "ray", "service_name": "shared", "namespace": "tools"}
        transforms = [PythonInterpreter(persistent=True, **kwargs) for _ in range(2)]
        printed = []
        for name, transform in zip("ab", transforms, strict=True):
            env = ChatEnv(batch_size=(1,), worker_id=0).append_transform(transform)
            code = f"```python\nx = globals().get('x', '') + '{name}'\nprint(x)\n```"
            td = env.step(answer(env.reset(queries("Q")), code))["next"]
            printed.append(td["history"].prompt.chats[0][-1]["content"].split("\n")[1])
            env.close()
        assert printed == ["a", "b"]
        assert made.execute("print(3)")["stdout"] == "3\n"
    finally:
        ray.shutdown()
