"""Functions that the tests of worker processes call there; importable by name."""

from __future__ import annotations

import array
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple


class Wordless(Exception):
    def __str__(self):
        sys.exit("no text")


class Counter:
    """Counts how often it was started in this process."""

    def __init__(self, seconds=0.0, fails=False):
        self.seconds, self.fails, self.starts = seconds, fails, 0

    def start(self):
        if self.fails:
            raise FileNotFoundError("no index")
        time.sleep(self.seconds)
        self.starts += 1

    def count(self):
        return [os.getpid(), self.starts]


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
    if how == "raise_this":
        raise argument("given up")
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
    if how == "session":
        options = {"start_new_session": True, "stdout": subprocess.PIPE, "text": True}
        code = "import time; print('up', flush=True); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", code], **options)
        child.stdout.readline()
        Path(argument).write_text(str(child.pid))
        time.sleep(600)
    if how == "fork":
        if os.fork() == 0:
            time.sleep(argument)
            return "the child"
        return "the parent"
    if how == "fork and die":
        if os.fork() == 0:
            time.sleep(argument)
        os._exit(4)
    if how == "wordless":
        raise Wordless
    if how == "busy":
        Path(argument).write_text(str(os.getpid()))
        return 9**9**9
    if how == "parent":
        return os.getppid()
    if how == "big number":
        return 10**10_000
    if how == "object":
        return object()
    raise AssertionError(how)
