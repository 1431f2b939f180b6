"""Commands in sandboxes: what they reach, what they cannot touch, and that nothing is left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from gateway.program_files import by_query, error_of, waves, write_program
from gateway.test_faults import check, of_us, until

from torchrl_llm.agents import ProgramAgent
from torchrl_llm.errors import ConfigError, ResourceError
from torchrl_llm.sandbox.container_sandbox import _answering_engine

pytest.importorskip("uvicorn")
sys.path.insert(0, str(Path(__file__).parents[1] / "sandbox"))
from container_engines import PYTHON, real_engine

IMAGE = "localhost/torchrl-llm-test-programs:1"

TEXT = """
HOME = os.environ["HOME"]

def cannot(act):
    try: act()
    except OSError: return True
    return False

def writes(row, *where):
    ask(*where, "q")
    places = (__file__, os.path.join(os.path.dirname(__file__), "new"), "new", "/usr/new")
    return float(all(cannot(lambda: open(place, "a")) for place in places))

def reads(row, *where):
    with open(os.path.join(HOME, "of-" + row["query"]), "w") as file: file.write("mine")
    ask(*where, "q")
    ask(*where, "q", "after the other one has written too")
    found = {name for top in (HOME, "/tmp") for _, _, names in os.walk(top) for name in names}
    keys = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ") as file: text = file.read()
        except OSError: continue
        keys |= {word for word in text.split("\\0") if word.startswith("OPENAI_API_KEY=")}
    files = {name for name in found if name.startswith("of-")}
    return float(files == {"of-" + row["query"]} and keys == {"OPENAI_API_KEY=" + where[1]})

def environment(row, *where):
    ask(*where, "q")
    env = os.environ
    given = env["ANTHROPIC_API_KEY"] == where[1] and env["ANTHROPIC_BASE_URL"] == where[0][:-3]
    return float(given and "SECRET" not in env and os.getuid() != 0 and row["more"] == ["it's", 1])

def spawn(row):
    words = [sys.executable, "-c", "import time; time.sleep(600)", row["token"]]
    subprocess.Popen(words, start_new_session=True)

def leaves(row, *where): ask(*where, "q"); spawn(row); return 0.75
def sleeps(row, *where): ask(*where, "q"); spawn(row); time.sleep(600)
def memory(row, *where): ask(*where, "q"); bytearray(1 << 30)
def exits(row, *where): ask(*where, "q"); print("said before"); sys.exit(3)
def text(row, *where): ask(*where, "q"); return "0.9"
def silent(row, *where): ask(*where, "q")
def run(row, *where): return globals()[row["query"].split()[0]](row, *where)
"""
EXPECTED = {
    "good": 0.5,
    "writes": 1.0,
    "reads 1": 1.0,
    "reads 2": 1.0,
    "environment": 1.0,
    "leaves": 0.75,
    "parts": 0.25,
    "sleeps": ("ProgramTimeout", "besides waiting for answers"),
    "memory": ("CommandError", "MemoryError"),
    "exits": ("CommandError", "said before"),
    "text": ("TypeError", "got '0.9'"),
}
PARTS = "def parts(row, *where): ask(*where, 'q'); return {'reward': 0.25, 'style': 3.0}\n"
COLLECTS = """
import os, sys
sys.path[:0] = {path!r}
from gateway.program_files import waves
from models_helper import make_tokenizer
rows = [{{"query": "sleeps", "token": {token!r}}}] * 2
with waves(rows, make_tokenizer(), **{agent!r} | {{"timeout_s": 300.0}}) as (_, batches):
    next(batches)
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """A folder whose ``docker`` is an engine that works here."""
    found = real_engine(tmp_path_factory.mktemp("engine"), IMAGE)
    if found is None:
        pytest.skip("no container engine works here")
    folder = tmp_path_factory.mktemp("bin")
    script = folder / "docker"
    script.write_text(f'#!/bin/sh\nexec {shutil.which(found)} "$@"\n')
    script.chmod(0o755)
    _answering_engine.cache_clear()
    yield folder
    _answering_engine.cache_clear()
    subprocess.run([script, "rmi", "--force", IMAGE], capture_output=True, timeout=60)


@pytest.fixture(
    params=[pytest.param("bubblewrap", marks=pytest.mark.sandbox), "container"],
)
def agent(request, tmp_path, monkeypatch):
    """Arguments of an agent whose command runs in a sandbox, in the folder of its file."""
    folder = tmp_path / "program"
    folder.mkdir()
    for each in (folder, *folder.parents[:3]):
        each.chmod(0o755)
    write_program(folder, PARTS + TEXT, is_command=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SECRET", "of the trainer")
    shared = {"sandbox": request.param, "memory_bytes": 256 << 20, "timeout_s": 5.0}
    if request.param == "container":
        path = f"{request.getfixturevalue('engine')}:{os.environ['PATH']}"
        monkeypatch.setenv("PATH", path)
        # Many engines that start at once on a small machine take their time.
        shared["timeout_s"] = 20.0
        return {**shared, "command": f"{PYTHON} program.py", "image": IMAGE}
    agent = {**shared, "command": f"{sys.executable} program.py"}
    try:
        ProgramAgent(**agent)
    except ResourceError as error:
        pytest.skip(str(error))
    return agent


def lines_with(token):
    """Command lines of this machine that hold a token, those of sandboxes included."""
    out = subprocess.run(["ps", "-wweo", "args="], capture_output=True, text=True, check=True)
    return [line for line in out.stdout.splitlines() if token in line]


def test_a_sandboxed_command_reaches_the_gateway_and_nothing_that_is_not_its_own(agent, tokenizer):
    token = uuid.uuid4().hex
    rows = [{"query": name, "token": token, "more": ["it's", 1]} for name in EXPECTED]
    before = set(of_us())
    with waves(rows, tokenizer, **agent) as (_, batches):
        found = by_query(next(batches))
        for name, expected in EXPECTED.items():
            check(found[name], expected)
        assert "agent.memory_bytes=268435456" in error_of(found["memory"][-1], "message")
        until(lambda: len(set(of_us()) - before) == 1)  # the host
        assert lines_with(token) == []
    assert sorted(path.name for path in Path().iterdir()) == ["program.py"]


@pytest.mark.parametrize("killed", ["host", "collector", "both"])
def test_sandboxed_commands_end_with_their_host_and_their_collector(agent, killed):
    token = uuid.uuid4().hex
    path = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    script = COLLECTS.format(path=path, token=token, agent=agent)
    collector = subprocess.Popen([sys.executable, "-c", script])
    until(lambda: sum(line.endswith(token) for line in lines_with("time.sleep(600)")) >= 2, 60)
    hosts = [pid for pid, words in of_us().items() if "program_host" in words]
    assert len(hosts) == 1
    if killed != "collector":
        os.kill(hosts[0], 9)
    if killed != "host":
        collector.kill()
    until(lambda: not [line for line in lines_with("time.sleep(600)") if token in line], 30)
    collector.wait(60)


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ({"program": "program.py:run", "sandbox": "bubblewrap"}, "agent.sandbox holds commands"),
        ({"command": "sh", "sandbox": "jail"}, "one of .*bubblewrap.*got 'jail'"),
        ({"command": "sh", "sandbox": "bubblewrap", "image": "i"}, "sandbox=container alone"),
        ({"command": "sh", "image": "i"}, "image has no effect"),
        ({"command": "no-such-thing", "sandbox": "bubblewrap"}, "there is no such command"),
    ],
)
def test_a_sandbox_that_would_hold_nothing_is_refused(agent, message):
    with pytest.raises(ConfigError, match=message):
        ProgramAgent(**agent)


def test_a_working_directory_that_a_sandbox_cannot_show_is_refused(monkeypatch):
    monkeypatch.chdir("/")
    with pytest.raises(ConfigError, match="cannot show '/'"):
        ProgramAgent(command="sh", sandbox="bubblewrap")


def test_an_agent_in_a_container_needs_an_engine(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    _answering_engine.cache_clear()
    with pytest.raises(ResourceError, match="no container engine answers"):
        ProgramAgent(command="python agent.py", sandbox="container")
