"""A process ends with the one that started it, however that one ended."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHILD = """
import sys, time
from torchrl_llm._parent import end_with_parent
{calls}
print("ready", flush=True)
time.sleep(600)
"""
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(
    sys.platform != "linux", reason="Linux tells a process of the end of its parent"
)
@pytest.mark.parametrize("calls", ["end_with_parent()", ""])
def test_a_child_whose_parent_was_killed_ends_if_it_asked_for_it(calls):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD.format(calls=calls)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    child = int(parent.stdout.readline())
    try:
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
        parent.wait()
        limit = time.monotonic() + (60 if calls else 0.5)
        while is_alive(child) and time.monotonic() < limit:
            time.sleep(0.02)
        assert is_alive(child) is not bool(calls)
    finally:
        if is_alive(child):
            os.kill(child, signal.SIGKILL)
        parent.stdout.close()
