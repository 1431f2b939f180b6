"""Components of a reward from the command line: real runs of the recipes."""

import importlib
from functools import partial
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from recipes.grpo_helper import SCRIPT, check_typed, column, rows, run_script
from recipes.script import run_main

from torchrl_llm._registry import _entries, find
from torchrl_llm.errors import ConfigError, RewardError
from torchrl_llm.recipes.objective_groups import RewardComponentsConfig
from torchrl_llm.recipes.ray_collection import make_collecting_env, of_collectors
from torchrl_llm.recipes.reward_config import check_function
from torchrl_llm.rewards import Scorer
from torchrl_llm.trainers import AsyncGRPOConfig, load_config

CONFIG = SCRIPT.parent / "config"
FATES = ("trained", "filtered", "truncated", "invalid", "surplus", "pending", "stale")
TWO_STEPS = ["train.max_steps=2", "inference_model.max_tokens=6"]
MINE = """
def starts_with_a_digit(sample, *, value=1.0):
    return value * sample.response[:1].isdigit()


def equal(response, answer):
    return response == answer


def of_row(response, row, *, value):
    return value * (response == row["answer"])


def fails(sample):
    raise RuntimeError("no reward today")
"""


class Halves(Scorer):
    """Half a point for each token."""

    per_token = True

    def score(self, sample):
        return [0.5] * sample.num_tokens


@pytest.fixture
def run(monkeypatch):
    return partial(run_script, monkeypatch)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*importlib.import_module("sys").path])
    path = tmp_path / f"rewards_{tmp_path.name.replace('-', '_')}.py"
    path.write_text(MINE)
    return path


def composed(*overrides, name="grpo"):
    with initialize_config_dir(str(CONFIG), version_base="1.3"):
        return compose(name, check_typed(*overrides, name=name))


def check_ledger(table):
    for row in table[1:]:
        generated = int(row["train/tokens_generated"])
        assert generated == sum(int(row[f"train/tokens_{fate}"]) for fate in FATES) > 0


def test_format_length_and_a_function_of_the_user_add_to_the_reward_of_the_task(
    tmp_path, run, mine
):
    table = run(
        tmp_path / "run",
        *TWO_STEPS,
        "reward.components.task.weight=2",
        "reward.components.format.weight=0.25",
        "reward.components.format.blocks=[answer]",
        "reward.components.length={longest: 3, cushion: 2, weight: 0.5}",
        f"reward.components.mine._target_={mine}:starts_with_a_digit",
        "reward.components.mine.value=0.5",
        f"reward.components.equal._target_={mine}:equal",
        "reward.components.equal.weight=0",
        f"reward.components.row._target_={mine}:of_row",
        "reward.components.row.value=3",
        "reward.components.row.weight=0",
    )
    check_ledger(table)
    for row in table[1:]:
        # By its signature a function is given the answer, or the row.
        assert row["train/reward_equal"] == row["train/success"]
        assert float(row["train/reward_row"]) == pytest.approx(3 * float(row["train/success"]))
        parts = {name: float(row[f"train/reward_{name}"]) for name in ("task", "format", "length")}
        mine = float(row["train/reward_mine"])
        total = 2 * parts["task"] + 0.25 * parts["format"] + 0.5 * parts["length"] + mine
        assert float(row["train/reward"]) == pytest.approx(total, abs=1e-5)
        # What is right is the task's to say.
        assert parts["task"] == pytest.approx(float(row["train/success"]), abs=1e-5)
        assert parts["format"] == 0 < mine <= 0.5
        assert float(row["train/invalid_mine"]) == 0
    evaluated = [float(row["eval/reward"]) for row in table if row.get("eval/reward")]
    accuracy = column(table, "eval/accuracy")
    assert all(reward > 2 * right for reward, right in zip(evaluated, accuracy, strict=True))


def test_without_components_the_rows_have_none(tmp_path, run):
    table = run(tmp_path, *TWO_STEPS)
    assert not [name for name in table[1] if name.startswith("train/reward_t")]


def test_a_component_that_fails_makes_rows_invalid_and_an_optional_one_does_not(
    tmp_path, run, mine
):
    failing = f"reward.components.mine._target_={mine}:fails"
    with pytest.raises(RewardError, match="none of the 2 steps had a valid reward"):
        run(tmp_path / "a", *TWO_STEPS, failing, "reward.on_all_invalid=continue")
    table = rows(tmp_path / "a")
    check_ledger(table)
    assert column(table, "train/invalid") == [1.0, 1.0]
    assert column(table, "train/reward_errors") == [16, 16]
    assert column(table, "train/tokens_trained") == [0.0, 0.0]
    table = run(tmp_path / "b", *TWO_STEPS, failing, "reward.components.mine.optional=true")
    check_ledger(table)
    assert column(table, "train/invalid") == [0.0, 0.0]
    assert column(table, "train/invalid_mine") == [1.0, 1.0]
    # The weight of what failed goes to the task, whose reward is 1 for a right answer.
    assert column(table, "train/reward") == [2 * right for right in column(table, "train/success")]


@pytest.mark.full
def test_components_run_in_processes_of_their_own(tmp_path, run, mine):
    table = run(
        tmp_path / "run",
        *TWO_STEPS,
        f"reward.components.mine._target_={mine}:starts_with_a_digit",
        "reward.components.mine.run=processes",
        "reward.components.mine.num_workers=1",
        "reward.components.mine.timeout=120",
    )
    check_ledger(table)
    assert column(table, "train/invalid_mine") == [0.0, 0.0]
    assert min(column(table, "train/reward_mine")) > 0


@pytest.mark.parametrize("task", ["tic_tac_toe", "calculator"])
def test_tasks_of_several_turns_take_components(tmp_path, run, mine, task):
    table = run(
        tmp_path / "run",
        f"env={task}",
        "train.max_steps=2",
        "inference_model.max_tokens=8",
        *(["env.max_steps=3"] if task == "tic_tac_toe" else []),
        f"reward.components.mine._target_={mine}:starts_with_a_digit",
        "reward.components.mine.weight=0.1",
    )
    check_ledger(table)
    for row in table[1:]:
        total = float(row["train/reward_task"]) + 0.1 * float(row["train/reward_mine"])
        assert float(row["train/reward"]) == pytest.approx(total, abs=1e-5)


@pytest.mark.parametrize("advantage", ["monte_carlo", "group"])
def test_rewards_per_token_reach_the_rules_of_credit_that_read_them(tmp_path, run, advantage):
    table = run(
        tmp_path,
        *TWO_STEPS,
        f"advantage={advantage}",
        "reward.components.mine._target_=recipes.test_grpo_rewards.Halves",
        "reward.overlong_cache=2",
    )
    check_ledger(table)
    for row in table[1:]:
        expected = 0.5 * float(row["train/response_length"])
        assert float(row["train/reward_mine"]) == pytest.approx(expected, rel=1e-5)


def test_a_registered_scorer_of_tokens_is_known_by_its_name(monkeypatch):
    monkeypatch.setitem(_entries["rewards"], "halves", Halves)
    assert RewardComponentsConfig(components={"halves": {}}).per_token
    assert RewardComponentsConfig(components={"halves": {"type": None}}).per_token
    assert RewardComponentsConfig(components={"mine": {"type": "halves"}}).per_token
    assert not RewardComponentsConfig(components={"task": {}, "format": {}}).per_token


def test_collectors_elsewhere_get_the_components(mine):
    overrides = [f"reward.components.mine._target_={mine}:starts_with_a_digit"]
    with initialize_config_dir(str(CONFIG), version_base="1.3"):
        values = compose("grpo-async", check_typed(*overrides, name="grpo-async"))
    config = of_collectors(load_config(values, AsyncGRPOConfig), device="cpu")
    env = make_collecting_env(config)
    assert set(env.reward_spec["rewards"].keys()) == {"task", "mine"}


def test_collectors_elsewhere_read_rows_of_ones_own(tmp_path):
    rows = tmp_path / "rows.csv"
    rows.write_text("prompt,answer\n" + "".join(f"{i}+1,{i + 1}\n" for i in range(40)))
    values = {"env": {"dataset": "rows", "repeats": 2}, "eval": {"num_prompts": 4}}
    values |= {"data": {"source": str(rows)}, "reward": {"function": "exact"}}
    config = of_collectors(load_config(values, AsyncGRPOConfig), device="cpu")
    assert make_collecting_env(config).batch_size == (16,)  # half of 16 prompts, two of each


def test_expert_iteration_selects_by_the_whole_reward(tmp_path, monkeypatch, mine):
    script = Path(SCRIPT).parents[1] / "expert-iteration" / "expert-iteration.py"
    table = run_main(
        monkeypatch,
        script,
        tmp_path / "run",
        "train.max_steps=1",
        "train.prompts_per_batch=2",
        "env.repeats=4",
        "eval.num_prompts=0",
        "logging.progress=false",
        "optimizer.warmup_steps=0",
        "reward.components.task.weight=0",
        f"reward.components.mine._target_={mine}:starts_with_a_digit",
    )
    (row,) = [row for row in table if row.get("train/reward")]
    assert float(row["train/reward"]) == float(row["train/reward_mine"])


# Settings


IMPOSSIBLE = [
    (["length.weight=1"], r"reward\.components\.length: missing.*'longest'.*shortest"),
    (["length.longest=3", "length.longst=4"], r"unexpected keyword argument 'longst'"),
    (["length.longest=-3"], r"reward\.components\.length: a length needs"),
    (["short.longest=3"], r"\.short: type must be one of \[.*'format'.*'length'"),
    (["short.type=lenght"], r"got 'lenght'"),
    (["format.type=format", "format._target_=a.b"], "pass one"),
    (["format.weight=x"], r"format: weight must be float, got 'x'"),
    (["format.run=somewhere"], r"format: run must be one of"),
    (["format.timeout=3"], r"format: a time limit needs"),
    (["task.run=threads"], r"task: the task's own reward has a weight"),
    (["task.weight=0"], r"reward\.components: a reward needs a component with a weight"),
    (["mine._target_=polite"], r"names no module"),
    (["mine._target_=nowhere.polite"], r"No module named 'nowhere'"),
    (["mine._target_=math.polite"], r"there is no 'polite' in math"),
    (["mine._target_=nowhere.py:polite"], r"there is no file .*nowhere\.py"),
    (["mine._target_=recipes.test_grpo_rewards.Halves", "mine.a=1"], "Halves takes no arg"),
    (["mine._target_=recipes.test_grpo_rewards.CONFIG", "mine.a=1"], "takes no arguments"),
    (["mine._target_=recipes.test_grpo_rewards.TWO_STEPS"], "a component is a Scorer"),
    (["judge.url=http://x", "judge.model=m", "judge.read=all"], "read must be one of"),
    (
        ["judge.url=http://x", "judge.model=m", "judge.api_key_variable=NOT_THERE_AT_ALL"],
        "NOT_THERE_AT_ALL is not set",
    ),
]


@pytest.mark.full
def test_components_that_cannot_be_are_refused_before_anything_is_loaded():
    for overrides, problem in IMPOSSIBLE:
        overrides = [f"reward.components.{each}" for each in overrides]
        with pytest.raises(ConfigError, match=problem):
            load_config(composed(*overrides))


def test_a_component_that_is_no_group_is_refused():
    with pytest.raises(ConfigError, match=r"reward\.components\.format must be a group of keys"):
        load_config({"reward": {"components": {"format": 3}}})


def test_a_file_whose_name_another_module_has_is_refused(tmp_path):
    path = tmp_path / "json.py"
    path.write_text(MINE)
    with pytest.raises(ConfigError, match="another module is called 'json'"):
        load_config({"reward": {"components": {"mine": {"_target_": f"{path}:fails"}}}})


def test_paths_of_files_do_not_depend_on_the_working_folder(mine, monkeypatch, tmp_path):
    monkeypatch.chdir(mine.parent)
    target = f"{mine.name}:starts_with_a_digit"
    config = load_config({"reward": {"components": {"mine": {"_target_": target}}}})
    assert config.reward.components["mine"]["_target_"] == f"{mine.resolve()}:starts_with_a_digit"


def test_credit_that_reads_no_reward_refuses_components_that_count():
    with pytest.raises(ConfigError, match=r"reward\.components without effect"):
        load_config(composed("advantage=constant", "reward.components.format.weight=1"))
    load_config(composed("advantage=constant", "reward.components.format.weight=0"))


def test_keys_that_only_the_user_knows_are_new_to_hydra():
    given = ["seed=1", "env.options.player=X", "+env.options.a=1", "reward.components={}"]
    passed = check_typed(*given)
    assert passed == ["seed=1", "++env.options.player=X", "+env.options.a=1", f"++{given[3]}"]
    config = load_config(composed("env=tic_tac_toe", "env.options.player=X"))
    assert config.env.options["player"] == "X"


def test_what_a_file_of_the_users_lacks_is_told_with_what_it_has(tmp_path):
    file = tmp_path / "own_rewards.py"
    file.write_text("import math\nWEIGHT = 2\ndef exactly(response, answer): return 1.0\n")
    with pytest.raises(ConfigError, match=r"there is no 'exact' in own_rewards; it has exactly$"):
        find("rewards", f"{file}:exact")
    with pytest.raises(ConfigError, match=r"name what is in the file, .*own_rewards\.py:NAME"):
        find("rewards", str(file))
    with pytest.raises(ConfigError, match=r"own_rewards\.py:WEIGHT is 2, and no function"):
        check_function(f"{file}:WEIGHT")
    judge = tmp_path / "own_judge.py"
    judge.write_text(
        "from torchrl_llm.rewards import JudgeReward\n"
        "judge = JudgeReward(lambda asked: ['Score: 7'] * len(asked), '{response}')"
    )
    assert check_function(f"{judge}:judge").score("4", "4").reward == 0.7
    raising = tmp_path / "own_raising.py"
    raising.write_text("import math\nWEIGHT = 1 / 0\n")
    with pytest.raises(ConfigError, match=r"division by zero \(.*own_raising\.py, line 2\)$"):
        find("rewards", f"{raising}:WEIGHT")
    leaving = tmp_path / "own_leaving.py"
    leaving.write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match=r"SystemExit: 0 \(.*own_leaving\.py, line 2\)$"):
        find("rewards", f"{leaving}:exact")
