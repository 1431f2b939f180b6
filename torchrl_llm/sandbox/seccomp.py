"""A filter of system calls for the sandboxes of Linux, as the kernel's own small programs.

Namespaces do not hold everything. This filter forbids what they leave open and no ordinary program
misses: memory that no limit counts (System V segments, ``memfd``, what lies in sockets of TCP or in
a socket's larger buffer), sockets of families that know no network namespace (``AF_VSOCK`` reaches
the host of a virtual machine), namespaces of its own, and parts of the kernel known for their holes
(``io_uring``, ``bpf``, ``userfaultfd``, keys).

Forbidden calls fail with an error that programs know, they are not killed.
"""

from __future__ import annotations

import errno
import functools
import platform
import struct
from typing import Literal

AF_UNIX = 1
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Numbers of the calls: x86_64, aarch64 (asm/unistd_64.h, asm-generic/unistd.h).
_FORBIDDEN = {
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "pidfd_getfd": (438, 438),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "userfaultfd": (323, 282),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "fsopen": (430, 430),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "open_by_handle_at": (304, 265),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kexec_load": (246, 104),
}
# What Landlock does not know: modes, owners, times and attributes of files by their paths. Where a
# call does not exist on one architecture its number is that of a call for the same purpose.
_ATTRIBUTES = {
    "chmod": (90, 53),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, 54),
    "lchown": (94, 54),
    "fchownat": (260, 54),
    "utime": (132, 88),
    "utimes": (235, 88),
    "futimesat": (261, 88),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
}
# What a process may ask of any other of its user: limits and the scheduler, by number. Only itself
# (0) is let; of calls that name groups and users too, only the process.
_OTHERS = {
    "prlimit64": (302, 261),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
}
_IOPRIO_SET, _SETPRIORITY = (251, 30), (141, 140)
_SOCKET, _CLONE, _CLONE3, _SETSID = (41, 198), (56, 220), (435, 435), (112, 157)
_SOCKETPAIR, _SETSOCKOPT = (53, 199), (54, 208)
_SOL_SOCKET, _SO_SNDBUF, _SO_SNDBUFFORCE = 1, 7, 32
_CLONE_NEWUSER = 0x10000000
_X32 = 0x40000000

# Classic BPF: load a word of the call's record, jump if equal, at least or any bit, return.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _ARGUMENT_AT = 0, 4, 16
_ALLOW, _KILL, _ERRNO, _ASK = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000


@functools.cache
def filter_program(
    machine: str | None = None,
    *,
    families: tuple[int, ...] = (AF_UNIX,),
    attributes: bool = True,
    others: bool = True,
    sessions: Literal["allow", "ask", "refuse"] = "allow",
) -> bytes | None:
    """The filter, as ``bwrap --seccomp`` reads it.

    Args:
        machine: name of the processor's architecture; this machine's if not given.
        families: sockets that may be opened one by one; pairs of ``AF_UNIX`` may always be.
        attributes: whether modes, owners and times of files may be changed by their paths.
        others: whether limits and priorities of other processes may be changed.
        sessions: whether a process may begin a session of its own; with ``"ask"``, whoever installs
            the filter with a listener decides about each.

    Returns:
        Instructions of eight bytes; ``None`` for an architecture whose numbers are not listed.

    Example:
        >>> len(filter_program("x86_64")) % 8
        0
    """
    machine = platform.machine() if machine is None else machine
    if machine not in _AUDIT_ARCH:
        return None
    column = list(_AUDIT_ARCH).index(machine)
    forbidden = _FORBIDDEN if attributes else _FORBIDDEN | _ATTRIBUTES
    numbers = sorted({numbers[column] for numbers in forbidden.values()})
    named: list[tuple[int, int, str]] = []
    if not others:
        named = [(_EQUAL, numbers[column], "named") for numbers in _OTHERS.values()]
        named += [(_EQUAL, _SETPRIORITY[column], "priority")]
        named += [(_EQUAL, _IOPRIO_SET[column], "forbid")]
    new_session = {"ask": "ask", "refuse": "forbid"}.get(sessions, "allow")
    allow = (_RETURN, _ALLOW, None)
    forbid = (_RETURN, _ERRNO | errno.EPERM, None)
    lines: list[tuple[int, int, str | None] | str] = [
        (_LOAD, _ARCH_AT, None),
        (_EQUAL, _AUDIT_ARCH[machine], "known"),
        (_RETURN, _KILL, None),
        "known",
        (_LOAD, _NUMBER_AT, None),
        # The second table of x86_64, which no distribution uses any more.
        (_AT_LEAST, _X32, "forbid"),
        (_EQUAL, _SOCKET[column], "socket"),
        (_EQUAL, _SOCKETPAIR[column], "pair"),
        (_EQUAL, _SETSOCKOPT[column], "option"),
        (_EQUAL, _CLONE[column], "clone"),
        # Its flags lie in memory, where a filter cannot look; the C library falls back to clone.
        (_EQUAL, _CLONE3[column], "absent"),
        (_EQUAL, _SETSID[column], new_session),
        *named,
        *((_EQUAL, number, "forbid") for number in numbers),
        allow,
        "clone",
        (_LOAD, _ARGUMENT_AT, None),
        (_ANY_BIT, _CLONE_NEWUSER, "forbid"),
        allow,
        "priority",
        (_LOAD, _ARGUMENT_AT, None),
        (_EQUAL, 0, "whose"),
        forbid,
        "whose",
        (_LOAD, _ARGUMENT_AT + 8, None),
        (_EQUAL, 0, "allow"),
        forbid,
        "named",
        (_LOAD, _ARGUMENT_AT, None),
        (_EQUAL, 0, "allow"),
        forbid,
        "option",
        (_LOAD, _ARGUMENT_AT + 8, None),
        (_EQUAL, _SOL_SOCKET, "of_any_socket"),
        allow,
        "of_any_socket",
        (_LOAD, _ARGUMENT_AT + 16, None),
        (_EQUAL, _SO_SNDBUF, "forbid"),
        (_EQUAL, _SO_SNDBUFFORCE, "forbid"),
        "allow",
        allow,
        "forbid",
        forbid,
        "pair",
        (_LOAD, _ARGUMENT_AT, None),
        (_EQUAL, AF_UNIX, "allow_socket"),
        (_RETURN, _ERRNO | errno.EAFNOSUPPORT, None),
        "socket",
        (_LOAD, _ARGUMENT_AT, None),
        *((_EQUAL, family, "allow_socket") for family in families),
        (_RETURN, _ERRNO | errno.EAFNOSUPPORT, None),
        "allow_socket",
        allow,
        "absent",
        (_RETURN, _ERRNO | errno.ENOSYS, None),
        "ask",
        (_RETURN, _ASK, None),
    ]
    return _assemble(lines)


def _assemble(lines: list[tuple[int, int, str | None] | str]) -> bytes:
    """Instructions from lines of (code, operand, label to jump to if it holds) and labels."""
    places: dict[str, int] = {}
    at = 0
    for line in lines:
        if isinstance(line, str):
            places[line] = at
        else:
            at += 1
    program = b""
    for line in lines:
        if isinstance(line, str):
            continue
        code, operand, label = line
        # Jumps count from the next instruction, and go forward only.
        jump = 0 if label is None else places[label] - len(program) // 8 - 1
        program += struct.pack("=HBBI", code, jump, 0, operand)
    return program
