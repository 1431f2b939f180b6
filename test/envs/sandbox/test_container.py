"""Containers: the engine's words, and runs and sessions on a stand-in for an engine."""

from __future__ import annotations

import shutil
import sys
import uuid
from pathlib import Path

import pytest

from torchrl_llm.envs.sandbox import ContainerSandbox, Limits
from torchrl_llm.errors import ConfigError, ResourceError


@pytest.fixture
def engine(tmp_path, bubblewrap):
    if not bubblewrap:
        pytest.skip("bubblewrap does not work here")
    shutil.copy(Path(__file__).with_name("fake_engine.py"), tmp_path)
    path = tmp_path / "engine"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/fake_engine.py "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def sandbox(engine):
    return ContainerSandbox(Limits(wall_s=20.0), image="here", engine=engine)


@pytest.mark.sandbox
def test_a_run_in_a_container_gives_what_came_of_it(sandbox):
    files = {"data/a.txt": "A"}
    code = "import os\nprint(input(), open('data/a.txt').read())\nopen('new', 'w')\nos._exit(3)"
    result = sandbox.run_python(code, files=files, stdin="in")
    assert (result.status, result.exit_code, result.stdout) == ("error", 3, "")
    result = sandbox.run_python(code.replace("os._exit(3)", ""), files=files, stdin="in")
    assert (result.status, result.stdout) == ("ok", "in A\n")


@pytest.mark.sandbox
def test_limits_end_a_container(sandbox, survivors):
    token = uuid.uuid4().hex
    loop = f"# {token}\nwhile True: pass"
    result = sandbox.run([sandbox.python, "-c", loop], limits=Limits(wall_s=1.5, cpu_s=20))
    assert (result.status, result.exit_code) == ("timeout", -9)
    assert survivors(token) == []
    assert sandbox.run_python("while True: print('a' * 1000)").status == "output"
    assert sandbox.run_python("'a' * (1 << 40)").status == "memory"


@pytest.mark.sandbox
def test_a_session_in_a_container_keeps_names_and_has_no_input(sandbox):
    session = sandbox.open_session()
    assert session.run("x = 20").ok
    assert session.run("print(x + 1)").stdout == "21\n"
    assert "EOFError" in session.run("input()").stderr
    assert session.run("import os\nos._exit(5)").exit_code == 5
    assert not session.alive
    session.close()


@pytest.mark.sandbox
def test_the_engine_is_told_to_contain(sandbox, tmp_path):
    limits = Limits(memory_bytes=1 << 28, num_processes=8, file_bytes=1 << 20, cpu_s=3)
    words = sandbox.argv(["prog", "-x"], "name", limits=limits, share=None)
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
def test_an_image_that_is_not_there_is_refused(engine):
    with pytest.raises(ResourceError, match="has no image 'absent'; fetch it first"):
        ContainerSandbox(image="absent", engine=engine)
    with pytest.raises(ConfigError, match="name of an image"):
        ContainerSandbox(image="--privileged", engine=engine)
