"""End a process together with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Get SIGTERM when the parent process ends, even if it was killed.

    Otherwise a rank whose ``torchrun`` was killed would continue alone, or wait forever for other
    ranks. It has an effect only on Linux.
    """
    parent = os.getppid()
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:  # the parent ended in between
        os.kill(os.getpid(), signal.SIGTERM)
