"""The guard of a run without namespaces: a small program between the trainer and the code.

The guard starts the code in a session, with limits and as a different user if possible. It forbids
everything that can be forbidden without privileges (system calls with a filter, files and signals
with Landlock). It becomes the parent of all processes that the code leaves behind. When the code or
the trainer ends, or when the trainer orders it, the guard kills all these processes and then exits.

It imports nothing from torchrl_llm, so it starts quickly. ``sys.argv`` names two descriptors: one
for orders (a JSON object) and one for reports.
"""

from __future__ import annotations

import _socket
import array
import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterable

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
# System-call filter: install it, get its notifications, receive one, answer it.
_SECCOMP = 317 if os.uname().machine == "x86_64" else 277
_SECCOMP_SET_FILTER, _SECCOMP_NEW_LISTENER = 1, 8
_SECCOMP_RECEIVE, _SECCOMP_SEND, _SECCOMP_CONTINUE = 0xC0502100, 0xC0182101, 1
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_VERSION, _LANDLOCK_BENEATH = 1, 1
# Number of Landlock's file rights at each version of its interface.
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_EXECUTE, _WRITE, _READ, _LIST, _TRUNCATE, _IOCTL = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
_TCP = 0b11  # to bind, to connect
_SCOPES = 0b11  # abstract sockets, signals

# Largest number of sessions of a run. The scheduler gives each session a share, so a fork bomb with
# a session per process would leave almost no time for the guard.
_SESSIONS = 8

# Allowance for other processes of the same user that start meanwhile.
_SLACK = 128

_SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
_libc = ctypes.CDLL(None, use_errno=True)


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("program", ctypes.c_char_p)]


def _prctl(*arguments) -> None:
    words = [a if isinstance(a, ctypes._SimpleCData) else ctypes.c_ulong(a) for a in arguments]
    words += [ctypes.c_ulong(0)] * (5 - len(words))
    if _libc.prctl(ctypes.c_int(words[0].value), *words[1:]) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {arguments[0]}")


def _syscall(number: int, *arguments) -> int:
    value = _libc.syscall(ctypes.c_long(number), *arguments)
    if value < 0:
        raise OSError(ctypes.get_errno(), f"system call {number}")
    return value


def landlock_version() -> int:
    """Return the version of the kernel's Landlock; 0 if unsupported."""
    try:
        return _syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    except OSError:
        return 0


def _landlock(read: list[str], write: list[str], folder: str) -> None:
    """Allow only reading some places, writing others, and everything in the folder."""
    version = landlock_version()
    if version == 0:
        return
    rights = (1 << _RIGHTS.get(version, 16)) - 1
    attributes = struct.pack("=Q", rights)
    if version >= 4:
        attributes += struct.pack("=Q", _TCP)
    if version >= 6:
        attributes += struct.pack("=Q", _SCOPES)
    rules = _ruleset(attributes)
    files = _EXECUTE | _WRITE | _READ | _TRUNCATE | _IOCTL
    allowed = [(path, _EXECUTE | _READ | _LIST) for path in read]
    allowed += [(path, _READ | _WRITE | _TRUNCATE) for path in write]
    for path, right in [*allowed, (folder, rights)]:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # the path does not exist on this machine
            continue
        if not os.path.isdir(path):
            right &= files
        rule = struct.pack("=Qi", right & rights, place)
        _syscall(_LANDLOCK_ADD, ctypes.c_int(rules), _LANDLOCK_BENEATH, rule, ctypes.c_uint(0))
        os.close(place)
    _restrict(rules)


def _ruleset(attributes: bytes) -> int:
    size, flags = ctypes.c_size_t(len(attributes)), ctypes.c_uint(0)
    return _syscall(_LANDLOCK_CREATE, attributes, size, flags)


def _restrict(rules: int) -> None:
    _syscall(_LANDLOCK_RESTRICT, ctypes.c_int(rules), ctypes.c_uint(0))
    os.close(rules)


def _stat(pid: str) -> list[bytes]:
    """Return the fields of ``/proc/PID/stat`` after the name, which may contain any character."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def _threads_of(uid: int) -> int:
    """Count the processes and threads that a user runs on the machine."""
    count = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                count += int(_stat(name)[17])
    return count


def _install(programs: list[str], channel: _socket.socket) -> None:
    """Install the first of these filters that the kernel accepts, and return its listener.

    Only one filter of a process can have a listener, and a container may already have one.
    Therefore the second filter rejects calls without a listener.
    """
    for program, flags in zip(programs, (_SECCOMP_NEW_LISTENER, 0), strict=True):
        data = bytes.fromhex(program)
        whole = _Filter(len(data) // 8, data)
        try:
            listener = _syscall(
                _SECCOMP,
                ctypes.c_uint(_SECCOMP_SET_FILTER),
                ctypes.c_uint(flags),
                ctypes.byref(whole),
            )
        except OSError:
            if not flags:
                raise
            continue
        if flags:
            rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", [listener]))
            channel.sendmsg([b"0"], [rights])
        return


def _listener(channel: _socket.socket) -> int | None:
    """Receive the listener of the child's filter; ``None`` if it has none."""
    _, rights, _, _ = channel.recvmsg(1, _socket.CMSG_SPACE(4))
    return array.array("i", rights[0][2])[0] if rights else None


def _answer(listener: int, allowed: set[int]) -> None:
    """Allow a new session, unless the run already has the largest number of sessions.

    Args:
        listener: descriptor of the request.
        allowed: processes that were allowed to create a session, even if they have not created it
            yet; updated in place.
    """
    question = bytearray(80)
    with contextlib.suppress(OSError, StopIteration):  # the process was killed meanwhile
        fcntl.ioctl(listener, _SECCOMP_RECEIVE, question)
        below = _below(os.getpid())
        allowed.intersection_update(below)
        verdict = (-errno.EPERM, 0)
        if len(allowed | set(below.values())) < _SESSIONS:
            with open(f"/proc/{struct.unpack_from('=I', question, 8)[0]}/status", "rb") as file:
                allowed.add(int(next(line for line in file if line.startswith(b"Tgid:"))[5:]))
            verdict = (0, _SECCOMP_CONTINUE)
        fcntl.ioctl(listener, _SECCOMP_SEND, question[:8] + struct.pack("=qiI", 0, *verdict))


def _become(orders: dict, channel: _socket.socket) -> None:
    """Replace this freshly forked process by the program."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    os.setsid()
    uid = orders["uid"]
    num_processes = orders["num_processes"]
    if uid is None:
        # This limit counts all processes of the user; the watcher in the trainer limits the run
        # itself.
        num_processes += _threads_of(os.getuid()) + _SLACK
    for name, (soft, hard) in orders["limits"].items():
        kind = getattr(resource, name)
        most = resource.getrlimit(kind)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(kind, (soft, hard))
    most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    if most != resource.RLIM_INFINITY:
        num_processes = min(num_processes, most)
    resource.setrlimit(resource.RLIMIT_NPROC, (num_processes, num_processes))
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    os.umask(0o077)
    os.chdir(orders["folder"])
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if orders["landlock"]:
        _landlock(orders["read"], orders["write"], orders["folder"])
    if all(orders["filters"]):
        _install(orders["filters"], channel)
    channel.close()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    _execute(orders["argv"], orders["env"])


def _execute(argv: list[str], env: dict[str, str]) -> None:
    # os.execvpe would import a module, which may not be readable any more.
    folders = [""] if "/" in argv[0] else env["PATH"].split(":")
    problem = ""
    for folder in folders:
        try:
            os.execve(f"{folder}/{argv[0]}" if folder else argv[0], argv, env)
        except (OSError, ValueError) as error:
            problem = str(error)
    os.write(2, f"{argv[0]}: {problem}\n".encode(errors="replace"))


def _below(pid: int) -> dict[int, int]:
    """Return all descendants of a process, with their sessions."""
    children: dict[int, list[tuple[int, int]]] = {}
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if name.isdigit():
                fields = _stat(name)
                children.setdefault(int(fields[1]), []).append((int(name), int(fields[3])))
    found: dict[int, int] = {}
    waiting = children.get(pid, [])
    while waiting:
        found.update(waiting)
        waiting = [child for one, _ in waiting for child in children.get(one, [])]
    return found


def _reap() -> tuple[dict[int, int], bool]:
    """Return the exit codes of children that have ended, and whether any child is left."""
    ended = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended, False
        if pid == 0:
            return ended, True
        ended[pid] = os.waitstatus_to_exitcode(status)


def _enter_domain(outside: int) -> bool:
    """Restrict signals of this process to its descendants, and return whether it worked.

    Args:
        outside: a process that must become unreachable.
    """
    if landlock_version() < 6:
        return False
    with contextlib.suppress(OSError):
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        _restrict(_ruleset(struct.pack("=QQQ", 0, 0, _SCOPES)))
        try:
            os.kill(outside, 0)
        except PermissionError:
            return True
    return False


def _kill_all(exit_codes: dict[int, int], *, alone: bool, uid: int | None) -> None:
    """Kill all descendants, even if they start new processes quickly.

    A signal to all processes is delivered atomically, so no process can start meanwhile. If the
    signal would also reach other processes, the descendants are first stopped one by one, until no
    new descendant is found.

    Args:
        exit_codes: a dict that is filled with the exit codes of the processes.
        alone: whether a signal to all processes reaches only descendants.
        uid: a user id that only the descendants have.
    """
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        ended, left = _reap()
        exit_codes.update(ended)
        if not left:
            return
        if alone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        elif uid is not None:
            _kill_user(uid)
        else:
            stop_and_kill(lambda: _below(os.getpid()))
        time.sleep(0.001)


def _kill_user(uid: int) -> None:
    helper = os.fork()
    if helper == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)


def stop_and_kill(find: Callable[[], Iterable[int]]) -> None:
    """Stop processes until no new one is found, then kill all of them.

    Args:
        find: returns the ids of the processes that run now.
    """
    stopped: set[int] = set()
    for _ in range(64):
        new = set(find()) - stopped
        if not new:
            break
        for pid in new:
            with contextlib.suppress(OSError, ValueError):
                resource.prlimit(pid, resource.RLIMIT_NPROC, (0, 0))  # it cannot fork any more
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= new
    for pid in stopped:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _watch(child: int, listener: int | None, exit_codes: dict[int, int]) -> None:
    """Answer the filter's requests until the child ends or a signal asks for the end.

    Args:
        child: the program.
        listener: listener of the filter.
        exit_codes: a dict that is filled with the exit codes of the processes that ended.
    """
    mask = (ctypes.c_ulong * 16)(sum(1 << (number - 1) for number in _SIGNALS))
    signals = _libc.signalfd(-1, ctypes.byref(mask), 0)
    poll = select.poll()
    poll.register(signals, select.POLLIN)
    if listener is not None:
        poll.register(listener, select.POLLIN)
    allowed: set[int] = set()
    while child not in exit_codes:
        ready = dict(poll.poll())
        if signals in ready:
            if struct.unpack_from("=I", os.read(signals, 128))[0] != signal.SIGCHLD:
                return
            exit_codes.update(_reap()[0])
        elif ready[listener] & select.POLLIN:
            _answer(listener, allowed)
        else:  # no process is left that could send a request
            poll.unregister(listener)


def _main() -> None:
    orders_fd, report_fd = int(sys.argv[1]), int(sys.argv[2])
    with open(orders_fd, encoding="utf-8", errors="surrogatepass") as file:
        orders = json.load(file)
    os.set_inheritable(report_fd, False)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # The run's pipes are also open here, and must not be reachable through /proc.
    _prctl(_PR_SET_DUMPABLE, 0)
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != orders["parent"]:
        return
    alone = orders["landlock"] and _enter_domain(orders["parent"])
    ours, its = _socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            _become(orders, its)
        except BaseException as error:
            os.write(report_fd, json.dumps({"failed": str(error)}).encode() + b"\n")
            os.write(2, f"the sandbox failed: {error}\n".encode(errors="replace"))
        finally:
            os._exit(127)
    its.close()
    for fd in orders["close"]:
        os.close(fd)
    exit_codes: dict[int, int] = {}
    _watch(child, _listener(ours), exit_codes)
    _kill_all(exit_codes, alone=alone, uid=orders["uid"])
    os.write(report_fd, json.dumps({"exit_code": exit_codes.get(child)}).encode() + b"\n")


if __name__ == "__main__":
    _main()
