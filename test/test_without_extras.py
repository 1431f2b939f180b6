"""An installation without extras trains, and whatever needs an extra says which."""

from __future__ import annotations

import json

import pytest
from without_extras import EXTRAS, ROOT, optional_packages, run_hidden

from torchrl_llm._registry import KINDS

# What is chosen by name and needs an extra. All others are made without one.
NEEDS = {
    "rewards math": "math",
    # Their rows are on the hub, unless a file has them.
    **dict.fromkeys(("tasks gsm8k", "tasks humaneval", "tasks ifeval", "tasks math"), "data"),
    "math of a file": "math",
    "ifeval of a file": "ifeval",
    "tools browser": "browser",
    "loggers mlflow": "mlflow",
    "loggers trackio": "trackio",
    "loggers wandb": "wandb",
    "backends vllm": "vllm",
}
MAKE = """
import json
from torchrl_llm._registry import KINDS, find, names

# Losses, advantage estimators, weights and the transformers backend take a model or a number.
ARGUMENTS = {
    "loggers": {"run_dir": "runs", "experiment_name": "one"},
    "judge": {"url": "http://localhost:1/v1", "model": "judge"},
    "length": {"longest": 9},
    "rows": {"dataset": [{"query": "1+1?", "answer": "2"}], "reward": str.__eq__},
}
made = {}


def make(entry, target, **arguments):
    try:
        target(**arguments)
    except Exception as error:
        made[entry] = [type(error).__name__, str(error)]
    else:
        made[entry] = ["", ""]


for kind in KINDS:
    for name in names(kind):
        arguments = ARGUMENTS.get(name, ARGUMENTS.get(kind, {}))
        make(f"{kind} {name}", find(kind, name), **arguments)
make("math of a file", find("tasks", "math"), dataset=[{"problem": "Half?", "answer": "1/2"}])
row = {"key": 1, "prompt": "Hi", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
make("ifeval of a file", find("tasks", "ifeval"), dataset=[row])
print(json.dumps(made))
"""
MAIN = "import sys\nfrom torchrl_llm.cli import main\nsys.exit(main({}))"


def test_packages_of_extras_are_hidden_and_those_of_the_base_are_not():
    hidden = optional_packages()
    assert {"math_verify", "peft", "nltk", "langdetect", "pytest", "hypothesis"} <= hidden
    assert not hidden & {"torch", "torchrl", "transformers", "hydra", "numpy", "yaml", "sympy"}
    assert "No module named 'math_verify'" in run_hidden("import math_verify").stderr


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Every name of every kind, and the error of making it, empty where there is none."""
    done = run_hidden(MAKE, tmp_path_factory.mktemp("made"))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_name_of_every_kind_is_found(made):
    assert {name.partition(" ")[0] for name in made} >= set(KINDS)


def test_what_needs_an_extra_names_it(made):
    assert set(NEEDS.values()) <= set(EXTRAS)
    for name, extra in NEEDS.items():
        kind, message = made[name]
        assert kind == "MissingExtraError", (name, kind, message)
        assert f"torchrl_llm[{extra}]" in message


def test_what_needs_none_is_made_without(made):
    kinds = ("rewards", "tasks", "tools", "agents", "loggers")
    free = {n: error for n, error in made.items() if n not in NEEDS and n.startswith(kinds)}
    assert not {name: error for name, error in free.items() if error != ["", ""]}
    assert not {n for n, (kind, _) in made.items() if kind == "ModuleNotFoundError"}


@pytest.mark.full
def test_every_file_of_tests_can_be_read_where_its_packages_are_not():
    """So that ``pytest -m gpu`` runs on a machine which has little else."""
    also = [text for text in EXTRAS["test"] if text.startswith(("pytest", "hypothesis", "peft"))]
    arguments = ["--collect-only", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    code = f"import sys, pytest\nsys.exit(pytest.main({[*arguments, str(ROOT / 'test')]!r}))"
    done = run_hidden(code, ROOT, also)
    assert done.returncode == 0, done.stdout[-4000:]


def test_a_training_with_a_named_reward_on_a_file_of_rows_runs(tmp_path):
    rows = "\n".join(f"{number}+1?,{number + 1}" for number in range(8))
    (tmp_path / "qa.csv").write_text(f"question,answer\n{rows}\n")
    arguments = ["train", "grpo", "data=qa.csv", "reward=exact", "train.max_steps=1"]
    arguments += ["inference_model.max_tokens=8", "hydra.run.dir=run"]
    done = run_hidden(MAIN.format(arguments), tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "metrics.csv").is_file()


@pytest.mark.parametrize(
    ("reward", "says"),
    [("exakt", "did you mean 'exact'?"), ("math", 'pip install "torchrl_llm[math]"')],
)
def test_a_reward_that_cannot_be_had_is_refused_with_what_to_do(reward, says, tmp_path):
    (tmp_path / "qa.csv").write_text("question,answer\n1+1?,2\n")
    done = run_hidden(MAIN.format(["train", "grpo", "data=qa.csv", f"reward={reward}"]), tmp_path)
    assert done.returncode == 1
    assert says in done.stderr
