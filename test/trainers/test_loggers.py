"""Loggers by name: those of other packages, in stores of temporary folders."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from torchrl_llm.errors import ConfigError, MissingExtraError
from torchrl_llm.trainers import MetricsTable, make_loggers


def test_numbers_reach_torchrls_tensorboard_logger(tmp_path):
    loggers = make_loggers(["csv", "tensorboard"], run_dir=tmp_path, experiment_name="grpo")
    MetricsTable(tmp_path / "metrics.csv", loggers).write(1, {"train/reward": 0.5})
    assert list((tmp_path / "grpo").glob("events.out.tfevents*"))


def test_unknown_backends_and_settings_without_effect_are_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"did you mean 'tensorboard'.*csv, mlflow, tensorboard, trackio, wandb"
    ):
        make_loggers(["tensorbord"], run_dir=tmp_path, experiment_name="x")
    with pytest.raises(ConfigError, match="no effect without mlflow or trackio or wandb"):
        make_loggers(["csv"], run_dir=tmp_path, experiment_name="x", project="p")


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_asking_for_one_without_its_package_names_the_extra(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf"torchrl_llm\[{name}\]"):
        make_loggers([name], run_dir=tmp_path, experiment_name="x")


def test_a_logger_that_cannot_be_started_is_told_before_anything_is_trained(tmp_path, monkeypatch):
    (tmp_path / "my_loggers.py").write_text("def down(**given): raise OSError('no account')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"my_loggers:down cannot be started: OSError: no acco"):
        make_loggers(["csv", "my_loggers:down"], run_dir=tmp_path, experiment_name="x")


ROOT = Path(__file__).parents[2]
CONFIG = {"optimizer.lr": 0.1, "env.tools": ["calculator"], "model.name": None, "seed": 3}


@pytest.mark.loggers
@pytest.mark.parametrize(("project", "expected"), [("mine", "mine"), (None, "of the environment")])
def test_weights_and_biases_gets_configuration_metrics_and_its_project(
    tmp_path, monkeypatch, project, expected
):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_PROJECT", "of the environment")
    (logger,) = make_loggers(["wandb"], run_dir=tmp_path, experiment_name="x", project=project)
    table = MetricsTable(tmp_path / "metrics.csv", [logger])
    table.log_config(CONFIG)
    table.write(1, {"train/reward": 0.5, "eval/accuracy": 0.25})
    run = wandb.run
    config, summary = dict(run.config), dict(run.summary)
    assert run.project == expected
    table.close()
    assert wandb.run is None
    assert table.failures == {}
    assert config | CONFIG | {"env.tools": "['calculator']"} == config
    expected = {"train/reward": 0.5, "eval/accuracy": 0.25, "train/step": 1, "eval/step": 1}
    assert summary | expected == summary


TWO_RUNS = """
import sys
from torchrl_llm.trainers import MetricsTable, make_loggers
config = {"optimizer.lr": 0.1, "env.tools": ["calculator"], "model.name": None, "seed": 3}
config |= {f"loss.many_{n}": n for n in range(150)}
for number in (1, 2):
    loggers = make_loggers(
        ["mlflow", "trackio"], run_dir=sys.argv[1], experiment_name="mine", project="ours"
    )
    table = MetricsTable(sys.argv[1] + "/metrics.csv", loggers)
    table.log_config(config)
    for step in (1, 2):
        table.write(step, {"train/reward": number + step / 4, "train/p@1": float("nan")})
    table.close()
    assert not table.failures, table.failures
print("results")
"""


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Folder of two runs of one process, with MLflow's store and Trackio's."""
    for name in ("mlflow", "trackio"):
        pytest.importorskip(name)
    folder = tmp_path_factory.mktemp("run")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW", "TRACKIO"))}
    environment |= {"TRACKIO_DIR": str(folder / "trackio"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", TWO_RUNS, str(folder)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "results\n"  # what loggers say is no result
    return folder


def select(file, query):
    with sqlite3.connect(file) as store:
        return store.execute(query).fetchall()


@pytest.mark.loggers
@pytest.mark.slow
def test_mlflow_gets_each_run_of_a_process_by_its_name_in_the_folder_of_the_run(stores):
    file = stores / "mlflow.db"
    names = "select r.name, e.name, r.status from runs r join experiments e using (experiment_id)"
    assert select(file, names) == [("mine", "ours", "FINISHED")] * 2
    query = "select step, value from metrics where key = 'train/reward' order by value"
    assert select(file, query) == [(1, 1.25), (2, 1.5), (1, 2.25), (2, 2.5)]
    # A name with a sign that MLflow refuses keeps its numbers, and those of the step.
    assert select(file, "select count(*) from metrics where key = 'train/p_1' and is_nan") == [(4,)]
    params = dict(select(file, "select key, value from params"))
    assert len(params) == 154
    assert (params["optimizer.lr"], params["env.tools"]) == ("0.1", "['calculator']")
    assert not (stores / "mlruns").exists()


@pytest.mark.loggers
@pytest.mark.slow
def test_trackio_gets_one_row_a_step_and_a_run_of_its_own_for_each(stores):
    file = stores / "trackio" / "ours.db"
    rows = select(file, "select run_id, step, metrics from metrics order by id")
    assert len({run for run, *_ in rows}) == 2
    found = [(step, json.loads(values)["train/reward"]) for _, step, values in rows]
    assert found == [(1, 1.25), (2, 1.5), (1, 2.25), (2, 2.5)]
    (first, _) = select(file, "select config from configs")
    assert json.loads(first[0])["env.tools"] == "['calculator']"


def test_tensorboard_gets_the_configuration(tmp_path, warned):
    loggers = make_loggers(["tensorboard"], run_dir=tmp_path, experiment_name="x")
    MetricsTable(tmp_path / "metrics.csv", loggers).log_config(CONFIG)
    loggers[0].experiment.flush()
    assert not warned
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*tfevents*"))
    assert b"optimizer.lr" in written
    assert b"calculator" in written
