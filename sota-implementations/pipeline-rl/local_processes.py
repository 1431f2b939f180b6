"""A Redis and an actor on this machine, which end with the learner that started them."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from torchrl_llm._parent import end_with_parent
from torchrl_llm._redis import PASSWORD_VARIABLE
from torchrl_llm.errors import ConfigError, WorkerError
from torchrl_llm.weights.transfer import free_port

_START_S, _END_S, _LAST_LINES = 20.0, 30.0, 20


@contextmanager
def local_redis(folder: Path, url: str | None) -> Iterator[tuple[str, Callable[[], None]]]:
    """Start a Redis on a free port, with a password for this process and its children.

    Args:
        folder: folder in which ``redis.log`` is written.
        url: URL of a running Redis to use instead.

    Yields:
        Its URL, and a function that raises ``WorkerError`` if it has ended.

    Raises:
        ConfigError: the program ``redis-server`` is missing.
        WorkerError: it did not start.
    """
    if url is not None:
        yield url, lambda: None
        return
    program = shutil.which("redis-server")
    if program is None:
        raise ConfigError(
            "pipeline-rl starts a Redis, and there is no program redis-server: install it (apt "
            "install redis-server), or name a Redis that runs, redis.url=redis://HOST:PORT/0"
        )
    password = os.environ.setdefault(PASSWORD_VARIABLE, secrets.token_hex(16))
    port = free_port()
    log = folder / "redis.log"
    quoted = json.dumps(password, ensure_ascii=False)
    told = f'bind 127.0.0.1\nport {port}\nsave ""\nappendonly no\nrequirepass {quoted}\n'
    with _process([program, "-"], log, told) as process:
        check = _check(process, "the Redis", log)
        deadline = time.monotonic() + _START_S
        while not _answers(port):
            check()
            if time.monotonic() > deadline:
                raise WorkerError(f"the Redis does not answer after {_START_S:g} s: see {log}")
            time.sleep(0.05)
        yield f"redis://127.0.0.1:{port}/0", check


@contextmanager
def local_actor(folder: Path, overrides: Sequence[str]) -> Iterator[Callable[[], None]]:
    """Start an actor, and give it time to end when the learner has ended.

    Args:
        folder: folder in which ``actor.log`` is written.
        overrides: keys of the learner, with the URL of the Redis.

    Yields:
        A function that raises ``WorkerError``, with the last lines of the log, if it has ended.
    """
    log, script = folder / "actor.log", Path(__file__).with_name("actor.py")
    with _process([sys.executable, str(script), *overrides], log) as process:
        yield _check(process, "the actor", log)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)


@contextmanager
def _process(command: Sequence[str], log: Path, told: str = "") -> Iterator[subprocess.Popen]:
    """A process that writes a log and does not receive Ctrl-C of the terminal."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    try:
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(told.encode())
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _check(process: subprocess.Popen, name: str, log: Path) -> Callable[[], None]:
    def check() -> None:
        if process.poll() is not None:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
            raise WorkerError(
                f"{name} has ended with status {process.returncode}; the end of {log}:\n"
                + "\n".join(lines)
            )

    return check


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
