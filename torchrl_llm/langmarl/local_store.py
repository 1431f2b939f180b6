"""Storage of a run in language space: the abstract store, a folder store, and JSON files.

Files are replaced atomically, so a killed process leaves the old file. Secrets are not written.

Next: :mod:`torchrl_llm.langmarl.store` defines the files.
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
    """A file or an iteration does not exist."""


class BaseStore(ABC):
    """Base of stores. Paths are relative, with ``/`` between folders and without ``..``."""

    @abstractmethod
    def path(self, path: str) -> Path:
        """Path of a file on this machine; ``ConfigError`` if it is outside the store."""

    @abstractmethod
    def read_text(self, path: str) -> str:
        """Read a file; if it is missing, the ``CheckpointError`` is a ``FileNotFoundError`` too."""

    @abstractmethod
    def write_text(self, path: str, text: str) -> None:
        """Replace a file atomically; after a ``CheckpointError`` the old one remains."""

    @abstractmethod
    def append_line(self, path: str, text: str) -> None:
        """Append a line after the last complete one; a ``CheckpointError`` leaves the old file."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether a file or folder exists."""

    @abstractmethod
    def list(self, folder: str) -> list[str]:
        """Names in a folder, with numbers sorted by value; empty if the folder is missing."""

    def lock(self, run_id: str) -> contextlib.AbstractContextManager[None]:
        """Lock a run while the context is open; does nothing by default."""
        return contextlib.nullcontext()


class LocalStore(BaseStore):
    """A store in a folder.

    Args:
        base_dir: the folder, created when the first file is written.

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
        """Path of a file in the folder."""
        parts = PurePosixPath(path)
        if parts.is_absolute() or ".." in parts.parts or "\0" in path:
            raise ConfigError(f"a path in a store is relative and without '..', got {path!r}")
        return self.base_dir / parts

    def read_text(self, path: str) -> str:
        """Read a file."""
        return read_file(self.path(path))

    def write_text(self, path: str, text: str) -> None:
        """Replace a file atomically."""
        replace_file(self.path(path), text)

    def append_line(self, path: str, text: str) -> None:
        """Append a line; thread-safe."""
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
        """Whether a file or folder exists."""
        return self.path(path).exists()

    def list(self, folder: str) -> list[str]:
        """Names in a folder, except drafts."""
        place = self.path(folder)
        names = os.listdir(place) if place.is_dir() else []
        # Drafts begin with a dot.
        return sorted((name for name in names if not name.startswith(".")), key=_by_number)

    @contextlib.contextmanager
    def lock(self, run_id: str) -> Iterator[None]:
        """Lock a run against other processes, and against other trainers of this process.

        Removes drafts of files that a killed process left behind.

        Args:
            run_id: name of the run.

        Raises:
            ConfigError: another trainer is training the run.
            CheckpointError: the lock file cannot be written.
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
                    f"{file.read().strip()}; wait for its end, or choose a different run_name"
                ) from None
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            remove_drafts(place.parent)
            try:
                yield
            finally:
                # A forked child also has the file open and would keep the lock.
                fcntl.flock(file, fcntl.LOCK_UN)


# -- files ----------------------------------------------------------------------------------------


def read_file(place: Path) -> str:
    """Read a text, like :meth:`BaseStore.read_text`."""
    try:
        return plain_file(place).read_bytes().decode("utf-8", "surrogatepass")
    except FileNotFoundError:
        raise MissingCheckpointError(f"{place} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{place} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DamagedCheckpointError(f"{place} is damaged: {error}") from None


def replace_file(place: Path, text: str) -> None:
    """Write a text atomically: readers see either the old file or the new one."""
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
            f"{place} cannot be written: {error.strerror}; the old file is unchanged. Make room "
            "there, or choose another experiment_dir"
        ) from error


def whole_lines(file: IO[bytes]) -> int:
    """Cut off an incomplete line left by a killed process; returns the remaining bytes."""
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
    """Check that a name is valid as a file name.

    Args:
        name: the name.
        what: description of the named thing, for the error.

    Raises:
        ConfigError: the name is empty, too long, or would leave the folder.

    Example:
        >>> check_name("piston_3", "an agent")
        'piston_3'
    """
    bad = not isinstance(name, str) or not name or name.startswith(".") or ".." in name
    if bad or re.search(r"[/\\\x00-\x1f]", name) or len(os.fsencode(name)) > _MOST_BYTES:
        raise ConfigError(
            f"the name of {what} becomes a file name: it must not be empty, begin with a dot, "
            f"hold '/', '\\' or '..', or be longer than {_MOST_BYTES} bytes; got {name!r}"
        )
    return name


def check_number(value: int, what: str) -> int:
    """Check that a number is valid in a file name.

    Args:
        value: the number.
        what: description of the counted thing, for the error.

    Raises:
        ConfigError: the value is not a whole number from 0.

    Example:
        >>> check_number(7, "an episode")
        7
    """
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < 0:
        raise ConfigError(f"the number of {what} is a whole number from 0 on, got {value!r}")
    return int(value)


def run_folder(run_id: str) -> str:
    """Folder of a run; ``ConfigError`` if its name is not valid for a folder."""
    return f"runs/{check_name(run_id, 'a run')}"


def evaluation_path(run_id: str, iteration: int, episode: int) -> str:
    """Path of the critic's evaluation of an episode.

    Example:
        >>> evaluation_path("one", 2, 7)
        'runs/one/evaluations/iter_2/eval_episode_007.json'
    """
    number = check_number(iteration, "an iteration")
    name = f"eval_episode_{check_number(episode, 'an episode'):03d}.json"
    return f"{run_folder(run_id)}/evaluations/iter_{number}/{name}"


def gradients_path(run_id: str, iteration: int, agent: str) -> str:
    """Path of the gradients of an agent, one per episode."""
    return f"{_gradients_of(run_id, iteration, agent)}_gradients.json"


def aggregated_path(run_id: str, iteration: int, agent: str) -> str:
    """Path of the gradient applied to an agent's policy."""
    return f"{_gradients_of(run_id, iteration, agent)}_aggregated.txt"


def _gradients_of(run_id: str, iteration: int, agent: str) -> str:
    number = check_number(iteration, "an iteration")
    return f"{run_folder(run_id)}/gradients/iter_{number}/{check_name(agent, 'an agent')}"


# -- JSON -----------------------------------------------------------------------------------------


def redacted(value: Any) -> Any:
    """Convert a value to JSON types, without secrets.

    Args:
        value: mappings, lists, dataclasses, sets, NumPy numbers, tensors; other values become text,
            and numbers that are not finite become ``None``.

    Returns:
        The value in plain types, with ``None`` for each ``api_key`` at any depth.

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
    r"""The text of a JSON file; :func:`redacted` is applied to the value.

    Example:
        >>> to_json_text({"reward": float("nan")})
        '{\n  "reward": null\n}\n'
    """
    return json.dumps(redacted(value), indent=2, allow_nan=False) + "\n"


def digest_of(text: str) -> str:
    """A short digest of a text, to detect changes.

    Example:
        >>> digest_of("Be kind.")
        '9cc11283e899a1a2'
    """
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def sealed(value: Any) -> Any:
    """The result of :func:`redacted`; a mapping gets a digest, which :func:`parsed` checks.

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
        store: store of the file.
        path: path of the file.

    Raises:
        DamagedCheckpointError: the file is not JSON, or differs from the written one.
        CheckpointError: the file is missing, or from a newer version of this package.
    """
    value = parsed(store.read_text(path), str(store.path(path)))
    version = value.get("schema_version", 1) if isinstance(value, dict) else 1
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise CheckpointError(
            f"{store.path(path)} has schema_version {version!r}, and this version of torchrl_llm "
            f"reads up to {SCHEMA_VERSION}; continue with the version that wrote it"
        )
    return value


def parsed(text: str, place: str) -> Any:
    """Parse a JSON text and remove its digest.

    Raises:
        DamagedCheckpointError: the text is not JSON, or its digest differs; the message names the
            place.
    """
    try:
        value = json.loads(text)
        if isinstance(value, dict) and _SEAL in value:
            seal = value.pop(_SEAL)  # of the stored value, in which secrets are already masked
            if digest_of(json.dumps(value, sort_keys=True)) != seal:
                raise ValueError("it is not what was written")
        return value
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"{place} is damaged: {error}; remove it, and the same command makes it again"
        ) from None
