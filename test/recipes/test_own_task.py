"""A task of the user's own, named by its module: the page's file trains; others are refused."""

import re
import textwrap
from pathlib import Path

import pytest
from recipes.grpo_helper import column, run_script

from torchrl_llm.envs.datasets import ArithmeticEnv
from torchrl_llm.errors import ConfigError
from torchrl_llm.recipes.tasks import check_task, task_class, task_options
from torchrl_llm.trainers import load_config

PAGE = Path(__file__).parents[2] / "docs" / "source" / "howto" / "train_your_own_tool.rst"


@pytest.fixture
def clock_task(tmp_path, monkeypatch):
    """The module that the page shows, where Python finds it."""
    block = re.search(r":caption: (clock_task\.py)\n\n((?:    .*\n|\n)+)", PAGE.read_text())
    (tmp_path / block[1]).write_text(textwrap.dedent(block[2]))
    monkeypatch.syspath_prepend(str(tmp_path))
    return "clock_task:ClockEnv"


def test_the_task_of_the_page_is_trained_by_its_module(clock_task, tmp_path, monkeypatch):
    table = run_script(
        monkeypatch,
        tmp_path / "run",
        "env=calculator",
        f"env.dataset={clock_task}",
        "train.max_steps=2",
    )
    assert len(column(table, "train/reward")) == 2
    generated = column(table, "train/tokens_generated")
    kept = [column(table, f"train/tokens_{name}") for name in ("trained", "filtered")]
    assert generated == [sum(both) for both in zip(*kept, strict=True)]


def test_the_tool_of_the_page_is_right_and_its_held_out_problems_are_never_trained(clock_task):
    task = task_class(clock_task)
    train, test = task.default_dataset("train"), task.default_dataset("test")
    assert len(test) == 512
    assert not {row["query"] for row in train} & {row["query"] for row in test}
    answers = {row["query"]: row["answer"] for row in [*train, *test]}
    for query in list(answers)[:50]:
        assert int(answers[query]) == eval(query[8:-1]) % 1000
    assert task_options(clock_task) == ()


def test_a_class_is_named_by_its_module():
    assert task_class("torchrl_llm.envs.datasets.number_tasks:ArithmeticEnv") is ArithmeticEnv


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:Env", "No module named 'no_such_module'.*PYTHONPATH"),
        ("torchrl_llm.envs:NoSuchEnv", "there is no 'NoSuchEnv' in torchrl_llm.envs"),
        (":Env", "write 'module:name'"),
        ("torchrl_llm.envs:", "write 'module:name'"),
        (
            "torchrl_llm.envs:ChatEnv",
            "TaskEnv, DatasetChatEnv, Session or Game.*got .*ChatEnv",
        ),
        ("math:pi", "or a function that makes an environment, got 3.14"),
    ],
)
def test_a_task_that_cannot_be_is_refused_when_it_is_named(name, message):
    for refused in (check_task, task_class):
        with pytest.raises(ConfigError, match=message):
            refused(name)
    with pytest.raises(ConfigError, match=rf"env\.dataset: .*{message}"):
        load_config({"env": {"dataset": name}})


def test_an_unknown_name_says_how_a_task_of_ones_own_is_given():
    with pytest.raises(ConfigError, match=r"'clock' is not among the tasks.*'module:name'"):
        check_task("clock")
