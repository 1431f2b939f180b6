"""A real redis-server for tests: on a free port, in a folder of its own, stopped with its test."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

START_S = 20.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RedisServer:
    """Starts at once; ``restart`` kills it as a crash does and starts it on the same port."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.options, self.port = Path(folder), options, free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.process: subprocess.Popen | None = None
        self.start()

    def start(self) -> None:
        command = [shutil.which("redis-server"), "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--dir", str(self.folder), "--logfile", str(self.folder / "redis.log")]
        command += self.options or ("--save", "", "--appendonly", "no")
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port), 1),
            ):
                return
            time.sleep(0.02)
        raise RuntimeError(f"redis-server did not start: {self.folder / 'redis.log'}")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(START_S)

    def restart(self, away_s: float = 0.0) -> None:
        self.kill()
        time.sleep(away_s)
        self.start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.kill()
