"""``torchrl-llm plot``: one table and one picture of runs that somebody else has written."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
from cli.run_folders import run_command, write_run, write_sweep

from torchrl_llm.cli import main


@pytest.fixture
def plot(tmp_path, monkeypatch, capsys):
    """Runs the command in an empty folder; its status, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    return partial(run_command, capsys, "plot")


def test_a_sweep_is_one_line_a_combination_with_mean_and_deviation_over_its_seeds(plot, tmp_path):
    status, out, err = plot(write_sweep(tmp_path / "sweep"), "--by", "loss.type")
    assert (status, err) == (0, "")
    lines = [line.split() for line in out.splitlines()[:3]]
    assert " ".join(lines[0]) == (
        "loss.type runs steps train/reward last highest eval/accuracy last highest"
    )
    # Last rewards 0.5 and 0.7: mean 0.6, deviation sqrt(2 * 0.1^2 / 1) = 0.141.
    assert lines[1][:6] == ["grpo", "2", "3", "0.600", "±", "0.141"]
    assert lines[1][6:9] == ["1.000", "±", "0.000"]
    assert lines[2][:6] == ["gspo", "2", "3", "0.900", "±", "0.000"]
    assert "train/reward, loss.type=grpo" in out
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_with_the_seed_among_the_keys_each_run_has_its_line(plot, tmp_path):
    _, out, _ = plot(write_sweep(tmp_path / "sweep"), "--by", "loss.type,seed")
    lines = [line.split()[:5] for line in out.splitlines()[1:5]]
    assert lines == [
        ["grpo", "0", "1", "3", "0.500"],
        ["grpo", "1", "1", "3", "0.700"],
        ["gspo", "0", "1", "3", "0.900"],
        ["gspo", "1", "1", "3", "0.900"],
    ]


def test_runs_are_called_by_what_differs_and_not_by_what_follows_from_it(plot, tmp_path):
    sweep = write_sweep(tmp_path / "sweep")
    _, out, _ = plot(sweep / "0", sweep / "2", "-o", tmp_path / "two.png")
    assert [line.split()[0] for line in out.splitlines()[1:3]] == [
        "loss.type=grpo",
        "loss.type=gspo",
    ]
    _, out, _ = plot(f"{sweep}/[01]")
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["seed=0", "seed=1"]
    assert f"picture {tmp_path / 'two.png'}" not in out


@pytest.mark.filterwarnings("error:Glyph:UserWarning")  # matplotlib cannot draw one
def test_names_of_somebody_else_reach_neither_terminal_nor_picture_raw(
    plot, tmp_path, capsys, monkeypatch
):
    hostile = "\x1b]0;owned\x07\u202e$\\frac{$ "
    run = write_run(
        tmp_path / hostile, {"seed": 1}, {"train/reward": [0.5], f"train/{hostile}": [1.0]}
    )
    status, out, err = plot(run, "--metric", f"train/{hostile}")
    assert status == 0
    said = [out, err]
    for command in (["view", "."], ["plot", f"{hostile}/gone"], ["doctor", f"{hostile}.yaml"]):
        monkeypatch.chdir(run)
        with contextlib.suppress(SystemExit):
            main(command)
        said += capsys.readouterr()
    assert not [text for text in said if {"\x1b", "\x07", "\u202e"} & set(text)]


def test_a_step_of_more_digits_than_a_run_can_count_is_left_out(plot, tmp_path):
    run = write_run(tmp_path / "run", {}, {"train/reward": [0.5]})
    with (run / "metrics.csv").open("a") as file:
        file.write("9" * 30 + ",0.7\n")
    status, out, _ = plot(run)
    assert status == 0
    assert "0.7" not in out


def test_the_best_of_a_loss_is_the_lowest(plot, tmp_path):
    _, out, _ = plot(write_sweep(tmp_path / "s") / "0", "--metric", "train/loss_objective")
    assert out.splitlines()[0].split()[-1] == "lowest"
    assert out.splitlines()[1].split()[-2:] == ["-1.000", "-2.000"]
    assert f"picture {tmp_path / 's' / '0' / 'curves.png'}" in out


def test_a_run_that_is_still_writing_is_read_up_to_its_last_whole_line(plot, tmp_path):
    run = write_run(tmp_path / "run", {}, {"train/reward": [0.25, 0.5]})
    with (run / "metrics.csv").open("a") as file:
        file.write("3,0.7")
    _, out, _ = plot(run)
    assert out.splitlines()[1].split() == ["run", "1", "2", "0.500", "0.500"]


def test_runs_of_different_columns_and_without_configuration_are_compared(plot, tmp_path):
    write_run(tmp_path / "a", {}, {"train/reward": [0.5]})
    other = write_run(tmp_path / "b", {}, {"perf/step_s": [2.0], "train/reward": [float("nan")]})
    (other / "config.yaml").unlink()
    _, out, _ = plot("a", "b", "--metric", "perf/step_s", "--metric", "train/reward")
    assert [line.split() for line in out.splitlines()[1:3]] == [
        ["a", "1", "1", "-", "-", "0.500", "0.500"],
        ["b", "1", "1", "2.000", "2.000", "-", "-"],
    ]


def test_a_job_of_a_sweep_that_wrote_nothing_is_named_and_left_out(plot, tmp_path):
    sweep = write_sweep(tmp_path / "sweep")
    (sweep / "3" / "metrics.csv").write_text("train/step,train/reward\n")
    status, out, err = plot(sweep)
    assert status == 0
    assert err == f"left out: {sweep / '3' / 'metrics.csv'} holds no step yet\n"
    assert len(out.split("\n\n")[0].splitlines()) == 4


WRONG = {
    "nothing": "DataError: there is no folder nothing",
    "sweeep": "DataError: there is no folder sweeep; did you mean sweep?",
    "empty/note.txt": "DataError: empty/note.txt is no folder of a run",
    "empty": "DataError: empty has no metrics.csv; it has note.txt",
    "sweep --metric train/rewrd": "did you mean 'train/reward'? There are eval/accuracy, train/",
    "sweep --by los.type": "did you mean 'loss.type'? Keys that differ: loss.type, seed",
    "sweep --by type": "did you mean 'loss.type'?",
    "sweep --by ,": "--by needs a key",
    "sweep -o no/such.png": "ConfigError: the picture no/such.png cannot be written",
    "sweep -o a.doc": "Format 'doc' is not supported",
    "broken": "DataError: broken/metrics.csv cannot be read: there is no column train/step",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_what_is_wrong_is_answered_with_what_there_is(plot, tmp_path, arguments):
    write_sweep(tmp_path / "sweep")
    for name, file, text in (("empty", "note.txt", ""), ("broken", "metrics.csv", "a,b\n1,2\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
    status, out, err = plot(*arguments.split())
    assert (status, out) == (1, "")
    assert WRONG[arguments] in err
    assert err.count("\n") == 1
