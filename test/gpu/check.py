"""Check of everything that needs a GPU, in one command that ends in time.

    python test/gpu/check.py --budget-s 420 --out DIR
    python test/gpu/check.py --budget-s 420 --out DIR2 --skip-done DIR   # what is left
    python test/gpu/check.py --tiny --device cpu --out DIR               # the rehearsal

Each section is a process with its own time limit. Sections run in the order of their value: one
that fails, hangs or is killed costs only itself. A section writes its figures to
``DIR/<name>.json`` as it finds them and everything else to ``DIR/<name>.log``; ``DIR/table.txt`` is
rewritten after each section. One that runs out of time writes the stack of every thread to its log
before it is killed.

``test/gpu/page.py`` makes the page of the documentation from the same files.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
# Kept back for the last table, and between a section's own end and its being killed.
_RESERVE_S, _GRACE_S = 6.0, 3.0
_MARK = "TORCHRL_LLM_GPU_CHECK"
# Of a fact in the table; its JSON file has all of it.
_WIDTH = 160


class Plan(NamedTuple):
    """A section and what it may take.

    Attributes:
        name: of its file, ``section_<name>.py``.
        limit_s: on a GPU; it is not begun with less than half of it left.
        needs: packages without which it is skipped.
    """

    name: str
    limit_s: float
    needs: tuple[str, ...] = ()


SECTIONS = (
    Plan("facts", 30.0),
    Plan("right", 150.0),
    Plan("main_job", 50.0),
    Plan("step", 110.0),
    Plan("head", 45.0),
    Plan("generate", 75.0),
    Plan("whole", 75.0),
    Plan("sleep", 120.0, ("vllm",)),
    Plan("vllm", 120.0, ("vllm",)),
)
_TINY_LIMIT_S = 240.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections; 0 when every one that ran is done."""
    given = _arguments(arguments)
    end = time.monotonic() + given.budget_s - _RESERVE_S
    given.out.mkdir(parents=True, exist_ok=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    entries: dict[str, dict[str, Any]] = {}
    try:
        for plan in _chosen(given.only):
            done = _done_before(plan.name, given.skip_done)
            try:
                entry = _run(plan, given, end) if done is None else done
            except (SystemExit, KeyboardInterrupt):
                found = _found(given.out / f"{plan.name}.json") or {}
                entries[plan.name] = _entry("stopped", "the check was ended", 0.0, found)
                raise
            entries[plan.name] = entry
            # What an earlier run found stays where this one did not begin.
            path = given.out / f"{plan.name}.json"
            if entry["status"] not in ("not begun", "skipped") or not path.exists():
                _write(path, json.dumps(entry, indent=1))
            _write(given.out / "table.txt", table(entries))
            print(_head(plan.name, entry), flush=True)
    finally:
        print("\n" + table(entries), flush=True)
    return int(any(e["status"] not in ("done", "skipped") for e in entries.values()))


def table(entries: dict[str, dict[str, Any]]) -> str:
    """All sections and their figures as text of fixed columns.

    Args:
        entries: of each section what its JSON file holds.
    """
    lines = []
    for name, entry in entries.items():
        lines.append(_head(name, entry))
        for fact, value in entry["facts"].items():
            line = f"    {fact}: {value}"
            lines.append(line if len(line) <= _WIDTH else line[: _WIDTH - 3] + "...")
        for figure in entry["figures"]:
            value = figure["value"]
            shown = "-" if value is None else f"{value:.5g}" if value < 1e5 else f"{value:,.0f}"
            aim = ""
            if "aim" in figure:
                aim = f"   aim {figure['aim']}: {'met' if figure['met'] else 'MISSED'}"
            lines.append(f"    {figure['name']:<58}{shown:>14} {figure['unit']}{aim}")
    return "\n".join(lines) + "\n"


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget-s", type=float, default=480.0, help="the whole ends by then")
    parser.add_argument("--out", type=Path, required=True, help="folder of results and logs")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes: a rehearsal")
    known = [plan.name for plan in SECTIONS]
    parser.add_argument(
        "--only", nargs="+", choices=known, metavar="SECTION", help=", ".join(known)
    )
    parser.add_argument("--skip-done", type=Path, metavar="DIR", help="results of an earlier run")
    return parser.parse_args(arguments)


def _chosen(only: Sequence[str] | None) -> list[Plan]:
    return [plan for plan in SECTIONS if only is None or plan.name in only]


def _done_before(name: str, folder: Path | None) -> dict[str, Any] | None:
    """What an earlier run found out in this section, if it came to its end there."""
    entry = _found(folder / f"{name}.json") if folder else None
    return entry if entry and entry.get("status") == "done" and "on" in entry else None


def _run(plan: Plan, given: argparse.Namespace, end: float) -> dict[str, Any]:
    limit = _TINY_LIMIT_S if given.tiny else plan.limit_s
    left = end - time.monotonic()
    missing = [name for name in plan.needs if find_spec(name) is None]
    if missing:
        return _entry("skipped", f"needs {', '.join(missing)}", 0.0)
    if left < limit / 2:
        return _entry(
            "not begun", f"{left:.0f} s were left of the budget, it may need {limit:.0f}", 0
        )
    limit = min(limit, left)
    results, log = given.out / f"{plan.name}.json", given.out / f"{plan.name}.log"
    with suppress(OSError):
        results.unlink()
    command = [sys.executable, str(FOLDER / f"section_{plan.name}.py"), "--out", str(results)]
    command += ["--device", given.device, "--seconds", f"{limit - _GRACE_S:.1f}"]
    command += ["--tiny"] * given.tiny
    mark = f"{os.getpid()}-{plan.name}"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", _MARK: mark}
    # The package is this checkout, whether or not it is installed.
    paths = [str(FOLDER.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    start = time.monotonic()
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process, mark)
    seconds = time.monotonic() - start
    found = _found(results)
    if code is None:
        return _entry("out of time", f"ended after {limit:.0f} s, see {log.name}", seconds, found)
    if code:
        why = f"signal {-code}" if code < 0 else f"exit code {code}"
        return _entry("failed", f"{why}: {_last_line(log)}", seconds, found)
    if found is None:
        return _entry("failed", f"no results that can be read in {results.name}", seconds)
    return _entry("done", "", seconds, found)


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End a section with all that it started; a live one writes the stacks of its threads first."""
    if process.poll() is None:
        process.send_signal(signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
    for other in _marked(mark):
        with suppress(ProcessLookupError):
            os.kill(other, signal.SIGKILL)
    # A process that hangs in the driver cannot be reaped; the next section does not wait for it.
    with suppress(subprocess.TimeoutExpired):
        process.wait(2.0)


def _marked(mark: str) -> Iterator[int]:
    """Processes that a section started, also those that left its session."""
    wanted = f"{_MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    yield int(folder.name)
            except OSError:
                continue


def _found(results: Path) -> dict[str, Any] | None:
    """Results as a section writes them; ``None`` where they are not there or something else."""
    try:
        found = json.loads(results.read_text()) if results.is_file() else None
        table({"": _entry("", "", 0.0, {**found})})
    except Exception:  # whatever a file may hold
        return None
    return found


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else ""


def _entry(
    status: str, reason: str, seconds: float, found: dict[str, Any] | None = None
) -> dict[str, Any]:
    found = found or {}
    return {
        "status": status,
        "reason": reason,
        "seconds": round(seconds, 1),
        "on": found.get("on", ""),
        "facts": found.get("facts", {}),
        "figures": found.get("figures", []),
    }


def _head(name: str, entry: dict[str, Any]) -> str:
    reason = f"  ({entry['reason']})" if entry["reason"] else ""
    return f"{name:<12}{entry['status']:<12}{entry['seconds']:7.1f} s{reason}"


def _write(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}")
    try:
        draft.write_text(text)
        os.replace(draft, path)
    except OSError as error:  # a full disk costs this file, not the sections to come
        print(f"{path} is not written: {error}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
