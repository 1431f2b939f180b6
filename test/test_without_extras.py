"""An installation without extras trains, and whatever needs an extra says which."""

from __future__ import annotations

import json

import pytest
from without_extras import EXTRAS, MAKE, NEEDS, ROOT, optional_packages, run_hidden, wrong_names

from torchrl_llm._registry import KINDS

REWARDS = ("exakt", "math", "exact")
COMMANDS = """
import json
from torchrl_llm.cli import main

codes = []
for command in {}:
    try:
        codes.append(main(command))
    except SystemExit as ended:
        codes.append(ended.code)
print(json.dumps(codes))
"""


def test_packages_of_extras_are_hidden_and_those_of_the_base_are_not():
    hidden = optional_packages()
    assert {"math_verify", "peft", "nltk", "langdetect", "pytest", "hypothesis"} <= hidden
    assert not hidden & {"torch", "torchrl", "transformers", "hydra", "numpy", "yaml", "sympy"}
    assert "No module named 'math_verify'" in run_hidden("import math_verify").stderr


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """One process, as each imports for seconds, has made all names and then trained."""
    folder = tmp_path_factory.mktemp("done")
    rows = "\n".join(f"{number}+1?,{number + 1}" for number in range(8))
    (folder / "qa.csv").write_text(f"question,answer\n{rows}\n")
    keys = ["train.max_steps=1", "inference_model.max_tokens=8", "hydra.run.dir=run"]
    commands = [["train", "grpo", "data=qa.csv", f"reward={reward}", *keys] for reward in REWARDS]
    done = run_hidden(MAKE + COMMANDS.format(commands), folder)
    assert done.returncode == 0, done.stderr
    return (
        folder,
        [json.loads(line) for line in done.stdout.splitlines() if line[:1] in ("[", "{")],
        done,
    )


@pytest.fixture(scope="module")
def made(done):
    """Every name of every kind, and the error of making it, empty where there is none."""
    return done[1][0]


def test_every_name_of_every_kind_is_found(made):
    assert {name.partition(" ")[0] for name in made} >= set(KINDS)


def test_what_needs_an_extra_names_it_and_all_others_need_none(made):
    assert set(NEEDS.values()) <= set(EXTRAS)
    assert wrong_names(made) == []


def test_a_name_that_is_not_found_or_asks_for_the_wrong_extra_is_noticed(made):
    changes = {
        "rewards exact": ["ModuleNotFoundError", "No module named 'math_verify'"],
        "rewards math": ["MissingExtraError", 'pip install "torchrl_llm[data]"'],
        "losses grpo": ["MissingExtraError", 'pip install "torchrl_llm[peft]"'],
        "tools browser": ["", ""],
    }
    noticed = {line.partition(":")[0] for line in wrong_names({**made, **changes})}
    assert noticed == set(changes)


@pytest.mark.full
def test_every_file_of_tests_can_be_read_where_its_packages_are_not():
    """So that ``pytest -m gpu`` runs on a machine which has little else."""
    also = [text for text in EXTRAS["test"] if text.startswith(("pytest", "hypothesis", "peft"))]
    arguments = ["--collect-only", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    code = f"import sys, pytest\nsys.exit(pytest.main({[*arguments, str(ROOT / 'test')]!r}))"
    done = run_hidden(code, ROOT, also)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.fixture(scope="module")
def trained(done):
    """The folder of trainings with several rewards, their exit codes, and what they say."""
    folder, said, process = done
    return folder, dict(zip(REWARDS, said[-1], strict=True)), process.stderr


def test_a_training_with_a_named_reward_on_a_file_of_rows_runs(trained):
    folder, codes, said = trained
    assert not codes["exact"], said
    assert (folder / "run" / "metrics.csv").is_file()


def test_a_reward_that_cannot_be_had_is_refused_with_what_to_do(trained):
    _, codes, said = trained
    assert (codes["exakt"], codes["math"]) == (1, 1)
    assert "did you mean 'exact'?" in said
    assert 'pip install "torchrl_llm[math]"' in said
