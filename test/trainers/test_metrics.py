from __future__ import annotations

import csv
import sys

import pytest
import torch
from objectives.rows_helper import actor, two_rows
from torchrl.record.loggers import Logger

from torchrl_llm.errors import ConfigError, MissingExtraError
from torchrl_llm.objectives import CompositeLoss, GRPOLoss, SFTLoss
from torchrl_llm.trainers.metrics import LossMeter, MetricsTable, make_loggers


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_is_on_disk_as_soon_as_it_is_written(tmp_path):
    table = MetricsTable(tmp_path / "metrics.csv", columns=["train/reward", "eval/accuracy"])
    table.write(0, {"eval/accuracy": 0.5})
    table.write(1, {"train/reward": torch.tensor(0.25)})
    assert rows(table.path) == [
        {"train/step": "0", "train/reward": "", "eval/accuracy": "0.5"},
        {"train/step": "1", "train/reward": "0.25", "eval/accuracy": ""},
    ]


def test_a_metric_that_appears_late_gets_its_column(tmp_path):
    table = MetricsTable(tmp_path / "metrics.csv")
    table.write(1, {"train/reward": 0.5})
    table.write(2, {"train/reward": 0.6, "perf/step_s": 1.5})
    table.write(3, {"train/reward": 0.7})
    assert [row["perf/step_s"] for row in rows(table.path)] == ["", "1.5", ""]
    assert table.read("perf/step_s") == ([2], [1.5])
    assert table.read("train/reward") == ([1, 2, 3], [0.5, 0.6, 0.7])


def test_names_without_prefix_and_steps_that_go_back_are_errors(tmp_path):
    table = MetricsTable(tmp_path / "metrics.csv")
    with pytest.raises(ValueError, match="must begin with train/"):
        table.write(1, {"reward": 0.5})
    table.write(2, {"train/reward": 0.5})
    with pytest.raises(ValueError, match="step 2 follows step 2"):
        table.write(2, {"train/reward": 0.5})


def test_resuming_cuts_the_file_back_to_the_checkpoint_byte_for_byte(tmp_path):
    path, other = tmp_path / "a.csv", tmp_path / "b.csv"
    table = MetricsTable(path)
    for step in (1, 2):
        table.write(step, {"train/reward": step / 3})
    kept = path.read_bytes()
    table.write(3, {"train/reward": 1.0, "train/late": 2})
    # The process dies in the middle of a line.
    path.write_bytes(path.read_bytes() + b"4,0.")
    resumed = MetricsTable(path)
    resumed.resume(2)
    assert [row["train/step"] for row in rows(path)] == ["1", "2"]
    resumed.write(3, {"train/reward": 1.0, "train/late": 2})
    table = MetricsTable(other)
    other.write_bytes(kept)
    table.resume(2)
    table.write(3, {"train/reward": 1.0, "train/late": 2})
    assert path.read_bytes() == other.read_bytes()


def test_resuming_without_a_file_begins_one(tmp_path):
    table = MetricsTable(tmp_path / "metrics.csv")
    table.resume(0)
    table.write(1, {"train/reward": 1.0})
    assert len(rows(table.path)) == 1


def test_numbers_reach_torchrls_tensorboard_logger(tmp_path):
    loggers = make_loggers(["csv", "tensorboard"], run_dir=tmp_path, experiment_name="grpo")
    MetricsTable(tmp_path / "metrics.csv", loggers).write(1, {"train/reward": 0.5})
    assert list((tmp_path / "grpo").glob("events.out.tfevents*"))


def test_unknown_backends_and_settings_without_effect_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"did you mean 'tensorboard'.*csv, tensorboard, wandb"):
        make_loggers(["tensorbord"], run_dir=tmp_path, experiment_name="x")
    with pytest.raises(ConfigError, match="no effect without wandb"):
        make_loggers(["csv"], run_dir=tmp_path, experiment_name="x", project="p")


def test_asking_for_wandb_without_the_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"torchrl_llm\[wandb\]"):
        make_loggers(["wandb"], run_dir=tmp_path, experiment_name="x")


CONFIG = {"optimizer.lr": 0.1, "env.tools": ["calculator"], "model.name": None, "seed": 3}


def test_weights_and_biases_gets_configuration_and_metrics(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    (logger,) = make_loggers(["wandb"], run_dir=tmp_path, experiment_name="x", project="p")
    table = MetricsTable(tmp_path / "metrics.csv", [logger])
    table.log_config(CONFIG)
    table.write(1, {"train/reward": 0.5})
    config, reward = dict(wandb.run.config), wandb.run.summary["train/reward"]
    wandb.finish()
    assert table.failures == {}
    assert config | CONFIG | {"env.tools": "['calculator']"} == config
    assert reward == 0.5


def test_tensorboard_gets_the_configuration(tmp_path, warned):
    loggers = make_loggers(["tensorboard"], run_dir=tmp_path, experiment_name="x")
    MetricsTable(tmp_path / "metrics.csv", loggers).log_config(CONFIG)
    loggers[0].experiment.flush()
    assert not warned
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*tfevents*"))
    assert b"optimizer.lr" in written
    assert b"calculator" in written


def test_a_logger_that_refuses_the_configuration_still_gets_the_metrics(tmp_path, warned):
    class Refuses(Logger):
        got = ()

        def log_hparams(self, cfg):
            raise TypeError("no such thing")

        def log_scalar(self, name, value, step=None, **kwargs):
            self.got += ((name, value),)

        _create_experiment = log_video = log_histogram = __repr__ = lambda self, *args: ""

    logger = Refuses("x", str(tmp_path))
    table = MetricsTable(tmp_path / "metrics.csv", [logger])
    table.log_config(CONFIG)
    table.write(1, {"train/reward": 0.5})
    (said,) = warned
    assert "Refuses did not take the configuration: TypeError: no such thing" in said
    assert logger.got == (("train/reward", 0.5),)


@pytest.mark.parametrize("name", ["", "policy/"])
def test_metrics_of_micro_batches_are_those_of_the_batch(name):
    loss = GRPOLoss(actor(), kl_to_ref_coeff=0.1)
    if name:
        terms = {"policy": (1.0, loss), "imitate": (0.1, SFTLoss(loss.actor_network))}
        loss = CompositeLoss(terms)
    rows = two_rows(ref=-1.5)
    whole, parts = LossMeter(), LossMeter()
    whole.add(loss(rows))
    normalizer = loss.normalizer(rows)
    for b in (0, 1):
        parts.add(loss(rows[b : b + 1], normalizer=normalizer))
    for meter in (whole, parts):
        meter.close(grad_norm=2.0)
    assert parts.metrics() == pytest.approx(whole.metrics())
    # Weights 1, 2, 1/2: (3.5)^2 / (3 x 5.25).
    assert parts.metrics()[f"train/{name}ESS"] == pytest.approx(3.5**2 / (3 * 5.25))


def test_batches_of_a_step_are_averaged():
    meter = LossMeter()
    for value in (1.0, 4.0):
        meter.add({"loss_objective": torch.tensor(value)})
        meter.add({"loss_objective": torch.tensor(value), "late": torch.tensor(1.0)})
        meter.close()
    assert meter.metrics() == {"train/loss_objective": 5.0, "train/late": 1.0}
    assert LossMeter().metrics() == {}


@pytest.mark.parametrize(
    ("harm", "wrong"),
    [
        (lambda path: path.unlink(), "was missing"),
        (lambda path: path.write_text("".join(path.open().readlines()[:2])), "at step 1"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00junk"), "is broken"),
        (lambda path: path.write_text(path.read_text().replace("0.25", "0.75")), "was altered"),
    ],
)
def test_a_file_that_lost_rows_is_named_and_mended_from_the_checkpoint(tmp_path, harm, wrong):
    table = MetricsTable(tmp_path / "metrics.csv")
    for step in (1, 2, 3):
        table.write(step, {"train/reward": 0.25 * step, "perf/step_s": 1.0})
    whole, copy = table.path.read_bytes(), tmp_path / "copy.csv"
    table.save(copy)
    table.write(4, {"train/reward": 1.0})
    harm(table.path)
    resumed = MetricsTable(table.path)
    assert wrong in resumed.resume(3, copy)
    assert table.path.read_bytes() == whole
    assert resumed.resume(3, copy) is None


class Down:
    """A logger whose server does not answer until the third step."""

    def __init__(self):
        self.asked = []

    def log_scalar(self, name, value, step=None):
        self.asked.append((name, step))
        if step < 3:
            raise ConnectionError("no route to host")


class Works(Down):
    def log_scalar(self, name, value, step=None):
        self.asked.append((name, step))


def test_a_logger_that_raises_is_warned_of_once_and_the_others_go_on(tmp_path, warned):
    down, works = Down(), Works()
    table = MetricsTable(tmp_path / "metrics.csv", [down, works])
    for step in (1, 2, 3):
        table.write(step, {"train/reward": 0.5, "train/loss": 0.1})
    (said,) = warned
    assert "ConnectionError: no route to host" in said
    assert table.failures == {"Down": 2}
    # A step that failed is not asked for its other metrics; the next one is asked again.
    assert down.asked == [("train/reward", n) for n in (1, 2, 3)] + [("train/loss", 3)]
    assert len(works.asked) == 6
    assert len(rows(table.path)) == 3


def test_a_metrics_file_that_cannot_be_written_stays_an_error(tmp_path):
    table = MetricsTable(tmp_path / "gone" / "metrics.csv", [Works()])
    with pytest.raises(FileNotFoundError):
        table.write(1, {"train/reward": 0.5})
