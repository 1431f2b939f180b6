"""The executor: whatever a tool does becomes a result, in time, and at once for the whole batch."""

import pickle
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
from waiting import in_threads

from torchrl_llm.errors import ConfigError
from torchrl_llm.tools.executor import ToolExecutor, shorten
from torchrl_llm.tools.tool import FunctionTool, Tool
from torchrl_llm.tools.tool_call import BrokenCall, ToolCall, ToolOutput


class Do(Tool):
    """Runs whatever function the test gives it."""

    description = "Does it."
    parameters = {"type": "object"}  # noqa: RUF012

    def __init__(self, function, name="do", **options):
        self.name, self.function = name, function
        for key, value in options.items():
            setattr(self, key, value)

    def run(self, call):
        return self.function(call)


def one(function, call=None, **options):
    """The result of one call of a function."""
    executor = ToolExecutor([Do(function)], **options)
    [[result]] = executor.run([[call or ToolCall("do")]])
    executor.close()
    return result


@pytest.fixture
def release():
    """Ends what hangs, when the test is over."""
    event = threading.Event()
    yield event
    event.set()


def test_results_stand_in_the_places_of_their_calls():
    executor = ToolExecutor([Do(lambda call: str(call.args["n"]))])
    batch = [[ToolCall("do", {"n": 10 * row + k}) for k in range(row)] for row in range(5)]
    found = [[r.content for r in row] for row in executor.run(batch)]
    assert found == [[str(10 * row + k) for k in range(row)] for row in range(5)]
    executor.close()


def test_calls_of_a_batch_run_at_once():
    # Each waits for all the others: one after another none would ever end.
    barrier = threading.Barrier(32)
    executor = ToolExecutor([Do(lambda call: str(barrier.wait()))], timeout=60)
    rows = executor.run([[ToolCall("do")] for _ in range(32)])
    assert sorted(int(r.content) for [r] in rows) == list(range(32))
    executor.close()


def test_calls_of_one_turn_run_at_once_unless_the_tool_is_stateful():
    barrier = threading.Barrier(4)
    executor = ToolExecutor([Do(lambda call: str(barrier.wait()))], timeout=60)
    [row] = executor.run([[ToolCall("do")] * 4])
    assert all(result.ok for result in row)
    executor.close()


@pytest.mark.parametrize("option", [{"stateful": True}, {"kind": "action"}])
def test_calls_to_a_stateful_tool_and_actions_run_in_order_within_a_conversation(option):
    seen, inside, most = {}, set(), []

    def note(call):
        row = call.args["row"]
        most.append(row in inside)
        inside.add(row)
        time.sleep(0.002)
        seen.setdefault(row, []).append(call.args["n"])
        inside.discard(row)
        return ""

    executor = ToolExecutor([Do(note, **option)])
    executor.run([[ToolCall("do", {"row": row, "n": n}) for n in range(5)] for row in range(8)])
    assert seen == {row: list(range(5)) for row in range(8)}
    assert not any(most)
    executor.close()


def test_no_more_calls_run_at_a_time_than_allowed():
    lock, inside, most = threading.Lock(), [0], [0]

    def count(call):
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        time.sleep(0.005)
        with lock:
            inside[0] -= 1
        return ""

    executor = ToolExecutor([Do(count)], max_concurrency=3)
    executor.run([[ToolCall("do")] for _ in range(24)])
    assert most[0] == 3
    executor.close()


def test_a_call_that_never_ends_is_given_up_and_the_others_are_answered(release):
    def hang(call):
        if call.args["n"] == 3:
            release.wait()
        return str(call.args["n"])

    executor = ToolExecutor([Do(hang)], timeout=0.3, max_concurrency=2)
    begun = time.monotonic()
    rows = executor.run([[ToolCall("do", {"n": n})] for n in range(16)])
    assert time.monotonic() - begun < 0.3 + 2
    assert [r.error for [r] in rows] == [""] * 3 + ["ToolTimeout"] + [""] * 12
    assert "0.3 s" in rows[3][0].content
    assert executor.num_hanging == 1
    release.set()
    for _ in range(200):
        if not executor.num_hanging:
            break
        time.sleep(0.01)
    assert executor.num_hanging == 0
    assert [r.content for [r] in executor.run([[ToolCall("do", {"n": 5})]] * 3)] == ["5"] * 3
    executor.close()


def test_what_stands_behind_a_call_that_never_ends_is_not_run(release):
    ran = []

    def hang(call):
        ran.append(call.args["n"])
        if call.args["n"] == 1:
            release.wait()
        return "done"

    executor = ToolExecutor([Do(hang, stateful=True)], timeout=0.2)
    [row] = executor.run([[ToolCall("do", {"n": n}) for n in range(4)]])
    assert [r.error for r in row] == ["", "ToolTimeout", "NotRun", "NotRun"]
    assert ran == [0, 1]
    executor.close()


def test_a_tool_of_which_too_many_calls_hang_is_not_called_any_more(release):
    executor = ToolExecutor(
        [Do(lambda call: release.wait() and "", "hang"), Do(lambda call: "fine")],
        timeout=0.1,
        max_concurrency=2,
    )
    executor.run([[ToolCall("hang")]] * 2)
    [[third], [other]] = executor.run([[ToolCall("hang")], [ToolCall("do")]])
    assert third.error == "ToolTimeout"
    assert "2 of its calls still hang" in third.content
    assert third.seconds == 0
    assert other.content == "fine"
    assert executor.num_hanging == 2
    executor.close()


def test_a_tool_has_a_limit_of_its_own(release):
    tools = [
        Do(lambda call: release.wait() and "", "quick", timeout=0.1),
        Do(lambda call: time.sleep(0.3) or "in time", "slow"),
    ]
    executor = ToolExecutor(tools, timeout=30)
    [[quick, slow]] = executor.run([[ToolCall("quick"), ToolCall("slow")]])
    assert (quick.error, slow.content) == ("ToolTimeout", "in time")
    executor.close()


@pytest.mark.full
def test_a_hanging_call_does_not_keep_the_interpreter_from_ending():
    code = (
        "import time\n"
        "from torchrl_llm.tools import ToolExecutor, FunctionTool, ToolCall\n"
        "schema = {'name': 'hang', 'parameters': {}}\n"
        "tool = FunctionTool(lambda: time.sleep(600), schema=schema)\n"
        "[[r]] = ToolExecutor([tool], timeout=0.1).run([[ToolCall('hang')]])\n"
        "assert r.error == 'ToolTimeout', r\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("not even this")


RAISED = [
    (ValueError("no such file"), "ValueError", "ValueError: no such file"),
    (KeyError(), "KeyError", "KeyError"),
    (SystemExit(3), "SystemExit", "SystemExit: 3"),
    (KeyboardInterrupt(), "KeyboardInterrupt", "KeyboardInterrupt"),
    (MemoryError(), "MemoryError", "MemoryError"),
    (Unprintable(), "Unprintable", "Unprintable"),
]


def test_what_a_tool_raises_is_its_result():
    for error, name, content in RAISED:

        def fail(call, error=error):
            raise error

        result = one(fail)
        assert (result.error, result.content, result.ok) == (name, content, False)


def test_a_recursion_without_end_is_a_result():
    def deep(call):
        return deep(call)

    assert one(deep).error == "RecursionError"


RESULTS = [
    (None, "null"),
    (7, "7"),
    (2.5, "2.5"),
    (True, "true"),
    ([1, "a"], '[1, "a"]'),
    ({"ä": 1}, '{"ä": 1}'),
    ({1: {2}}, '{"1": "{2}"}'),
    (b"\xffab", "\ufffdab"),
    ("lone \ud800 surrogate", "lone ? surrogate"),
    (ToolOutput({"n": 1}), '{"n": 1}'),
]


def test_a_result_of_any_type_is_text():
    found = [one(lambda call, value=value: value).content for value, _ in RESULTS]
    assert found == [content for _, content in RESULTS]


def test_a_value_that_cannot_be_written_is_an_error():
    class Bad:
        def __str__(self):
            raise OSError("gone")

    assert one(lambda call: Bad()).error == "OSError"


def test_what_an_output_says_is_kept():
    result = one(lambda call: ToolOutput("out", "Killed", exit_code=-9, truncated=True))
    assert (result.error, result.exit_code, result.truncated) == ("Killed", -9, True)


def test_a_result_of_ten_megabytes_is_cut_and_says_so():
    result = one(lambda call: "a" * 5_000_000 + "b" * 5_000_000, max_result_chars=1000)
    assert 990 <= len(result.content) <= 1000
    assert result.truncated
    assert result.content.startswith("a" * 500)
    assert result.content.endswith("b" * 300)
    left = int(result.content.split("[... ")[1].split()[0])
    kept = len(result.content) - len(f"\n[... {left} characters left out ...]\n")
    assert left + kept == 10_000_000


def test_a_text_is_never_longer_than_allowed_and_whole_where_it_fits():
    for length in (0, 1, 63, 64, 65, 100, 1000):
        text, cut = shorten("x" * length, 64)
        assert len(text) <= 64
        assert cut == (length > 64)
        assert cut or text == "x" * length


def test_seconds_are_those_of_the_call():
    assert one(lambda call: time.sleep(0.05) or "").seconds >= 0.05


# -- calls that cannot be run ---------------------------------------------------------------------


def add(a: int, b: int = 0) -> int:
    """Add two numbers.

    Args:
        a: one of them.
        b: the other.
    """
    return a + b


def answer(call):
    executor = ToolExecutor([FunctionTool(add)])
    [[result]] = executor.run([[call]])
    executor.close()
    return result


def test_a_hostile_name_is_an_unknown_tool():
    marks = ("", "add; rm -rf /", "add\x00", "<|im_end|>", "a" * 10_000)
    for name in ("__import__", "../../etc/passwd", *marks):
        result = answer(ToolCall(name))
        assert result.error == "UnknownTool"
        assert len(result.content) < 300


def test_an_unknown_tool_names_the_nearest():
    assert answer(ToolCall("addd")).content == "There is no tool 'addd'. Did you mean 'add'?"
    assert answer(ToolCall("zzz")).content == "There is no tool 'zzz'. There are ['add']."


MISFITS = [
    ({}, "'a' is a required property"),
    ({"a": "two"}, "'two' is not of type 'integer' (at a)"),
    ({"a": 1.5}, "1.5 is not of type 'integer' (at a)"),
    ({"a": [1]}, "[1] is not of type 'integer' (at a)"),
    ({"a": True}, "True is not of type 'integer' (at a)"),
    ({"a": 1, "c": 2}, "Additional properties are not allowed ('c' was unexpected)"),
]


def test_arguments_that_do_not_fit_are_answered_with_what_was_expected():
    for args, problem in MISFITS:
        result = answer(ToolCall("add", args))
        assert result.error == "InvalidArguments"
        assert problem in result.content
        assert result.content.endswith('Expected {"a": integer, "b": integer (optional)}.')


def test_a_malformed_call_is_answered_with_what_was_expected():
    result = answer(BrokenCall("no closing tag", "<call>...</call>"))
    assert result.error == "MalformedCall"
    assert result.content == (
        "This tool call cannot be read: no closing tag. Expected <call>...</call> Tools: add."
    )


def test_stop_on_error_leaves_out_what_follows_a_failure():
    ran = []

    def sometimes(call):
        ran.append(call.args["n"])
        if call.args["n"] == 1:
            raise ValueError("no")
        return "yes"

    executor = ToolExecutor([Do(sometimes)], stop_on_error=True)
    rows = executor.run([[ToolCall("do", {"n": n}) for n in row] for row in ([0, 1, 2, 3], [4, 5])])
    assert [r.error for r in rows[0]] == ["", "ValueError", "NotRun", "NotRun"]
    assert [r.error for r in rows[1]] == ["", ""]
    assert sorted(ran) == [0, 1, 4, 5]
    [row] = executor.run([[ToolCall("do", {"n": 7}), BrokenCall("?"), ToolCall("do", {"n": 8})]])
    assert [r.error for r in row] == ["", "MalformedCall", "NotRun"]
    executor.close()


# -- life -----------------------------------------------------------------------------------------


class Resource(Tool):
    name = "resource"

    def __init__(self):
        self.events = []

    def run(self, call):
        return "open" if self.events.count("start") > self.events.count("close") else "shut"

    def start(self):
        self.events.append("start")

    def end_session(self, session):
        self.events.append(session)

    def close(self):
        self.events.append("close")
        raise OSError("a tool may fail to close")


def test_tools_start_once_end_sessions_and_start_again_after_close():
    tool = Resource()
    executor = ToolExecutor([tool])
    executor.end_session(1)
    assert tool.events == []
    for _ in range(2):
        [[result]] = executor.run([[ToolCall("resource")]])
        assert result.content == "open"
    executor.end_session(7)
    executor.close()
    executor.close()
    assert tool.events == ["start", 7, "close"]
    executor.run([[ToolCall("resource")]])
    assert tool.events[-1] == "start"


def test_a_batch_without_calls_starts_nothing():
    tool = Resource()
    assert ToolExecutor([tool]).run([[], []]) == [[], []]
    assert tool.events == []


def test_an_executor_that_has_run_can_be_pickled():
    executor = ToolExecutor([FunctionTool(add)], timeout=3)
    executor.run([[ToolCall("add", {"a": 1})]])
    again = pickle.loads(pickle.dumps(executor))
    assert again.run([[ToolCall("add", {"a": 2})]])[0][0].content == "2"
    assert again.timeout == 3
    executor.close()
    again.close()


def test_threads_end_with_the_executor():
    before = threading.active_count()
    executor = ToolExecutor([FunctionTool(add)])
    executor.run([[ToolCall("add", {"a": 1})]] * 8)
    assert threading.active_count() > before
    del executor
    for _ in range(500):
        if threading.active_count() <= before:
            return
        time.sleep(0.01)
    raise AssertionError("threads of an executor that is gone are still there")


def test_two_callers_share_an_executor():
    executor = ToolExecutor([FunctionTool(add)], max_concurrency=4)

    def call(offset):
        rows = executor.run([[ToolCall("add", {"a": offset + n})] for n in range(50)])
        return [int(r.content) for [r] in rows]

    found = in_threads(*(partial(call, 1000 * k) for k in range(4)))
    assert found == [[1000 * k + n for n in range(50)] for k in range(4)]
    executor.close()


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two tools are named 'add'"):
        ToolExecutor([FunctionTool(add), FunctionTool(add)])


def test_an_interrupted_caller_leaves_a_working_executor(release):
    def interrupt(call):
        if not release.is_set():
            time.sleep(0.3)  # by then the caller has handed its calls over, and waits
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            release.wait()
        return "done"

    executor = ToolExecutor([Do(interrupt)], max_concurrency=1, timeout=60)
    with pytest.raises(KeyboardInterrupt):
        executor.run([[ToolCall("do")]] * 3)
    assert executor.num_hanging == 1
    release.set()
    patience = time.monotonic() + 60
    while executor.num_hanging and time.monotonic() < patience:
        time.sleep(0.01)  # the call that was given up comes back
    assert [r.content for [r] in executor.run([[ToolCall("do")]] * 3)] == ["done"] * 3
    executor.close()
