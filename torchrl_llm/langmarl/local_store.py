"""Where a run in language space is kept: the abstract store, a folder, and what JSON is in it.

A file is replaced as a whole, so a process that is killed leaves the old one. No secret is written.

Next: :mod:`torchrl_llm.langmarl.store` says which file is what.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
import torch

from torchrl_llm._files import plain_file, remove_drafts, replacing
from torchrl_llm.errors import CheckpointError, ConfigError, DamagedCheckpointError

SCHEMA_VERSION = 1
_SECRETS = {"api-key", "apikey", "authorization", "x-api-key", "access-token"}
_PLAIN = {str, int, bool, type(None)}
_MOST_BYTES = 200
_SEAL = "blake2b"
_appending = threading.Lock()


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """A file or an iteration that is not there."""


class BaseStore(ABC):
    """Base of stores. Paths are relative, with ``/`` between folders and without ``..``."""

    @abstractmethod
    def path(self, path: str) -> Path:
        """Where a file is on this machine; a ``ConfigError`` if that is outside of the store."""

    @abstractmethod
    def read_text(self, path: str) -> str:
        """Read a file; if it is missing, the ``CheckpointError`` is a ``FileNotFoundError`` too."""

    @abstractmethod
    def write_text(self, path: str, text: str) -> None:
        """Replace a file at once; a ``CheckpointError`` leaves the old one."""

    @abstractmethod
    def append_line(self, path: str, text: str) -> None:
        """Append a line behind the last whole one; a ``CheckpointError`` leaves the old file."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether there is such a file or folder."""

    @abstractmethod
    def list(self, folder: str) -> list[str]:
        """Names in a folder, numbers in them sorted by value; none if it is missing."""

    def lock(self, run_id: str) -> contextlib.AbstractContextManager[None]:
        """Keep others out of a run while the context is open; here nobody is kept out."""
        return contextlib.nullcontext()


class LocalStore(BaseStore):
    """A store in a folder.

    Args:
        base_dir: the folder, made when the first file is written.

    Example:
        >>> import tempfile
        >>> store = LocalStore(tempfile.mkdtemp())
        >>> for number in (2, 10):
        ...     store.write_text(f"runs/one/{number}.txt", "text")
        >>> store.list("runs/one")
        ['2.txt', '10.txt']
    """

    def __init__(self, base_dir: str | os.PathLike[str]) -> None:
        self.base_dir = Path(base_dir).expanduser().absolute()

    def path(self, path: str) -> Path:
        """Where a file is in the folder."""
        parts = PurePosixPath(path)
        if parts.is_absolute() or ".." in parts.parts or "\0" in path:
            raise ConfigError(f"a path in a store is relative and without '..', got {path!r}")
        return self.base_dir / parts

    def read_text(self, path: str) -> str:
        """Read a file."""
        return read_file(self.path(path))

    def write_text(self, path: str, text: str) -> None:
        """Replace a file at once."""
        replace_file(self.path(path), text)

    def append_line(self, path: str, text: str) -> None:
        """Append a line; threads may do so at a time."""
        place, line = self.path(path), f"{text}\n".encode("utf-8", "surrogatepass")
        with _appending, _writing(place), place.open("a+b", buffering=0) as file:
            end = whole_lines(file)
            try:
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(end)
                raise

    def exists(self, path: str) -> bool:
        """Whether there is such a file or folder."""
        return self.path(path).exists()

    def list(self, folder: str) -> list[str]:
        """Names in a folder, without drafts of files."""
        place = self.path(folder)
        names = os.listdir(place) if place.is_dir() else []
        # Drafts begin with a dot.
        return sorted((name for name in names if not name.startswith(".")), key=_by_number)

    @contextlib.contextmanager
    def lock(self, run_id: str) -> Iterator[None]:
        """Keep other processes, and other trainers of this one, out of a run.

        Drafts of files that a killed process has left in it are removed.

        Args:
            run_id: name of the run.

        Raises:
            ConfigError: the run is being trained.
            CheckpointError: the file of the lock cannot be written.
        """
        place = self.path(f"{run_folder(run_id)}/lock")
        with _writing(place):
            file = place.open("a+")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise ConfigError(
                    f"the run {run_id!r} in {self.base_dir} is being trained by "
                    f"{file.read().strip()}; wait for its end, or give run_name another name"
                ) from None
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            remove_drafts(place.parent)
            try:
                yield
            finally:
                # A child that was forked has the file too, and would keep the lock.
                fcntl.flock(file, fcntl.LOCK_UN)


# -- files ----------------------------------------------------------------------------------------


def read_file(place: Path) -> str:
    """Read a text, as :meth:`BaseStore.read_text` does."""
    try:
        return plain_file(place).read_bytes().decode("utf-8", "surrogatepass")
    except FileNotFoundError:
        raise MissingCheckpointError(f"{place} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{place} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DamagedCheckpointError(f"{place} is damaged: {error}") from None


def replace_file(place: Path, text: str) -> None:
    """Write a text so that readers see the old file or the new one, and nothing between."""
    with _writing(place), replacing(place) as draft, draft.open("xb") as file:
        file.write(text.encode("utf-8", "surrogatepass"))
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _writing(place: Path) -> Iterator[None]:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise CheckpointError(
            f"{place} cannot be written: {error.strerror}; what was there is as before. Make room "
            "there, or choose another experiment_dir"
        ) from error


def whole_lines(file: IO[bytes]) -> int:
    """Cut off half a line, which a process that was killed has left; the bytes that remain."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - 1))
    if file.read(1) in (b"", b"\n"):
        return end
    file.seek(0)
    return file.truncate(file.read().rfind(b"\n") + 1)


def _by_number(name: str) -> list[Any]:
    parts = re.split(r"([0-9]+)", name)
    return [int(part) if place % 2 else part for place, part in enumerate(parts)]


def check_name(name: str, what: str) -> str:
    """Check that a name can be one of a file.

    Args:
        name: the name.
        what: is called so, in the error.

    Raises:
        ConfigError: empty, too long, or with what would leave the folder.

    Example:
        >>> check_name("piston_3", "an agent")
        'piston_3'
    """
    bad = not isinstance(name, str) or not name or name.startswith(".") or ".." in name
    if bad or re.search(r"[/\\\x00-\x1f]", name) or len(os.fsencode(name)) > _MOST_BYTES:
        raise ConfigError(
            f"the name of {what} becomes that of a file: it must not be empty, begin with a dot, "
            f"hold '/', '\\' or '..', or be longer than {_MOST_BYTES} bytes; got {name!r}"
        )
    return name


def check_number(value: int, what: str) -> int:
    """Check that a number can be one in the name of a file.

    Args:
        value: the number.
        what: is counted by it, in the error.

    Raises:
        ConfigError: no whole number from 0 on.

    Example:
        >>> check_number(7, "an episode")
        7
    """
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < 0:
        raise ConfigError(f"the number of {what} is a whole number from 0 on, got {value!r}")
    return int(value)


def run_folder(run_id: str) -> str:
    """Folder of a run; a ``ConfigError`` if its name cannot be one of a folder."""
    return f"runs/{check_name(run_id, 'a run')}"


def evaluation_path(run_id: str, iteration: int, episode: int) -> str:
    """Path of what the critic said of an episode.

    Example:
        >>> evaluation_path("one", 2, 7)
        'runs/one/evaluations/iter_2/eval_episode_007.json'
    """
    number = check_number(iteration, "an iteration")
    name = f"eval_episode_{check_number(episode, 'an episode'):03d}.json"
    return f"{run_folder(run_id)}/evaluations/iter_{number}/{name}"


def gradients_path(run_id: str, iteration: int, agent: str) -> str:
    """Path of the gradients of an agent, one for each episode."""
    return f"{_gradients_of(run_id, iteration, agent)}_gradients.json"


def aggregated_path(run_id: str, iteration: int, agent: str) -> str:
    """Path of the gradient that was applied to the policy of an agent."""
    return f"{_gradients_of(run_id, iteration, agent)}_aggregated.txt"


def _gradients_of(run_id: str, iteration: int, agent: str) -> str:
    number = check_number(iteration, "an iteration")
    return f"{run_folder(run_id)}/gradients/iter_{number}/{check_name(agent, 'an agent')}"


# -- JSON -----------------------------------------------------------------------------------------


def redacted(value: Any) -> Any:
    """A value as JSON has it, without secrets.

    Args:
        value: mappings, lists, dataclasses, sets, numbers of numpy, tensors; what is none of these
            becomes its text, and what is not finite becomes ``None``.

    Returns:
        The same of plain types, with ``None`` for each ``api_key`` at any depth.

    Example:
        >>> redacted({"llm": {"name": "m", "api_key": "sk-1"}, "rewards": [torch.tensor(0.5)]})
        {'llm': {'name': 'm', 'api_key': None}, 'rewards': [0.5]}
    """
    if type(value) in _PLAIN:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {
            str(key): None if str(key).lower().replace("_", "-") in _SECRETS else redacted(each)
            for key, each in value.items()
        }
    if isinstance(value, Enum):
        return redacted(value.value)
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
    if isinstance(value, (np.generic, np.ndarray, torch.Tensor)):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [redacted(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(redacted, value), key=str)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int)) else str(value)


def to_json_text(value: Any) -> str:
    r"""The text of a JSON file; the value goes through :func:`redacted`.

    Example:
        >>> to_json_text({"reward": float("nan")})
        '{\n  "reward": null\n}\n'
    """
    return json.dumps(redacted(value), indent=2, allow_nan=False) + "\n"


def digest_of(text: str) -> str:
    """A short digest of a text, by which a change of it is noticed.

    Example:
        >>> digest_of("Be kind.")
        '9cc11283e899a1a2'
    """
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def sealed(value: Any) -> Any:
    """A value as of :func:`redacted`; a mapping gets a digest, which :func:`parsed` checks.

    Example:
        >>> sealed({"reward": 1.0})
        {'reward': 1.0, 'blake2b': 'f30b66bc5a590bad'}
    """
    value = redacted(value)
    if not isinstance(value, dict):
        return value
    return {**value, _SEAL: digest_of(json.dumps(value, sort_keys=True))}


def read_json(store: BaseStore, path: str) -> Any:
    """Read a JSON file.

    Args:
        store: where it is.
        path: of the file.

    Raises:
        DamagedCheckpointError: it is no JSON, or not what was written.
        CheckpointError: it is missing, or of a newer version of this package.
    """
    value = parsed(store.read_text(path), str(store.path(path)))
    version = value.get("schema_version", 1) if isinstance(value, dict) else 1
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise CheckpointError(
            f"{store.path(path)} has schema_version {version!r}, and this version of torchrl_llm "
            f"reads up to {SCHEMA_VERSION}; go on with the version that wrote it"
        )
    return value


def parsed(text: str, place: str) -> Any:
    """The value of a JSON text, without its digest.

    Raises:
        DamagedCheckpointError: it is no JSON, or its digest is another; the place is named.
    """
    try:
        value = json.loads(text)
        if isinstance(value, dict) and _SEAL in value:
            seal = value.pop(_SEAL)  # of what was kept, which hides secrets already
            if digest_of(json.dumps(value, sort_keys=True)) != seal:
                raise ValueError("it is not what was written")
        return value
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"{place} is damaged: {error}; remove it, and the same command makes it again"
        ) from None
