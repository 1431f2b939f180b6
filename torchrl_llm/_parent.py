"""A process that ends with the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Get SIGTERM when the process that started this one is gone, also where it was killed.

    A rank whose ``torchrun`` was killed would go on alone, or wait for others that never come.
    Elsewhere than on Linux nothing happens.
    """
    parent = os.getppid()
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:  # it ended in between
        os.kill(os.getpid(), signal.SIGTERM)
