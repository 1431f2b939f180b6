"""Stands in for the client of a container engine; its containers are made by bubblewrap.

It refuses any word that it does not know, so that a test notices what an engine would.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

STATE = Path(__file__).parent
FLAGS = {
    "--interactive", "--init", "--read-only", "--pull=never", "--network=none", "--cap-drop=ALL",
    "--user=65534:65534", "--security-opt=no-new-privileges", "--hostname=sandbox",
    "--log-driver=none", "--entrypoint", "--no-healthcheck", "--stop-signal=KILL",
}  # fmt: skip


def run(words):
    line = [
        "bwrap",
        "--unshare-all",
        "--die-with-parent",
        "--clearenv",
        "--ro-bind",
        "/usr",
        "/usr",
    ]
    for folder in ("bin", "lib", "lib64"):
        line += ["--symlink", f"usr/{folder}", f"/{folder}"]
    line += ["--proc", "/proc", "--dev", "/dev", "--setenv", "PATH", "/usr/bin:/bin"]
    limits = ["prlimit"]
    while words[0].startswith("--"):
        flag, _, value = words.pop(0).partition("=")
        if flag == "--name":
            name = value
        elif flag == "--tmpfs":
            line += ["--perms", "1777", "--tmpfs", value.partition(":")[0]]
        elif flag == "--workdir":
            line += ["--chdir", value]
        elif flag == "--env":
            line += ["--setenv", *value.split("=", 1)]
        elif flag == "--mount":
            options = dict(part.partition("=")[::2] for part in value.split(","))
            assert options.pop("type") == "bind"
            bind = "--ro-bind" if "readonly" in options else "--bind"
            line += [bind, options["source"], options["target"]]
        elif flag == "--memory":
            limits.append(f"--as={value}")
        elif flag == "--ulimit":
            limits.append(f"--{value}")
        elif flag not in ("--memory-swap", "--pids-limit", "--shm-size"):
            assert f"{flag}={value}".rstrip("=") in FLAGS, flag
    assert words.pop(0) == "here"
    with (STATE / f"{name}.info").open("w") as info:
        line += ["--info-fd", str(info.fileno())]
        process = subprocess.Popen([*line, "--", *limits, *words], pass_fds=[info.fileno()])
    (STATE / name).write_text(str(process.pid))
    code = process.wait()
    return code if code >= 0 else 128 - code


def end(name):
    try:
        os.kill(int((STATE / name).read_text()), 9)
    except ProcessLookupError:
        pass
    except (OSError, ValueError):
        return 1
    # As an engine does: when it returns, nothing runs in the container any more.
    until = time.monotonic() + 20
    while _runs(name) and time.monotonic() < until:
        time.sleep(0.01)
    return 0


def _runs(name):
    try:
        space = json.loads((STATE / f"{name}.info").read_text())["pid-namespace"]
    except (OSError, ValueError):
        return False  # it has not begun
    for process in Path("/proc").glob("[0-9]*/ns/pid"):
        with contextlib.suppress(OSError):
            if process.stat().st_ino == space:
                return True
    return False


def inspect(name):
    if not (STATE / name).exists():
        return 1
    sys.stdout.write("2026-01-01|false|1|1\n")
    return 0


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    if command == "run":
        sys.exit(run(rest))
    if command in ("rm", "kill"):
        sys.exit(end(rest[-1]))
    if command == "inspect":
        sys.exit(inspect(rest[-1]))
    if command == "image":
        sys.exit(rest[-1] != "here")
    sys.exit(command != "info")
