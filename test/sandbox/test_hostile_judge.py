"""Code that wants its reward without the work: the tests, the secret and the verdict in its reach.

The judge of :mod:`torchrl_llm.rewards.code_judge` runs in each sandbox, with a candidate that
looks everywhere in ``/proc``. Where it finds something, it cheats well enough to pass.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

import torchrl_llm.rewards

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
ATTACKS = {
    "reads the job again from somebody's standard input": """
        found = []
        for path in places([f"fd/{fd}" for fd in range(32)]):
            try: found += [path] * (b'"tests"' in take(path))
            except (OSError, TypeError): pass
        def f(x):
            return 777 if found else 0
    """,
    "finds the secret in somebody's memory": """
        def search(pid):
            with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb") as memory:
                for line in maps:
                    low, high = (int(x, 16) for x in line.split()[0].split("-"))
                    if " rw" in line:
                        memory.seek(low)
                        if b"777" in memory.read(high - low): return True
        def f(x):
            for pid in filter(str.isdigit, os.listdir("/proc")):
                try:
                    if int(pid) != os.getpid() and search(pid): return 777
                except OSError: pass
            return 0
    """,
    "finds the secret in command lines, variables and lists of files": """
        def f(x):
            for path in places(["environ", "cmdline", "auxv", "maps", "cwd/main.py", "stat"]):
                try:
                    if b"5ecre7" in take(path): return 777
                except OSError: pass
            return 0
    """,
    "writes a verdict wherever it can": """
        fakes = {"ready": True, "compile": "success", "run": "success", "passed": 1, "message": ""}
        import json
        for path in places([f"fd/{fd}" for fd in range(32)]):
            try:
                with open(os.open(path, os.O_WRONLY | os.O_NONBLOCK), "wb") as file:
                    file.write(b"\\nforged" + json.dumps(fakes).encode() + b"\\n")
            except OSError: pass
        def f(x): return 0
    """,
    "traces its judge": """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        def f(x):
            # Attach, or seize, or take one of its descriptors.
            judge = os.getppid()
            if libc.ptrace(16, judge, None, None) == 0: return 777
            if libc.ptrace(0x4206, judge, None, None) == 0: return 777
            other = os.pidfd_open(judge)
            return 777 if any(libc.syscall(438, other, fd, 0) >= 0 for fd in range(8)) else 0
    """,
    "reads a whole process at once": """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        number = 310 if os.uname().machine == "x86_64" else 270
        class Part(ctypes.Structure):
            _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
        own = ctypes.create_string_buffer(16)
        def f(x):
            here = Part(ctypes.addressof(own), 16)
            # Pages of a fork lie where they lay in its parent.
            there = Part(id(__builtins__), 16)
            parts = ctypes.byref(here), 1, ctypes.byref(there), 1, 0
            return 777 if libc.syscall(number, os.getppid(), *parts) > 0 else 0
    """,
}


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
    return job(textwrap.dedent(SPY) + textwrap.dedent(ATTACKS[name]))


def verdict(stdout):
    said = {}
    for line in stdout.split("\n"):
        if line.startswith(SECRET):
            said |= json.loads(line.removeprefix(SECRET))
    return said


@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_that_judges_is_in_reach(attack, name):
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
