"""Code that takes what it can get: processes, memory, time, output, disk.

Every attack goes through ``attack``, which asserts that nothing survives, that the trainer and its
files are as before, and that the time stays within the limit and two seconds.
"""

from __future__ import annotations

import textwrap

import pytest
from cases import cases

CASES = cases(__file__)

MEGABYTE = 1 << 20


def code(text):
    return textwrap.dedent(text)


def test_a_fork_bomb_ends_with_the_run(attack):
    result = attack(code("import os\nwhile True: os.fork()"), wall_s=1)
    assert result.status in ("error", "killed", "timeout")


def test_a_fork_bomb_that_swallows_errors_ends_with_the_run(attack):
    bomb = """
        import os
        while True:
            try: os.fork()
            except OSError: pass
    """
    assert attack(code(bomb), wall_s=1).status in ("timeout", "killed")


def test_a_fork_bomb_of_sessions_of_their_own_ends_with_the_run(attack):
    bomb = """
        import os, signal
        for s in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(s, signal.SIG_IGN)
        while True:
            try:
                if os.fork() == 0: os.setsid()
            except OSError: pass
    """
    assert attack(code(bomb), wall_s=1).status in ("timeout", "killed")


def test_sessions_that_end_each_other_end_with_the_run(attack):
    relay = """
        import os, time
        if os.fork() == 0:
            while True:
                try:
                    if os.fork(): os._exit(0)
                    os.setsid()
                    if os.fork() == 0: os.setsid()
                except OSError: pass
        time.sleep(60)
    """
    assert attack(code(relay), wall_s=1).status in ("timeout", "killed")


def test_processes_that_start_their_own_successors_end_with_the_run(attack):
    relay = """
        import os
        while True:
            try:
                if os.fork(): os._exit(0)
            except OSError: pass
    """
    # The first one ends at once, and with it the run.
    assert attack(code(relay), wall_s=2).status == "ok"


def test_a_thread_bomb_ends_with_the_run(attack):
    bomb = """
        import threading, time
        while True: threading.Thread(target=time.sleep, args=(60,)).start()
    """
    result = attack(code(bomb), wall_s=1.5)
    assert result.status in ("error", "memory", "killed", "timeout")


def test_no_more_processes_than_allowed_run_at_a_time(attack):
    many = """
        import os, time
        started = 0
        try:
            for _ in range(64):
                if os.fork() == 0:
                    time.sleep(30); os._exit(0)
                started += 1
        except OSError: pass
        time.sleep(1)
        print(started)
    """
    result = attack(code(many), num_processes=8)
    assert result.status == "killed" or int(result.stdout) <= 8


def test_a_memory_bomb_runs_out_of_memory(attack):
    result = attack("x = []\nwhile True: x.append(bytearray(1 << 20))")
    assert result.status == "memory"
    assert "MemoryError" in result.stderr


def test_one_huge_allocation_runs_out_of_memory(attack):
    assert attack("'a' * (1 << 40)").status == "memory"


def test_memory_of_many_processes_counts_together(attack):
    bomb = """
        import os, time
        for _ in range(7):
            if os.fork() == 0: break
        x = bytearray(os.urandom(1) * (120 << 20))
        time.sleep(30)
    """
    result = attack(code(bomb), wall_s=8, memory_bytes=200 * MEGABYTE)
    assert result.status == "memory"
    assert result.seconds < 8


GIVE_BACK = """
    import mmap, os, time
    size = 160 << 20
    for _ in range(9):
        if os.fork() == 0: break
    while True:
        pages = mmap.mmap(-1, size, flags=mmap.{kind} | mmap.MAP_ANONYMOUS)
        for at in range(0, size, 4096): pages[at] = 1
        pages.madvise(mmap.MADV_DONTNEED)
        {after}
"""


@pytest.mark.parametrize("kind", ["MAP_PRIVATE", "MAP_SHARED"])
@pytest.mark.parametrize("after", ["time.sleep(60)", "pages.close()"], ids=["kept", "let go"])
def test_memory_that_is_given_back_between_two_looks_counts(attack, trainer, kind, after):
    if after == "pages.close()" and not trainer.counts_together:
        pytest.skip("without control groups what is gone before the next look is not seen")
    bomb = code(GIVE_BACK.format(kind=kind, after=after))
    result = attack(bomb, wall_s=8, cpu_s=60, memory_bytes=200 * MEGABYTE)
    assert result.status == "memory"
    assert result.seconds < 8


@pytest.mark.full
def test_what_lies_in_sockets_counts(attack):
    hoard = """
        import os, socket, time
        for _ in range(12):
            if os.fork() == 0: break
        pairs = []
        try:
            while True:
                pairs.append(socket.socketpair())
                for end in pairs[-1]:
                    end.setblocking(False)
                    try:
                        while True: end.send(bytes(4096))
                    except BlockingIOError: pass
        except OSError: time.sleep(60)
    """
    result = attack(code(hoard), wall_s=10, cpu_s=60, memory_bytes=100 * MEGABYTE)
    assert result.status == "memory"
    assert result.seconds < 10


def test_buffers_of_sockets_stay_as_small_as_they_are(attack):
    raiser = """
        import socket
        one, _ = socket.socketpair()
        print(one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 212992)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    """
    result = attack(code(raiser))
    assert (result.stdout, result.status) == ("True\n", "error")
    assert "PermissionError" in result.stderr


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6"])
def test_no_socket_can_be_opened_to_itself(attack, family):
    opener = f"import socket\nsocket.create_server(('', 0), family=socket.{family})"
    assert attack(opener).status == "error"


HONEST = CASES["honest"]


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_below_its_limits_is_let(attack, name):
    result = attack(HONEST[name], wall_s=20)
    assert (result.status, result.stderr) == ("ok", "")


def test_shared_memory_that_no_limit_counts_is_refused(attack):
    bomb = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        print(libc.shmget(0, 1 << 20, 0o1600))
        try: os.memfd_create("x")
        except OSError as error: print(error.errno)
    """
    assert attack(code(bomb)).stdout.split() == ["-1", "1"]


def test_the_memory_file_system_holds_no_more_than_allowed(attack):
    bomb = """
        written = 0
        try:
            for number in range(64):
                with open(f"/dev/shm/{number}", "wb") as file:
                    written += file.write(bytes(1 << 20))
        except OSError: pass
        print(written >> 20)
    """
    result = attack(code(bomb))
    assert result.status == "ok"
    assert int(result.stdout) <= 4


def test_endless_output_is_ended_and_cut(attack):
    result = attack("while True: print('a' * 1000)", output_bytes=10_000)
    assert result.status == "output"
    assert result.stdout_truncated
    assert len(result.stdout) == 10_000
    assert result.seconds < 5


def test_endless_errors_are_ended_and_cut(attack):
    result = attack("import sys\nwhile True: sys.stderr.write('e' * 1000)", output_bytes=10_000)
    assert result.status == "output"
    assert result.stderr_truncated
    assert result.stdout == ""


def test_a_line_of_a_gigabyte_is_ended(attack):
    line = "import os\nchunk = b'x' * 65536\nfor _ in range(1 << 14): os.write(1, chunk)"
    result = attack(line)
    assert result.status == "output"
    assert len(result.stdout) == 64 << 10


def test_output_above_what_is_kept_is_cut_while_the_run_goes_on(attack):
    result = attack("print('a' * 5000)\nprint('b' * 5000)\nopen('done', 'w')", output_bytes=5000)
    assert result.status == "ok"
    assert (result.stdout, result.stdout_truncated) == ("a" * 5000, True)
    assert not result.stderr_truncated


def test_an_endless_loop_is_a_timeout(attack):
    result = attack("print('before', flush=True)\nwhile True: pass", wall_s=1, cpu_s=10)
    assert result.status == "timeout"
    assert result.exit_code == -9
    assert result.stdout == "before\n"
    assert result.seconds >= 1


def test_an_endless_sleep_is_a_timeout(attack):
    assert attack("import time\ntime.sleep(10 ** 6)", wall_s=1).status == "timeout"


def test_a_loop_that_ignores_every_signal_is_a_timeout(attack):
    stubborn = """
        import signal
        for s in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(s, signal.SIG_IGN)
        while True: pass
    """
    assert attack(code(stubborn), wall_s=1, cpu_s=10).status == "timeout"


def test_cpu_time_has_a_limit_of_its_own(attack):
    result = attack("while True: pass", wall_s=40, cpu_s=1)
    assert result.status == "cpu"
    assert result.exit_code == -24


@pytest.mark.full
def test_cpu_time_ends_also_who_ignores_its_signal(attack):
    stubborn = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert attack(stubborn, wall_s=40, cpu_s=1).status == "cpu"


def test_a_regular_expression_that_never_ends_is_a_timeout(attack):
    assert attack("import re\nre.match('(a+)+b', 'a' * 60)", wall_s=1, cpu_s=9).status == "timeout"


def test_a_run_that_stops_itself_is_a_timeout(attack):
    result = attack("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", wall_s=1)
    assert result.status == "timeout"


def test_a_file_grows_no_further_than_allowed(attack):
    result = attack("open('big', 'wb').write(bytes(64 << 20))")
    assert result.status == "error"
    assert "OSError" in result.stderr


def test_deep_recursion_is_an_error(attack):
    result = attack("def f(): return f()\nf()")
    assert result.status == "error"
    assert "RecursionError" in result.stderr


def test_recursion_without_a_limit_ends_the_run_alone(attack):
    deep = "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(x): return list(map(f, [x]))\nf(1)"
    assert attack(deep).status in ("killed", "memory", "error")


def test_all_the_files_that_may_be_open_harm_nobody(attack):
    result = attack("files = []\nwhile True: files.append(open('main.py'))", num_files=64)
    assert result.status == "error"
    assert "Too many open files" in result.stderr


def test_sixteen_megabytes_of_input_that_nobody_reads_block_nobody(attack):
    assert attack("print('done')", stdin="x" * (16 << 20)).stdout == "done\n"
