"""Tools in processes: killed when they take too long, replaced when they die, gone when closed."""

import os
import pickle
import time
from pathlib import Path

import pytest
from tools.process_worker import Stateful, Worker
from waiting import wait_until

from torchrl_llm.errors import ConfigError
from torchrl_llm.tools.executor import ToolExecutor
from torchrl_llm.tools.process_tool import ProcessTool
from torchrl_llm.tools.tool_call import ToolCall


@pytest.fixture(scope="module")
def executor():
    made = ToolExecutor([ProcessTool(Worker(), num_processes=2, limit_s=1.0)])
    made.run([[ToolCall("work", {"do": "pid"})]] * 2)
    yield made
    made.close()


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def ask(executor, do, value=None):
    [[result]] = executor.run([[ToolCall("work", {"do": do, "value": value})]])
    return result


def test_calls_run_in_as_many_processes_as_asked_for_and_none_of_them_is_this_one(executor):
    pids = {int(r.content) for [r] in executor.run([[ToolCall("work", {"do": "pid"})]] * 20)}
    assert len(pids) <= 2
    assert os.getpid() not in pids


def test_a_call_that_never_ends_is_killed_in_time_and_replaced(executor):
    begun = time.monotonic()
    calls = [ToolCall("work", {"do": "spin"}), ToolCall("work", {"do": "say", "value": "hi"})]
    [[spun, said]] = executor.run([calls])
    assert spun.error == "ToolTimeout"
    assert time.monotonic() - begun < 1 + 2
    assert said.content == "hi"
    assert executor.num_hanging == 0
    assert ask(executor, "say", "again").content == "again"


def test_what_a_killed_call_has_started_dies_with_it(executor, tmp_path):
    file = tmp_path / "pid"
    assert ask(executor, "sleep_child", str(file)).error == "ToolTimeout"
    wait_until(lambda: not alive(int(file.read_text())))


@pytest.mark.parametrize(("do", "value", "code"), [("die", 7, 7), ("kill", None, -9)])
def test_a_process_that_dies_is_a_result_and_takes_no_other_call_with_it(executor, do, value, code):
    rows = executor.run(
        [[ToolCall("work", {"do": do, "value": value})], [ToolCall("work", {"do": "say"})]]
    )
    assert (rows[0][0].error, rows[0][0].exit_code) == ("ToolDied", code)
    assert rows[1][0].ok
    assert ask(executor, "say", "still here").content == "still here"


@pytest.mark.parametrize(
    ("do", "value", "error", "content"),
    [
        ("raise", "no", "ValueError", "ValueError: no"),
        ("exit", 2, "SystemExit", "SystemExit: 2"),
        ("output", None, "Odd", "out"),
        ("say", {"n": 1}, "", '{"n": 1}'),
    ],
)
def test_what_happens_in_a_process_comes_back(executor, do, value, error, content):
    result = ask(executor, do, value)
    assert (result.error, result.content) == (error, content)
    assert result.truncated == (do == "output")


def test_a_result_of_ten_megabytes_comes_back_cut(executor):
    result = ask(executor, "big", 10_000_000)
    assert result.truncated
    assert len(result.content) <= executor.max_result_chars


def test_processes_end_when_the_tool_is_closed_and_start_again_when_it_is_called(executor):
    first = int(ask(executor, "pid").content)
    executor.close()
    wait_until(lambda: not alive(first))
    second = int(ask(executor, "pid").content)
    assert second != first


def test_a_pool_that_has_run_can_be_pickled():
    tool = ProcessTool(Worker(), num_processes=1, limit_s=3)
    again = pickle.loads(pickle.dumps(tool))
    assert (again.name, again.limit_s, again.num_processes) == ("work", 3, 1)


def test_what_cannot_work_in_processes_is_refused():
    with pytest.raises(ConfigError, match="keeps something between calls"):
        ProcessTool(Stateful())

    def local(a: int) -> int:
        """Local.

        Args:
            a: a number.
        """
        return a

    with pytest.raises(ConfigError, match="cannot be sent to another process"):
        ProcessTool(local)
