"""A sandbox that contains nothing, for tests of what is built on sandboxes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from torchrl_llm.sandbox.interface import Sandbox, SandboxResult


class LocalSandbox(Sandbox):
    """Runs programs as they are, counts them, and can be made to fail."""

    python = sys.executable
    missing = ("everything",)

    def __init__(self, limits=None, broken=None):
        super().__init__(limits)
        self.num_runs, self.broken, self.most_at_once = 0, broken, 0
        self._now, self._lock = 0, threading.Lock()

    def __getstate__(self):
        return {"limits": self.limits, "broken": self.broken}

    def __setstate__(self, state):
        self.__init__(**state)

    def run(self, argv, *, stdin=b"", files=None, limits=None):
        with self._lock:
            self.num_runs += 1
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            return self._run(argv, stdin, files or {}, limits or self.limits)
        finally:
            with self._lock:
                self._now -= 1

    def _run(self, argv, stdin, files, limits):
        if self.broken:
            return SandboxResult(status="sandbox_error", stderr=self.broken)
        started = time.monotonic()
        stdin = stdin.encode() if isinstance(stdin, str) else stdin
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                data = text.encode() if isinstance(text, str) else text
                Path(folder, name).write_bytes(data)
            try:
                done = subprocess.run(
                    argv, input=stdin, capture_output=True, cwd=folder, timeout=limits.wall_s
                )
            except subprocess.TimeoutExpired as error:
                out = (error.stdout or b"").decode(errors="replace")
                return SandboxResult(status="timeout", stdout=out, seconds=limits.wall_s)
        status = "ok" if not done.returncode else "killed" if done.returncode < 0 else "error"
        return SandboxResult(
            status=status,
            stdout=done.stdout.decode(errors="replace"),
            stderr=done.stderr.decode(errors="replace"),
            exit_code=done.returncode,
            seconds=time.monotonic() - started,
        )

    def open_session(self, limits=None):
        raise AssertionError("not for these tests")
