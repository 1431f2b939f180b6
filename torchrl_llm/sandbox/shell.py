"""The shell of a session: a program that runs only inside the sandbox.

The source of this module is sent as text to the interpreter of a session (:mod:`.interpreter`),
together with :mod:`.run_supervisor`. The latter is available as ``guard``, and finds and kills
processes. A :class:`Shell` sends commands to a persistent bash, reads their output, and prints each
result as JSON.

Next: :mod:`torchrl_llm.tools.shell` has the tool.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import pathlib
import select
import shlex
import stat
import subprocess
import sys
import time

# Largest number of bytes of all returned files together.
_FILE_BYTES = 64 << 10
# A command that writes more than the kept bytes times this number is ended, like every run.
_OUTPUT_FACTOR = 64
_CHUNK = 1 << 16
# Seconds between two checks of whether the shell has ended.
_LOOK_S = 0.02
guard = None


class Shell:
    """A bash that persists between commands; when it ends, a new bash starts.

    Args:
        files: maps a path to a text; the files are written into the working directory.
    """

    def __init__(self, files) -> None:
        # Orphans of a command become children of this process, so that this process can end them.
        guard._prctl(guard._PR_SET_CHILD_SUBREAPER, 1)
        # Commands must not reach the pipes of this process through /proc.
        guard._prctl(guard._PR_SET_DUMPABLE, 0)
        for path, text in files.items():
            pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
            pathlib.Path(path).write_bytes(text.encode("utf-8", "replace"))
        self._bash = None

    def run(self, command, *, timeout_s, keep, names) -> None:
        """Run a command and print its result.

        Args:
            command: command for bash.
            timeout_s: time limit in seconds.
            keep: number of bytes of output to keep.
            names: files whose contents are returned.
        """
        linecache.clearcache()  # each cached piece contains this whole file
        if self._bash is None:
            self._start()
        self._told, self._status = _Output(keep), bytearray()
        script = f"eval {shlex.quote(command)} </dev/null {self._status_w}>&-\n"
        script += f"builtin echo $? >&{self._status_w}\n"
        ended = self._pump(script.encode("utf-8", "replace"), time.monotonic() + timeout_s)
        exit_code = int(self._status) if ended == "ready" else self._stop()
        answer = {"ended": ended, "exit_code": exit_code, "output": self._told.parts()}
        json.dump({**answer, "files": _contents(names)}, sys.stdout)

    def _start(self) -> None:
        self._output_r, output_w = os.pipe()
        self._status_r, self._status_w = os.pipe()
        self._bash = subprocess.Popen(
            ["bash", "--noprofile", "--norc", "-s"],
            stdin=subprocess.PIPE,
            stdout=output_w,
            stderr=output_w,
            pass_fds=[self._status_w],
            preexec_fn=os.setpgrp,  # "kill 0" ends the shell, not this process
            bufsize=0,
        )
        os.close(output_w)
        os.close(self._status_w)
        for fd in (self._output_r, self._status_r, self._bash.stdin.fileno()):
            os.set_blocking(fd, False)

    def _stop(self):
        """End the shell and its background processes, and return its exit code."""
        exit_codes = {}
        guard._kill_all(exit_codes, alone=False, uid=None)
        while self._take(self._output_r, self._told.add):
            pass
        bash, self._bash = self._bash, None
        bash.returncode = exit_codes.get(bash.pid, bash.returncode)
        bash.stdin.close()
        os.close(self._output_r)
        os.close(self._status_r)
        return bash.returncode

    def _pump(self, script, deadline) -> str:
        """Write the script and read until its status arrives or a limit is exceeded."""
        stdin = self._bash.stdin.fileno()
        readers = {self._output_r: self._told.add, self._status_r: self._status.extend}
        while (left := deadline - time.monotonic()) > 0:
            ready, can_write, _ = select.select(
                readers, [stdin] if script else [], [], min(left, _LOOK_S)
            )
            try:
                script = script[os.write(stdin, script[:_CHUNK]) :] if can_write else script
            except OSError:  # the shell has ended
                script = b""
            for fd in ready:
                if not self._take(fd, readers[fd]):
                    del readers[fd]
            if self._status.endswith(b"\n"):
                # Background processes may write forever.
                while not self._told.too_long and self._take(self._output_r, self._told.add):
                    pass
                return "ready" if self._status.strip().isdigit() else "exit"
            if self._told.too_long:
                return "output"
            ended = guard._reap()[0]
            if self._bash.pid in ended:
                self._bash.returncode = ended[self._bash.pid]
                return "exit"
        return "timeout"

    @staticmethod
    def _take(fd, add) -> bool:
        """Read a chunk; return false at the end of the pipe, or if nothing is available."""
        try:
            chunk = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        add(chunk)
        return bool(chunk)


class _Output:
    """The beginning and the end of a command's output.

    Args:
        keep: largest number of bytes of both together.
    """

    def __init__(self, keep) -> None:
        self.keep, self.total = keep, 0
        self._head, self._tail = b"", b""

    def add(self, chunk) -> None:
        self.total += len(chunk)
        room = self.keep * 2 // 3 - len(self._head)
        self._head += chunk[:room]
        self._tail = (self._tail + chunk[room:])[-(self.keep - self.keep * 2 // 3) :]

    @property
    def too_long(self) -> bool:
        """Whether the command has written too much."""
        return self.total > _OUTPUT_FACTOR * self.keep

    def parts(self):
        """Return beginning and end as texts, and the number of bytes left out between them."""
        left_out = self.total - len(self._head) - len(self._tail)
        if not left_out:  # a character may be split between the two
            return [(self._head + self._tail).decode("utf-8", "replace"), 0, ""]
        head, tail = (part.decode("utf-8", "replace") for part in (self._head, self._tail))
        return [head, left_out, tail]


def _contents(names):
    """Read the texts of files; ``None`` for a file that is missing or too large."""
    found, room = dict.fromkeys(names), _FILE_BYTES
    for name in names:
        with contextlib.suppress(OSError, ValueError), open(name, "rb", opener=_at_once) as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                data = file.read(room + 1)
                if len(data) <= room:
                    found[name], room = data.decode("utf-8", "replace"), room - len(data)
    return found


def _at_once(path, flags):
    return os.open(path, flags | os.O_NONBLOCK)  # opening a pipe without a writer would block
