"""vLLM's own server as a process of its own, on loopback, on the CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

from torchrl_llm.modules.backends.server import EXTENSION
from torchrl_llm.weights.transfer import free_port

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
ARGUMENTS = {
    "dtype": "float32",
    "max-model-len": "256",
    "max-num-seqs": "64",
    "kv-cache-memory-bytes": str(64 << 20),
    "distributed-executor-backend": "uni",
    "generation-config": "vllm",
    "logprobs-mode": "processed_logprobs",
    "max-logprobs": "-1",
    "worker-extension-cls": EXTENSION,
}
FLAGS = ["--enforce-eager", "--no-enable-chunked-prefill", "--no-async-scheduling"]
START_S = 500


@contextmanager
def vllm_server(model, folder, **changes):
    """Start a server, wait until it answers, and kill it with all its children in the end.

    Args:
        changes: of its arguments.

    Yields:
        Its address and its process, the leader of a group of its own.
    """
    port, log = free_port(), Path(folder) / "server.log"
    arguments = {**ARGUMENTS, "model": str(model), "host": "127.0.0.1", "port": str(port)}
    arguments |= changes
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *FLAGS]
    command += [part for name, value in arguments.items() for part in (f"--{name}", value)]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": paths}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        _wait(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}", process
    finally:
        kill(process)


def kill(process):
    """End a server at once, with its engine."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


def _wait(url, process, log):
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"no server came up:\n{log.read_text(errors='replace')[-3000:]}")
