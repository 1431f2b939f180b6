"""Code that takes what it can get: processes, memory, time, output, disk.

Every attack goes through ``attack``, which asserts that nothing survives, that the trainer and its
files are as before, and that the time stays within the limit and two seconds.
"""

from __future__ import annotations

import textwrap

import pytest
from cases import cases
from sandbox.programs import check, named

CASES = cases(__file__)
PROGRAMS = CASES["programs"]

MEGABYTE = 1 << 20


def code(text):
    return textwrap.dedent(text)


@pytest.mark.parametrize("name", named(PROGRAMS))
def test_a_program_ends_as_it_must(attack, name):
    check(attack, PROGRAMS[name])


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
def test_memory_that_is_freed_between_two_checks_counts(attack, trainer, kind, after):
    if after == "pages.close()" and not trainer.counts_together:
        pytest.skip("without control groups what is gone before the next look is not seen")
    bomb = code(GIVE_BACK.format(kind=kind, after=after))
    result = attack(bomb, wall_s=8, cpu_s=60, memory_bytes=200 * MEGABYTE)
    assert result.status == "memory"
    assert result.seconds < 8


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6"])
def test_no_socket_can_be_opened_to_itself(attack, family):
    opener = f"import socket\nsocket.create_server(('', 0), family=socket.{family})"
    assert attack(opener).status == "error"


HONEST = CASES["honest"]


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_below_its_limits_passes(attack, name):
    result = attack(HONEST[name], wall_s=20)
    assert (result.status, result.stderr) == ("ok", "")


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


def test_output_above_what_is_kept_is_cut_while_the_run_goes_on(attack):
    result = attack("print('a' * 5000)\nprint('b' * 5000)\nopen('done', 'w')", output_bytes=5000)
    assert result.status == "ok"
    assert (result.stdout, result.stdout_truncated) == ("a" * 5000, True)
    assert not result.stderr_truncated


def test_sixteen_megabytes_of_input_that_nobody_reads_block_nobody(attack):
    assert attack("print('done')", stdin="x" * (16 << 20)).stdout == "done\n"
