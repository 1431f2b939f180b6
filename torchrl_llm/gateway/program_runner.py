"""Runs many programs with their own loop in parallel, in processes that can be killed.

A program is a function of a file or a command. :class:`ProgramRunner` keeps a few host processes
(:mod:`torchrl_llm.gateway.program_host`), under this or a different Python, and sends each job to
the host with the fewest jobs. A return value, an exception or a crash is reported as
:class:`Ended`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torchrl_llm.data.failures import PROGRAM, Failure
from torchrl_llm.envs.datasets.verifiers_env import VerifiersEnv
from torchrl_llm.errors import ConfigError
from torchrl_llm.gateway.sandboxed_commands import Box

HOST = str(Path(__file__).with_name("program_host.py"))
_BOXED = """
import sys
sys.path[0] = sys.argv.pop(1)
from torchrl_llm.gateway import program_host, sandboxed_commands
program_host.main(sandboxed_commands.SandboxedCommands)
"""
# A thread that does not end stays in its host; a host with this many takes no more jobs. A
# coroutine that does not end blocks the others of its host.
_MOST_STUCK_THREADS = 8
ADAPTERS = {"verifiers": VerifiersEnv.PROGRAM}
"""Programs of this package, by their names for ``program``."""


class Ended(NamedTuple):
    """How a program ended.

    Attributes:
        value: return value: a number, numbers by name, or ``None``.
        failure: the failure, if any.
    """

    value: float | Mapping[str, float] | None = None
    failure: Failure | None = None


class _Host:
    """One host process and its jobs."""

    def __init__(self, words: list[str], on_end: Callable[[int, Ended], None]) -> None:
        self._folder = tempfile.mkdtemp(prefix="programs-")
        self.process = subprocess.Popen(
            [*words, self._folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.jobs: set[int] = set()
        self.stopped: set[int] = set()
        self.refused: Failure | None = None
        self._most_stuck, self._is_over = _MOST_STUCK_THREADS, False
        self._groups: dict[int, int] = {}
        self._on_end = on_end
        self._lock = threading.Lock()
        threading.Thread(target=self._read, name="program-host", daemon=True).start()

    @property
    def is_usable(self) -> bool:
        return self.process.poll() is None and len(self.stopped) < self._most_stuck

    def add(self, number: int) -> bool:
        """Try to add a job; returns whether the host accepts it and will report its end."""
        with self._lock:
            if not self._is_over:
                self.jobs.add(number)
            return not self._is_over

    def send(self, **message: Any) -> None:
        # The reader thread reports a dead host.
        with contextlib.suppress(BrokenPipeError, ValueError), self._lock:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def _read(self) -> None:
        for line in self.process.stdout:
            message = json.loads(line)
            number = message.get("id")
            if "group" in message:
                self._groups[number] = message["group"]
            elif number is not None:
                failure = _failure(message["error"]) if "error" in message else None
                self._end(number, Ended(message.get("value"), failure))
            elif "error" in message:
                self.refused = _failure(message["error"])
            elif message["shares_loop"]:
                self._most_stuck = 1
        status = self.process.wait()
        ended = f"signal {-status}" if status < 0 else f"status {status}"
        died = Failure.told(
            "ProgramDied", f"the process of the program ended with {ended}", source=PROGRAM
        )
        for group in (self.process.pid, *self._groups.values()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)
        with self._lock:
            self._is_over, jobs = True, list(self.jobs)
        for number in jobs:
            self._end(number, Ended(None, self.refused or died))

    def _end(self, number: int, ended: Ended) -> None:
        self._groups.pop(number, None)
        self.stopped.discard(number)
        if number in self.jobs:
            self.jobs.discard(number)
            self._on_end(number, ended)

    def kill(self) -> None:
        self.jobs.clear()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()  # it ends its jobs and itself
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()


def _failure(told: Mapping[str, Any]) -> Failure:
    frames = [tuple(frame) for frame in told["frames"]]
    made = Failure.told(told["type"], told["message"], frames, PROGRAM)
    return made._replace(traceback=told["traceback"].rstrip() or made.traceback)


class ProgramRunner:
    """Runs one program for many rows.

    Args:
        on_end: called with the number of a job and its outcome, from the host's thread.
        program: ``FILE.py:FUNCTION``; sync, or a coroutine function; or a name of
            :data:`ADAPTERS`.
        command: a command line instead of ``program``; it runs without a shell.
        python: the Python for ``program``; by default this one.
        num_hosts: number of processes for functions; each command is its own process.
        box: the sandbox of ``command``; none by default.

    Raises:
        ConfigError: neither or both are given, or the file, function or Python does not exist.
        ResourceError: this machine does not support the sandbox.
    """

    def __init__(
        self,
        on_end: Callable[[int, Ended], None],
        *,
        program: str | None = None,
        command: str | None = None,
        python: str | None = None,
        num_hosts: int = 2,
        box: Box | None = None,
    ) -> None:
        check_program(program, command, python, box)
        program = ADAPTERS.get(program, program)
        kind, target = ("function", program) if program is not None else ("command", command)
        self._words = [python or sys.executable, HOST, kind, target]
        if box is not None:
            library = str(Path(__file__).parents[2])
            self._words = [sys.executable, "-c", _BOXED, library, json.dumps([command, *box])]
        self._on_end, self._num_hosts = on_end, 1 if program is None else num_hosts
        self._hosts: list[_Host] = []

    def start(self, number: int, row: Mapping[str, Any], base_url: str, api_key: str) -> None:
        """Begin a job.

        Args:
            number: number of the job.
            row: row of the dataset, as JSON.
            base_url: base url of the gateway, ending in ``/v1``.
            api_key: key of its session.
        """
        while not (host := self._host()).add(number):
            pass  # it died meanwhile
        host.send(id=number, row=row, base_url=base_url, api_key=api_key)

    def _host(self) -> _Host:
        for host in self._hosts:
            if not host.is_usable and not host.jobs:
                host.kill()
        self._hosts = [host for host in self._hosts if host.is_usable or host.jobs]
        usable = [host for host in self._hosts if host.is_usable]
        if len(usable) < self._num_hosts:
            self._hosts.append(_Host(self._words, self._on_end))
            return self._hosts[-1]
        return min(usable, key=lambda host: len(host.jobs))

    def stop(self, number: int) -> None:
        """End a job without a report.

        Args:
            number: number of the job.
        """
        for host in self._hosts:
            if number in host.jobs:
                host.jobs.discard(number)
                host.stopped.add(number)
                host.send(stop=number)

    def close(self) -> None:
        """End all jobs and processes."""
        hosts, self._hosts = self._hosts, []
        for host in hosts:
            host.kill()


def check_program(
    program: str | None, command: str | None, python: str | None, box: Box | None = None
) -> None:
    """Check that a program or command can be run.

    Args:
        program: ``FILE.py:FUNCTION``.
        command: a command.
        python: a Python.
        box: the sandbox of a command.

    Raises:
        ConfigError: neither or both of the first two are given, or something does not exist.
        ResourceError: this machine does not have the sandbox.
    """
    if (program is None) == (command is None):
        raise ConfigError(
            "agent=program needs agent.program=FILE.py:FUNCTION or agent.command='...', one of both"
        )
    if program is None:
        inside = box is not None and box.kind == "container"  # because an image has its own
        if not command.split() or not (inside or shutil.which(command.split()[0])):
            raise ConfigError(f"agent.command={command!r}: there is no such command")
        if python is not None:
            raise ConfigError("agent.python has no effect with agent.command, which names its own")
        if box is not None:
            box.open(command)
        return
    if box is not None:
        raise ConfigError("agent.sandbox holds commands: write agent.command='python FILE.py'")
    file, colon, name = ADAPTERS.get(program, program).rpartition(":")
    if not (colon and name.isidentifier()):
        raise ConfigError(f"agent.program is FILE.py:FUNCTION, got {program!r}")
    if not Path(file).is_file():
        raise ConfigError(f"agent.program={program!r}: there is no file {file!r}")
    if python is not None and shutil.which(python) is None:
        raise ConfigError(f"agent.python={python!r}: there is no such Python")
