"""The process that forks the others: threads, programs that end, starts, what is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from functools import partial
from pathlib import Path

import pytest
from sandbox.workers import threaded_functions
from sandbox.workers.remote_functions import Counter, behave
from waiting import in_threads, wait_until

from torchrl_llm.errors import ConfigError
from torchrl_llm.sandbox.workers import (
    RemoteCallError,
    RemoteDiedError,
    RemoteRaisedError,
    RemoteTimeoutError,
    WorkerPool,
)

FUNCTIONS = Path(__file__).with_name("remote_functions.py")


@pytest.fixture
def pool():
    pool = WorkerPool((FUNCTIONS, "behave"), num_workers=1)
    yield pool
    pool.close()


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def run(program, tmp_path, *arguments):
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(program))
    command = [sys.executable, str(file), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


# -- what a call leaves behind --------------------------------------------------------------------


def test_what_a_killed_call_has_started_in_a_session_of_its_own_dies_with_it(pool, tmp_path):
    file = tmp_path / "pid"

    def call():
        with pytest.raises(RemoteDiedError):
            pool.call("session", file)

    caller = threading.Thread(target=call)
    caller.start()
    wait_until(lambda: file.exists() and file.read_text())
    child = int(file.read_text())
    assert alive(child)
    pool.close()
    caller.join()
    wait_until(lambda: not alive(child))


def test_a_fork_of_the_function_gives_no_second_answer(pool):
    assert pool.call("fork", 0.0) == "the parent"
    time.sleep(0.3)
    assert [pool.call("return", number) for number in range(5)] == [0, 1, 2, 3, 4]


def test_a_death_is_noticed_although_a_fork_of_the_dead_lives_on(pool):
    with pytest.raises(RemoteDiedError, match="exit status 4"):
        pool.call("fork and die", 600.0, timeout=60.0)


# -- strange answers ------------------------------------------------------------------------------


def test_an_exception_that_cannot_be_read_and_a_number_without_digits_are_errors(pool):
    pid = pool.call("pid")
    with pytest.raises(RemoteRaisedError) as caught:
        pool.call("wordless")
    assert caught.value.kind == "Wordless"
    with pytest.raises(RemoteRaisedError) as caught:
        pool.call("big number")
    assert caught.value.kind == "ValueError"
    assert pool.call("pid") == pid


# -- deaths ---------------------------------------------------------------------------------------


def test_one_that_was_killed_while_it_waited_costs_no_call(pool):
    first = pool.call("pid")
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not alive(first))
    assert pool.call("pid") != first


def test_without_the_server_nothing_is_left_and_the_next_call_starts_another(pool):
    worker, server = pool.call("pid"), pool.call("parent")
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: not alive(worker))
    found = set()
    for _ in range(2):
        try:
            found.add(pool.call("parent"))
        except RemoteCallError:  # it was found dead by this call
            continue
    assert len(found) == 1
    assert found != {server}


def test_closing_ends_calls_that_run(pool, tmp_path):
    file, caught = tmp_path / "pid", []

    def call():
        try:
            pool.call("busy", file)
        except RemoteDiedError as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    wait_until(lambda: file.exists() and file.read_text())
    pool.close()
    thread.join(60)
    assert len(caught) == 1
    assert not alive(int(file.read_text()))
    assert pool.call("return", 1) == 1


def test_a_computation_that_never_looks_up_ends_when_the_program_is_killed(tmp_path):
    file = tmp_path / "pid"
    program = f"""
        import os, signal, threading, time
        from pathlib import Path
        from torchrl_llm.sandbox.workers import WorkerPool

        pool, file = WorkerPool(({str(FUNCTIONS)!r}, "behave")), Path({str(file)!r})
        threading.Thread(target=pool.call, args=("busy", file), daemon=True).start()
        while not (file.exists() and file.read_text()):
            time.sleep(0.05)
        if os.fork() == 0:  # it keeps the pool's sockets open
            time.sleep(30)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    file_of_program = tmp_path / "program.py"
    file_of_program.write_text(textwrap.dedent(program))
    done = subprocess.run([sys.executable, str(file_of_program)], timeout=600)
    assert done.returncode == -signal.SIGKILL
    pid = int(file.read_text())
    wait_until(lambda: not alive(pid), seconds=20.0)


def test_a_fork_that_ends_leaves_the_processes_of_its_parent_alone(tmp_path):
    program = f"""
        import os, sys
        from torchrl_llm.sandbox.workers import WorkerPool

        pool = WorkerPool(({str(FUNCTIONS)!r}, "behave"), num_workers=1)
        before = pool.call("pid")
        child = os.fork()
        if child == 0:
            sys.exit(0)  # an ordinary end, with everything that is done then
        os.waitpid(child, 0)
        print(pool.call("pid") == before)
        """
    done = run(program, tmp_path)
    assert done.stdout.strip() == "True", done.stderr


# -- starts ---------------------------------------------------------------------------------------


def test_a_process_starts_once_and_that_takes_nothing_of_the_time_of_a_call():
    counter = Counter(seconds=3.0)
    pool = WorkerPool(counter.count, start=counter.start, num_workers=1)
    first = pool.call(timeout=2.9)
    assert first[1] == 1
    assert pool.call(timeout=30) == first
    pool.close()
    assert counter.starts == 0


def test_a_start_that_fails_says_why_each_time():
    counter = Counter(fails=True)
    pool = WorkerPool(counter.count, start=counter.start, num_workers=1)
    for _ in range(3):
        with pytest.raises(RemoteCallError, match="FileNotFoundError: no index"):
            pool.call()
    pool.close()


def test_where_a_module_has_started_a_thread_processes_are_not_forked():
    pool = WorkerPool(threaded_functions.parent_and_threads, num_workers=1)
    server, threads = pool.call(timeout=60)
    # A fork would have none of its parent's threads; an interpreter of its own imports again.
    assert threads == 2
    assert server != os.getpid()
    with pytest.raises(RemoteRaisedError, match="argument"):
        pool.call("too many")
    pool.close()


def test_a_function_of_the_program_itself_is_found(tmp_path):
    program = """
        from torchrl_llm.sandbox.workers import WorkerPool

        def double(x):
            return 2 * x

        if __name__ == "__main__":
            pool = WorkerPool(double)
            print(pool.call(21))
            pool.close()
        """
    done = run(program, tmp_path)
    assert done.stdout.split() == ["42"], done.stderr


def test_a_program_that_would_start_itself_over_and_over_is_told(tmp_path):
    program = """
        from torchrl_llm.sandbox.workers import WorkerPool

        def double(x):
            return 2 * x

        print(WorkerPool(double).call(21))
        """
    done = run(program, tmp_path)
    assert done.returncode == 1
    assert 'put what it does under `if __name__ == "__main__":`' in done.stderr


def test_what_is_defined_at_a_prompt_is_refused_at_once(monkeypatch):
    prompt = types.ModuleType("__main__")
    exec("def f(): pass", prompt.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", prompt)
    with pytest.raises(ConfigError, match="put it into a module of its own"):
        WorkerPool(prompt.f)


def test_a_text_that_names_the_program_is_no_function_of_it():
    pool = WorkerPool(Counter(seconds="__main__").count, num_workers=1)
    assert pool.call(timeout=60)[1] == 0
    pool.close()


def test_a_start_goes_with_a_function():
    with pytest.raises(ConfigError, match="goes with a function"):
        WorkerPool((FUNCTIONS, "behave"), start=print)


def test_a_caller_that_is_interrupted_leaves_a_pool_that_answers(pool):
    pool.call("return", 0)
    main = threading.get_ident()
    threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        pool.call("power", 9)
    assert pool.call("return", 7) == 7
    with pytest.raises(RemoteTimeoutError):
        pool.call("power", 9, timeout=0.2)


def test_a_pool_of_a_function_serves_hundreds_of_calls_of_many_threads():
    pool = WorkerPool(behave, num_workers=3)

    def work(start):
        return [pool.call("return", start + number) for number in range(50)]

    found = in_threads(*(partial(work, 1000 * k) for k in range(8)))
    assert found == [[1000 * k + number for number in range(50)] for k in range(8)]
    pool.close()
