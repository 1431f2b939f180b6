"""HumanEvalEnv: the real problems in the real sandbox, and small ones without it."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from envs.fake_policy import AnsweringPolicy
from rewards.local_sandbox import LocalSandbox

from torchrl_llm.agents import ReToolAgent
from torchrl_llm.data.history import History
from torchrl_llm.data.row_files import load_rows
from torchrl_llm.envs.datasets.hub_tasks import HumanEvalEnv
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.rewards import RewardParser
from torchrl_llm.rewards.code import CodeProblem, CodeRunner, HumanEvalRewardParser
from torchrl_llm.sandbox import Limits, make_sandbox

PROMPT = "from math import floor\n\ndef half(x):\n    '''Half of x, rounded down.'''\n"
TEST = "def check(candidate):\n    assert candidate(5) == 2\n    assert candidate(-1) == -1\n"
ROW = {"task_id": "T/0", "prompt": PROMPT, "entry_point": "half", "test": TEST}
BODY = "    return floor(x / 2)\n"


class LocalEnv(HumanEvalEnv):
    """Without a sandbox."""

    def make_reward(self):
        return HumanEvalRewardParser(runner=CodeRunner(LocalSandbox()))


def test_rows_become_query_answer_and_solution():
    td = LocalEnv(dataset=[{**ROW, "canonical_solution": BODY}], num_envs=2, repeats=2).reset()
    assert list(td["query"]) == [PROMPT] * 2
    assert list(td["solution"]) == [BODY] * 2
    assert list(td["task_id"]) == ["T/0"] * 2
    assert td["answer"][0] == {"entry_point": "half", "test": TEST, "prompt": PROMPT}
    assert td["history"].prompt.role == [["system", "user"]] * 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"test": "def check(candidate):\n    pass"}, "T/0: the tests of 'half' assert nothing"),
        ({"test": "def check(candidate:"}, "T/0: the tests are no Python"),
        ({"test": None}, "T/0: a problem of code needs the strings"),
        ({"entry_point": 3}, "T/0: a problem of code needs the strings"),
    ],
)
def test_a_problem_that_cannot_be_judged_is_refused(wrong, message):
    with pytest.raises(DataError, match=message):
        LocalEnv(dataset=[{**ROW, **wrong}])


def test_one_limit_of_memory_holds_for_tasks_agents_and_sandboxes_and_may_be_chosen():
    def limits(task, agent):
        (transform,) = agent.make_transforms()[:1]
        (tool,) = transform.tools.values()
        reward = task.make_reward().runner.limits
        return [each.memory_bytes for each in (reward, tool.executor.limits)]

    assert limits(HumanEvalEnv(dataset=[ROW]), ReToolAgent()) == [Limits().memory_bytes] * 2
    task = HumanEvalEnv(dataset=[ROW], memory_bytes=64 << 20)
    assert limits(task, ReToolAgent(memory_bytes=64 << 20)) == [64 << 20] * 2
    for refused in (0, -1):
        with pytest.raises(ConfigError, match="memory_bytes"):
            HumanEvalEnv(dataset=[ROW], memory_bytes=refused)
        with pytest.raises(ConfigError, match="memory_bytes must be at least 1"):
            ReToolAgent(memory_bytes=refused).make_transforms()


def test_a_task_of_ones_own_on_the_same_problems_has_its_own_reward():
    class Form(RewardParser):
        def score(self, response, answer):
            return 1.0

    class Own(HumanEvalEnv):
        REWARD = Form

    assert type(Own(dataset=[ROW]).make_reward()) is Form


def test_there_is_no_training_split_on_the_hub():
    with pytest.raises(ConfigError, match=r"no split 'train'.*data_files"):
        HumanEvalEnv(split="train")


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_whole_functions_and_continuations_are_scored_in_every_mode(mode, tokenizer):
    replies = [
        "```python\nimport math\ndef half(x):\n    return math.floor(x / 2)\n```",
        BODY,
        BODY + "\n\nprint(half(3))\n\nThis function halves.",
        "def half(x):\n    return floor(x / 2)",
        "```python\n    return x // 2\n```",
        "for _ in range(1):\n        x = floor(x / 2)\n    return x\n",
        "```py\nx = x / 2\nreturn floor(x)\n```",
        "    return x / 2\n",
        "    pass",
        "I cannot.",
    ]
    expected = [1.0] * 7 + [0.0, 0.0, -0.1]
    if mode != "history":  # there only the reading is another
        replies, expected = replies[::3], expected[::3]
    feed, size = iter(replies), len(replies)
    policy = AnsweringPolicy(mode, lambda prompt: next(feed), tokenizer)
    env = LocalEnv(dataset=[ROW], num_envs=size, repeats=size, input_mode=mode, tokenizer=tokenizer)
    td = env.step(policy(env.reset()))["next"]
    assert td["reward"].flatten().tolist() == pytest.approx(expected)
    assert td["reward_valid"].all()
    assert td["terminated"].all()


@pytest.mark.parametrize(
    ("before", "behind"),
    [
        ("Here is the function:\n\n", ""),
        ("", "\n\nThis rounds down."),
        ("Sure!\n\nimport math\n", "\n\nIt's done: 5 -> 2.\n"),
        ("The class of problems is known.\n@staticmethod\n", ""),
    ],
)
def test_words_around_a_function_without_a_fence_are_taken_off(before, behind):
    code = "def half(x):\n    y = x // 2\n\n    return y"
    parser = HumanEvalRewardParser(runner=CodeRunner(LocalSandbox()))
    assert parser.judge(before + code + behind, ROW).all_passed
    assert not parser.judge(before + code.replace("//", "*") + behind, ROW).all_passed


def test_a_continuation_may_hold_triple_quotes_at_the_margin():
    body = "    text = '''\nmargin'''\n    return floor(x / 2)\n"
    parser = HumanEvalRewardParser(runner=CodeRunner(LocalSandbox()))
    assert parser.judge(body, ROW).all_passed


# The real problems


@pytest.fixture(scope="module")
def problems(humaneval_file):
    return load_rows(humaneval_file)


def scored(problems, answers, runner):
    """The step after these answers, all in one batch."""

    class Env(HumanEvalEnv):
        def make_reward(self):
            return HumanEvalRewardParser(runner=runner, num_threads=64)

    env = Env(dataset=problems, shuffle=False, num_envs=len(problems))
    td = env.reset()
    turns = [[{"role": "assistant", "content": text}] for text in answers]
    chats = td["history"].prompt.chats
    td["history"].full = History.of([a + b for a, b in zip(chats, turns, strict=True)])
    return env.step(td)["next"]


def test_every_real_problem_has_cases(problems):
    made = [HumanEvalEnv.make_row(row) for row in problems]
    assert len(made) == 164
    cases = [CodeProblem.of(row["answer"]).num_cases for row in made]
    assert min(cases) == 1
    assert sum(cases) > 1000


@pytest.mark.full
@pytest.mark.sandbox
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bubblewrap on this machine")
@pytest.mark.timeout(300)
def test_all_canonical_solutions_pass_in_the_sandbox_64_at_once_and_none_without_its_body(problems):
    runner = CodeRunner(make_sandbox("bubblewrap"), timeout_s=30.0)
    right = scored(problems, [row["canonical_solution"] for row in problems], runner)
    assert right["reward_valid"].all()
    assert torch.equal(right["reward"], torch.ones(164, 1, 1))
    assert right["success"].all()
    wrong = scored(problems, ["    pass\n"] * 164, runner)
    assert wrong["reward_valid"].all()
    assert torch.equal(wrong["reward"], torch.zeros(164, 1, 1))
    assert not wrong["success"].any()


@pytest.mark.full
@pytest.mark.sandbox
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bubblewrap on this machine")
def test_64_programs_run_at_the_same_time():
    runner = CodeRunner(make_sandbox("bubblewrap"), timeout_s=30.0, cache_size=0)
    problem = CodeProblem("f", "assert f(0.5) == 1")
    code = "import time\ndef f(seconds):\n    time.sleep(seconds)\n    return 1"
    started = time.monotonic()
    with ThreadPoolExecutor(64) as pool:
        results = list(pool.map(lambda _: runner.run(code, problem), range(64)))
    assert all(result.all_passed for result in results)
    # One after another they would take as long as all of them together.
    assert sum(result.seconds for result in results) > 8 * (time.monotonic() - started)


@pytest.mark.sandbox
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bubblewrap on this machine")
@pytest.mark.parametrize("target", ["mem", "fd/1", "fd/0", "environ"])
def test_in_the_sandbox_code_cannot_look_into_the_process_that_has_the_tests(target):
    code = (
        f"import os\ndef half(x):\n    open(f'/proc/{{os.getppid()}}/{target}', 'rb').close()\n"
        "    return x // 2"
    )
    result = CodeRunner(make_sandbox("bubblewrap")).run(code, CodeProblem.of(ROW))
    assert result.run_status == "runtime"
    assert "PermissionError" in result.message


@pytest.mark.full
@pytest.mark.sandbox
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bubblewrap on this machine")
@pytest.mark.parametrize(
    ("body", "statuses"),
    [
        ("    while True: pass\n", {"timeout"}),
        ("    return 'x' * 10**10\n", {"memory"}),
        ("    import os\n    while True: os.fork()\n", {"timeout", "runtime", "killed"}),
        ("    import os, signal\n    os.kill(os.getppid(), 9)\n", {"killed"}),
        ("    import socket\n    socket.create_connection(('1.1.1.1', 53), 1)\n", {"runtime"}),
        (f"    return open({os.path.abspath(__file__)!r}).read()\n", {"runtime"}),
    ],
)
def test_hostile_answers_fail_in_time_and_the_reward_stays_valid(body, statuses):
    runner = CodeRunner(make_sandbox("bubblewrap"), timeout_s=2.0)
    parser = HumanEvalRewardParser(runner=runner)
    result = parser.judge(body, ROW)
    assert result.run_status in statuses
    # The limit of the sandbox is one second above that of the program.
    assert result.seconds < 3.0 + 2.0
    assert parser.score(body, ROW).reward <= 0.0
