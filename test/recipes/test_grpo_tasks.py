"""Every task through the GRPO recipe: ``env=NAME``, its settings, its data, two steps."""

import gzip
import inspect
import json
from functools import partial
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from recipes.grpo_helper import SCRIPT, check_typed, column, run_script

from torchrl_llm._registry import names
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.recipes.tasks import check_task, task_class, task_options
from torchrl_llm.trainers import load_config

CONFIG = SCRIPT.parent / "config"
FATES = ("trained", "filtered", "truncated", "invalid", "surplus", "pending", "stale")
HALF = {
    "prompt": "def half(x):\n    '''Half of x.'''\n",
    "entry_point": "half",
    "test": "def check(candidate):\n    assert candidate(4) == 2\n",
    "canonical_solution": "    return x / 2\n",
}
NO_COMMA = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
# Rows for the tasks that have none of their own.
ROWS = {
    "gsm8k": [
        {"question": f"What is {n} plus {n}?", "answer": f"Add.\n#### {2 * n}"} for n in range(16)
    ],
    "humaneval": [{**HALF, "task_id": f"T/{n}"} for n in range(16)],
    "ifeval": [{"key": n, "prompt": f"Name {n} words.", **NO_COMMA} for n in range(16)],
    "math": [{"problem": f"What is {n}+1?", "solution": f"\\boxed{{{n + 1}}}"} for n in range(16)],
}
SHORT = {
    "key_door": ["env.max_steps=3"],
    "prisoners_dilemma": ["env.options.num_rounds=2"],
    "tic_tac_toe": ["env.max_steps=3"],
}


@pytest.fixture
def run(monkeypatch):
    return partial(run_script, monkeypatch)


def composed(*overrides):
    with initialize_config_dir(str(CONFIG), version_base="1.3"):
        return compose("grpo", list(overrides))


def data_of(task, folder):
    """Overrides that give a task its rows, from a packed file."""
    if task == "rows":
        path = folder / "rows.csv"
        path.write_text("question,answer\n" + "".join(f"{n}+1?,{n + 1}\n" for n in range(64)))
        return [f"data.source={path}", "reward.function=exact"]
    if task not in ROWS:
        return []
    path = folder / "rows.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, ROWS[task])).encode()))
    return [f"env.data_files={path}"]


# Settings


def test_every_task_has_a_file_of_settings_and_every_file_a_task():
    files = {path.stem for path in (CONFIG / "env").glob("*.yaml")}
    assert files == set(names("tasks"))
    for name in files:
        written = OmegaConf.load(CONFIG / "env" / f"{name}.yaml")
        assert written.env.dataset == name


def test_the_settings_of_a_task_are_valid_and_its_options_are_the_defaults_of_its_class():
    for task in names("tasks"):
        data = "data.source=rows.csv" if task == "rows" else "env.data_files=rows.jsonl"
        own = ["reward.function=exact"] if task == "rows" else []
        config = load_config(composed(f"env={task}", data, *own))
        assert config.env.dataset == task
        defaults = {}
        for base in reversed(inspect.getmro(task_class(task))):
            if "__init__" in vars(base):
                parameters = inspect.signature(base.__init__).parameters
                defaults |= {name: each.default for name, each in parameters.items()}
        for name, value in config.env.options.items():
            assert value == defaults[name], f"{task}: {name}"


def test_options_reach_the_schema_from_the_command_line():
    overrides = ["env=countdown", "env.options.num_count=3"]
    check_typed(*overrides)
    config = load_config(composed(*overrides))
    assert config.env.options == {"num_count": 3, "max_number": 100, "max_target": 1000}
    assert load_config(composed()).env.options == {}


def test_a_task_that_there_is_not_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"env.dataset: 'gsm8' is not among.*mean 'gsm8k'"):
        load_config({"env": {"dataset": "gsm8"}})
    with pytest.raises(ConfigError, match="There are arithmetic,"):
        check_task("nothing like any of them")


def test_the_settings_of_every_task_are_not_options():
    assert task_options("arithmetic") == ()
    assert "seed" not in task_options("tic_tac_toe")
    assert "opponent" in task_options("tic_tac_toe")


# Training


def task_params():
    """All tasks; in a plain run a tool, a program, a checker of text, and a game of moves."""
    sample = ("calculator", "humaneval", "ifeval", "tic_tac_toe")
    return [
        pytest.param(task, marks=[] if task in sample else pytest.mark.full)
        for task in names("tasks")
        if task_class(task).PROGRAM is None  # those are in test/gateway
    ]


@pytest.mark.parametrize("task", task_params())
def test_every_task_trains_for_two_steps(task, tmp_path, run):
    table = run(
        tmp_path / "run",
        f"env={task}",
        *data_of(task, tmp_path),
        *SHORT.get(task, []),
        "train.max_steps=2",
        "inference_model.max_tokens=12",
        "env.on_overlong=truncate",
    )
    assert [row["train/step"] for row in table] == ["0", "1", "2"]
    assert len(column(table, "eval/accuracy")) == 2
    for row in table[1:]:
        generated = int(row["train/tokens_generated"])
        assert generated == sum(int(row[f"train/tokens_{fate}"]) for fate in FATES) > 0
        assert float(row["train/invalid"]) == 0.0


def test_options_change_the_problems(tmp_path, run):
    from torchrl_llm.recipes.builders import make_eval_env, make_train_env

    config = load_config(composed("env=countdown", "env.options.num_count=3"))
    for env in (make_train_env(config, None, seed=0), make_eval_env(config, None)):
        numbers = env.reset()["query"][0].rpartition("numbers ")[2]
        assert numbers.count(",") == 2


def test_a_task_without_problems_of_its_own_asks_for_a_file(tmp_path, run):
    with pytest.raises(Exception, match=r"env\.data_files"):
        run(tmp_path, "env=humaneval")
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "x"}\n')
    with pytest.raises(DataError, match="lacks the column"):
        run(tmp_path / "b", "env=humaneval", f"env.data_files={path}")


def test_the_real_humaneval_file_trains_and_holds_its_end_out(tmp_path, run, humaneval_file):
    table = run(
        tmp_path,
        "env=humaneval",
        f"env.data_files={humaneval_file}",
        "train.max_steps=1",
        "inference_model.max_tokens=8",
        "env.on_overlong=truncate",
    )
    assert [row["train/step"] for row in table] == ["0", "1"]
    assert column(table, "train/invalid") == [0.0]


def test_the_real_ifeval_file_trains(tmp_path, run):
    path = Path(__file__).parents[3] / "shared" / "data" / "ifeval" / "input_data.jsonl"
    if not path.exists():
        pytest.skip(f"no IFEval file {path}")
    table = run(
        tmp_path,
        "env=ifeval",
        f"env.data_files={path}",
        "train.max_steps=1",
        "inference_model.max_tokens=8",
        "env.on_overlong=truncate",
    )
    assert [row["train/step"] for row in table] == ["0", "1"]
