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

SECRET = "the-trainers-secret"


def code(text, **values):
    """A program: values first, then the dedented text. ``trainer`` is the trainer's process id."""
    lines = ["import os, sys", "trainer = int(sys.argv[2])"]
    lines += [f"{name} = {value!r}" for name, value in values.items()]
    return "\n".join(lines) + "\n" + textwrap.dedent(text)


@pytest.mark.parametrize("name", ["private.txt", "open.txt"])
def test_the_trainers_files_cannot_be_read(attack, trainer, name):
    result = attack(code("print(open(path).read())", path=str(trainer.home / name)))
    assert result.status == "error"
    assert SECRET not in result.stdout + result.stderr


def test_the_trainers_files_cannot_be_found(attack, trainer):
    search = """
        for start in (home, "/root", "/home", "/etc", "/var", "/proc/1/root", "/proc/1/cwd"):
            for folder, _, files in os.walk(start): print(folder, files)
    """
    result = attack(code(search, home=str(trainer.home)))
    assert "private.txt" not in result.stdout
    assert "shadow" not in result.stdout


def test_the_trainers_files_cannot_be_written_or_removed(attack, trainer):
    vandal = """
        done = []
        for act in (
            lambda: open(path, "a").write("x"), lambda: os.remove(path), lambda: os.chmod(path, 0),
            lambda: os.rename(path, path + "2"), lambda: os.link(path, "mine"),
            lambda: os.truncate(path, 0), lambda: open(path + "3", "w"),
            lambda: os.utime(path, (0, 0)), lambda: os.setxattr(path, "user.x", b"x"),
        ):
            try: act(); done.append(act)
            except OSError: pass
        print(len(done))
    """
    assert attack(code(vandal, path=str(trainer.home / "open.txt"))).stdout == "0\n"


def test_what_can_be_learnt_of_files_outside_is_named(attack, trainer):
    look = """
        try: print(os.stat(path).st_size)
        except OSError: print(None)
    """
    result = attack(code(look, path=str(trainer.home / "open.txt")))
    named = [phrase for phrase in trainer.missing if phrase.startswith("sizes, owners")]
    seen = result.stdout.strip() == str(len(SECRET))
    assert (seen, len(named)) == (trainer.kind == "subprocess",) * 2


def test_the_trainers_variables_cannot_be_read(attack):
    search = """
        print(dict(os.environ))
        for name in os.listdir("/proc"):
            try: print(open(f"/proc/{name}/environ").read())
            except OSError: pass
    """
    result = attack(code(search))
    assert result.status == "ok"
    assert "SECRET" not in result.stdout
    assert SECRET not in result.stdout


def test_the_trainers_memory_cannot_be_read(attack):
    reader = """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        print(libc.ptrace(16, trainer, None, None))
        for name in ("mem", "maps", "environ"):
            try: print(open(f"/proc/{trainer}/{name}", "rb").read(1))
            except OSError: print(-1)
    """
    result = attack(code(reader))
    assert set(result.stdout.split()) == {"-1"}


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


def test_names_are_not_resolved(attack):
    assert attack("import socket\nsocket.getaddrinfo('example.org', 80)").status == "error"


def test_killing_its_parent_harms_nobody(attack):
    killer = """
        import signal
        refused = 0
        for pid in (os.getppid(), trainer):
            for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
                try: os.kill(pid, number)
                except OSError: refused += 1
        print("still here")
    """
    result = attack(code(killer))
    assert result.status in ("ok", "killed")


def test_killing_everything_harms_nobody(attack):
    result = attack(code("import signal\nos.kill(-1, signal.SIGKILL)\nos.killpg(0, 9)"))
    assert result.status in ("killed", "error")


def test_killing_each_process_one_by_one_harms_nobody(attack):
    killer = """
        for pid in range(1, 32768):
            if pid != os.getpid():
                try: os.kill(pid, 9)
                except OSError: pass
        print("done")
    """
    result = attack(code(killer))
    assert result.status in ("ok", "killed")


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


def test_writing_outside_its_folder_is_refused(attack, trainer):
    writer = """
        import site, sysconfig
        places = ["/", "/usr", "/usr/bin", "/etc", "/var/tmp", "/dev", "/proc", "/root", "/home",
                  "/opt", "/usr/local/lib", "..", "../..", "/run", "/sys", home,
                  os.path.dirname(sys.executable),
                  *site.getsitepackages(), *sysconfig.get_paths().values()]
        name = "written-by-" + sys.argv[1]
        for place in places:
            try: open(os.path.join(place, name), "w").close(); print(place)
            except OSError: pass
    """
    assert attack(code(writer, home=str(trainer.home))).stdout == ""


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


def test_links_out_of_its_folder_lead_nowhere(attack, trainer):
    linker = """
        for name, target in (("a", home), ("b", "/"), ("c", home + "/private.txt")):
            os.symlink(target, name)
        for act in (lambda: open("c").read(), lambda: open("a/private.txt").read()):
            try: print(act())
            except OSError: pass
    """
    assert attack(code(linker, home=str(trainer.home))).stdout == ""


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


def test_leaving_at_once_is_its_exit_code(attack):
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


def test_no_terminal_is_reached(attack):
    typist = """
        import fcntl, termios
        fcntl.ioctl(os.open("/dev/tty", os.O_RDWR), termios.TIOCSTI, b"x")
    """
    assert attack(code(typist)).status == "error"


def test_closing_its_output_hides_nothing_from_the_limits(attack):
    result = attack("import os\nos.closerange(0, 64)\nwhile True: pass", wall_s=1, cpu_s=9)
    assert result.status == "timeout"


def test_a_background_process_that_holds_the_output_open_delays_nothing(attack):
    holder = "import os, time\nif os.fork() == 0: time.sleep(60)\nprint('done')"
    result = attack(holder)
    assert (result.status, result.stdout) == ("ok", "done\n")
    assert result.seconds < 4


def test_it_is_not_root_and_cannot_become_it(attack):
    climber = """
        import subprocess
        print(os.getuid() == 0, os.geteuid() == 0)
        acts = lambda: os.setuid(0), lambda: os.chroot("."), lambda: os.mknod("m", 0o60600, 64768)
        for act in acts:
            try: act(); print("done")
            except OSError: pass
        print(open("/proc/self/status").read().split("CapEff:")[1].split()[0])
        print(open("/proc/self/status").read().split("NoNewPrivs:")[1].split()[0])
    """
    assert attack(code(climber)).stdout.split() == ["False", "False", "0" * 16, "1"]


def test_namespaces_of_its_own_are_refused(attack):
    maker = """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        for flag in (0x10000000, 0x00020000, 0x40000000):
            print(libc.unshare(flag))
        clone = 56 if os.uname().machine == "x86_64" else 220
        print(libc.syscall(clone, 0x10000000 | 17, 0, 0, 0, 0))
    """
    assert attack(code(maker)).stdout.split() == ["-1"] * 4


def test_dangerous_parts_of_the_kernel_are_refused(attack):
    caller = """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        x86 = os.uname().machine == "x86_64"
        for number in (425, 321 if x86 else 280, 323 if x86 else 282, 250 if x86 else 219):
            libc.syscall(number, 0, 0, 0, 0, 0)
            print(ctypes.get_errno())
    """
    assert attack(code(caller)).stdout.split() == ["1"] * 4


def test_limits_and_priorities_of_the_trainer_stay(attack):
    meddler = """
        import resource
        acts = (
            lambda: resource.prlimit(trainer, resource.RLIMIT_CORE, (0, 0)),
            lambda: os.setpriority(os.PRIO_PROCESS, trainer, 5),
            lambda: os.sched_setaffinity(trainer, {0}),
            lambda: os.sched_setscheduler(trainer, os.SCHED_BATCH, os.sched_param(0)),
        )
        for act in acts:
            try: act(); print("done")
            except OSError: pass
        # Its own it may change as ever.
        before = os.nice(0)
        os.nice(1)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.sched_setaffinity(0, os.sched_getaffinity(0))
        print(os.getpriority(os.PRIO_PROCESS, 0) - before)
    """
    assert attack(code(meddler)).stdout == "1\n"


def test_nothing_of_system_v_is_left_behind(attack):
    leaver = """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        x86 = os.uname().machine == "x86_64"
        for number in (29, 64, 68) if x86 else (194, 190, 186):
            print(libc.syscall(number, 0, 1, 0o1600))
        print(libc.syscall(240 if x86 else 180, b"queue", 0o102, 0o600, None))
    """
    assert attack(code(leaver)).stdout.split() == ["-1"] * 4


def test_devices_and_settings_of_the_kernel_are_out_of_reach(attack):
    opener = """
        for path in ("/dev/mem", "/dev/kmsg", "/dev/vda", "/dev/sda", "/dev/kvm", "/dev/fuse",
                     "/proc/kcore", "/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern",
                     "/sys/kernel/mm/transparent_hugepage/enabled"):
            for mode in ("rb", "r+b"):
                if path.startswith("/proc/sys/") and mode == "rb": continue
                try: open(path, mode); print(path, mode)
                except OSError: pass
    """
    assert attack(code(opener)).stdout == ""


@pytest.mark.parametrize(
    "source", ["print('a\0b')", "x = '\ud800'", "def", "\ufeffprint('a')", "x = 1\n" * 30_000]
)
def test_sources_of_any_kind_are_answered(attack, source):
    assert attack(source).status in ("ok", "error")
