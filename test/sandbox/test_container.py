"""Containers: the engine's words, and runs and sessions on a stand-in for an engine."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from torchrl_llm.errors import ConfigError, ResourceError
from torchrl_llm.sandbox import ContainerSandbox, Limits
from torchrl_llm.sandbox.contained_process import Program

sys.path.insert(0, str(Path(__file__).parent))
from container_engines import IMAGE, PYTHON, real_engine
from test_hostile_judge import ATTACKS, JUDGE, hostile_job, verdict

CAPTURE = {"capture_output": True, "timeout": 60}


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """An engine of this machine that runs containers."""
    engine = real_engine(tmp_path_factory.mktemp("engine"))
    if engine is None:
        pytest.skip("no container engine works here")
    yield engine
    only = f"--filter=ancestor={IMAGE}"
    left = subprocess.run([engine, "ps", "--all", "--quiet", only], **CAPTURE)
    subprocess.run([engine, "rmi", "--force", IMAGE], **CAPTURE)
    assert left.stdout == b""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory, bubblewrap):
    """A program that takes an engine's words."""
    if not bubblewrap:
        pytest.skip("bubblewrap does not work here")
    folder = tmp_path_factory.mktemp("stand_in")
    shutil.copy(Path(__file__).with_name("fake_engine.py"), folder)
    path = folder / "engine"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {folder}/fake_engine.py "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def contained(real):
    return ContainerSandbox(Limits(wall_s=60.0), image=IMAGE, engine=real, python=PYTHON)


@pytest.fixture(scope="module", params=[pytest.param("stand_in", marks=pytest.mark.full), "real"])
def sandbox(request):
    if request.param == "real":
        return request.getfixturevalue("contained")
    engine = request.getfixturevalue("stand_in")
    return ContainerSandbox(Limits(wall_s=60.0), image="here", engine=engine, python="python3")


@pytest.mark.sandbox
def test_a_run_in_a_container_gives_what_came_of_it(sandbox):
    files = {"data/a.txt": "A"}
    code = "import os\nprint(input(), open('data/a.txt').read())\nopen('new', 'w')\nos._exit(3)"
    result = sandbox.run_python(code, files=files, stdin="in")
    assert (result.status, result.exit_code, result.stdout) == ("error", 3, "")
    result = sandbox.run_python(code.replace("os._exit(3)", ""), files=files, stdin="in")
    assert (result.status, result.stdout) == ("ok", "in A\n")


def test_no_part_of_the_judge_can_be_reached_in_a_container(contained):
    def judged(name):
        said = verdict(contained.run_python(JUDGE, stdin=hostile_job(name)).stdout)
        return said["compile"], said["run"], said["passed"]

    with ThreadPoolExecutor(3) as pool:
        verdicts = dict(zip(ATTACKS, pool.map(judged, ATTACKS), strict=True))
    assert verdicts == dict.fromkeys(ATTACKS, ("success", "wrong", 0))


@pytest.mark.sandbox
def test_limits_end_a_container(sandbox, survivors):
    token = uuid.uuid4().hex
    loop = f"# {token}\nwhile True: pass"
    result = sandbox.run([sandbox.python, "-c", loop], limits=Limits(wall_s=4.0, cpu_s=40))
    assert (result.status, result.exit_code) == ("timeout", -9)
    assert survivors(token) == []
    start = time.monotonic()
    assert sandbox.run_python("while True: print('a' * 1000)").status == "output"
    assert time.monotonic() - start < 40  # the engine waits for nobody who reads
    assert sandbox.run_python("'a' * (1 << 40)").status == "memory"


@pytest.mark.sandbox
def test_a_session_in_a_container_keeps_names_and_has_no_input(sandbox):
    session = sandbox.open_session()
    assert session.run("x = 20").ok
    # The engine's client may be slow: what a piece wrote comes with its own answer all the same.
    for number in range(200):
        result = session.run(f"import sys\nprint({number} + x)\nprint('e', file=sys.stderr)")
        assert (result.stdout, result.stderr) == (f"{number + 20}\n", "e\n")
    assert "EOFError" in session.run("input()").stderr
    assert session.run("import os\nos._exit(5)").exit_code == 5
    assert not session.alive
    session.close()


@pytest.mark.sandbox
def test_a_program_that_exits_as_an_engine_does_is_no_failure_of_the_engine(sandbox):
    for exit_code in (125, 126, 127):
        result = sandbox.run_python(f"import os\nos._exit({exit_code})")
        assert (result.status, result.exit_code) == ("error", exit_code)


def test_an_engine_that_starts_nothing_is_a_failure_of_the_sandbox(contained):
    result = contained.run_python("pass", limits=Limits(wall_s=60.0, memory_bytes=1))
    assert (result.status, result.exit_code) == ("sandbox_error", None)
    assert result.stderr


def test_a_container_is_apart_from_the_machine(contained, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://user:secret@example.org")
    code = """
import os, socket
status = open("/proc/self/status").read()
rights = [status.split(key)[1].split()[0] for key in ("CapEff:", "NoNewPrivs:")]
print(os.getuid(), os.getcwd(), *rights)
print([name for name in os.environ if "proxy" in name.lower()], os.listdir("/sys/class/net"))
for name in ("/x", "/usr/x", "/etc/x", "/files/x", "/pipes/x", "/proc/sys/x", "/dev/x", "/sys/x"):
    try: open(name, "w").close(); print(name)
    except OSError: pass
with open("big", "wb") as file:
    try: file.write(bytes(64 << 20))
    except OSError: print("full")
"""
    result = contained.run_python(code, files={"a": "b"})
    assert result.stderr == ""
    first = f"65534 /sandbox {'0' * 16} 1"
    assert result.stdout.splitlines() == [first, "[] ['lo']", "full"]


def test_processes_of_a_container_are_counted_and_end_with_it(contained, survivors):
    if "the number of processes" in contained.missing:
        pytest.skip("the engine may not limit that here")
    token = uuid.uuid4().hex
    code = """
import os, time
started = 0
try:
    while True:
        if os.fork() == 0: os.setsid(); time.sleep(600)
        started += 1
except OSError: print(started)
"""
    limits = Limits(wall_s=60.0, num_processes=8)
    result = contained.run([PYTHON, "-c", code, token], limits=limits)
    assert (result.status, result.stdout) == ("ok", "7\n")
    assert survivors(token) == []


@pytest.mark.sandbox
def test_the_engine_is_told_to_contain(stand_in):
    sandbox = ContainerSandbox(image="here", engine=stand_in)
    limits = Limits(memory_bytes=1 << 28, num_processes=8, file_bytes=1 << 20, cpu_s=3)
    words = sandbox.argv(Program(argv=["prog", "-x"], limits=limits), "name", share=None)
    for word in (
        "--network=none", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges",
        "--user=65534:65534", "--pull=never", "--memory=268435456", "--memory-swap=268435456",
        "--pids-limit=9", "--ulimit=cpu=3:4", "--ulimit=fsize=1048576:1048576",
    ):  # fmt: skip
        assert word in words
    assert words[-3:] == ["here", "prog", "-x"]
    assert not any("mount" in word for word in words)


def test_an_engine_that_does_not_answer_is_refused():
    with pytest.raises(ResourceError, match="no container engine answers: tried /no-such-engine"):
        ContainerSandbox(engine="/no-such-engine")


@pytest.mark.sandbox
def test_an_image_that_is_not_there_is_refused(stand_in):
    with pytest.raises(ResourceError, match="has no image 'absent'; fetch it first"):
        ContainerSandbox(image="absent", engine=stand_in)
    with pytest.raises(ConfigError, match="name of an image"):
        ContainerSandbox(image="--privileged", engine=stand_in)


def test_an_engine_that_answers_and_starts_nothing_is_refused(tmp_path):
    engine = tmp_path / "engine"
    engine.write_text("#!/bin/sh\n[ $1 != run ] || { echo no cgroups >&2; exit 126; }\n")
    engine.chmod(0o755)
    with pytest.raises(ResourceError, match="can start no container of 'i': it said 'no cgroups'"):
        ContainerSandbox(image="i", engine=str(engine))


def test_limits_that_an_engine_ignores_are_named(tmp_path):
    engine = tmp_path / "engine"
    engine.write_text("#!/bin/sh\n[ $1 != inspect ] || echo '2026-01-01|false|0|0'\n")
    engine.chmod(0o755)
    sandbox = ContainerSandbox(image="i", engine=str(engine))
    assert sandbox.missing == ("memory of all processes together", "the number of processes")
    words = sandbox.argv(Program(argv=["prog"], limits=Limits()), "name", share=None)
    assert not [word for word in words if word.startswith(("--memory", "--pids-limit"))]
