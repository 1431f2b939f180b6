"""What differs between two runs of ``run_programs.py``, and which row of the table explains it.

Differences have ids: ``history.the_last_message`` (a program), ``modules.Text.to_tokens(padding)``
(an argument that ours does not take; the class itself, ``modules.Text(prompt)``, for its
constructor), ``modules.Text(prompt=None)`` (another default), ``modules.Text.prompt`` (an attribute
that ours does not have), ``torchrl_llm.data.topk:TopKRewardSelector`` (an import path). Rows of the
table name ids, or patterns of them. Its columns are read by
``docs/source/coming_from_torchrl.rst``, too.
"""

from __future__ import annotations

import csv
import fnmatch
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
TESTS = HERE.parent
TABLES = HERE.parents[1] / "docs" / "source" / "coming_from_torchrl"


class Difference(NamedTuple):
    """One difference; ``kind`` is refused, other, works, missing or raw error."""

    id: str
    kind: str
    told: str


class Row(NamedTuple):
    """One row of a table; ``held_by`` are ids and patterns of differences, or names of tests."""

    what: str
    kind: str
    held_by: tuple[str, ...]
    file: str

    @property
    def patterns(self) -> list[str]:
        """What names differences, and no test (``test/folder/test_file.py::test_name``)."""
        return [each for each in self.held_by if "::" not in each]

    def explains(self, difference: Difference) -> bool:
        """Whether the row is about the difference."""
        if self.kind not in ("", difference.kind):
            return False
        return any(_matches(difference.id, pattern) for pattern in self.patterns)

    def stale(self, found: list[Difference]) -> list[str]:
        """What the row names and is not there (any more)."""
        alive = [each.id for each in found if self.kind in ("", each.kind)]
        gone = [each for each in self.patterns if not any(_matches(id_, each) for id_ in alive)]
        return gone + [each for each in self.held_by if "::" in each and not _is_a_test(each)]


def _matches(id_: str, pattern: str) -> bool:
    return id_ == pattern or fnmatch.fnmatchcase(id_, pattern.replace("[", "[[]"))


def _is_a_test(name: str) -> bool:
    path, _, function = name.partition("::")
    path = TESTS.parent / path
    return path.is_file() and f"def {function}(" in path.read_text()


def table() -> list[Row]:
    """The rows that the page "Coming from TorchRL" shows, of all its files."""
    rows = []
    for path in sorted(TABLES.glob("*.csv")):
        with path.open(newline="") as file:
            for line in csv.reader(file):
                if len(line) != 5:
                    raise ValueError(f"{path.name}: a row has 5 columns, not {len(line)}: {line}")
                rows.append(Row(line[0], line[1], tuple(line[4].split()), path.name))
    return rows


def measure(folder: Path) -> tuple[dict, dict]:
    """What ``run_programs.py`` says of ``torchrl.*.llm`` and of ``torchrl_llm``, side by side."""
    roots = ("torchrl", "torchrl_llm")
    script = str(HERE / "run_programs.py")
    runs = [
        subprocess.Popen([sys.executable, script, root, f"{root}.json"], cwd=folder)
        for root in roots
    ]
    if any(run.wait() for run in runs):
        raise RuntimeError("run_programs.py failed; what it wrote says why")
    theirs, ours = (json.loads((folder / f"{root}.json").read_text()) for root in roots)
    return theirs, ours


def of_programs(theirs: dict, ours: dict) -> list[Difference]:
    """Programs that printed something else, or of which one side raised."""
    found = []
    for name, wanted in theirs.items():
        got = ours[name]
        told = f"torchrl: {_result(wanted)}\ntorchrl_llm: {_result(got)}"
        if wanted["error"] and got["error"]:
            continue
        if got["error"]:
            found.append(Difference(name, "refused" if _is_ours(got) else "raw error", told))
        elif wanted["error"]:
            found.append(Difference(name, "works", told))
        elif wanted["printed"] != got["printed"]:
            found.append(Difference(name, "other", told))
    return found


def _is_ours(result: dict) -> bool:
    """Whether an error was raised by this package's own check, and not by something underneath."""
    return "/torchrl_llm/" in result["raised_in"] and len(result["error"]) > 60


def _result(result: dict) -> str:
    return result["printed"] + (f"raises {result['error']}" if result["error"] else "")


def of_signatures(theirs: dict, ours: dict) -> list[Difference]:
    """Names, arguments, defaults, attributes and import paths that ours lacks or has otherwise."""
    found = []
    for name, wanted in theirs["names"].items():
        got = ours["names"].get(name)
        if got is None:
            found.append(Difference(name, "missing", "no such name"))
            continue
        found += _arguments(name, wanted["arguments"], got["arguments"])
        for base in set(wanted.get("bases", ())) - set(got.get("bases", ())):
            found.append(Difference(f"{name}:{base}", "missing", f"is no {base}"))
        for each in set(wanted["own"]) - set(got["attributes"]):
            found.append(Difference(f"{name}.{each}", "missing", "no such attribute"))
        for method in set(wanted["own"]) & set(wanted["methods"]) & set(got["methods"]):
            found += _arguments(
                f"{name}.{method}", wanted["methods"][method], got["methods"][method]
            )
    found += [
        Difference(path, "missing", "cannot be imported")
        for path in theirs["paths"]
        if not _importable(*path.split(":"))
    ]
    return sorted(found)


def _arguments(name: str, wanted: dict[str, str], got: dict[str, str]) -> list[Difference]:
    takes_any = any(each.startswith("**") for each in got)
    found = []
    for argument, default in wanted.items():
        if argument.startswith("*"):
            continue
        if argument not in got:
            if not takes_any:
                found.append(Difference(f"{name}({argument})", "missing", "no such argument"))
        elif got[argument] != default:
            told = f"default {got[argument]}, in torchrl {default}"
            found.append(Difference(f"{name}({argument}={default})", "missing", told))
    return found


def _importable(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:
        return False
