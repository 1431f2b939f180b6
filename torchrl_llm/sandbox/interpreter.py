"""The interpreter of a session: a program that runs only inside the sandbox.

The source of this module is sent to the sandbox as text, and imports nothing from torchrl_llm. The
program reads pieces of code from a pipe, and answers each piece with its status. Code and answers
are frames: four bytes of length, then JSON. The code prints to standard output and standard error
as usual; the reader drains these pipes when the answer arrives.

``sys.argv`` names the two pipes, as numbers of open descriptors or as paths; two more paths
redirect standard output and standard error.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import struct
import sys
import traceback
import types


def _serve(requests, answers) -> None:
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    number, own = 0, os.getpid()
    while True:
        head = requests.read(4)
        if len(head) < 4:
            return
        request = json.loads(requests.read(struct.unpack(">I", head)[0]))
        number += 1
        values = _run(request["code"], f"<piece {number}>", vars(main))
        if os.getpid() != own:  # the piece of code forked, and this process is the child
            os._exit(values["exit_code"])
        answer = json.dumps(values).encode()
        answers.write(struct.pack(">I", len(answer)) + answer)
        answers.flush()


def _run(code: str, file: str, names: dict) -> dict:
    answer = {"exit_code": 0, "memory": False}
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    try:
        exec(compile(code, file, "exec"), names)
    except SystemExit as exit_:
        code_ = exit_.code
        if not isinstance(code_, int) and code_ is not None:
            print(code_, file=sys.__stderr__)
            code_ = 1
        answer["exit_code"] = (code_ or 0) & 0xFF
    except BaseException as error:
        answer["exit_code"] = 1
        answer["memory"] = isinstance(error, MemoryError)
        # The first frame belongs to this function.
        inner = error.__traceback__.tb_next if error.__traceback__ else None
        error = error.with_traceback(inner)
        try:
            traceback.print_exception(error, file=sys.__stderr__)
        except BaseException:
            _write(2, f"{type(error).__name__}\n")
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(BaseException):
            stream.flush()
    return answer


def _write(fd: int, text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(fd, text.encode())


def _open(place: str, mode: str):
    if place != "0":
        return open(int(place) if place.isdigit() else place, mode)
    # The code must not read later pieces from its standard input.
    pipe = os.dup(0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return open(pipe, mode)


if __name__ == "__main__":
    for standard, place in enumerate(sys.argv[3:], start=1):
        os.dup2(os.open(place, os.O_WRONLY | os.O_CLOEXEC), standard)
    requests, answers = _open(sys.argv[1], "rb"), _open(sys.argv[2], "wb")
    for pipe in (requests, answers):
        os.set_inheritable(pipe.fileno(), False)
    sys.argv[:] = [""]
    _serve(requests, answers)
