"""A system-call filter for Linux sandboxes, as a classic BPF program.

Namespaces do not isolate everything. This filter closes remaining gaps. It forbids features that no
ordinary program needs: memory that no limit counts (System V segments, ``memfd``, data in TCP
sockets or in enlarged socket buffers), socket families without network namespaces (``AF_VSOCK``
reaches the host of a virtual machine), new namespaces, and parts of the kernel with a history of
vulnerabilities (``io_uring``, ``bpf``, ``userfaultfd``, keys).

A forbidden call fails with a normal error; the program is not killed.
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
# "attributes" are changes that Landlock does not cover: modes, owners, times and attributes of
# files by path. If an architecture lacks a call, its number is that of a call with the same
# purpose. "others" are calls that change limits or scheduling of another process of the same user:
# only the process itself (0) is allowed, and for calls that can also name groups and users, only
# the process.
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
    """Return the filter in the format of ``bwrap --seccomp``.

    Args:
        machine: name of the processor's architecture; by default the architecture of this machine.
        families: allowed socket families; pairs of ``AF_UNIX`` sockets are always allowed.
        attributes: whether modes, owners and times of files may be changed by path.
        others: whether limits and priorities of other processes may be changed.
        sessions: whether a process may create a session; with ``"ask"``, the listener of the filter
            decides for each call.

    Returns:
        Instructions of eight bytes; ``None`` for an unknown architecture.

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
        # The x32 table of x86_64, which no distribution uses any more.
        (_AT_LEAST, _X32, "forbid"),
        (_EQUAL, looked_into["socket"], "socket"),
        (_EQUAL, looked_into["socketpair"], "pair"),
        (_EQUAL, looked_into["setsockopt"], "option"),
        (_EQUAL, looked_into["clone"], "clone"),
        # The flags of this call are in memory, which a filter cannot read; the C library uses clone
        # instead.
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
    """Assemble lines of (code, operand, label for the jump if true) and labels."""
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
