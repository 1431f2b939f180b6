"""A sandbox that runs each program in its own container, with Docker, Podman or similar.

A container starts in some tenths of a second. Use this sandbox for code that needs an image (other
languages, packages, a different system), or on machines where only such an engine provides
isolation.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from torchrl_llm.errors import ConfigError, ResourceError
from torchrl_llm.sandbox import local_process
from torchrl_llm.sandbox.contained_process import Contained, PipeSession, Program, interpreter_argv
from torchrl_llm.sandbox.interface import Limits, SandboxSession
from torchrl_llm.sandbox.process_watch import Capture, Tree

FOLDER = "/sandbox"
_NOBODY = "65534:65534"
_ENGINES = ("docker", "podman")
# Exit codes of an engine that could not start the program; a program may also use them.
_PERHAPS_THE_ENGINE = (125, 126, 127)
_KILLED = 137
_RUNS = 64
_MEMORY, _PROCESSES = "memory of all processes together", "the number of processes"
_PATIENCE_S = 60.0
_TRIES = 4
_PIPES = ("answers", "stdout", "stderr")
# Waits until the writer of its input ends; at that time a container may still be starting.
_INHERIT = 'cat; for i in 1 2 3 4 5; do "$0" rm --force --volumes "$1"; sleep 1; done'
_PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")


class ContainerSandbox(local_process.ProcessSandbox):
    r"""Runs programs in containers without network, capabilities or a writable file system.

    ``memory_bytes`` limits the container as a whole and the data of each process. The image must
    exist locally, because no image is pulled. Its entry point and health check are not run. The
    constructor starts and removes a container to check whether the engine works. For each
    container, a process removes the container if the trainer is killed.

    Args:
        limits: limits of each run; ``None`` for the defaults. ``wall_s`` includes the container's
            start.
        image: the image; it needs ``sh`` and ``cp`` if runs have files.
        engine: ``"docker"``, ``"podman"``, or the path of a compatible program; ``None`` for Docker
            or Podman, whichever works first.
        python: the interpreter inside the image.

    Raises:
        ResourceError: when no engine works, or the engine does not have the image or cannot start a
            container.

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
        self.python = python
        if _ask(self.engine, "image", "inspect", image) is None:
            raise ResourceError(
                f"{self.engine} has no image {image!r}; fetch it first: {self.engine} pull {image}"
            )
        self.missing = self._try()

    def _try(self) -> tuple[str, ...]:
        """Start a container, and return the limits that the engine ignores.

        Raises:
            ResourceError: when the engine cannot start a container.
        """
        program = Program(argv=[self.python, "-c", ""], limits=Limits())
        with self._spawn(program) as contained:
            with contextlib.suppress(subprocess.TimeoutExpired):
                contained.process.wait(_PATIENCE_S)
            state = contained.look()
            contained.kill()
            contained.stderr.drain()
            if state is None or not state.started:
                said = contained.stderr.text().strip()
                raise ResourceError(
                    f"{self.engine} can start no container of {self.image!r}: it said {said!r}"
                )
        return state.missing

    def argv(self, program: Program, name: str, *, share: Path | None) -> list[str]:
        """Build the engine's command line for a program.

        Args:
            program: what to run.
            name: name of the container.
            share: a folder with the subfolders ``files`` (copied into the run's folder) and
                ``pipes``.
        """
        argv, limits, begin = program.argv, program.limits, program.folder
        words = [self.engine, "run", "--interactive", f"--name={name}", "--init", "--pull=never"]
        words += ["--entrypoint=", "--no-healthcheck", "--stop-signal=KILL"]
        words += [f"--network={'host' if program.network else 'none'}", "--read-only"]
        words += ["--cap-drop=ALL", f"--user={_NOBODY}"]
        words += ["--security-opt=no-new-privileges", "--hostname=sandbox", "--log-driver=none"]
        # An engine would report ignored options in the errors of each run.
        if _MEMORY not in self.missing:
            words += [f"--memory={limits.memory_bytes}", f"--memory-swap={limits.memory_bytes}"]
        if _PROCESSES not in self.missing:
            words += [f"--pids-limit={limits.num_processes + 1}"]
        held = local_process.kernel_limits(limits)
        del held["RLIMIT_STACK"]
        # With this limit, a single process gets an error before all processes are killed.
        held["RLIMIT_DATA"] = held.pop("RLIMIT_AS")
        # This limit counts the user's processes in all containers; the engine's default may be
        # higher than the engine can grant.
        held["RLIMIT_NPROC"] = (_granted(_RUNS * (limits.num_processes + 1)),) * 2
        words += local_process.limit_words("--ulimit=", held)
        words += [f"--shm-size={limits.file_bytes}"]
        for folder in (FOLDER, "/tmp"):
            options = f"rw,exec,nosuid,nodev,mode=1777,size={limits.file_bytes}"
            words += [f"--tmpfs={folder}:{options}"]
        words += [f"--workdir={begin or FOLDER}"]
        if begin is not None:
            words += [f"--mount=type=bind,source={begin},target={begin},readonly"]
        variables = {**local_process.ENVIRONMENT, "HOME": FOLDER}
        words += [f"--env={key}={value}" for key, value in variables.items()]
        words += [f"--env={key}" for key in program.env]  # the client knows the values
        if share is None:
            return [*words, self.image, *argv]
        # Pipes must be writable. The container can change nothing on the machine except a folder
        # with pipes.
        words += [f"--mount=type=bind,source={share / 'files'},target=/files,readonly"]
        words += [f"--mount=type=bind,source={share / 'pipes'},target=/pipes"]
        copy = 'cp -R /files/. . && exec "$@"'
        return [*words, self.image, "sh", "-c", copy, "sh", *argv]

    def _spawn(self, program: Program) -> _InContainer:
        return self._start(program, _share(program.files) if program.files else None)

    def _start(self, program: Program, share: Path | None) -> _InContainer:
        name = f"sandbox-{uuid.uuid4().hex}"
        try:
            return _InContainer(
                program,
                self.argv(program, name, share=share),
                engine=self.engine,
                name=name,
                share=share,
                env={**_environment(), **program.env},
            )
        except BaseException:
            if share is not None:
                shutil.rmtree(share, ignore_errors=True)
            raise

    def open_session(self, limits: Limits | None = None) -> SandboxSession:
        """See :meth:`Sandbox.open_session`."""
        limits = self.limits if limits is None else limits
        share = _share({})
        # Output through the engine's client would arrive later than an answer on a separate pipe.
        answers_r, out_r, err_r = (_fifo(share / "pipes" / name) for name in _PIPES)
        argv = interpreter_argv(self.python, 0, *(f"/pipes/{name}" for name in _PIPES))

        def start(code_fd: int, _: int) -> Contained:
            try:
                contained = self._start(Program(argv=argv, limits=limits, stdin=code_fd), share)
            except BaseException:
                os.close(out_r)
                os.close(err_r)
                raise
            contained.listen(out_r, err_r, limits.output_bytes)
            return contained

        return PipeSession(start, limits, answers_fd=answers_r)


def _fifo(path: Path) -> int:
    os.mkfifo(path)
    os.chmod(path, 0o622)
    # Open for reading and writing, so that there is no end of file before the first write.
    return os.open(path, os.O_RDWR | os.O_NONBLOCK)


class _State(NamedTuple):
    """State of a container, as reported by the engine.

    Attributes:
        started: whether the program was started.
        out_of_memory: whether the container was killed for its memory.
        missing: limits that the engine ignores.
    """

    started: bool
    out_of_memory: bool
    missing: tuple[str, ...]


class _InContainer(Contained):
    """The engine's client; it runs as long as the container."""

    grouped = False

    def __init__(
        self, *args: Any, engine: str, name: str, share: Path | None, **kwargs: Any
    ) -> None:
        self.engine, self.name, self.share = engine, name, share
        self._state: _State | None = None
        self._removed = False
        self._client: tuple[Capture, ...] = ()
        super().__init__(*args, **kwargs)
        self._heir = subprocess.Popen(
            ["sh", "-c", _INHERIT, engine, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        # The engine counts resources; the resources of its client are not part of the run.
        self.tree = Tree(-1, self.program.limits)

    def listen(self, out_r: int, err_r: int, keep: int) -> None:
        """Read output and errors from separate pipes instead of from the client."""
        self._client = (self.stdout, self.stderr)
        self.stdout, self.stderr = Capture(out_r, keep), Capture(err_r, keep)

    @property
    def outputs(self) -> tuple[Capture, ...]:
        return (self.stdout, self.stderr, *self._client)

    def interrupt(self) -> None:
        _ask(self.engine, "kill", self.name)
        super().interrupt()

    def look(self) -> _State | None:
        """Read the state of the container; ``None`` if it does not exist."""
        keys = ("State.StartedAt", "State.OOMKilled", "HostConfig.Memory", "HostConfig.PidsLimit")
        form = "--format=" + "|".join(f"{{{{.{key}}}}}" for key in keys)
        answer = (_ask(self.engine, "inspect", form, self.name) or "").strip().split("|")
        if len(answer) != len(keys):
            return None
        started_at, out_of_memory, memory, processes = answer
        held = ((memory, _MEMORY), (processes, _PROCESSES))
        return _State(
            not started_at.startswith("0001"),
            out_of_memory == "true",
            tuple(phrase for value, phrase in held if not value.isdigit() or int(value) == 0),
        )

    def kill(self) -> None:
        if self._removed:
            return
        self._removed = True
        exit_code = self.process.poll()
        if exit_code in (*_PERHAPS_THE_ENGINE, _KILLED):
            self._state = self.look()
        # End the client first: its remaining output is not read, and engines wait for this. The
        # client also must not start a container after its removal.
        self.process.kill()
        self.wait()
        for _ in range(1 if exit_code is not None else _TRIES):
            if _ask(self.engine, "rm", "--force", "--volumes", self.name) is not None:
                break
            time.sleep(0.2)
        for said in self._client if self.exit_code() is None else ():
            said.drain()
            self.stderr.kept += said.kept  # the output says why there is no container
        os.killpg(self._heir.pid, signal.SIGKILL)
        self._heir.stdin.close()
        self._heir.wait()

    @property
    def out_of_memory(self) -> bool:
        return self._state is not None and self._state.out_of_memory

    def exit_code(self) -> int | None:
        code = self.process.returncode
        if code is None or code < 0:
            return None
        if code in _PERHAPS_THE_ENGINE and (self._state is None or not self._state.started):
            return None
        return 128 - code if 128 < code <= 192 else code

    def close(self) -> None:
        super().close()
        if self.share is not None:
            shutil.rmtree(self.share, ignore_errors=True)


def _environment() -> dict[str, str]:
    """Return the client's variables without proxy settings, which it would pass on."""
    return {key: value for key, value in os.environ.items() if key.lower() not in _PROXIES}


def _granted(num_processes: int) -> int:
    most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    return num_processes if most == resource.RLIM_INFINITY else min(most, num_processes)


def _share(files: Mapping[PurePosixPath, bytes]) -> Path:
    """Make a folder on this machine that a container can see."""
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
    """Return the output of an engine command; ``None`` if it fails."""
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
    """Find the first engine that works, including its daemon if it has one.

    Raises:
        ResourceError: when none works.
    """
    wanted = _ENGINES if engine is None else (engine,)
    for name in wanted:
        if shutil.which(name) and _ask(name, "info") is not None:
            return name
    raise ResourceError(
        f"no container engine answers: tried {', '.join(wanted)} with 'info'; is it installed, its "
        "daemon running, and may this user talk to it?"
    )
