"""A trainer that is process 1, as in a container without an init, and what runs leave to it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import torchrl_llm

TRAINER = """
import json, os, signal, subprocess, sys, threading, time, types, warnings
root, kind = sys.argv[1:]
module = sys.modules["torchrl_llm"] = types.ModuleType("torchrl_llm")
module.__path__ = [root]
from torchrl_llm.sandbox import Limits, make_sandbox
warnings.simplefilter("ignore")
assert os.getpid() == 1

def children():
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try: fields = open(f"/proc/{name}/stat").read().rpartition(")")[2].split()
        except OSError: continue
        if fields[1] == "1": found[int(name)] = fields[0]
    return found

def everything():
    sandbox = make_sandbox(kind, Limits(wall_s=20.0))
    codes = ["print(1)", "1 / 0", "import os; os.abort()", "import os; os.kill(-1, 9)",
             "import os\\nfor _ in range(3): os.fork() or os.setsid()",
             "while True: print('a' * 9999)"]
    statuses = [sandbox.run_python(code).status for code in codes]
    statuses.append(sandbox.run_python("while True: pass", limits=Limits(wall_s=0.5)).status)
    session = sandbox.open_session()
    statuses.append(session.run("print(1)").status)
    threading.Timer(0.3, session.close).start()
    session.run("import time; time.sleep(60)")
    for _ in range(5):  # one that is ended while it begins
        sandbox.run_python("pass", limits=Limits(wall_s=0.001))
    del session
    return statuses

here = everything()
mine = children()
# A worker's runs must leave nothing to process 1 either.
worker = os.fork()
if worker == 0:
    everything()
    os._exit(0)
os.waitpid(worker, 0)
print(json.dumps([here, mine, children()]))
"""


@pytest.mark.parametrize(
    "kind", [pytest.param("bubblewrap", marks=pytest.mark.sandbox), "subprocess"]
)
def test_runs_leave_no_process_to_a_trainer_that_is_process_1(kind, bubblewrap):
    if kind == "bubblewrap" and not bubblewrap:
        pytest.skip("bubblewrap does not work here")
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root can make a trainer process 1")
    line = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", TRAINER]
    done = subprocess.run(
        [*line, str(Path(torchrl_llm.__file__).parent), kind],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    statuses, after_own, after_workers = json.loads(done.stdout)
    assert statuses[0] == statuses[-1] == "ok"
    assert after_own == after_workers == {}
