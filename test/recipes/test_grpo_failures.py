"""Nothing fails in silence: what a user sees of rewards, tools and worlds that fail, as a run."""

import json
import shlex
import subprocess
import sys
from functools import partial
from itertools import pairwise

import pytest
from recipes.grpo_helper import SCRIPT, SMALL, column, rows, run_script

from torchrl_llm._registry import names
from torchrl_llm.assets import embedded_model_path
from torchrl_llm.data import failures
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.envs import TaskEnv
from torchrl_llm.recipes import builders
from torchrl_llm.recipes.tasks import task_class
from torchrl_llm.trainers import BatchSource

FATES = ("trained", "stale", "filtered", "truncated", "invalid", "surplus", "lost", "pending")
TYPO = "def score(response, answer):\n    return float(response.strp() == answer)\n"


@pytest.fixture
def run(monkeypatch):
    return partial(run_script, monkeypatch)


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(failures, "_said", set())
    monkeypatch.setattr(failures.logger, "warning", lines.append)
    return lines


def check_ledger(table):
    carried = 0
    for row in table:
        if row.get("train/tokens_generated"):
            spent = [int(row[f"train/tokens_{fate}"]) for fate in FATES]
            assert carried + int(row["train/tokens_generated"]) == sum(spent) > 0
            carried = spent[-1]


def typed(*words, folder):
    """A command as a user types it."""
    return subprocess.run(
        [str(word) for word in words], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.full
def test_a_typo_in_a_reward_is_shown_and_ends_the_run_which_goes_on_when_it_is_mended(tmp_path):
    reward = tmp_path / "mine.py"
    reward.write_text(TYPO)
    steps = ["train.max_steps=2", "inference_model.max_tokens=6", "eval.num_prompts=0"]
    begun = typed(
        sys.executable,
        SCRIPT,
        *SMALL,
        *steps,
        "reward=mine.py:score",
        f"hydra.run.dir={tmp_path / 'run'}",
        folder=tmp_path,
    )
    assert begun.returncode == 1
    told = begun.stdout + begun.stderr
    assert told.count("Traceback") == 1
    assert f'  File "{reward}", line 2, in score\n    return float(response.strp()' in told
    assert "\nAttributeError: 'str' object has no attribute 'strp'" in told
    assert "\n  query:    What is " in told
    assert f"16 of them by AttributeError: 'str' object has no attribute 'strp' at {reward}" in told
    reward.write_text(TYPO.replace("strp", "strip"))
    [command] = [line for line in begun.stderr.splitlines() if "checkpoint.resume=auto" in line]
    name, *words = shlex.split(command)
    assert name == "python"
    ended = typed(sys.executable, *words, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    table = rows(tmp_path / "run")
    assert [row["train/step"] for row in table] == ["1", "2"]
    assert column(table, "train/reward_errors") == [16, 0]
    check_ledger(table)


def test_a_file_of_ones_own_without_a_right_answer_is_told_once_with_two_answers(
    tmp_path, run, capsys
):
    problem = {"question": "Who wrote Faust?", "answer": "#### 1808"}
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(problem) + "\n" for _ in range(12)))
    run(
        tmp_path / "run",
        "env=gsm8k",
        f"env.data_files={file}",
        "train.max_steps=4",
        "train.no_signal_steps=2",
        "inference_model.max_tokens=8",
    )
    told = capsys.readouterr().err
    begin = "no signal: in each of the last 2 steps all answers had the same reward"
    assert told.count(begin) == 1
    told = told.partition(begin)[2]
    assert told.count("  query:    Who wrote Faust?") == 2
    assert told.count("  answer:   #### 1808") + told.count("  answer:   1808") == 2
    assert "Look at the form that the reward expects" in told


TOOL = """
from torchrl_llm.envs.datasets import CalculatorEnv
from torchrl_llm.tools import ToolTransform


def calculator(expression: str) -> str:
    '''Compute.

    Args:
        expression: what.
    '''
    return {}[expression]


class BrokenEnv(CalculatorEnv):
    def make_tools(self):
        return [ToolTransform([calculator])]
"""


def test_a_tool_that_raises_is_shown_and_counted_and_the_run_goes_on(
    tmp_path, run, said, monkeypatch
):
    module = f"broken_tool_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(TOOL)
    monkeypatch.syspath_prepend(str(tmp_path))
    table = run(
        tmp_path / "run",
        "env=calculator",
        f"env.dataset={module}:BrokenEnv",
        "train.max_steps=2",
        "eval.num_prompts=0",
    )
    assert min(column(table, "train/tool_errors")) > 4
    assert column(table, "train/reward_errors") == [0, 0]
    check_ledger(table)
    [text] = [text for text in said if "calculator" in text]
    assert text.startswith("tool 'calculator' failed")
    assert f'  File "{tmp_path / module}.py", line 12, in calculator\n    return {{}}' in text
    assert "\nKeyError: '" in text


@pytest.mark.full
def test_a_task_that_the_model_of_the_package_cannot_learn_is_told_before_anything_else(
    tmp_path, run, said
):
    small = ["train.max_steps=1", "eval.num_prompts=0", "env.max_steps=1"]
    run(tmp_path / "a", "env=tic_tac_toe", *small)
    assert said[0].startswith("env=tic_tac_toe is a task for a larger model. ")
    assert "model.name=" in said[0]
    said.clear()
    run(tmp_path / "b", "env=tic_tac_toe", f"model.name={embedded_model_path()}", *small)
    run(tmp_path / "c", *small)
    assert not [text for text in said if "larger" in text]


def test_the_tasks_say_themselves_what_they_need():
    small = {name for name in names("tasks") if not task_class(name).NEEDS_LARGER_MODEL}
    assert small == {"arithmetic", "calculator", "delegation", "rows", "verifiers"}
    assert not TaskEnv.NEEDS_LARGER_MODEL


@pytest.mark.full
def test_a_game_that_outgrows_the_context_goes_on_to_the_end(tmp_path, run, monkeypatch):
    seen, fill = [], BatchSource.fill

    def remembered(self):
        seen.append(fill(self))
        return seen[-1]

    monkeypatch.setattr(BatchSource, "fill", remembered)
    table = run(
        tmp_path,
        "env=key_door",
        "train.max_steps=1",
        "train.prompts_per_batch=1",
        "inference_model.max_tokens=700",
        "eval.num_prompts=0",
        "filter.zero_variance=drop",
    )
    assert max(column(table, "train/out_of_context")) > 0
    assert column(table, "train/overlong") == [0]
    check_ledger(table)
    for found in seen:
        turns = {}
        for row in row_list(found):
            turns.setdefault(int(row["traj_id"]), []).append(row)
        for trajectory in turns.values():
            for before, after in pairwise(trajectory):
                assert not before["next", "done"].any()
                assert len(before["tokens", "full"]) < len(after["tokens", "prompt"]) < 2048
            assert trajectory[-1]["next", "done"].all()
            assert all(len(row["tokens", "response"]) for row in trajectory)


def test_a_prompt_may_grow_to_the_length_that_was_asked_for(tmp_path, run):
    table = run(
        tmp_path,
        "env=key_door",
        "train.max_steps=1",
        "env.max_prompt_length=400",
        "inference_model.max_tokens=60",
        "eval.num_prompts=4",
    )
    assert [row["train/step"] for row in table] == ["0", "1"]
    assert column(table, "train/out_of_context") == [1.0]
    check_ledger(table)


def test_a_task_of_one_turn_has_nothing_that_counts_its_tokens():
    from torchrl_llm.trainers import load_config

    def names(**env):
        config = load_config({"env": {"repeats": 2, **env}, "train": {"prompts_per_batch": 1}})
        env = builders.make_train_env(config, builders.make_tokenizer(None, 8), seed=0)
        return [type(transform).__name__ for transform in env.transform]

    assert "ContextLimit" not in names()
    assert names(dataset="calculator")[-1] == "ContextLimit"
