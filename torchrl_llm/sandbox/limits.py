"""Limits of one process, set by ``prlimit`` between the sandbox and the program.

A Python function between fork and exec would do the same, but forking a trainer with many
gigabytes and threads is slow and can hang; ``prlimit`` costs a millisecond.
"""

from __future__ import annotations

import functools
import itertools
import os
import platform
import shutil

from torchrl_llm.sandbox.interface import Limits
from torchrl_llm.sandbox.process_watch import cpu_seconds

STACK_BYTES = 8 << 20

# The range that systemd keeps for users who exist only while a service runs.
_UIDS = (61184, 65519)
_turns = itertools.count()


def find(program: str) -> str | None:
    """Where a system program is, ``PATH`` of the trainer aside.

    Args:
        program: its name.
    """
    return shutil.which(program, path="/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/bin")


@functools.cache
def counts_processes_by_namespace() -> bool:
    """Whether a limit on processes counts those of a user namespace alone (Linux 5.14 and later).

    Before, it counts everything that the user runs on the machine, and would forbid all.
    """
    try:
        major, minor = platform.release().split(".")[:2]
        return (int(major), int("".join(itertools.takewhile(str.isdigit, minor)))) >= (5, 14)
    except ValueError:
        return False


def unused_uid() -> int:
    """A user that no account has, another one for each of the next thousands of runs."""
    low, high = _UIDS
    return low + (os.getpid() * 67 + next(_turns)) % (high - low + 1)


def prlimit_argv(prlimit: str, limits: Limits, *, num_processes: int | None) -> list[str]:
    """The words to put in front of a program.

    Args:
        prlimit: the program of that name.
        limits: what the run may use.
        num_processes: of the user, or ``None`` for no limit.
    """
    cpu_s = cpu_seconds(limits)
    argv = [
        prlimit,
        f"--as={limits.memory_bytes}",
        # One may ignore the signal at the first; none can ignore that at the second.
        f"--cpu={cpu_s}:{cpu_s + 1}",
        f"--fsize={limits.file_bytes}",
        f"--nofile={limits.num_files}",
        f"--stack={STACK_BYTES}",
        "--core=0",
    ]
    if num_processes is not None:
        argv.append(f"--nproc={num_processes}")
    return [*argv, "--"]
