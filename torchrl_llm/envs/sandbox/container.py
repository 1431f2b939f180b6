"""Containers: each run in one of its own, where an engine (Docker, Podman) answers.

Starting one takes some tenths of a second; it is for code that needs an image (other languages,
packages, another system), or for machines whose only door to isolation is such an engine.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from torchrl_llm.envs.sandbox.base import Limits, SandboxSession
from torchrl_llm.envs.sandbox.contained import ENVIRONMENT, Contained, ProcessSandbox
from torchrl_llm.envs.sandbox.session import INTERPRETER, PipeSession
from torchrl_llm.envs.sandbox.watch import Tree, cpu_seconds
from torchrl_llm.errors import ConfigError, ResourceError

__all__ = ["ContainerSandbox"]

FOLDER = "/sandbox"
_NOBODY = "65534:65534"
_ENGINES = ("docker", "podman")
_ENGINE_FAILED = 125


class ContainerSandbox(ProcessSandbox):
    r"""Runs programs in containers without network, capabilities or a writable file system.

    ``memory_bytes`` counts for the container as a whole; what else of the machine it can see, the
    image decides. The image must be there already: nothing is pulled.

    Args:
        limits: of each run; ``None`` for the defaults. ``wall_s`` includes the container's start.
        image: the image; it needs ``sh`` and ``cp`` where runs are given files.
        engine: ``"docker"``, ``"podman"``, or the path of a program that takes the same words;
            ``None`` for the first of the two that answers.
        python: the interpreter inside the image.

    Raises:
        ResourceError: no engine answers, or it does not have the image.

    Example:
        >>> ContainerSandbox(image="python:3.12-slim").run_python("print(1)")  # doctest: +SKIP
        SandboxResult(status='ok', stdout='1\n', ...)
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        image: str = "python:3.12-slim",
        engine: str | None = None,
        python: str = "python3",
    ) -> None:
        super().__init__(limits)
        if not image or image.startswith("-"):
            raise ConfigError(f"image must be the name of an image, got {image!r}")
        self.image = image
        self.engine = _answering_engine(engine)
        self._python = python
        if _ask(self.engine, "image", "inspect", image) is None:
            raise ResourceError(
                f"{self.engine} has no image {image!r}; fetch it first: {self.engine} pull {image}"
            )

    @property
    def python(self) -> str:
        """The interpreter inside the image."""
        return self._python

    @property
    def missing(self) -> tuple[str, ...]:
        """Nothing: see :attr:`Sandbox.missing`."""
        return ()

    def argv(self, argv: Sequence[str], name: str, *, limits: Limits, share: Path | None) -> list:
        """The engine's command line for a program.

        Args:
            argv: the program, as it is called inside.
            name: of the container.
            limits: of the run.
            share: a folder with ``files``, to be copied into the run's, and ``pipes``.
        """
        cpu_s = cpu_seconds(limits)
        words = [self.engine, "run", "--interactive", f"--name={name}", "--init", "--pull=never"]
        words += ["--network=none", "--read-only", "--cap-drop=ALL", f"--user={_NOBODY}"]
        words += ["--security-opt=no-new-privileges", "--hostname=sandbox", "--log-driver=none"]
        words += [f"--memory={limits.memory_bytes}", f"--memory-swap={limits.memory_bytes}"]
        words += [f"--pids-limit={limits.num_processes + 1}"]
        words += [f"--ulimit=cpu={cpu_s}:{cpu_s + 1}", "--ulimit=core=0:0"]
        words += [f"--ulimit=fsize={limits.file_bytes}:{limits.file_bytes}"]
        words += [f"--ulimit=nofile={limits.num_files}:{limits.num_files}"]
        words += [f"--shm-size={limits.file_bytes}"]
        for folder in (FOLDER, "/tmp"):
            options = f"rw,exec,nosuid,nodev,mode=1777,size={limits.file_bytes}"
            words += [f"--tmpfs={folder}:{options}"]
        words += [f"--workdir={FOLDER}"]
        words += [f"--env={key}={value}" for key, value in (*ENVIRONMENT.items(), ("HOME", FOLDER))]
        if share is None:
            return [*words, self.image, *argv]
        # Pipes are written to; a folder that holds nothing else is all of the machine it can touch.
        words += [f"--mount=type=bind,source={share / 'files'},target=/files,readonly"]
        words += [f"--mount=type=bind,source={share / 'pipes'},target=/pipes"]
        copy = 'cp -R /files/. . && exec "$@"'
        return [*words, self.image, "sh", "-c", copy, "sh", *argv]

    def _spawn(
        self,
        argv: Sequence[str],
        *,
        limits: Limits,
        files: Mapping[PurePosixPath, bytes],
        stdin: int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Contained:
        share = _share(files) if files else None
        return self._start(argv, limits, share, stdin)

    def _start(
        self, argv: Sequence[str], limits: Limits, share: Path | None, stdin: int | None
    ) -> Contained:
        name = f"sandbox-{uuid.uuid4().hex}"
        try:
            return _InContainer(
                self.argv(argv, name, limits=limits, share=share),
                engine=self.engine,
                name=name,
                share=share,
                limits=limits,
                env=os.environ,  # of the engine's client, which none of it hands on
                stdin=stdin,
            )
        except BaseException:
            if share is not None:
                shutil.rmtree(share, ignore_errors=True)
            raise

    def open_session(self, limits: Limits | None = None) -> SandboxSession:
        """See :meth:`Sandbox.open_session`."""
        limits = self.limits if limits is None else limits
        share = _share({})
        answers = share / "pipes" / "answers"
        os.mkfifo(answers)
        os.chmod(answers, 0o622)
        # For reading and writing, so that it is no end of file while nobody writes yet.
        answers_r = os.open(answers, os.O_RDWR | os.O_NONBLOCK)
        program = [self.python, "-E", "-s", "-B", "-c", INTERPRETER.read_text()]

        def start(code_fd: int, _: int) -> Contained:
            return self._start([*program, "0", "/pipes/answers"], limits, share, code_fd)

        return PipeSession(start, limits, answers_fd=answers_r)


class _InContainer(Contained):
    """The engine's client, which runs as long as the container does."""

    def __init__(
        self, argv: Sequence[str], *, engine: str, name: str, share: Path | None, **kwargs: Any
    ) -> None:
        self.engine = engine
        self.name = name
        self.share = share
        self._out_of_memory = False
        self._removed = False
        super().__init__(argv, **kwargs)
        # The engine counts, and the client's own use is none of the run's.
        self.tree = Tree(-1, kwargs["limits"])

    def interrupt(self) -> None:
        _ask(self.engine, "kill", self.name)
        super().interrupt()

    def kill(self) -> None:
        if self._removed:
            return
        self._removed = True
        if self.process.poll() is not None and self.process.returncode == 137:
            state = _ask(self.engine, "inspect", "--format={{.State.OOMKilled}}", self.name)
            self._out_of_memory = (state or "").strip() == "true"
        _ask(self.engine, "rm", "--force", self.name)
        self.wait()
        if self.process.returncode is None:
            self.process.kill()
            self.wait()

    @property
    def out_of_memory(self) -> bool:
        return self._out_of_memory

    def exit_code(self) -> int | None:
        code = self.process.returncode
        if code is None or code < 0 or code == _ENGINE_FAILED:
            return None
        return 128 - code if 128 < code <= 192 else code

    def close(self) -> None:
        super().close()
        if self.share is not None:
            shutil.rmtree(self.share, ignore_errors=True)


def _share(files: Mapping[PurePosixPath, bytes]) -> Path:
    """A folder on this machine that a container is to see."""
    share = Path(tempfile.mkdtemp(prefix="sandbox-"))
    for name in ("files", "pipes"):
        (share / name).mkdir()
    for path, data in files.items():
        place = share / "files" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    for place in (share, *share.rglob("*")):
        place.chmod(0o755 if place.is_dir() else 0o644)
    return share


def _ask(engine: str, *words: str) -> str | None:
    """What an engine answers; ``None`` where it fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [engine, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=20,
            errors="replace",
        )
        return done.stdout if done.returncode == 0 else None
    return None


@functools.lru_cache(maxsize=8)
def _answering_engine(engine: str | None) -> str:
    """The first engine whose daemon, if it has one, answers.

    Raises:
        ResourceError: none does.
    """
    wanted = _ENGINES if engine is None else (engine,)
    for name in wanted:
        if shutil.which(name) and _ask(name, "info") is not None:
            return name
    raise ResourceError(
        f"no container engine answers: tried {', '.join(wanted)} with 'info'; is it installed, its "
        "daemon running, and may this user talk to it?"
    )
