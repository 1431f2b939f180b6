"""Processes of tests, forked from a server that has imported what they need and has run no test.

A fork of the process that runs the tests may hang: whatever its threads held stays locked.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

# What a run imports, some of it in its course only; what is not installed is left out.
IMPORTED = (
    "collectors.ray_later",
    "quicker",
    "recipes.kill_helper",
    "matplotlib.pyplot",
    "transformers.models.qwen2.modeling_qwen2",
    "weights.processes",
    "torchrl_llm.recipes.ray_collection",
    "weights.import_vllm",
)


def fork_server():
    """The context of the one server of this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED])
    here = Path(__file__).parent  # where the server finds what it is to import
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    with mock.patch.dict(os.environ, {"PYTHONPATH": path}):
        forkserver.ensure_running()
    return context


def run_both_ranks(target, *arguments, timeout=600):
    """Run ``target(rank, *arguments)`` for two ranks, each in a process of its own, to the end."""
    context = fork_server()
    processes = [context.Process(target=target, args=(rank, *arguments)) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=timeout)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0], "see what a rank has printed"


def run_program(code, *arguments):
    """Run a program, as after ``python -c``, in a process that has imported everything already.

    Returns:
        The process that has ended, with what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        process = fork_server().Process(target=_program, args=(code, arguments, files))
        process.start()
        process.join()
        said = (file.read_text() for file in files)
        return subprocess.CompletedProcess(arguments, process.exitcode, *said)


def _program(code, arguments, files):
    for handle, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), handle)
    sys.argv = ["-c", *arguments]
    exec(code, {"__name__": "__main__"})
