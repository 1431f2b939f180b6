"""The task of repairs: problems, what the shell leaves, and who is rewarded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recipes.script import run_alone
from rewards.local_sandbox import LocalSandbox
from tensordict import TensorDict
from torchrl.envs.utils import check_env_specs, step_mdp

from torchrl_llm.collectors import LLMCollector
from torchrl_llm.data import Source
from torchrl_llm.data.history import History
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.envs.datasets.repairs import (
    _MISTAKES,
    RepairsEnv,
    repair_problem,
    repair_problems,
)
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.modules import FakeWrapper, load_tokenizer
from torchrl_llm.rewards.code import CodeRunner, FilesRewardParser

EVALUATE = Path(__file__).parents[3] / "sota-implementations" / "evaluate" / "evaluate.py"
PER_MISTAKE = 4560 // len(_MISTAKES)
pytestmark = pytest.mark.filterwarnings("ignore:SubprocessSandbox:RuntimeWarning")


def judge(files, answer):
    reward = FilesRewardParser(runner=CodeRunner(LocalSandbox()))
    return reward.score(json.dumps(files), answer)


def writing(files):
    """A command that writes files."""
    return "\n".join(f"cat > {path} <<'END'\n{text}END" for path, text in files.items())


def called(command):
    function = {"name": "shell", "arguments": {"command": command}}
    return {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}


def turn(td, *messages):
    chats = zip(td["history"].prompt.chats, messages, strict=True)
    td["history"].full = History.of([chat + [message] for chat, message in chats])
    return td


DONE = {"role": "assistant", "content": "It is repaired."}


# Problems


def test_each_problem_belongs_to_one_split_and_is_a_different_one():
    train, test = repair_problems("train"), repair_problems("test")
    assert sorted([*train, *test]) == list(range(4560))
    rows = [json.dumps(repair_problem(number)) for number in (*train, *test)]
    assert len(set(rows)) == 4560
    assert not [row for row in rows if "NUMBER" in row or "MODULE" in row]
    with pytest.raises(ConfigError, match="split"):
        repair_problems("dev")


@pytest.mark.parametrize("kind", range(len(_MISTAKES)))
def test_the_broken_files_of_a_problem_fail_and_the_right_ones_pass(kind):
    for number in (0, PER_MISTAKE // 2, PER_MISTAKE - 1):  # from 3 to 40
        row = repair_problem(kind * PER_MISTAKE + number)
        assert row["files"].keys() == row["solution"].keys()
        assert row["files"] != row["solution"]
        assert judge(row["solution"], row["answer"]) == (1.0, True, True, False)
        assert judge(row["files"], row["answer"]) == (0.0, False, True, False)


def test_files_that_are_gone_or_no_python_are_worth_nothing():
    row = repair_problem(0)
    (path,) = row["files"]
    for text in (None, "def window_sums(", "window_sums = 3", "raise SystemExit"):
        assert judge({path: text}, row["answer"])[:2] == (0.0, False)
    with pytest.raises(DataError, match="entry_point"):
        judge(row["files"], {"module": "shop"})


def test_what_is_written_into_the_files_cannot_pass_the_tests_by_itself():
    row = repair_problem(0)
    (path,) = row["files"]
    for text in (
        "import os\nos._exit(0)",
        "class Same:\n    def __eq__(self, other): return True\ndef window_sums(*a): return Same()",
        "import sys\nsys.modules.clear()\ndef window_sums(values, size=0): return []",
    ):
        assert judge({path: text}, row["answer"]).reward == 0.0


# Episodes


def test_who_repairs_is_rewarded_and_who_does_not_is_not():
    env = RepairsEnv(num_envs=4, split="test", shuffle=False)
    td = env.reset()
    rows = [repair_problem(number) for number in repair_problems("test")[:4]]
    assert list(td["files"]) == [row["files"] for row in rows]
    right, wrong = writing(rows[0]["solution"]), writing({"new.py": "x = 1\n"})
    say = called(f"ls; {right}\npython3 -c 'import {rows[0]['answer']['module']}'")
    td = env.step(turn(td, say, called(wrong), DONE, called(f"rm {' '.join(rows[3]['files'])}")))
    after = td["next"]
    assert after["tools", "auxiliary"].flatten().tolist() == [True, True, False, True]
    assert after["done"].flatten().tolist() == [False, False, True, False]
    assert after["history"].prompt.chats[0][-1]["content"].split() == sorted(rows[0]["files"])
    td = env.step(turn(step_mdp(td).set("_step", ~after["done"]), *[DONE] * 4))["next"]
    assert td["reward"].flatten().tolist() == [1.0, 0.0, 0.0, 0.0]
    assert td["success"].flatten().tolist() == [True, False, False, False]
    assert td["reward_valid"].all()
    assert td["done"].all()
    assert td["files"][0] == rows[0]["solution"]
    assert set(td["files"][3].values()) == {None}
    env.close()


def test_rows_that_are_kept_can_be_judged_again():
    row = repair_problem(0)
    kept = TensorDict(
        {"files": [row["files"], row["solution"]], "answer": [row["answer"]] * 2}, batch_size=2
    )
    reward = FilesRewardParser(runner=CodeRunner(LocalSandbox()), input_mode="history")
    assert reward(kept)["next", "reward"].flatten().tolist() == [0.0, 1.0]


@pytest.mark.parametrize("repairs", [True, False])
def test_a_policy_that_calls_as_its_template_says_is_collected_and_rewarded(repairs):
    tokenizer = load_tokenizer()
    solutions = {
        (row := repair_problem(number))["query"]: row["solution"]
        for number in repair_problems("test")[:2]
    }

    def reply(prompt):
        if "<tool_response>" in prompt:
            return "done"
        files = next(files for query, files in solutions.items() if query in prompt)
        files = files if repairs else {"other.txt": "x\n"}
        call = {"name": "shell", "arguments": {"command": f"{writing(files)}\nls"}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

    env = RepairsEnv(num_envs=2, split="test", shuffle=False, tokenizer=tokenizer)
    policy = FakeWrapper(reply, tokenizer=tokenizer)
    collector = LLMCollector(
        env,
        policy=policy,
        yield_completed_trajectories=True,
        reset_at_each_iter=True,
    )
    rows = row_list(next(iter(collector)))
    ends = [row for row in rows if row["next", "done"].item()]
    assert [row["next", "reward"].item() for row in ends] == [float(repairs)] * 2
    for row in ends:
        sources = row["trace", "source"]
        assert (sources == Source.TOOL).any()
        assert not row["masks", "all_assistant_mask"][sources == Source.TOOL].any()
    env.close()


def test_the_embedded_model_is_evaluated_and_repairs_nothing(tmp_path, monkeypatch):
    overrides = ("tasks=[repairs]", "eval.num_prompts=4", "inference_model.max_tokens=16")
    run_alone(monkeypatch, EVALUATE, tmp_path, *overrides)
    result = json.loads((tmp_path / "metrics.json").read_text())["repairs"]
    assert (result["accuracy"], result["invalid"], result["num_prompts"]) == (0.0, 0.0, 4)
    lines = (tmp_path / "answers_repairs.jsonl").read_text().splitlines()
    first = repair_problem(repair_problems("test")[0])
    assert json.loads(lines[0])["messages"][1]["content"] == first["query"]


def test_the_specs_describe_what_it_gives():
    env = RepairsEnv(num_envs=2)
    check_env_specs(env)
    assert [tool["function"]["name"] for tool in env.tool_schemas] == ["shell"]
    env.close()
