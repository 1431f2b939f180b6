"""What every sandbox does: runs, files, input, results, many at once, and how one is chosen."""

from __future__ import annotations

import dataclasses
import os
import time
import uuid
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
from sandbox.conftest import kill

from torchrl_llm.errors import ConfigError, ResourceError
from torchrl_llm.sandbox import (
    BubblewrapSandbox,
    Limits,
    SandboxResult,
    SubprocessSandbox,
    make_sandbox,
    run_supervisor,
    subprocess_sandbox,
)
from torchrl_llm.sandbox import bubblewrap as module
from torchrl_llm.sandbox.contained_process import Program
from torchrl_llm.sandbox.seccomp import filter_program

KINDS = [pytest.param("bubblewrap", marks=pytest.mark.sandbox), "subprocess"]


def make(kind, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make_sandbox(kind, **kwargs)


@pytest.fixture(params=KINDS)
def sandbox(request, bubblewrap):
    if request.param == "bubblewrap" and not bubblewrap:
        pytest.skip("bubblewrap does not work here")
    return make(request.param, limits=Limits(wall_s=20.0))


def test_a_run_gives_output_errors_and_exit_code(sandbox):
    code = "import sys\nprint('out')\nprint('err', file=sys.stderr)\nsys.exit(3)"
    result = sandbox.run_python(code)
    assert dataclasses.replace(result, seconds=0.0) == SandboxResult(
        status="error", stdout="out\n", stderr="err\n", exit_code=3
    )
    assert result.seconds > 0


def test_input_arrives_as_it_is(sandbox):
    result = sandbox.run_python("import sys\nprint(sys.stdin.read())", stdin="grüße\n")
    assert result.stdout == "grüße\n\n"
    raw = "import sys\nprint(sys.stdin.buffer.read())"
    assert sandbox.run_python(raw, stdin=b"\xff\0").stdout == "b'\\xff\\x00'\n"
    assert sandbox.run_python("input()").status == "error"


def test_files_lie_in_its_folder_and_modules_among_them_import(sandbox):
    files = {"helper.py": "VALUE = 7", "data/deep/rows.bin": b"\0\1"}
    code = """
import helper, os
print(helper.VALUE, open("data/deep/rows.bin", "rb").read(), sorted(os.listdir(".")))
open("data/deep/new", "w").close()
open("helper.py", "w").close()
"""
    result = sandbox.run_python(code, files=files)
    assert result.stdout == "7 b'\\x00\\x01' ['data', 'helper.py', 'main.py']\n"
    assert result.ok


def test_files_outside_its_folder_are_refused(sandbox):
    for name in ("/etc/x", "../x", "a/../../x", "", ".", "a\0b"):
        with pytest.raises(ConfigError, match="inside the run's folder"):
            sandbox.run_python("pass", files={name: "x"})


def test_what_is_no_command_is_refused(sandbox):
    for argv in ([], "ls", ["echo", 3]):
        with pytest.raises(ConfigError, match="argv must be a program and its arguments"):
            sandbox.run(argv)


def test_a_program_is_not_taken_for_a_word_of_the_sandbox(sandbox):
    result = sandbox.run(["--version"])
    assert (result.status, result.stdout) == ("error", "")


def test_a_file_in_another_file_is_refused(sandbox):
    with pytest.raises(ConfigError, match="a folder of 'a/b/c' is itself among the files"):
        sandbox.run_python("pass", files={"a/b/c": "1", "a": "2"})


WRONG = (
    {"wall_s": 0}, {"wall_s": -1}, {"wall_s": float("nan")}, {"wall_s": float("inf")},
    {"cpu_s": 0.0}, {"cpu_s": "1"}, {"memory_bytes": -1}, {"memory_bytes": 5e8},
    {"num_processes": 0}, {"output_bytes": True}, {"file_bytes": 0}, {"num_files": None},
)  # fmt: skip


def test_limits_that_a_kernel_would_misread_are_refused():
    for values in WRONG:
        with pytest.raises(ConfigError, match=next(iter(values))):
            Limits(**values)


def test_a_sandbox_that_cannot_set_its_limits_says_so():
    if run_supervisor.landlock_version() == 0:
        pytest.skip("takes Landlock, whose rules need a descriptor more than there is")
    result = make("subprocess", limits=Limits(num_files=2)).run_python("pass")
    assert (result.status, result.exit_code) == ("sandbox_error", None)
    assert "the sandbox failed: " in result.stderr


def test_each_run_begins_with_an_empty_folder(sandbox):
    look = "import os\nprint(os.listdir('.'))\nopen('left', 'w').close()"
    assert [sandbox.run_python(look).stdout for _ in range(2)] == ["['main.py']\n"] * 2


def test_other_programs_run_too(sandbox):
    assert sandbox.run(["sh", "-c", "cat; echo $0", "name"], stdin="in ").stdout == "in name\n"


def test_a_program_that_is_not_there_is_no_exception(sandbox):
    result = sandbox.run(["no-such-program"])
    assert result.status in ("error", "sandbox_error")
    assert "no-such-program" in result.stderr or "No such file" in result.stderr
    assert sandbox.run(["echo", "a\0b"]).status in ("error", "sandbox_error")


def test_programs_started_in_sessions_of_their_own_can_be_ended_as_groups(sandbox):
    code = """
import os, subprocess
for _ in range(12):
    sleeper = subprocess.Popen(["sleep", "60"], start_new_session=True)
    assert os.getsid(sleeper.pid) == sleeper.pid
    os.killpg(sleeper.pid, 9)
    assert sleeper.wait() == -9
"""
    assert sandbox.run_python(code).status == "ok"


SESSIONS = """
import os, sys, time
answers, write = os.pipe()
for _ in range(20):
    if os.fork() == 0:
        try: os.setsid(); os.write(write, b"y")
        except PermissionError: os.write(write, b"n")
        time.sleep(60)
got = b""
while len(got) < 20: got += os.read(answers, 20)
print(got.decode())
"""


@pytest.mark.parametrize("asks", [True, False])
def test_a_plain_run_has_few_sessions_at_a_time(monkeypatch, asks):
    if filter_program() is None:
        pytest.skip("no filter of system calls for this machine")
    if not asks:  # as inside a container that is itself asked by a filter
        real = subprocess_sandbox._filter
        monkeypatch.setattr(subprocess_sandbox, "_filter", lambda sessions: real("refuse"))
    got = make("subprocess", limits=Limits(wall_s=20.0)).run_python(SESSIONS).stdout.strip()
    assert got.count("y") == (run_supervisor._SESSIONS - 1 if asks else 0)


def test_limits_of_one_run_come_before_the_sandboxs(sandbox):
    code = "import resource\nprint(resource.getrlimit(resource.RLIMIT_AS)[0])"
    assert sandbox.run_python(code, limits=Limits(memory_bytes=300 << 20)).stdout == "314572800\n"
    assert sandbox.run_python(code).stdout == f"{512 << 20}\n"


def test_the_environment_holds_nothing_of_the_trainers(sandbox, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    result = sandbox.run_python("import os\nprint(sorted(os.environ))")
    assert set(eval(result.stdout)) <= {
        "HOME", "LANG", "MALLOC_ARENA_MAX", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PATH",
        "PWD", "TMPDIR", "TORCHRL_LLM_RUN",
    }  # fmt: skip


def test_descriptors_of_the_trainer_stay_outside(sandbox, tmp_path):
    with open(tmp_path / "open", "w") as file:
        os.set_inheritable(file.fileno(), True)
        result = sandbox.run_python("import os\nprint(len(os.listdir('/proc/self/fd')))")
    assert result.stdout == "4\n"  # three of its own, and that of the listing


@pytest.mark.full
def test_sixty_four_runs_at_once_are_apart_from_each_other(sandbox):
    code = """
import os, sys, time
number = sys.stdin.read()
open("mine", "w").write(number)
time.sleep(0.2)
print(open("mine").read(), len(os.listdir(".")))
"""
    limits = Limits(wall_s=60.0, cpu_s=10.0)
    with ThreadPoolExecutor(64) as pool:
        results = pool.map(
            lambda n: sandbox.run_python(code, stdin=str(n), limits=limits), range(64)
        )
        assert [result.stdout for result in results] == [f"{n} 2\n" for n in range(64)]


def test_no_descriptor_is_left_open(sandbox):
    def count():
        return len(os.listdir("/proc/self/fd"))

    sandbox.run_python("pass")
    before = count()
    for _ in range(3):
        sandbox.run_python("print(1)", stdin="x", files={"a/b": "c"})
        session = sandbox.open_session()
        session.run("print(1)")
        session.close()
        sandbox.run(["no-such-program"])
    assert count() == before


def test_a_run_that_is_ended_while_it_begins_leaves_no_process(sandbox, survivors):
    token = f"early-{uuid.uuid4().hex}"
    try:
        for step in range(60):
            argv = ["/usr/bin/sleep", "300", token]
            contained = sandbox._spawn(Program(argv=argv, limits=sandbox.limits))
            time.sleep(0.0002 * (step % 30))
            contained.close()
        assert survivors(token) == []
    finally:
        kill(token)


@pytest.mark.sandbox
def test_auto_takes_bubblewrap_where_it_works(bubblewrap):
    if not bubblewrap:
        pytest.skip("bubblewrap does not work here")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sandbox = make_sandbox()
    assert isinstance(sandbox, BubblewrapSandbox)
    assert sandbox.missing == ()


def test_auto_falls_back_with_a_warning_that_says_what_is_open(monkeypatch):
    def fail(python):
        raise ResourceError("no bubblewrap")

    monkeypatch.setattr(module, "_working_layout", fail)
    with pytest.warns(RuntimeWarning, match="Not contained: .*the size of all files"):
        sandbox = make_sandbox()
    assert isinstance(sandbox, SubprocessSandbox)
    assert sandbox.run_python("print(1)").stdout == "1\n"


def test_what_a_plain_process_leaves_open_depends_on_the_kernel():
    new, old = (
        subprocess_sandbox._missing(run_supervisor.landlock_version() or 7, True),
        subprocess_sandbox._missing(0, False),
    )
    assert set(new) < set(old)
    assert any("kill" in phrase for phrase in old)


def test_bubblewrap_that_is_absent_or_forbidden_is_named(monkeypatch):
    module._working_layout.cache_clear()
    monkeypatch.setattr(module, "find", lambda program: None)
    with pytest.raises(ResourceError, match="'bwrap', which is not installed"):
        BubblewrapSandbox()
    monkeypatch.setattr(module, "find", lambda program: f"/usr/bin/{program}")
    monkeypatch.setattr(module, "_try", lambda layout: (False, "bwrap: No permissions"))
    with pytest.raises(ResourceError, match=r"bwrap: No permissions.*seccomp profile"):
        BubblewrapSandbox()
    module._working_layout.cache_clear()


def test_an_interpreter_that_does_not_run_is_refused(sandbox):
    with pytest.raises(ResourceError, match="no-such-python"):
        type(sandbox)(python="/no-such-python")


def test_an_unknown_kind_is_refused():
    with pytest.raises(ConfigError, match="'subprocess'"):
        make_sandbox("jail")


@pytest.mark.sandbox
def test_root_becomes_nobody_inside_where_user_namespaces_are_forbidden(bubblewrap):
    if not bubblewrap or os.geteuid() != 0:
        pytest.skip("only root can do without user namespaces")
    layouts = [layout for layout in module._layouts(None) if layout.become == "inside"]
    sandbox = BubblewrapSandbox()
    sandbox._layout, sandbox.python = layouts[0], layouts[0].python
    code = """
import os
print(os.getuid() == 0, open("/proc/self/status").read().split("CapEff:")[1].split()[0])
open("new", "w").close()
"""
    result = sandbox.run_python(code, files={"a/b": "c"})
    assert (result.status, result.stdout) == ("ok", f"False {'0' * 16}\n")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("attributes", [True, False])
def test_the_filter_jumps_forward_to_its_own_lines(machine, attributes):
    program = filter_program(machine, attributes=attributes)
    lines = [program[at : at + 8] for at in range(0, len(program), 8)]
    for number, line in enumerate(lines):
        if line[0] in (0x15, 0x35, 0x45):
            assert number + 1 + line[2] < len(lines)
            assert line[3] == 0
    assert filter_program("riscv64") is None
