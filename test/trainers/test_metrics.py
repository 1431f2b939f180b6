import csv
import errno
import tracemalloc

import pytest
import torch
from objectives.rows_helper import actor, two_rows
from torchrl.record.loggers import Logger

from torchrl_llm.objectives import CompositeLoss, GRPOLoss, SFTLoss, SFTLossOutput
from torchrl_llm.trainers.metrics import LossMeter, MetricsTable


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_is_on_disk_as_soon_as_it_is_written(tmp_path):
    table = MetricsTable(tmp_path / "metrics.csv", columns=["train/reward", "eval/accuracy"])
    table.write(0, {"eval/accuracy": 0.5})
    table.write(1, {"train/reward": torch.tensor(0.25)})
    assert rows(table.path) == [
        {"train/step": "0", "train/reward": "", "eval/accuracy": "0.5", "eval/step": "0"},
        {"train/step": "1", "train/reward": "0.25", "eval/accuracy": "", "eval/step": ""},
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


CONFIG = {"optimizer.lr": 0.1, "env.tools": ["calculator"], "model.name": None, "seed": 3}


class Lines(Logger):
    """A logger that keeps what it is given."""

    def __init__(self, *args):
        super().__init__(*args)
        self.got = []

    def log_metrics(self, metrics, step=None, **kwargs):
        self.got.append((dict(metrics), step))

    def close(self, timeout=None):
        self.got.append("closed")

    _create_experiment = log_video = log_scalar = log_histogram = log_hparams = __repr__ = (
        lambda self, *args: ""
    )


class Refuses(Lines):
    def log_hparams(self, cfg):
        raise TypeError("no such thing")


def test_a_logger_that_refuses_the_configuration_still_gets_the_metrics(tmp_path, warned):
    logger = Refuses("x", str(tmp_path))
    table = MetricsTable(tmp_path / "metrics.csv", [logger])
    table.log_config(CONFIG)
    table.write(1, {"train/reward": 0.5})
    (said,) = warned
    assert "Refuses did not take the configuration: TypeError: no such thing" in said
    assert logger.got == [({"train/reward": 0.5}, 1)]


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
        for _ in range(2):
            meter.add(SFTLossOutput(loss_sft=torch.tensor(value)))
        meter.close(late=1.0)
    assert meter.metrics() == {"train/loss_sft": 5.0, "train/late": 1.0}
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
    """A logger whose server does not answer in some steps."""

    def __init__(self, *steps):
        self.asked, self.steps = [], steps

    def log_scalar(self, name, value, step=None):
        self.asked.append((name, step))
        if step in self.steps:
            raise ConnectionError("no route to host")


def test_a_logger_that_raises_is_warned_of_once_and_the_others_go_on(tmp_path, warned):
    down, works = Down(1, 2), Down()
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


def test_a_logger_that_fails_three_times_in_a_row_is_dropped_and_that_is_said(tmp_path, warned):
    down, works = Down(1, 2, 4, 5, 6, 7), Down()
    table = MetricsTable(tmp_path / "metrics.csv", [down, works])
    for step in range(1, 9):
        table.write(step, {"train/reward": 0.5})
    assert down.asked[-1] == ("train/reward", 6)  # step 3 worked, so that counting began again
    first, dropped = warned
    assert "the run continues" in first
    assert "the metrics of step 6 either" in dropped
    assert "3 times in a row: it is dropped" in dropped
    assert table.failures == {"Down": 5}
    assert [step for _, step in works.asked] == list(range(1, 9))
    assert len(rows(table.path)) == 8


def test_a_logger_gets_all_metrics_of_a_step_at_once_and_its_end(tmp_path):
    logger = Lines("x", str(tmp_path))
    table = MetricsTable(tmp_path / "metrics.csv", [logger])
    table.write(1, {"train/reward": 0.5, "eval/accuracy": 0.25})
    table.close()
    table.write(2, {"train/reward": 0.75})
    expected = {"train/reward": 0.5, "eval/accuracy": 0.25, "eval/step": 1}
    assert logger.got == [(expected, 1), "closed"]


def test_the_copy_of_a_checkpoint_does_not_take_memory_by_the_length_of_the_run(tmp_path):
    table = MetricsTable(tmp_path / "metrics.csv")
    names = [f"train/a_metric_{number}" for number in range(20)]
    for step in range(1000):
        table.write(step, dict.fromkeys(names, step / 7))
    tracemalloc.start()
    try:
        table.save(tmp_path / "copy.csv")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "copy.csv").read_bytes() == table.path.read_bytes()
    assert peak < table.path.stat().st_size  # its rows, read, take nine times that


def test_the_step_of_an_evaluation_is_a_metric_of_it(tmp_path):
    table = MetricsTable(tmp_path / "metrics.csv")
    table.write(0, {"eval/accuracy": 0.25})
    table.write(1, {"train/reward": 0.5})
    table.write(2, {"train/reward": 0.5, "eval/accuracy": 0.75})
    assert table.read("eval/step") == ([0, 2], [0.0, 2.0])


def test_a_metrics_file_that_cannot_be_written_stays_an_error(tmp_path):
    table = MetricsTable(tmp_path / "gone" / "metrics.csv", [Down()])
    with pytest.raises(FileNotFoundError):
        table.write(1, {"train/reward": 0.5})


def test_a_disk_that_is_full_for_a_while_loses_no_row_and_is_told_twice(
    tmp_path, warned, monkeypatch
):
    def half_a_line(self, file, rows):
        file.write("2,0.")
        file.flush()
        raise OSError(errno.ENOSPC, "No space left on device")

    table = MetricsTable(tmp_path / "metrics.csv", columns=["train/reward"])
    for step in range(1, 6):
        with monkeypatch.context() as patch:
            if step in (2, 3):
                patch.setattr(MetricsTable, "_lines", half_a_line)
            table.write(step, {"train/reward": 0.25 * step})
            assert table.read("train/reward")[0] == [*range(1, step + 1)]
            if step == 2:
                with pytest.raises(OSError, match="No space left"):
                    table.save(tmp_path / "copy.csv")
    full, again = warned
    assert "could not be written: [Errno 28] No space left on device; the run continues" in full
    assert "is written again" in again
    assert [row["train/reward"] for row in rows(table.path)] == [
        "0.25",
        "0.5",
        "0.75",
        "1.0",
        "1.25",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.csv"]
