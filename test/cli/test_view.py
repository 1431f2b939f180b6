"""``torchrl-llm view``: the page of a run that somebody else has written, and what it needs."""

import importlib
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
from cli.run_folders import run_command, write_run, write_sweep
from evaluation.report.evaluations import write_evaluation
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


EVALUATE = Path(__file__).parents[2] / "sota-implementations" / "evaluate"


@pytest.fixture
def figures(monkeypatch):
    """What the recipe computes of records."""
    monkeypatch.syspath_prepend(str(EVALUATE))
    return importlib.import_module("evaluate_utils").figures


def tables_of(header):
    return {table["title"]: table["rows"] for table in header["tables"]}


def test_an_evaluation_is_a_page_of_its_figures_and_its_answers(view, tmp_path, figures):
    answers = {"2+2?": "rrww", "1+3?": "wwwi"}
    write_evaluation(tmp_path / "e", answers, figures=figures, eval__repeats=4)
    status, out, err = view("e")
    assert (status, err) == (0, "")
    assert out.startswith("page e/view.html, 8 answers, ")
    header, columns = unpacked((tmp_path / "e/view.html").read_text(encoding="utf-8"))
    assert header["title"] == "tiny on sums (2 prompts), temperature 0.5, 2026-01-31"
    assert (header["facts"], header["by_prompt"]) == ({"eval.repeats": "4"}, True)
    # 2 of 4 and 0 of 4 are right: pass@2 is (1 - 1/6 + 0) / 2; of two runs of 2 one is right.
    head, *lines = tables_of(header)["sums, with k answers"]
    assert head == ["k", "pass@k", "majority@k"]
    values = [[line[0], *(float(cell.split()[0]) for cell in line[1:])] for line in lines]
    assert values == [["1", 0.25, 0.25], ["2", 0.4167, 0.25], ["4", 0.5, 0.25]]
    assert all(" to " in cell for line in lines for cell in line[1:])
    figures_of = dict(tables_of(header)["Figures"][1:])
    assert (figures_of["invalid"], figures_of["num_prompts"]) == ("0.1250", "2")
    texts = [header["strings"][n] for n in columns["label answer is"]]
    assert texts == ["right"] * 2 + ["wrong"] * 5 + ["invalid"]
    assert (
        columns["row group"].tolist()
        == [columns["row group"][0]] * 4 + [columns["row group"][4]] * 4
    )
    assert "answer is" in header["labels"]


def test_an_evaluation_that_has_not_ended_or_is_long_says_so(view, tmp_path):
    write_evaluation(tmp_path / "e", {"a": "rr", "b": "ww"}, model__name=None)
    (tmp_path / "e/metrics.json").unlink()
    _, out, err = view("e", "--rows", "3")
    assert "2 answers" in out
    assert err.splitlines() == [
        "sums has no figures: its evaluation has not ended.",
        "2 of 4 answers are shown. --rows N chooses a different number.",
    ]
    header, _ = unpacked((tmp_path / "e/view.html").read_text(encoding="utf-8"))
    assert header["title"].startswith("the package's model on sums (2 prompts)")
    assert header["tables"] == []


def test_two_evaluations_are_compared_prompt_by_prompt(view, tmp_path, figures):
    write_evaluation(tmp_path / "a", {"p": "r", "q": "w", "x": "w"}, figures=figures)
    write_evaluation(
        tmp_path / "b", {"p": "w", "q": "w", "y": "w"}, figures=figures, model__name="big"
    )
    status, out, err = view("a", "b")
    assert status == 0
    assert out.startswith("page view.html, 4 answers, ")
    assert err.splitlines() == [
        "Only A answered 1 of the prompts of sums; they are not compared.",
        "Only B answered 1 of the prompts of sums; they are not compared.",
    ]
    header, columns = unpacked((tmp_path / "view.html").read_text(encoding="utf-8"))
    assert (header["title"], header["runs"]) == ("A a and B b", ["A a", "B b"])
    tables = tables_of(header)
    assert tables["Configuration"] == [["", "A", "B"], ["model.name", "tiny", "big"]]
    assert tables["Answers to the same prompts"][1] == ["A right, B wrong", "1"]
    assert tables["Figures"][1][::3] == ["accuracy", "-0.3333"]
    assert [header["strings"][n] for n in columns["label run"]] == ["A a", "B b"] * 2


def test_two_runs_are_drawn_together(view, run, tmp_path):
    config = {"model": {"name": None}, "loss": {"type": "gspo"}, "env": {"dataset": "sums"}}
    write_run(tmp_path / "other", config, {"train/reward": [0.5, 0.75], "perf/s": [1.0, 2.0]})
    status, out, err = view("run", "other")
    assert status == 0
    assert out.startswith("page view.html, two runs, ")
    assert "Only A has eval/accuracy.\nOnly B has perf/s.\n" in err
    assert "env.dataset differs: rewards, accuracies and lengths are those of different" in err
    header, columns = unpacked((tmp_path / "view.html").read_text(encoding="utf-8"))
    drawn = {panel["title"]: panel["labels"] for panel in header["panels"]}
    assert drawn == {
        "train/reward": ["A run", "B other"],
        "eval/accuracy": ["A run"],
        "perf/s": ["B other"],
    }
    assert columns["B other train/reward values"].tolist() == [0.5, 0.75]
    tables = tables_of(header)
    assert tables["Configuration"][1:] == [
        ["loss.type", "grpo", "gspo"],
        ["seed", "3", "null"],
        ["env.dataset", "null", "sums"],
    ]
    assert tables["Metrics at the end"][1] == ["train/reward", "0.5", "0.75", "+0.25"]


WRONG = {
    "run run run": "view compares two runs, got 3; plot compares any number",
    "run scores": "run and scores cannot be compared: one is an evaluation and the other a run",
    "scores --steps 1": "--steps chooses the rollouts of one run; leave it out here",
    "run run --steps 1": "--steps chooses the rollouts of one run; leave it out here",
    "begun": "begun has no answers yet",
    "strange": "line 1 of strange/answers_x.jsonl is no answer of an evaluation: it needs reward",
    "nothing": "DataError: there is no folder nothing",
    "rum": "did you mean run?",
    "empty": "DataError: empty has no metrics.csv; it has note.txt",
    "sweep": "sweep contains 4 runs, name one of them: sweep/0, sweep/1, sweep/2 ...",
    "run --steps 7:": "no rollouts have these steps; run/rollouts has steps 1 to 2",
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
    write_evaluation(tmp_path / "scores", {"p": "r"})
    write_evaluation(tmp_path / "begun", {})
    (tmp_path / "empty").mkdir()
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange/answers_x.jsonl").write_text('{"messages": []}\n')
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


def test_two_runs_in_language_space_differ_in_their_settings(view, tmp_path):
    for name, seed in (("a", 0), ("b", 1)):
        folder = write_run(tmp_path / name, {}, {"train/reward": [0.0, 0.5]})
        (folder / "config.yaml").unlink()
        (folder / "config.json").write_text(f'{{"paradigm": "central_credit", "seed": {seed}}}')
        (folder / "run_meta.json").write_text("{}")
    status, _, err = view("a", "b")
    assert status == 0
    assert "evaluate" not in err
    header, _ = unpacked((tmp_path / "view.html").read_text(encoding="utf-8"))
    assert tables_of(header)["Configuration"] == [["", "A", "B"], ["seed", "0", "1"]]
