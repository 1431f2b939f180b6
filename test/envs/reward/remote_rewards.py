"""Functions that the tests of worker processes call there; importable by name."""

from __future__ import annotations

import array
import os
import subprocess
import sys
import time
from typing import NamedTuple


class Score(NamedTuple):
    reward: float
    success: bool


def behave(how, argument=None):
    if how == "return":
        return argument
    if how == "score":
        return Score(0.5, True)
    if how == "tensor":
        return array.array("d", [0.5, 1.0])
    if how == "raise":
        raise ZeroDivisionError("by zero")
    if how == "exit":
        sys.exit("enough")
    if how == "die":
        os._exit(3)
    if how == "power":
        return 9**9**argument
    if how == "memory":
        return len(bytearray(argument))
    if how == "print":
        sys.stdout.write("x" * argument)
        sys.stdout.flush()
        return 1.0
    if how == "pid":
        return os.getpid()
    if how == "child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        time.sleep(600)
    if how == "object":
        return object()
    raise AssertionError(how)
