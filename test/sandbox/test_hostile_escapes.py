"""Code that wants out: the trainer's files, variables, memory and processes, and the network.

Every attack goes through ``attack``, which asserts that nothing survives, that the trainer and its
files are as before, and that the time stays within the limit and two seconds.
"""

from __future__ import annotations

import os
import socket
import tempfile
import textwrap
import uuid

import pytest
from cases import cases
from sandbox.programs import check, named

PROGRAMS = cases(__file__)["programs"]
SECRET = "the-trainers-secret"


def code(text, **values):
    """A program: values first, then the dedented text. ``trainer`` is the trainer's process id."""
    lines = ["import os, sys", "trainer = int(sys.argv[2])"]
    lines += [f"{name} = {value!r}" for name, value in values.items()]
    return "\n".join(lines) + "\n" + textwrap.dedent(text)


@pytest.mark.parametrize("name", named(PROGRAMS))
def test_a_program_ends_as_it_must(attack, trainer, name):
    check(attack, PROGRAMS[name], before=code("", home=str(trainer.home)))


@pytest.mark.parametrize("name", ["private.txt", "open.txt"])
def test_the_trainers_files_cannot_be_read(attack, trainer, name):
    result = attack(code("print(open(path).read())", path=str(trainer.home / name)))
    assert result.status == "error"
    assert SECRET not in result.stdout + result.stderr


def test_what_can_be_learned_about_outside_files_is_listed(attack, trainer):
    look = """
        try: print(os.stat(path).st_size)
        except OSError: print(None)
    """
    result = attack(code(look, path=str(trainer.home / "open.txt")))
    named = [phrase for phrase in trainer.missing if phrase.startswith("sizes, owners")]
    seen = result.stdout.strip() == str(len(SECRET))
    assert (seen, len(named)) == (trainer.kind == "subprocess",) * 2


def test_no_connection_reaches_a_server_of_this_machine(attack):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        client = "import socket\nsocket.create_connection(('127.0.0.1', port), timeout=2)"
        result = attack(code(client, port=server.getsockname()[1]))
        assert result.status == "error"
        with pytest.raises(TimeoutError):
            server.accept()


def test_no_datagram_reaches_a_server_of_this_machine(attack):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(0.2)
        client = """
            import socket
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", port))
        """
        attack(code(textwrap.dedent(client), port=server.getsockname()[1]))
        with pytest.raises(TimeoutError):
            server.recv(1)


@pytest.mark.parametrize("place", ["path", "abstract"])
def test_no_local_socket_is_reached(attack, place):
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        os.chmod(folder, 0o777)
        path = f"{folder}/server" if place == "path" else "\0" + uuid.uuid4().hex
        server.bind(path)
        if place == "path":
            os.chmod(path, 0o777)
        server.listen()
        server.settimeout(0.2)
        result = attack(code("import socket\nsocket.socket(1).connect(path)", path=path))
        assert result.status == "error"
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize("family", ["AF_NETLINK", "AF_PACKET", "AF_VSOCK", "AF_ALG"])
def test_sockets_that_know_no_network_namespace_are_refused(attack, family):
    opener = f"import socket\nsocket.socket(socket.{family}, socket.SOCK_DGRAM)"
    assert attack(opener).status == "error"


LEAVE = """
    import time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            {close}
            {ignore}
            while True: time.sleep(1)
        os._exit(0)
    os.wait()
    print("gone", flush=True)
"""


@pytest.mark.parametrize("close", ["pass", "os.closerange(0, 64)"], ids=["open", "closed"])
@pytest.mark.parametrize(
    "ignore",
    [
        "pass",
        "import signal; [signal.signal(s, 1) for s in range(1, 32) if s not in (9, 19)]",
    ],
    ids=["plain", "ignoring"],
)
def test_processes_left_behind_end_with_the_run(attack, close, ignore):
    result = attack(code(LEAVE.format(close=close, ignore=ignore)))
    assert (result.status, result.stdout) == ("ok", "gone\n")
    assert result.seconds < 4


def test_processes_left_behind_by_a_run_that_is_killed_end_with_it(attack):
    result = attack(
        code(LEAVE.format(close="pass", ignore="pass") + "    while True: pass"), wall_s=1
    )
    assert result.status == "timeout"


def test_what_it_writes_to_its_folder_is_gone_afterwards(attack):
    name = f"left-{uuid.uuid4().hex}"
    writer = """
        for place in (".", "/tmp"):
            try: open(f"{place}/{name}", "w").write("x")
            except OSError: pass
        print(os.getcwd())
    """
    result = attack(code(writer, name=name))
    for place in (result.stdout.strip(), "/tmp", "/sandbox"):
        assert not os.path.lexists(f"{place}/{name}")


def test_a_folder_left_in_the_worst_state_is_removed(attack):
    mess = """
        print(os.getcwd())
        os.mkdir("locked"); open("locked/file", "w").close()
        locked = os.open("locked", os.O_RDONLY); os.fchmod(locked, 0)
        os.mkfifo("pipe")
        for _ in range(1200): os.mkdir("d"); os.chdir("d")
    """
    result = attack(code(mess))
    assert result.status == "ok"
    assert not os.path.lexists(result.stdout.strip())


def test_exiting_at_once_reports_the_exit_code(attack):
    assert attack("import os\nprint('a', flush=True)\nos._exit(0)").status == "ok"
    result = attack("import os\nos._exit(41)")
    assert (result.status, result.exit_code) == ("error", 41)


def test_a_crash_of_the_interpreter_names_the_signal(attack):
    result = attack("import ctypes\nctypes.string_at(0)")
    assert (result.status, result.exit_code) == ("killed", -11)
    result = attack("import os\nos.abort()")
    assert (result.status, result.exit_code) == ("killed", -6)


def test_junk_for_terminals_and_invalid_text_are_data(attack):
    junk = r"""
        os.write(1, b"\x1b[2J\x1b]0;title\x07\r\x08\x00\xff\xfe\x9b31m")
        os.write(2, b"\xc3(\xed\xa0\x80")
    """
    result = attack(code(junk))
    assert result.status == "ok"
    assert result.stdout == "\x1b[2J\x1b]0;title\x07\r\x08\x00\ufffd\ufffd\ufffd31m"
    assert result.stderr.startswith("\ufffd(")


@pytest.mark.parametrize(
    "source", ["print('a\0b')", "x = '\ud800'", "def", "\ufeffprint('a')", "x = 1\n" * 30_000]
)
def test_source_code_of_any_kind_gets_a_result(attack, source):
    assert attack(source).status in ("ok", "error")
