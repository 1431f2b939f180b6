"""Section *right*: every fast path equals its slow twin on the device, and what memory it takes.

Runs the tests with the marker ``gpu`` in several processes, and next to them ``memory_runs.py``.
Each outcome is written as it comes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from results import Section

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# The most valuable first; what is not named here comes before the last two, which compile.
FIRST = ("head", "layouts", "sampled_scores", "losses", "sharded", "resume", "out_of_memory")
LAST = ("scorer",)
# Left out of the rehearsal: what compiles, what imports anew, and variants of the same code.
LEFT_OUT = "bfloat16 or compiled or three_steps or 300 or temperatures or TOPR or CISPO or SAPO"
MEMORY = ("full", "checkpointing", "lora")
TEST_TIMEOUT_S = 60


def test_files() -> list[str]:
    """Files of tests in the order in which they run."""
    found = {path.stem.removeprefix("test_"): str(path) for path in HERE.glob("test_*.py")}
    others = sorted(found.keys() - {*FIRST, *LAST})
    return [found[name] for name in (*FIRST, *others, *LAST) if name in found]


class MemoryRuns:
    """The processes that measure memory; on a CPU one goes through all configurations.

    Args:
        run: the section.
        folder: for their output.
    """

    def __init__(self, run: Section, folder: Path) -> None:
        self._run, self._folder = run, folder
        groups = [(name,) for name in MEMORY] if run.device.type == "cuda" else [MEMORY]
        self._pending = {names: self._start(names) for names in groups}

    def _start(self, names: tuple[str, ...]) -> subprocess.Popen:
        command = [
            sys.executable,
            "-P",
            str(HERE / "memory_runs.py"),
            "--device",
            self._run.device.type,
        ]
        command += ["--out", str(self._file(names)), *names]
        command += ["--tiny"] if self._run.tiny or self._run.device.type == "cpu" else []
        with self._file(names).with_suffix(".log").open("w") as log:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)

    def _file(self, names: tuple[str, ...]) -> Path:
        return self._folder / f"memory_{'_'.join(names)}.json"

    def collect(self, *, wait_s: float = 0.0) -> None:
        """Write down what is there; what does not end in time is ended."""
        for names, process in list(self._pending.items()):
            if process.poll() is None and wait_s:
                try:
                    process.wait(wait_s)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            if process.poll() is None:
                continue
            del self._pending[names]
            file = self._file(names)
            found = json.loads(file.read_text()) if file.exists() else {}
            for name in names:
                if name in found:
                    self._report(name, found[name])
                else:
                    lines = file.with_suffix(".log").read_text().strip().splitlines()
                    said = lines[-1][:300] if lines else ""
                    self._run.fact(f"memory, {name}", f"failed ({process.returncode}): {said}")

    def _report(self, name: str, found: dict[str, Any]) -> None:
        self._run.fact(f"memory, {name}", found)
        train, sample = found["train"], found["sample"]
        if train["measured"] is None:
            return
        gib = 2**30
        self._run.add(f"memory, {name}, training, measured", train["measured"] / gib, "GiB")
        self._run.add(f"memory, {name}, training, by formula", train["formula"] / gib, "GiB")
        off = abs(train["formula"] / train["measured"] - 1)
        self._run.aim(f"memory, {name}, training, formula off by", off, "ratio", at_most=0.1)
        both = f"memory, {name}, sampling, formula / measured"
        self._run.add(both, sample["formula"] / sample["measured"], "ratio")


class Outcomes:
    """A plugin of pytest that writes each test's outcome to the section.

    Args:
        run: the section.
        memory: is asked for news after each test.
    """

    def __init__(self, run: Section, memory: MemoryRuns) -> None:
        self._run, self._memory = run, memory
        self.counts: Counter[str] = Counter()
        self._outcomes: dict[str, str] = {}
        self._skipped: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """One phase of one test has ended."""
        if report.when != "call" and report.passed:
            return
        name = report.nodeid.rpartition("/")[2]
        if report.when == "teardown":
            name = f"{name}, its end"
        self.counts[report.outcome] += 1
        self._outcomes[name] = f"{report.outcome}, {report.duration:.1f} s"
        if report.failed:
            self._run.fact(f"failed: {name}", last_line(report.longreprtext))
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "skipped"
            self._skipped[reason.removeprefix("Skipped: ")] += 1
            self._run.fact("tests skipped, by reason", dict(self._skipped))
        self._run.fact("outcomes", self._outcomes)
        self._memory.collect()

    def pytest_collectreport(self, report: Any) -> None:
        """A file could not be read."""
        if report.failed:
            self.counts["failed"] += 1
            self._run.fact(f"failed: {report.nodeid}", last_line(str(report.longrepr)))


def last_line(text: str) -> str:
    """What pytest marks as the error, or the last line; at most 300 characters."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (errors or lines or ["no text"])[0][:300]


def run_tests(run: Section, outcomes: Outcomes) -> None:
    """Run the tests in processes of their own and write down how many passed."""
    import pytest

    on_cuda = run.device.type == "cuda"
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    if not on_cuda:
        os.environ["TORCHRL_LLM_REHEARSE"] = "cpu"
    chosen = ["-m", "gpu and not vllm", "-q", "-p", "no:cacheprovider", "--no-header"]
    if run.tiny:
        chosen += ["-k", f"not ({LEFT_OUT})"]
        run.fact("left out of the rehearsal", LEFT_OUT)
    # A test that hangs in the driver does not see a signal: its process is ended.
    limits = [f"--timeout={TEST_TIMEOUT_S}", "--timeout-method=thread", "--max-worker-restart=8"]
    workers = ["-n", "4" if on_cuda else "1" if run.tiny else "2"]
    os.chdir(ROOT)
    code = pytest.main([*chosen, *limits, *workers, *test_files()], plugins=[outcomes])
    counts = outcomes.counts
    run.fact("pytest ended with", str(code))
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        counts["failed"] += 1  # it came to no end, or never began
    run.aim("tests that failed", counts["failed"], "tests", at_most=0)
    run.add("tests that passed", counts["passed"], "tests")
    run.add("tests that were skipped", counts["skipped"], "tests")


def main() -> None:
    run = Section.from_command_line()
    # Where this file is there are names that tests do not mean.
    sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p or ".").resolve() != HERE)]
    path = [str(ROOT), str(ROOT / "test"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    with tempfile.TemporaryDirectory() as folder:
        memory = MemoryRuns(run, Path(folder))
        try:
            run_tests(run, Outcomes(run, memory))
        except Exception as error:
            run.fact("tests", f"failed: {type(error).__name__}: {error}")
        memory.collect(wait_s=max(1.0, run.seconds_left - 5.0))


if __name__ == "__main__":
    main()
