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
import json
import platform
import struct
from pathlib import Path
from typing import Literal

AF_UNIX = 1
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Numbers of system calls on x86_64 and aarch64 (asm/unistd_64.h, asm-generic/unistd.h).
# "attributes" are what Landlock does not know: modes, owners, times and attributes of files by
# their paths; where a call does not exist on one architecture its number is that of a call for the
# same purpose. "others" are what a process may ask of any other of its user, limits and the
# scheduler, by number: only itself (0) is let; of calls that name groups and users too, only the
# process.
_CALLS = json.loads(Path(__file__).with_name("system_calls.json").read_text(encoding="utf-8"))
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
    forbidden, other, looked_into = (
        {name: numbers[column] for name, numbers in calls.items()}
        for calls in (
            _CALLS["forbidden"] if attributes else _CALLS["forbidden"] | _CALLS["attributes"],
            _CALLS["others"],
            _CALLS["looked_into"],
        )
    )
    numbers = sorted(set(forbidden.values()))
    named: list[tuple[int, int, str]] = []
    if not others:
        named = [(_EQUAL, number, "named") for number in other.values()]
        named += [(_EQUAL, looked_into["setpriority"], "priority")]
        named += [(_EQUAL, looked_into["ioprio_set"], "forbid")]
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
        (_EQUAL, looked_into["socket"], "socket"),
        (_EQUAL, looked_into["socketpair"], "pair"),
        (_EQUAL, looked_into["setsockopt"], "option"),
        (_EQUAL, looked_into["clone"], "clone"),
        # Its flags lie in memory, where a filter cannot look; the C library falls back to clone.
        (_EQUAL, looked_into["clone3"], "absent"),
        (_EQUAL, looked_into["setsid"], new_session),
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
