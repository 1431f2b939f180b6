"""Sessions: names are kept, limits end them, and no text can confuse them."""

from __future__ import annotations

import os
import textwrap
import threading
import time
import uuid
import warnings

import pytest

from torchrl_llm.errors import ConfigError
from torchrl_llm.sandbox import Limits, make_sandbox

KINDS = [pytest.param("bubblewrap", marks=pytest.mark.sandbox), "subprocess"]

LEAVE = """
import subprocess, sys
sleep = [sys.executable, "-c", "import time; time.sleep(99)", "{token}"]
subprocess.Popen(sleep, start_new_session=True)
"""


@pytest.fixture(params=KINDS)
def sandbox(request, bubblewrap):
    if request.param == "bubblewrap" and not bubblewrap:
        pytest.skip("bubblewrap does not work here")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make_sandbox(request.param, Limits(wall_s=20.0, memory_bytes=256 << 20))


@pytest.fixture
def session(sandbox):
    session = sandbox.open_session()
    yield session
    session.close()


def test_names_are_kept_from_piece_to_piece(session):
    assert session.run("x = 20\ndef double(n): return 2 * n").ok
    result = session.run("print(double(x) + 2)")
    assert (result.status, result.stdout, result.exit_code) == ("ok", "42\n", 0)


def test_errors_are_answered_and_names_survive_them(session):
    session.run("x = 1")
    result = session.run("y = 2\nz = 1 / 0")
    assert (result.status, result.exit_code) == ("error", 1)
    assert "ZeroDivisionError" in result.stderr
    assert "z = 1 / 0" in result.stderr
    assert "_run" not in result.stderr
    assert session.run("print(x + y)").stdout == "3\n"


def test_writing_to_standard_error_is_no_failure(session):
    result = session.run("import sys\nprint('note', file=sys.stderr)")
    assert (result.status, result.stdout, result.stderr) == ("ok", "", "note\n")


def test_marks_in_code_and_output_are_text(session):
    for mark in ("---END---", "\x00\x00\x00\x05", '{"exit_code": 0}', "<piece 1>"):
        result = session.run(f"text = {mark!r}\nprint(text)\n'''\n{mark.strip(chr(0))}\n'''")
        assert (result.status, result.stdout) == ("ok", mark + "\n")
        assert session.run("print(1)").stdout == "1\n"


def test_ten_thousand_lines_come_at_once(session):
    result = session.run("for i in range(10_000): print(i)", wall_s=5)
    assert result.stdout == "".join(f"{i}\n" for i in range(10_000))


def test_syntax_errors_zeros_and_surrogates_are_answered(session):
    for code in ("def", "x = '\0'", "x = '\ud800'\nprint(x)"):
        assert session.run(code).status == "error"
    assert session.run("print(1)").stdout == "1\n"


def test_leaving_ends_the_piece_not_the_session(session):
    assert session.run("x = 5\nimport sys\nsys.exit(3)").exit_code == 3
    assert session.run("raise SystemExit").status == "ok"
    result = session.run("raise SystemExit('sorry')")
    assert (result.exit_code, result.stderr) == (1, "sorry\n")
    assert session.run("print(x)").stdout == "5\n"


def test_output_of_child_processes_belongs_to_the_piece(session):
    result = session.run("import subprocess\nsubprocess.run(['echo', 'child'])")
    assert result.stdout == "child\n"


def test_output_from_behind_comes_with_the_next_piece(session):
    late = "import threading, time\nthreading.Timer(0.3, print, ['late']).start()"
    assert session.run(late).stdout == ""
    time.sleep(1)
    assert session.run("print('now')").stdout == "late\nnow\n"


def test_output_is_cut_for_each_piece(sandbox):
    session = sandbox.open_session(Limits(output_bytes=100))
    first, second = session.run("print('a' * 150)"), session.run("print('b')")
    session.close()
    assert (first.stdout, first.stdout_truncated) == ("a" * 100, True)
    assert (second.stdout, second.stdout_truncated) == ("b\n", False)


def test_a_timeout_ends_the_session(session):
    start = time.monotonic()
    result = session.run("print('a', flush=True)\nwhile True: pass", wall_s=1)
    assert time.monotonic() - start < 3
    assert (result.status, result.exit_code, result.stdout) == ("timeout", -9, "a\n")
    assert not session.alive
    after = session.run("print(1)")
    assert after.status == "sandbox_error"
    assert "open another session" in after.stderr


def test_running_out_of_memory_ends_the_session(session):
    assert session.run("x = 'a' * (1 << 40)").status == "memory"
    assert not session.alive


def test_endless_output_ends_the_session(session):
    assert session.run("while True: print('a' * 1000)").status == "output"
    assert not session.alive


@pytest.mark.parametrize(
    ("code", "status", "exit_code"),
    [
        ("import os; os._exit(7)", "error", 7),
        ("import os; os.kill(os.getpid(), 9)", "killed", -9),
        ("import ctypes; ctypes.string_at(0)", "killed", -11),
    ],
)
def test_an_interpreter_that_dies_says_how(session, code, status, exit_code):
    result = session.run(code)
    assert (result.status, result.exit_code) == (status, exit_code)
    assert not session.alive


def test_forged_answers_are_refused(session):
    forger = """
        import os
        for fd in range(3, 4096):
            for frame in (b"\\xff" * 5000, b"\\0\\0\\0\\2[]", b"\\0\\0\\0\\1"):
                try: os.write(fd, frame)
                except OSError: pass
    """
    result = session.run(textwrap.dedent(forger))
    assert result.status in ("killed", "timeout", "error")
    assert not session.alive


def test_nothing_of_a_session_survives_its_end(sandbox, survivors):
    session = sandbox.open_session()
    token = uuid.uuid4().hex
    assert session.run(LEAVE.format(token=token)).ok
    until = time.monotonic() + 30
    while not survivors(token) and time.monotonic() < until:  # it has forked, and is not yet itself
        time.sleep(0.01)
    assert len(survivors(token)) == 1
    session.close()
    session.close()
    assert survivors(token) == []


def test_a_session_that_nobody_holds_ends(sandbox, survivors):
    session = sandbox.open_session()
    token = uuid.uuid4().hex
    assert session.run(LEAVE.format(token=token)).ok
    del session
    assert survivors(token) == []


def test_a_fork_of_the_trainer_that_lets_go_ends_nothing(sandbox):
    session = sandbox.open_session()
    session.run("x = 1")
    pid = os.fork()
    if pid == 0:
        del session
        os._exit(0)
    os.waitpid(pid, 0)
    assert session.run("print(x)").stdout == "1\n"
    session.close()


def test_a_fork_inside_that_comes_back_answers_nothing(session):
    code = "import os\nx = os.fork()\nif x: os.waitpid(x, 0)\nprint('parent' if x else 'child')"
    result = session.run(code)
    assert (result.status, result.stdout) == ("ok", "child\nparent\n")
    assert session.run("print(x > 0)").stdout == "True\n"


def test_no_time_is_no_limit(session):
    for wall_s in (0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="wall_s must be above 0"):
            session.run("pass", wall_s=wall_s)


def test_a_session_outlives_the_thread_that_opened_it(sandbox):
    opened = []
    thread = threading.Thread(target=lambda: opened.append(sandbox.open_session()))
    thread.start()
    thread.join()
    time.sleep(0.3)
    assert opened[0].run("print(1)").stdout == "1\n"
    opened[0].close()


def test_closing_cuts_a_running_piece_short(session):
    threading.Timer(0.5, session.close).start()
    start = time.monotonic()
    result = session.run("import time\ntime.sleep(60)")
    assert time.monotonic() - start < 10
    assert result.status in ("sandbox_error", "killed")


def test_sessions_are_apart_from_each_other(sandbox):
    one, two = sandbox.open_session(), sandbox.open_session()
    one.run("secret = 1\nopen('file', 'w').write('x')")
    result = two.run("import os\nprint(os.listdir('.'), 'secret' in globals())")
    one.close()
    two.close()
    assert result.stdout == "[] False\n"


def test_a_session_has_no_input(session):
    assert "EOFError" in session.run("input()").stderr


def test_classes_of_a_session_can_be_pickled(session):
    code = "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))).__name__)"
    assert session.run(code).stdout == "A\n"
