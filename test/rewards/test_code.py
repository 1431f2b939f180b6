"""Rewards of code: statuses, credit, the cache, and code that would rather not be tested."""

from __future__ import annotations

import copy
import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
from cases import cases
from rewards.local_sandbox import LocalSandbox

from torchrl_llm.errors import DataError, RewardError
from torchrl_llm.rewards.code import (
    CodeProblem,
    CodeRewardParser,
    CodeRunner,
    extract_code,
)

CASES = cases(__file__)

DOUBLE = {
    "entry_point": "double",
    "tests": "def check(f):\n    assert f(2) == 4\n    assert f('a') == 'aa'\n"
    "    assert f(-1) == -2",
}
RIGHT = "def double(x):\n    return 2 * x\n"


@pytest.fixture
def runner():
    return CodeRunner(LocalSandbox(), timeout_s=5.0)


@pytest.fixture
def judge(runner):
    return lambda code, problem=DOUBLE, **kwargs: runner.run(
        code, CodeProblem.of(problem), **kwargs
    )


def fenced(code):
    return f"Here it is:\n```python\n{code}\n```\nDone."


# What came of a program


def test_a_right_program_passes_every_case(judge):
    result = judge(RIGHT)
    assert result.all_passed
    assert result[:5] == ("success", "success", 3, 3, "")
    assert result.seconds > 0


@pytest.mark.parametrize(("code", "compiled", "ran", "message"), CASES["ways_to_fail"])
def test_every_way_to_fail_has_a_status(judge, code, compiled, ran, message):
    result = judge(code.replace("@OPEN", "(" * 5000))
    assert (result.compile_status, result.run_status, result.passed) == (compiled, ran, 0)
    assert message in result.message
    assert not result.all_passed


@pytest.mark.parametrize("loop", ["while True: pass", "def double(x):\n    while True: pass"])
def test_a_program_that_does_not_end_is_stopped_and_not_remembered(loop):
    runner = CodeRunner(LocalSandbox(), timeout_s=0.5)
    for runs in (1, 2):
        result = runner.run(loop, CodeProblem.of(DOUBLE))
        assert "timeout" in (result.compile_status, result.run_status)
        assert result.seconds < 0.5 + 2
        assert runner.sandbox.num_runs == runs


def test_what_a_program_prints_and_reads_stays_away_from_the_verdict(judge):
    noisy = "import sys\nprint('x' * 10**6, input if 0 else '')\nsys.stderr.write('y')\n" + RIGHT
    assert judge(noisy).all_passed
    assert "EOFError" in judge("input()").message


# Code that would rather not be tested

CHEATS = CASES["cheats"]


@pytest.mark.parametrize("cheat", CHEATS)
def test_no_trick_passes_and_none_makes_the_reward_invalid(runner, cheat):
    if "the judge's" in cheat and os.geteuid() == 0:
        pytest.skip("root may look into every process; sandboxes take that right away")
    parser = CodeRewardParser(runner=runner, partial_credit=False)
    score = parser.score(fenced(CHEATS[cheat]), DOUBLE)
    assert not score.success
    assert score.reward <= 0


def test_a_process_that_ends_its_judge_is_killed_and_not_a_failure_of_the_sandbox(judge):
    result = judge(CHEATS["kills its judge"])
    assert (result.run_status, result.passed) == ("killed", 0)


def test_the_tests_import_nothing_that_the_code_has_written(judge):
    code = (
        "import os\nopen('colorsys.py', 'w').write('def rgb_to_hsv(*a): return (0, 0, 0)')\n"
        "assert os.path.exists('colorsys.py')\ndef f(): return (0, 0, 0)"
    )
    tests = "import colorsys\nassert f() == colorsys.rgb_to_hsv(1, 0.5, 0)"
    assert judge(code, {"entry_point": "f", "tests": tests}).run_status == "wrong"


# Data that crosses


@pytest.mark.parametrize(
    "value",
    [
        "(1, [2.5, {'a': None}], {3}, frozenset({4}), b'5', 1 + 2j, True, bytearray(b'x'))",
        "__import__('collections').Counter('aab')",
        "__import__('collections').namedtuple('P', 'x y')(1, 2)",
        "float('inf')",
        "10 ** 400",
        "'\\ud800'",
        "list(range(10**5))",
    ],
)
def test_plain_data_and_subclasses_of_it_come_back_equal(judge, value):
    problem = {"entry_point": "f", "tests": f"v = {value}\nassert f(v) == v\nassert v == f(v)"}
    assert judge("def f(x): return x", problem).all_passed


def test_a_tuple_is_no_list_and_one_is_not_true(judge):
    tests = "assert f([1]) == (1,)\nassert isinstance(f(0), tuple)\nassert f(0) is not True"
    problem = {"entry_point": "f", "tests": tests}
    assert judge("def f(x): return (1,)", problem).all_passed
    assert judge("def f(x): return [1]", problem).run_status == "wrong"


def test_tests_may_expect_an_exception_and_may_use_the_prelude(judge):
    problem = {
        "entry_point": "f",
        "prelude": "import math\ndef helper(x):\n    return x + 1\ndef f(x):\n    ...\n",
        "tests": "try:\n    f(-1)\nexcept ValueError as e:\n    assert 'negative' in str(e)\n"
        "else:\n    assert False, 'must raise'\nassert f(4) == helper(math.sqrt(4))",
    }
    code = (
        "def f(x):\n    if x < 0:\n        raise ValueError('negative')\n    return helper(x**.5)"
    )
    assert judge(code, problem).all_passed
    # The stub of the prelude is not the answer.
    assert judge("x = 1", problem).message == "the code defines no function 'f'"


def test_dataclasses_and_future_imports_work_in_a_program(judge):
    code = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass P:\n    x: int\n"
        "def double(x: P | int):\n    return P(x).x * 2"
    )
    assert judge(code).all_passed


# Cases and credit


def test_cases_that_were_not_run_count_as_failed(judge):
    last_only = "def double(x): return x * 2 if isinstance(x, str) or x < 0 else 5"
    assert judge(last_only)[1:4] == ("wrong", 0, 3)
    assert judge(last_only, stop_early=False)[1:4] == ("wrong", 2, 3)
    ends = "import os\ndef double(x): return 2 * x if x == 2 else os._exit(0)"
    assert judge(ends, stop_early=False)[1:4] == ("runtime", 1, 3)


def test_a_loop_of_assertions_is_one_case_and_a_constant_one_is_none():
    tests = (
        "def check(f):\n    '''Cases.'''\n    assert True, 'for show'\n"
        "    for i in range(9):\n        assert f(i) == i\n    x = 3\n    assert f(x) == x"
    )
    assert CodeProblem("f", tests).num_cases == 2


def test_what_a_case_defines_is_there_in_the_next(judge):
    tests = "def check(f):\n    assert (y := f(1)) == 2\n    z = y\n    assert f(z) == 2 * y"
    assert judge(RIGHT, {"entry_point": "double", "tests": tests}).all_passed


@pytest.mark.parametrize("tests", ["", "def check(f):\n    f(1)", "def check(f):\n    assert True"])
def test_a_problem_without_a_case_is_refused(runner, tests):
    with pytest.raises(DataError, match="the tests of 'f' assert nothing"):
        CodeProblem.of({"entry_point": "f", "tests": tests})
    with pytest.raises(RewardError, match="assert nothing"):
        runner.run("def f(): pass", CodeProblem("f", tests))
    assert runner.sandbox.num_runs == 0


def test_rows_that_are_no_problem_say_what_is_missing():
    with pytest.raises(DataError, match=r"'entry_point' and 'tests'.*\['tests'\]"):
        CodeProblem.of({"tests": "assert f()"})
    with pytest.raises(DataError, match="the tests are no Python"):
        CodeProblem.of({"entry_point": "f", "tests": "assert ("})
    with pytest.raises(DataError, match="is a mapping, got 'x'"):
        CodeRewardParser(runner=CodeRunner(LocalSandbox())).score("x = 1", "x")


@pytest.mark.parametrize(
    ("response", "reward", "partial"),
    [
        (RIGHT, 1.0, 1.0),
        (fenced(RIGHT), 1.0, 1.0),
        ("def double(x): return x * 2 if x != 2 else 0", 0.0, 2 / 3),
        ("def double(x): return 0", 0.0, 0.0),
        ("def double(x):", -0.1, -0.1),
        ("import nothing_there", -0.1, -0.1),
        ("", -0.1, -0.1),
        ("<think>def double(x): return 2 * x</think>  \n", -0.1, -0.1),
        ("```python\n```", -0.1, -0.1),
    ],
)
def test_rewards_follow_the_table(runner, response, reward, partial):
    whole = CodeRewardParser(runner=runner).score(response, DOUBLE)
    part = CodeRewardParser(runner=runner, partial_credit=True).score(response, DOUBLE)
    assert whole.reward == pytest.approx(reward)
    assert part.reward == pytest.approx(partial)
    assert whole.success == part.success == (reward == 1.0)


def test_a_time_limit_has_a_reward_of_its_own():
    runner = CodeRunner(LocalSandbox(), timeout_s=0.3)
    parser = CodeRewardParser(runner=runner, timeout_reward=-0.05)
    assert parser.score("def double(x):\n    while True: pass", DOUBLE).reward == -0.05
    assert parser.score("while True: pass", DOUBLE).reward == -0.05


# The cache


def test_the_same_program_and_tests_run_once(judge, runner):
    for _ in range(3):
        assert judge(RIGHT).all_passed
    assert runner.sandbox.num_runs == 1
    judge(RIGHT, stop_early=False)
    judge(RIGHT + "\n")
    judge(RIGHT, {**DOUBLE, "tests": "assert double(1) == 2"})
    assert runner.sandbox.num_runs == 4


def test_threads_that_ask_at_once_get_one_run(judge, runner):
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(judge, [RIGHT] * 16))
    assert all(result == results[0] for result in results)
    assert runner.sandbox.num_runs == 1


def test_the_oldest_result_is_forgotten_first():
    runner = CodeRunner(LocalSandbox(), cache_size=1)
    for code in (RIGHT, "x = 1", RIGHT):
        runner.run(code, CodeProblem.of(DOUBLE))
    assert runner.sandbox.num_runs == 3
    runner.run(RIGHT, CodeProblem.of(DOUBLE))
    assert runner.sandbox.num_runs == 3


def test_a_failure_of_the_sandbox_is_invalid_for_everyone_who_asked_and_not_remembered():
    sandbox = LocalSandbox(broken="no user namespaces")
    runner = CodeRunner(sandbox)
    for _ in range(2):
        with pytest.raises(RewardError, match=r"sandbox failed \(sandbox_error\): no user names"):
            runner.run(RIGHT, CodeProblem.of(DOUBLE))
    assert sandbox.num_runs == 2
    sandbox.broken = None
    assert runner.run(RIGHT, CodeProblem.of(DOUBLE)).all_passed


def test_a_sandbox_whose_interpreter_does_not_start_has_failed():
    class NoPython(LocalSandbox):
        python = "/bin/false"

    with pytest.raises(RewardError, match=r"the sandbox failed \(error\)"):
        CodeRunner(NoPython()).run(RIGHT, CodeProblem.of(DOUBLE))


def test_runners_are_copied_and_pickled_without_results_or_locks(runner, judge):
    judge(RIGHT)
    assert copy.deepcopy(runner) is not runner
    for other in (pickle.loads(pickle.dumps(runner)), copy.deepcopy(runner)):
        assert other.timeout_s == runner.timeout_s
        assert other.run(RIGHT, CodeProblem.of(DOUBLE)).all_passed


# Finding code


def test_the_code_of_a_response():
    for response, code in CASES["the_code_of_a_response"]:
        assert extract_code(response, "f") == code


@pytest.mark.full
def test_a_long_line_of_fences_takes_linear_time():
    assert extract_code("```\nx\n```\n" * 20_000, "f") == "x\n"
    assert extract_code("`" * 200_000, "f") == "`" * 200_000
    assert extract_code("```\n" * 100_000, "f") is None
    assert extract_code("<answer>" * 100_000 + "x", "f") == "<answer>" * 100_000 + "x"


def test_answers_survive_json():
    # rows come from JSON lines and travel as plain values
    assert CodeProblem.of(json.loads(json.dumps(DOUBLE))).num_cases == 3
