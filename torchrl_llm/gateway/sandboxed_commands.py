"""Runs each command of a program in its own sandbox.

A command sees its working directory, read-only, and may write into a folder in memory, which is
removed at its end. It shares the network of the machine, where the gateway listens.

Next: :mod:`torchrl_llm.sandbox` has the sandboxes.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torchrl_llm.errors import ConfigError
from torchrl_llm.gateway.program_host import checked, failure, variables
from torchrl_llm.sandbox import BubblewrapSandbox, ContainerSandbox, Limits
from torchrl_llm.sandbox.contained_process import Program
from torchrl_llm.sandbox.local_process import ProcessSandbox

_KINDS = ("bubblewrap", "container")
# The session of a command ends it much earlier.
_LONGEST_S = 7 * 86400.0
_LONGEST_TEXT = 4000
_CLOSE_S = 4.0
_RESULT = "/sandbox/reward.json"
# Separate pipes for the command's output and its return value.
_SCRIPT = f'"$@" >&2; status=$?; cat {_RESULT} 2> /dev/null; exit $status'


class Box(NamedTuple):
    """The sandbox of a command.

    Attributes:
        kind: ``"bubblewrap"`` or ``"container"``.
        memory_bytes: limit per process, and for a container as a whole.
        image: image of the container; by default the image of
            :class:`~torchrl_llm.sandbox.ContainerSandbox`.
    """

    kind: str
    memory_bytes: int
    image: str | None = None

    def open(self, command: str) -> ProcessSandbox:
        """Make the sandbox and test it.

        Args:
            command: arguments; their Python is visible inside.

        Raises:
            ConfigError: unknown kind, an image without a container, or a working directory that
                would hide a folder of the sandbox.
            ResourceError: this machine does not support it.
        """
        if self.kind not in _KINDS:
            raise ConfigError(f"agent.sandbox is one of {_KINDS}, got {self.kind!r}")
        if os.getcwd() in ("/", "/tmp"):
            raise ConfigError(
                f"agent.sandbox shows the working directory, and cannot show {os.getcwd()!r}: "
                "begin in the folder of the program"
            )
        limits = Limits(
            wall_s=_LONGEST_S,
            memory_bytes=self.memory_bytes,
            file_bytes=256 << 20,
            output_bytes=1 << 20,
            num_processes=256,
            num_files=1024,
        )
        if self.kind == "container":
            image = {} if self.image is None else {"image": self.image}
            return ContainerSandbox(limits, **image)
        if self.image is not None:
            raise ConfigError("agent.image has an effect with agent.sandbox=container alone")
        first = shutil.which(shlex.split(command)[0]) or ""
        is_python = Path(first).name.startswith("python")
        return BubblewrapSandbox(
            limits, python=os.path.abspath(first) if is_python else sys.executable
        )


class SandboxedCommands:
    """Runs a command for each job, with the interface of :mod:`~torchrl_llm.gateway.program_host`.

    Args:
        target: the command and the values of its :class:`Box`; JSON.
        done: reports the result of a job.
    """

    is_async = False

    def __init__(self, target: str, done: Callable[..., None]) -> None:
        command, *box = json.loads(target)
        self._words, self._box, self._done = shlex.split(command), Box(*box), done
        self._sandbox = self._box.open(command)
        self._running: dict[int, threading.Thread] = {}
        self._stopped: set[int] = set()

    def start(self, job: Mapping[str, Any]) -> None:
        """Begin a job."""
        run = threading.Thread(target=self._run, args=(job,), daemon=True)
        self._running[job["id"]] = run
        run.start()

    def _run(self, job: Mapping[str, Any]) -> None:
        number = job["id"]
        try:
            told = self._told(job)
        except Exception as error:  # a file of the user's
            told = {"error": failure(error)}
        self._running.pop(number, None)
        self._stopped.discard(number)
        self._done(id=number, **told)

    def _told(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a job."""
        program = Program(
            argv=["/bin/sh", "-c", _SCRIPT, "sh", *self._words],
            limits=self._sandbox.limits,
            env=variables(job, _RESULT),
            folder=os.getcwd(),
            network=True,
        )
        result = self._sandbox.run_program(program, is_over=lambda: job["id"] in self._stopped)
        if result.ok:
            return {"value": checked(json.loads(result.stdout) if result.stdout else None)}
        status = result.exit_code
        ended = f"status {status}" if (status or 0) >= 0 else f"signal {-status}"
        message = {
            "memory": f"it needed more memory than agent.memory_bytes={self._box.memory_bytes}",
            "sandbox_error": "its sandbox did not start",
            "output": "it printed too much",
        }.get(result.status, f"the command ended with {ended}")
        told = {"type": "CommandError", "message": message, "frames": []}
        return {"error": {**told, "traceback": result.stderr[-_LONGEST_TEXT:]}}

    def stop(self, number: int) -> None:
        """Kill the processes of a job, within a tenth of a second."""
        if number in self._running:
            self._stopped.add(number)

    def close(self) -> None:
        """Kill the processes of all jobs."""
        runs, patience = dict(self._running), time.monotonic() + _CLOSE_S
        self._stopped.update(runs)
        for run in runs.values():
            run.join(max(0.0, patience - time.monotonic()))
