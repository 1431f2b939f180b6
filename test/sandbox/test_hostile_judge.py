"""Code that wants its reward without the work: the tests, the secret and the verdict in its reach.

The judge of :mod:`torchrl_llm.rewards.code_judge` runs in each sandbox, with a candidate that
looks everywhere in ``/proc``. Where it finds something, it cheats well enough to pass.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from cases import cases

import torchrl_llm.rewards

CASES = cases(__file__)

SECRET = "5ecre7" * 5
JUDGE = Path(torchrl_llm.rewards.__file__).with_name("code_judge.py").read_text()

SPY = """
    import os, re
    def places(names):
        for pid in sorted(filter(str.isdigit, os.listdir("/proc")), key=int):
            if int(pid) == os.getpid(): continue
            for folder in (f"/proc/{pid}", f"/proc/{pid}/task/{pid}"):
                for name in names:
                    yield f"{folder}/{name}"
    def take(path):
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            return file.read(1 << 20) or b""
"""
ATTACKS = CASES["attacks"]


def job(source):
    return json.dumps(
        {
            "entry_point": "f",
            "prelude": "",
            "tests": "try:\n    assert f(1) == 777\nexcept BaseException as e:\n"
            "    __case__(0, e)\nelse:\n    __case__(0, None)",
            "sources": [source],
            "stop_early": True,
            "timeout_s": 4.0,
            "secret": SECRET,
        }
    )


def hostile_job(name):
    return job(textwrap.dedent(SPY) + ATTACKS[name])


def verdict(stdout):
    said = {}
    for line in stdout.split("\n"):
        if line.startswith(SECRET):
            said |= json.loads(line.removeprefix(SECRET))
    return said


@pytest.mark.parametrize("name", ATTACKS)
def test_no_part_of_the_judge_can_be_reached(attack, name):
    result = attack(JUDGE, stdin=hostile_job(name))
    said = verdict(result.stdout)
    assert said["ready"]
    # It was judged, and what it returned is not what was to be guessed.
    assert (said["compile"], said["run"], said["passed"]) == ("success", "wrong", 0), said
    assert "forged" not in result.stdout


def test_an_honest_program_passes_in_the_same_place(attack):
    result = attack(JUDGE, stdin=job("def f(x): return 777 * x"))
    assert verdict(result.stdout)["passed"] == 1


SEARCH = """
    found = []
    for path in places(["environ", "maps"]):
        try: found += [path] * bool(take(path))
        except OSError: pass
    for path in places(["root", "cwd", "exe", *(f"fd/{fd}" for fd in range(32))]):
        try: found.append((path, os.stat(path)))
        except OSError: pass
    for path in places(["mem"]):
        try: found.append((path, open(path, "rb")))
        except OSError: pass
    print(found)
"""


def test_no_other_process_can_be_looked_into(attack):
    assert attack(textwrap.dedent(SPY + SEARCH), stdin="x").stdout == "[]\n"
