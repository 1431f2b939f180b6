"""Trainers to attack: root's and an ordinary user's, with each of the sandboxes.

Every hostile program runs in each of these four places under the marker ``full``; a plain run has
every program in one of them, which its name decides.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
import uuid
import zlib
from pathlib import Path

import processes
import pytest

import torchrl_llm
from torchrl_llm.errors import ResourceError
from torchrl_llm.sandbox import BubblewrapSandbox

PACKAGE = Path(torchrl_llm.__file__).parent
SECRET = "the-trainers-secret"
NOBODY = 65534
PYTHONS = (sys.executable, "/usr/bin/python3")
DEFAULTS = {"wall_s": 5.0, "memory_bytes": 256 << 20, "file_bytes": 4 << 20}


@functools.cache
def bubblewrap_works():
    try:
        BubblewrapSandbox()
    except ResourceError:
        return False
    return True


def kill(token):
    """End survivors, so that a test that fails harms no other."""
    stopped = set()
    while new := {pid for pid, _ in processes.survivors(token)} - stopped:
        for pid in new:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= new
    for pid in stopped:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def digest(folder):
    """All names, contents, owners and modes below a folder."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        state = path.lstat()
        total.update(f"{path} {state.st_mode} {state.st_uid} {state.st_size}".encode())
        if path.is_file():
            total.update(path.read_bytes())
    return total.hexdigest()


class Trainer:
    """A trainer in a process of its own, and the checks that hold after any attack."""

    def __init__(self, kind, user):
        self.kind = kind
        self.base = Path(tempfile.mkdtemp(prefix="trainer-"))
        self.home, self.folders = self.base / "home", self.base / "folders"
        self.home.mkdir()
        self.folders.mkdir()
        # A copy, since another user may be unable to enter the folder of this checkout.
        library = self.base / "library"
        (library / "torchrl_llm").mkdir(parents=True)
        (library / "torchrl_llm/__init__.py").touch()
        for name in ("errors.py", "_checked.py", "_registry.py"):
            shutil.copy(PACKAGE / name, library / "torchrl_llm")
        shutil.copytree(
            PACKAGE / "sandbox",
            library / "torchrl_llm/sandbox",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        shutil.copy(Path(__file__).with_name("trainer.py"), library)
        (self.home / "private.txt").write_text(SECRET)
        (self.home / "private.txt").chmod(0o600)
        (self.home / "open.txt").write_text(SECRET)
        (self.home / "open.txt").chmod(0o666)
        become = []
        if user == "nobody":
            # Should a sandbox fail to hold them, the kernel holds the bombs of these tests.
            become = [
                "prlimit",
                "--nproc=200",
                "setpriv",
                f"--reuid={NOBODY}",
                f"--regid={NOBODY}",
                "--clear-groups",
            ]
            for path in (self.base, *self.base.rglob("*")):
                os.chown(path, NOBODY, NOBODY)
        self.base.chmod(0o755)
        python = next((p for p in PYTHONS if self._runs([*become, p])), None)
        if python is None:
            pytest.skip("no Python that an ordinary user can start")
        self.process = subprocess.Popen(
            [*become, python, "-B", str(library / "trainer.py"), kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=self.home,
            env={
                "PYTHONPATH": str(library),
                "SECRET": SECRET,
                "PATH": "/usr/bin:/bin",
                "TMPDIR": str(self.folders),
            },
            text=True,
        )
        hello = json.loads(self.process.stdout.readline())
        self.python, self.pid, self.uid = hello["python"], hello["pid"], hello["uid"]
        self.missing, self.counts_together = hello["missing"], hello["grouped"]
        self.calm = self._ask("pass", {}, "", "calm")

    @staticmethod
    def _runs(python):
        # To start it once may take rights that are given up on the way.
        check = (
            "import os, sys; assert sys.version_info >= (3, 11) and os.access(sys.executable, 1)"
        )
        try:
            done = subprocess.run(
                [*python, "-c", check],
                cwd="/",
                capture_output=True,
            )
        except OSError:
            return False
        return done.returncode == 0

    def _ask(self, code, limits, stdin, token):
        request = {"code": code, "limits": DEFAULTS | limits, "stdin": stdin, "token": token}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answers, _, _ = select.select([self.process.stdout], [], [], 60)
        if not answers:
            self.process.kill()
        line = self.process.stdout.readline() if answers else ""
        if not line:
            kill(token)
        assert line, "the trainer died, or did not answer"
        return types.SimpleNamespace(**json.loads(line))

    def attack(self, code, *, stdin="", **limits):
        """Run hostile code; whatever it does, these hold."""
        token = uuid.uuid4().hex
        files = digest(self.home)
        result = self._ask(code, limits, stdin, token)
        left = processes.survivors(token)
        kill(token)
        assert left == []
        assert result.status != "sandbox_error", result.stderr
        assert result.took <= (DEFAULTS | limits)["wall_s"] + 2
        assert digest(self.home) == files
        assert result.sentinel == self.calm.sentinel
        assert result.grown < 48 << 20
        assert result.open_files == self.calm.open_files
        patience = time.monotonic() + 60  # a large folder is removed behind
        while list(self.folders.iterdir()) and time.monotonic() < patience:
            time.sleep(0.1)
        assert list(self.folders.iterdir()) == []
        return result

    def close(self):
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()
        shutil.rmtree(self.base, ignore_errors=True)


def why_not(kind, user):
    """Why a trainer cannot be made on this machine; empty where it can."""
    if not sys.platform.startswith("linux"):
        return "needs Linux"
    if user == "nobody" and os.geteuid() != 0:
        return "only root can become another user; these tests run as an ordinary one"
    if kind == "bubblewrap" and not bubblewrap_works():
        return "bubblewrap does not work here"
    return ""


PLACES = [(kind, user) for kind in ("bubblewrap", "subprocess") for user in ("self", "nobody")]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leave each hostile program in one of the places that there are, and mark the others."""
    hostile = [item for item in items if item.path.name.startswith("test_hostile_")]
    places = [place for place in PLACES if not why_not(*place)] if hostile else []
    for item in hostile if places else ():
        place = item.callspec.params["trainer"]
        program = item.name.replace("-".join(place), "")
        if place != places[zlib.crc32(program.encode()) % len(places)]:
            item.add_marker("full")


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(
            place,
            id="-".join(place),
            marks=[pytest.mark.sandbox] if place[0] == "bubblewrap" else [],
        )
        for place in PLACES
    ],
)
def trainer(request):
    """A trainer: root's (or whoever runs the tests) and an ordinary user's, in each sandbox."""
    if reason := why_not(*request.param):
        pytest.skip(reason)
    trainer = Trainer(*request.param)
    yield trainer
    trainer.close()


@pytest.fixture
def attack(trainer):
    """Run hostile code in the trainer's sandbox, with the checks that hold after any attack."""
    return trainer.attack


@pytest.fixture(scope="session")
def bubblewrap():
    """Whether bubblewrap works on this machine."""
    return sys.platform.startswith("linux") and bubblewrap_works()


@pytest.fixture(scope="session")
def survivors():
    """Find the processes whose command line holds a token."""
    return processes.survivors
