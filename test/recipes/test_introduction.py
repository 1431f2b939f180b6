"""A run introduces itself: its first line, when it comes, and the folder that it names."""

import re
import subprocess
import sys

import pytest

from torchrl_llm._run_log import RunLog, display_path
from torchrl_llm.cli.train import FLAT, RECIPES
from torchrl_llm.recipes import launch
from torchrl_llm.recipes.introduction import introduction

GRPO = launch.PAGES / "grpo" / "grpo-sync.py"


def run_begin(cwd, page, *arguments, environment=None):
    """``launch.begin`` in a process: its standard error, what Hydra will get, and heavy imports."""
    name = {"grpo-sync": "grpo", "reward-model": "reward"}.get(page.stem, page.stem)
    program = (
        f"import sys, os; os.environ.update({environment or {}})\n"
        f"sys.argv = {[str(page), *arguments]}\n"
        "from torchrl_llm.recipes import launch\n"
        f"launch.begin({str(page)!r}, {name!r})\n"
        "print([name for name in ('torch', 'transformers', 'torchrl') if name in sys.modules])\n"
        "print(*sys.argv[1:], sep='\\n')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    heavy, *arguments = done.stdout.splitlines()
    assert heavy == "[]"
    return done.stderr, arguments


def folder_of(argument):
    return re.fullmatch(r"hydra\.\w+\.dir='(.*)'", argument)[1]


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in FLAT])
def test_each_recipe_names_itself_and_the_folder_it_will_use_before_torch_is_there(
    recipe, tmp_path
):
    said, arguments = run_begin(tmp_path, launch.PAGES / RECIPES[recipe])
    (line,) = said.splitlines()
    assert line.startswith(f"{recipe}: ")
    folder = folder_of(arguments[-1])
    assert line.endswith(f"folder {folder}")
    assert re.fullmatch(rf"outputs/{recipe}/\d{{4}}-\d\d-\d\d/\d\d-\d\d-\d\d", folder)


def test_the_line_has_what_was_chosen_and_a_folder_that_was_given(tmp_path):
    given = ["loss=gspo", "advantage=leave_one_out", "data=qa.csv", "reward=exact", "model.name=m"]
    said, arguments = run_begin(tmp_path, GRPO, *given, "hydra.run.dir=${now:%Y}/mine")
    folder = folder_of(arguments[-1])
    assert re.fullmatch(r"\d{4}/mine", folder)
    assert sum("hydra.run.dir" in argument for argument in arguments) == 1
    assert said == (
        "grpo: model m, data qa.csv, reward exact, loss gspo, advantage leave_one_out, "
        f"folder {folder}\n"
    )


def test_a_sweep_names_its_own_folder(tmp_path):
    said, arguments = run_begin(tmp_path, GRPO, "-m", "seed=1,2")
    folder = folder_of(arguments[-1])
    assert said == f"grpo: sweep over seed=1,2, folder {folder}\n"
    assert arguments == ["-m", "seed=1,2", f"hydra.sweep.dir='{folder}'"]
    said, _ = run_begin(tmp_path, GRPO, "-m", "seed=1,2", "model.name=https://me:secret@host")
    assert "secret" not in said
    assert run_begin(tmp_path, GRPO, "-m", "seed=1,2", "logging.progress=false")[0] == ""


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [(["logging.progress=false"], {}), ([], {"RANK": "1"}), (["--cfg", "job"], {})],
    ids=["quiet", "rank 1", "a question to Hydra"],
)
def test_a_quiet_run_another_rank_and_a_question_to_hydra_have_no_first_line(
    arguments, environment, tmp_path
):
    assert run_begin(tmp_path, GRPO, *arguments, environment=environment)[0] == ""


def test_each_job_of_a_sweep_introduces_itself_with_its_folder_and_its_own_command(tmp_path):
    page = tmp_path / "page.py"
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "small.yaml").write_text("seed: 0\nmodel: {name: null}\n")
    page.write_text(
        "import sys\n"
        "from torchrl_llm.recipes import launch\n"
        "launch.begin(__file__, 'small')\n"
        "import hydra\n"
        "@hydra.main(version_base='1.3', config_path='config', config_name='small')\n"
        "@launch.tells_errors\n"
        "def main(cfg): print(sys.argv[1:])\n"
        "main()\n"
    )
    command = [sys.executable, page, "-m", "seed=1,2", "model.name=m", "hydra.sweep.dir=all"]
    command += ["hydra/job_logging=none", "hydra/hydra_logging=none"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr.splitlines() == [
        "small: sweep over seed=1,2 model.name=m, folder all",
        "small: model m, folder all/0",
        "small: model m, folder all/1",
    ]
    assert done.stdout.splitlines() == ["['seed=1', 'model.name=m']", "['seed=2', 'model.name=m']"]
    assert "small: model m, folder all/1" in (tmp_path / "all" / "1" / "run.log").read_text()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"tasks": ["gsm8k", "ifeval"], "model.name": None}, "model of the package, task gsm8k + "),
        ({"env.dataset": "gsm8k", "env.data_files": "a.jsonl"}, "task gsm8k, data a.jsonl, "),
        ({"env.dataset": "rows", "data.source": ["a.csv", "b.csv"]}, "data a.csv + b.csv, "),
        ({"env.dataset": "gsm8k", "reward.function": None}, "task gsm8k, reward of the task, "),
        ({"reward.function": "exact", "reward.components.a.weight": 1}, "reward exact + a, "),
        ({"loss.estimator": "sampled", "advantage.type": "group"}, "loss sampled, advantage group"),
        ({}, "folder runs"),
    ],
)
def test_a_line_holds_what_the_settings_say_and_nothing_else(settings, expected):
    assert introduction("x", settings, "runs").startswith(f"x: {expected}")


def test_paths_are_shown_as_they_are_copied(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert display_path(tmp_path / "a" / "b") == "a/b"
    assert display_path("a/b") == "a/b"
    assert display_path(tmp_path.parent / "c") == str(tmp_path.parent / "c")
    assert display_path(tmp_path) == str(tmp_path)  # not "."


LIBRARY = """
import logging, sys, warnings
from pathlib import Path
from torchrl_llm._run_log import RunLog
from torchrl_llm.recipes import launch
sys.argv = ["page"]
launch._loggers_to_stderr()
Path("site-packages/vllm").mkdir(parents=True)
theirs, ours = Path("site-packages/vllm/a.py"), Path("mine.py")
code = "import logging, warnings\\nlogging.getLogger('x').{}('{} %s', 1)\\nwarnings.warn('{} w')\\n"
with RunLog("."):
    for file, level, text in (
        (theirs, "warning", "their"), (theirs, "error", "their"), (ours, "info", "my")
    ):
        exec(compile(code.format(level, text + " " + level, text + " " + level), file.absolute(),
                     "exec"), {"__name__": file.stem + level})
"""


def test_what_libraries_say_is_in_the_log_and_their_errors_and_own_code_on_the_terminal(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LIBRARY], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    said, log = done.stderr, (tmp_path / "run.log").read_text()
    assert "their warning" not in said
    assert said.splitlines()[0] == "their error 1"  # no time, no mark
    assert "my info 1\n" in said
    assert "UserWarning: my info w" in said
    for text in ("[x][WARNING] their warning 1", "their warning w", "their error 1", "my info w"):
        assert text in log


def test_torchrls_messages_are_plain_sentences(tmp_path):
    program = (
        "import torchrl_llm\nfrom torchrl._utils import logger\nlogger.warning('a sentence')\n"
    )
    environment = {"TORCHRL_CONSOLE_STREAM": "stderr", "PATH": "", "PYTHONPATH": sys.path[0]}
    done = subprocess.run(
        [sys.executable, "-c", f"import os; os.environ.update({environment})\n{program}"],
        capture_output=True,
        text=True,
    )
    assert done.stderr.splitlines()[-1] == "a sentence"


def test_the_line_of_a_run_is_in_its_log_once(tmp_path, capsys):
    launch._first_line.append("grpo: folder x")
    config = type("Hydra", (), {"mode": None})
    original, launch._hydra = launch._hydra, lambda: config
    try:
        with RunLog(tmp_path):
            launch._introduce(__import__("omegaconf").OmegaConf.create({"seed": 1}))
    finally:
        launch._hydra = original
    assert (tmp_path / "run.log").read_text().count("grpo: folder x\n") == 1
    assert capsys.readouterr().err == ""
    assert not launch._first_line
