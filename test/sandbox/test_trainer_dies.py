"""A trainer that is killed takes every run and session with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

import torchrl_llm

TRAINER = """
import sys, threading, time, types, warnings
root = sys.argv[1]
module = sys.modules["torchrl_llm"] = types.ModuleType("torchrl_llm")
module.__path__ = [root]
from torchrl_llm.sandbox import Limits, make_sandbox
warnings.simplefilter("ignore")
sandbox = make_sandbox(sys.argv[2], Limits(wall_s=60.0))
code = "import os, time\\nif os.fork() == 0: os.setsid()\\nprint('up', flush=True)\\ntime.sleep(60)"
argv = [sandbox.python, "-c", code, sys.argv[3]]
threading.Thread(target=sandbox.run, args=(argv,), daemon=True).start()
session = sandbox.open_session()
session.run("import subprocess\\nsubprocess.Popen(['sleep', '60'], executable='/bin/sleep')")
time.sleep(2)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    "kind", [pytest.param("bubblewrap", marks=pytest.mark.sandbox), "subprocess"]
)
def test_a_trainer_that_is_killed_takes_its_runs_with_it(kind, bubblewrap, survivors):
    if kind == "bubblewrap" and not bubblewrap:
        pytest.skip("bubblewrap does not work here")
    token = uuid.uuid4().hex
    root = str(Path(torchrl_llm.__file__).parent)
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, root, kind, token], stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout.readline() == "ready\n"
    assert len(survivors(token)) > 1
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    patience = time.monotonic() + 20
    while survivors(token) and time.monotonic() < patience:
        time.sleep(0.05)
    assert survivors(token) == []
