"""The other end of a worker process: calls one function again and again until nobody asks.

It is run as a script, in a bare interpreter, and needs the standard library alone: what a reward
does not import, its process does not load. Requests are pickled by the process that started it;
answers are JSON, so that whatever a reward is given can at worst answer wrongly.

Its only user is :mod:`torchrl_llm.envs.reward.worker_pool`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import time
from typing import Any, BinaryIO

_LENGTH = struct.Struct("!Q")
_LONGEST_MESSAGE = 2000


def _read(stream: BinaryIO) -> Any:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        os._exit(0)  # nobody asks any more
    return pickle.loads(stream.read(_LENGTH.unpack(head)[0]))


def _write(stream: BinaryIO, reply: dict[str, Any]) -> None:
    content = json.dumps(reply).encode()
    stream.write(_LENGTH.pack(len(content)) + content)
    stream.flush()


def _failure(error: BaseException) -> dict[str, Any]:
    try:
        message = str(error)
    except Exception:  # an exception may not even have a text
        message = ""
    return {"error": type(error).__name__, "message": message[:_LONGEST_MESSAGE]}


def _plain(value: Any) -> Any:
    """A value as JSON takes it: numbers, strings, lists of them, and named tuples by field."""
    if hasattr(value, "_asdict"):
        return {"fields": {name: _plain(item) for name, item in value._asdict().items()}}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return {"items": [_plain(item) for item in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return float(value)


def _load(target: tuple[str, ...]) -> Any:
    if target[0] == "pickle":
        return pickle.loads(target[1])
    _, path, name = target
    spec = importlib.util.spec_from_file_location("reward_function", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def _limit_cpu(seconds: float | None) -> None:
    """Of this call, for the case that the process that would stop it is gone."""
    if seconds is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + seconds) + 2, hard))


def main() -> None:
    """Serve the socket whose descriptor is the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stream = socket.socket(fileno=int(sys.argv[1])).makefile("rwb")
    os.dup2(2, 1)  # what a reward prints is no answer
    setup = _read(stream)
    if setup["memory_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_AS, (setup["memory_bytes"],) * 2)
    sys.path[:] = setup["path"]
    try:
        function = _load(setup["target"])
    except BaseException as error:
        _write(stream, _failure(error))
        return
    _write(stream, {"ready": True})
    while True:
        try:
            request = _read(stream)
            _limit_cpu(request["seconds"])
            reply = {"value": _plain(function(*pickle.loads(request["arguments"])))}
        except BaseException as error:  # also SystemExit: a reward that gives up is no reason to
            reply = _failure(error)
        _write(stream, reply)


if __name__ == "__main__":
    main()
