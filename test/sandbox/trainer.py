"""Plays the trainer in the hostile tests: a process of its own that runs what it is told to.

It reads requests as JSON lines and answers with what came of each. It holds a secret in its memory,
its environment and its home; the tests look whether these stay as they were.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import time
import warnings

from torchrl_llm.sandbox import Limits, make_sandbox
from torchrl_llm.sandbox.cgroups import groups_work

SENTINEL = bytearray(b"trainer" * 100_000)


def memory_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def answer(sandbox, request):
    argv = [sandbox.python, "-E", "-s", "-B", "main.py", request["token"], str(os.getpid())]
    before, start = memory_bytes(), time.monotonic()
    result = sandbox.run(
        argv,
        stdin=request["stdin"],
        files={"main.py": request["code"]},
        limits=Limits(**request["limits"]),
    )
    return {
        **dataclasses.asdict(result),
        "took": time.monotonic() - start,
        "grown": memory_bytes() - before,
        "sentinel": hashlib.sha256(SENTINEL).hexdigest(),
        "open_files": len(os.listdir("/proc/self/fd")),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    # The answers have a pipe of their own: nothing else may write to it.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sandbox = make_sandbox(sys.argv[1])
    hello = {
        "pid": os.getpid(),
        "uid": os.getuid(),
        "missing": sandbox.missing,
        "grouped": groups_work(),
    }
    print(json.dumps({"python": sandbox.python, **hello}), file=out)
    for line in sys.stdin:
        print(json.dumps(answer(sandbox, json.loads(line))), file=out)
