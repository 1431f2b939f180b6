"""``torchrl-llm view``: the page of a run that somebody else has written, and what it needs."""

from __future__ import annotations

import os
import shutil
from functools import partial

import pytest
from cli.run_folders import run_command, write_run, write_sweep
from evaluation.report.pages import make_rows, unpacked

from torchrl_llm.assets import embedded_model_path
from torchrl_llm.data.rollout_store import RolloutWriter
from torchrl_llm.modules import load_tokenizer


@pytest.fixture
def view(tmp_path, monkeypatch, capsys):
    """Runs the command in an empty folder; its status, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    return partial(run_command, capsys, "view")


@pytest.fixture
def run(tmp_path):
    """The folder of a run with 64 rollouts of two steps, 32 each, and a checkpoint."""
    folder = write_run(
        tmp_path / "run",
        {"model": {"name": None}, "loss": {"type": "grpo"}, "seed": 3},
        {"train/reward": [0.25, 0.5], "eval/accuracy": [None, 0.75]},
    )
    writer = RolloutWriter(folder / "rollouts")
    rows = make_rows(load_tokenizer(), 64, words=5)
    for step in (1, 2):
        writer.append(step, rows[32 * step - 32 : 32 * step])
    shutil.copytree(embedded_model_path(), folder / "checkpoints/step_000002")
    return folder


def test_a_run_becomes_one_page_with_its_curves_and_its_rollouts(view, run):
    status, out, err = view("run")
    assert (status, err) == (0, "")
    assert out.startswith("page run/view.html, 64 rollouts, ")
    header, columns = unpacked((run / "view.html").read_text(encoding="utf-8"))
    assert (header["title"], header["tokenizer"], header["notices"]) == ("run", True, [])
    assert header["facts"] == {"loss.type": "grpo", "seed": "3"}
    assert [panel["title"] for panel in header["panels"]] == ["Reward", "Held-out accuracy"]
    assert columns["row step"].tolist() == [1] * 32 + [2] * 32
    assert header["labels"] == ["fate"]
    assert not list(run.glob(".*"))  # nothing half written


def test_a_run_without_rollouts_is_a_page_of_curves_that_says_how_to_keep_them(view, run):
    shutil.rmtree(run / "rollouts")
    status, out, err = view("run", "-o", "there.html")
    assert status == 0
    assert out.startswith("page there.html, 0 rollouts")
    assert "logging.rollouts=sample" in err
    header, _ = unpacked((run.parent / "there.html").read_text(encoding="utf-8"))
    assert (header["num_rows"], len(header["panels"])) == (0, 2)
    assert "logging.rollouts=sample" in header["notices"][0]


def test_many_rollouts_are_shown_in_part_and_the_page_says_so(view, run):
    _, out, err = view("run", "--steps", "2")
    assert "32 rollouts" in out
    assert err.startswith("32 of 64 rollouts are shown, of step 2. --steps A:B and --rows N")
    _, out, err = view("run", "--rows", "40")
    assert "32 rollouts" in out  # whole steps
    _, out, err = view("run", "--rows", "10", "--steps", "2:")
    assert "10 rollouts" in out
    header, columns = unpacked((run / "view.html").read_text(encoding="utf-8"))
    assert set(columns["row step"].tolist()) == {2}
    assert header["notices"] == [err.rstrip("\n")]


def test_a_run_whose_tokenizer_is_gone_shows_ids(view, run):
    shutil.rmtree(run / "checkpoints")
    assert view("run")[2] == ""  # it began with the model of the package
    config = (run / "config.yaml").read_text().replace("name: null", "name: ./no_such")
    (run / "config.yaml").write_text(config)
    status, _, err = view("run")
    assert status == 0
    assert err.startswith("Tokens are shown as ids, for there is no tokenizer: run holds no model")
    header, columns = unpacked((run / "view.html").read_text(encoding="utf-8"))
    assert not header["tokenizer"]
    assert header["strings"][columns["token text"][0]].startswith("⟨")


def test_a_run_that_still_writes_is_shown_as_far_as_it_is_whole(view, run):
    (segment,) = (run / "rollouts").glob("*.rows")
    data = segment.read_bytes()
    segment.write_bytes(data[:-100])
    with (run / "metrics.csv").open("a") as file:
        file.write("3,0.7")
    status, out, _ = view("run")
    assert status == 0
    assert "32 rollouts" in out  # those of the first step


def test_a_page_that_cannot_be_replaced_is_left_as_it_was(view, run, monkeypatch):
    assert view("run")[0] == 0
    before = (run / "view.html").read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    status, _, err = view("run", "--steps", "1")
    assert status == 1
    assert "No space left on device; name another place with --output FILE" in err
    assert (run / "view.html").read_bytes() == before


WRONG = {
    "nothing": "DataError: there is no folder nothing",
    "rum": "did you mean run?",
    "empty": "DataError: empty has no metrics.csv; it has note.txt",
    "sweep": "sweep stands for 4 runs, name one of them: sweep/0, sweep/1, sweep/2 ...",
    "run --steps 7:": "no rollouts are of such steps; run/rollouts has steps 1 to 2",
    "run --steps x": "--steps takes A:B, as 40:60, :60, 40: or 40, got 'x'",
    "run --rows -1": "--rows must be at least 0, got -1",
    "run -o no/such.html": "the page no/such.html cannot be written: ",
    "run -o empty": "the page empty cannot be written: ",
    "run -o .": "the page . cannot be written: ",
    "run -o run/metrics.csv/a.html": "the page run/metrics.csv/a.html cannot be written: ",
    "damaged": "damaged",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_what_is_wrong_is_answered_with_what_there_is(view, run, tmp_path, arguments):
    write_sweep(tmp_path / "sweep")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "note.txt").write_text("")
    shutil.copytree(run, tmp_path / "damaged")
    (segment,) = (tmp_path / "damaged/rollouts").glob("*.rows")
    data = bytearray(segment.read_bytes())
    data[len(data) // 4] ^= 0xFF
    segment.write_bytes(data)
    status, out, err = view(*arguments.split())
    assert (status, out) == (1, "")
    assert WRONG[arguments] in err
    assert err.count("\n") == 1
    assert not list(tmp_path.rglob(".*"))


@pytest.mark.skipif(os.geteuid() == 0, reason="the root user may write everywhere")
def test_a_folder_that_cannot_be_written_asks_for_another_place(view, run):
    run.chmod(0o500)
    status, _, err = view("run")
    run.chmod(0o700)
    assert status == 1
    assert "name another place with --output FILE" in err
