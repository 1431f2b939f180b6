"""Host process for programs of users; uses only the standard library, for any Python.

It reads jobs from standard input, one line of JSON each, and writes results to standard output:
``{"ready"}`` once (its value is true if a program that never ends blocks the others), then for each
job ``{"group"}`` (the process group of a command) and ``{"value"}`` or ``{"error"}``. ``{"id",
"row", "base_url", "api_key"}`` starts a job, ``{"stop": id}`` ends one. When the input ends,
because the parent process has ended, all jobs end.

Next: :mod:`torchrl_llm.gateway.program_runner` is the parent.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import importlib.util
import inspect
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

_LONGEST = 4000
_FUTURES = concurrent.futures._base.__file__


class Stopped(BaseException):
    """Raised inside a program that exceeded its time limit."""


def tell(out, lock, **message):
    """Write the result of a job."""
    line = json.dumps(message) + "\n"
    with lock:
        out.write(line.encode())
        out.flush()


def checked(value):
    """Check a program's return value: a number, named numbers, or nothing."""
    if value is None:
        return None
    items = value.items() if isinstance(value, dict) and value else [("reward", value)]
    for name, number in items:
        try:
            good = math.isfinite(float(number)) and not isinstance(number, str)
        except (TypeError, ValueError):
            good = False
        if not good or not isinstance(name, str):
            raise TypeError(
                "a program returns a finite number, a dict of named finite numbers, or None for "
                f"the task's own reward; got {value!r:.200}"
            )
    numbers = {name: float(number) for name, number in items}
    return numbers if isinstance(value, dict) else numbers["reward"]


class Functions:
    """Runs a function of a file for each job: in a thread, or as a coroutine in one loop."""

    def __init__(self, target, done):
        file, _, name = target.rpartition(":")
        path = Path(file).resolve()
        # Search modules in the user's folder, not in this one, whose file names clash with
        # packages.
        sys.path[0] = str(path.parent)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        self.function, self.done = getattr(module, name), done
        self.is_async = inspect.iscoroutinefunction(self.function)
        parameters = list(inspect.signature(self.function).parameters)
        self.takes_client = parameters[1:2] == ["client"]
        self.running, self.shared = {}, None
        if self.is_async:
            self.loop = asyncio.new_event_loop()
            threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def start(self, job):
        """Begin a job."""
        if self.is_async:
            future = asyncio.run_coroutine_threadsafe(self.call_async(job), self.loop)
            self.running[job["id"]] = future
            future.add_done_callback(lambda _: self.end(job["id"], future.result))
            return
        run = threading.Thread(
            target=lambda: self.end(job["id"], lambda: self.call(job)), daemon=True
        )
        self.running[job["id"]] = run
        run.start()

    def call(self, job):
        """Run the function, with a client if it takes one."""
        where = job["base_url"], job["api_key"]
        return self.function(job["row"], *([self.client(*where)] if self.takes_client else where))

    async def call_async(self, job):
        """Run the coroutine function."""
        return await self.call(job)

    def client(self, base_url, api_key):
        """A client for the session; all clients share connections."""
        if self.shared is None:
            import openai

            kind = openai.AsyncOpenAI if self.is_async else openai.OpenAI
            self.shared = kind(base_url=base_url, api_key=api_key, timeout=None, max_retries=0)
        return self.shared.with_options(base_url=base_url, api_key=api_key)

    def end(self, number, result):
        """Report the result of a job."""
        try:
            told = {"value": checked(result())}
        except BaseException as error:  # a program may raise anything, even SystemExit
            told = {"error": failure(error)}
        self.running.pop(number, None)
        self.done(id=number, **told)

    def stop(self, number):
        """Interrupt a job when it next runs Python or waits in its loop."""
        run = self.running.get(number)
        if isinstance(run, threading.Thread):
            raised = ctypes.py_object(Stopped)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(run.ident), raised)
        elif run is not None:  # from its loop, so that a blocked job reports no end
            self.loop.call_soon_threadsafe(run.cancel)

    def close(self):
        """Do nothing: threads end with the process."""


class Commands:
    """Runs a command for each job, in its own process group."""

    is_async = False

    def __init__(self, target, done):
        self.words, self.done, self.running = shlex.split(target), done, {}

    def start(self, job):
        """Begin a job."""
        folder = tempfile.TemporaryDirectory(prefix="program-")
        result, log = Path(folder.name, "reward.json"), Path(folder.name, "log")
        try:
            with log.open("wb") as out:
                process = subprocess.Popen(
                    self.words,
                    env={**os.environ, **variables(job, str(result))},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            self.done(id=job["id"], error=failure(error))
            return
        self.running[job["id"]] = process
        self.done(id=job["id"], group=process.pid)
        wait = threading.Thread(
            target=self.wait, args=(job["id"], process, folder, result, log), daemon=True
        )
        wait.start()

    def wait(self, number, process, folder, result, log):
        """Report the outcome of a job."""
        status = process.wait()
        kill(process)  # its remaining processes
        self.running.pop(number, None)
        try:
            if status:
                said = log.read_bytes()[-_LONGEST:].decode(errors="replace")
                ended = f"signal {-status}" if status < 0 else f"status {status}"
                told = {"type": "CommandError", "message": f"the command ended with {ended}"}
                self.done(id=number, error={**told, "frames": [], "traceback": said})
                return
            value = json.loads(result.read_text()) if result.exists() else None
            self.done(id=number, value=checked(value))
        except Exception as error:  # a file of the user's
            self.done(id=number, error=failure(error))
        finally:
            folder.cleanup()

    def stop(self, number):
        """Kill the processes of a job."""
        if (process := self.running.get(number)) is not None:
            kill(process)

    def close(self):
        """Kill the processes of all jobs."""
        for process in list(self.running.values()):
            kill(process)


def variables(job, result):
    """Environment of a command; it may write its return value to a file."""
    url, key = job["base_url"], job["api_key"]
    return {
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
        "ROW": json.dumps(job["row"]),
        "REWARD_FILE": result,
    }


def kill(process):
    """End a process and its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def failure(error):
    """An exception as JSON."""
    shown = traceback.TracebackException.from_exception(error)
    own = [frame for frame in shown.stack if frame.filename not in (__file__, _FUTURES)]
    shown.stack = traceback.StackSummary.from_list(own)
    frames = [(frame.filename, frame.lineno, frame.name) for frame in own]
    return {
        "type": type(error).__name__,
        "message": str(error)[:_LONGEST],
        "frames": frames,
        "traceback": "".join(shown.format())[-_LONGEST:],
    }


def main(runs):
    """Answer jobs until the input ends.

    The first argument is the class that runs jobs. The arguments of the process are the target and
    a temporary folder.
    """
    # Output of programs goes to the log of the run, not to the results; programs cannot read jobs.
    jobs, out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    lock = threading.Lock()
    target, tempfile.tempdir = sys.argv[1:]
    try:
        runner = runs(target, lambda **message: tell(out, lock, **message))
    except BaseException as error:  # the user's file may raise anything
        tell(out, lock, error=failure(error))
        return
    tell(out, lock, ready=True, shares_loop=runner.is_async)
    for line in jobs:
        job = json.loads(line)
        if "stop" in job:
            runner.stop(job["stop"])
        else:
            runner.start(job)
    runner.close()
    shutil.rmtree(tempfile.tempdir, ignore_errors=True)
    if os.getpgrp() == os.getpid():  # also end processes that functions left behind
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main(Functions if sys.argv.pop(1) == "function" else Commands)
