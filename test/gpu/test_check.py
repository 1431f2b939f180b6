"""A section that fails, hangs or is killed costs itself alone, and the check ends in time."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpu import check
from waiting import wait_until

# With something small in the place of torch, which takes a second to import.
REPORTS = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    + """
from types import SimpleNamespace
device = lambda name: SimpleNamespace(type=name)
sys.modules["torch"] = SimpleNamespace(device=device, manual_seed=int, __version__="0")
from results import Section
run = Section.from_command_line()
run.add("before", 1.5, "s")
"""
)
# It imports no torch, so that it hangs soon. It ignores the polite signals, and its child leaves
# its session.
HANGS = """
import json, signal, subprocess, sys, time
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
figure = {"name": "before", "value": 1.5, "unit": "s"}
with open(sys.argv[2], "w") as file:
    json.dump({"figures": [figure], "facts": {"child": child.pid}}, file)
def wait_for_ever():
    time.sleep(600)
wait_for_ever()
"""
PLANTED = {
    "hangs": HANGS,
    "killed": REPORTS + "import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n",
    "raises": REPORTS + "raise MemoryError('CUDA out of memory')\n",
    "works": REPORTS
    + "run.aim('ours / other', 1.25, 'ratio', at_least=1.5)\nrun.fact('card', 'A')\n",
}


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Sections in a folder of their own; returns a call of the check there."""
    for name, text in PLANTED.items():
        (tmp_path / f"section_{name}.py").write_text(text)
    plans = [check.Plan("absent", 5.0, ("no_such_package",))]
    plans += [check.Plan(name, 4.0 if name == "hangs" else 60.0) for name in PLANTED]
    monkeypatch.setattr(check, "SECTIONS", tuple(plans))
    monkeypatch.setattr(check, "FOLDER", tmp_path)

    def run(folder, *arguments):
        arguments = ["--device", "cpu", "--out", str(tmp_path / folder), *arguments]
        code = check.main(arguments)
        found = {p.stem: json.loads(p.read_text()) for p in (tmp_path / folder).glob("*.json")}
        return code, found, tmp_path / folder

    return run


def test_a_section_that_hangs_or_is_killed_leaves_the_others(planted, capsys):
    code, found, folder = planted("out")
    assert code == 1
    statuses = {name: entry["status"] for name, entry in found.items()}
    assert statuses == {
        "absent": "skipped",
        "hangs": "out of time",
        "killed": "failed",
        "raises": "failed",
        "works": "done",
    }
    assert found["absent"]["reason"] == "needs no_such_package"
    assert found["killed"]["reason"].startswith("signal 9")
    assert found["raises"]["reason"] == "exit code 1: MemoryError: CUDA out of memory"
    before = {"name": "before", "value": 1.5, "unit": "s"}
    assert all(found[name]["figures"][0] == before for name in PLANTED)
    aim = {"name": "ours / other", "value": 1.25, "unit": "ratio", "aim": ">= 1.5", "met": False}
    assert found["works"]["figures"][1] == aim
    # Where it hung is in its log, and what it started is gone.
    assert "in wait_for_ever" in (folder / "hangs.log").read_text()
    child = Path(f"/proc/{found['hangs']['facts']['child']}")
    wait_until(lambda: not child.exists())
    shown = (folder / "table.txt").read_text()
    assert shown == capsys.readouterr().out.split("\n\n", 1)[1][:-1]
    assert "ours / other" in shown
    assert "aim >= 1.5: MISSED" in shown


def test_a_second_run_takes_over_what_is_done_and_runs_what_is_left(planted):
    _, first, folder = planted("first", "--only", "killed", "works")
    (folder.parent / "section_works.py").write_text("raise SystemExit('run again')")
    code, second, _ = planted("second", "--only", "raises", "works", "--skip-done", str(folder))
    assert code == 1
    assert second["works"] == first["works"]
    assert second["raises"]["status"] == "failed"


@pytest.mark.parametrize("written", ["[]", "null", "{", '{"figures": [null]}', "[" * 9999, None])
def test_results_that_cannot_be_read_cost_their_section_alone(planted, written):
    def run(folder, *arguments):
        code, found, _ = planted(folder, "--only", "raises", "works", *arguments)
        return code, {name: entry["status"] for name, entry in found.items()}

    folder = check.FOLDER
    text = f"import sys; open(sys.argv[2], 'w').write({written!r})\n" if written else ""
    (folder / "section_raises.py").write_text(text)
    assert run("first") == (1, {"raises": "failed", "works": "done"})
    (folder / "first" / "raises.json").write_text(written or "")
    (folder / "section_works.py").write_text("raise SystemExit('run again')")
    after = run("second", "--skip-done", str(folder / "first"))
    assert after == (1, {"raises": "failed", "works": "done"})


def test_a_check_that_is_ended_has_the_figures_so_far_in_its_table(planted, monkeypatch, capsys):
    def ended(process, mark):
        end(process, mark)
        raise SystemExit(143)

    end = check._end
    monkeypatch.setattr(check, "_end", ended)
    with pytest.raises(SystemExit):
        planted("out", "--only", "works")
    assert "works       stopped" in capsys.readouterr().out


def test_no_section_is_begun_that_cannot_end_within_the_budget(planted):
    start = time.monotonic()
    _, found, _ = planted("out", "--budget-s", "12")
    assert time.monotonic() - start < 12
    assert found["hangs"]["status"] == "out of time"
    # Each may need 60 s, and at most 2 s were left.
    assert found["works"]["status"] == "not begun"
    assert "s were left of the budget" in found["works"]["reason"]


def test_every_section_of_the_check_has_its_file_and_none_is_forgotten():
    files = {path.stem.removeprefix("section_") for path in check.FOLDER.glob("section_*.py")}
    assert files == {plan.name for plan in check.SECTIONS}


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_rehearsal_goes_through_every_section_on_a_cpu(tmp_path):
    command = [sys.executable, str(check.FOLDER / "check.py"), "--tiny", "--device", "cpu"]
    command += ["--budget-s", "1800"]  # the machine may be busy
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True)
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert done.returncode == 0, done.stdout
    assert {entry["status"] for entry in found.values()} <= {"done", "skipped"}
    assert all(e["figures"] for e in found.values() if e["status"] == "done")
