"""Weights through a folder that sender and receivers share: a safetensors file for each version.

A file takes its name when it is whole, and is never written to again. So neither side waits for the
other, no reader ever takes half a version, whoever is killed whenever, and either side may be
restarted. The last two versions stay. Each names its number, its digest and what it computes.

On one machine put the folder on ``/dev/shm``: then nothing touches a disc. Between machines any
shared file system will do whose files, once flushed, look the same everywhere.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from torchrl_llm._files import remove_drafts, replacing
from torchrl_llm._registry import register
from torchrl_llm.errors import ResourceError, WeightUpdateError
from torchrl_llm.modules.backends.backend_port import Backend
from torchrl_llm.weights.canary_rule import CanaryTarget
from torchrl_llm.weights.engine_updaters import EngineWeights, Sender, update_backend
from torchrl_llm.weights.fingerprint import weights_digest
from torchrl_llm.weights.weight_names import Weights, engine_weights
from torchrl_llm.weights.weight_source import WeightSource

_KEPT = 2


class FileSource(WeightSource):
    """One version in a shared folder; it may be opened often, until two newer ones are there.

    Args:
        path: of the file, as the receiver sees it.
        about: what its header says.

    Attributes:
        path: as given.
        version: of the weights.

    Raises:
        WeightUpdateError: the header is of another kind of file.
    """

    def __init__(self, path: str | Path, about: Mapping[str, str]) -> None:
        self.path = Path(path)
        try:
            self.version = int(about["version"])
            self.digest, self.counter = about["digest"], about["writer"]
            told = json.loads(about["canary"])
        except (KeyError, ValueError) as error:
            raise WeightUpdateError(f"{path} is no file of a FileWriter ({error!r})") from None
        self.canary = None if told is None else CanaryTarget.from_json(told)

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`WeightSource.receive`."""
        with _opened(self.path) as file:
            for name in sorted(file.keys()):
                # What is mapped is gone with the file on some file systems.
                yield name, file.get_tensor(name).clone()


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    # Where the file goes while it is opened, torch has an error of its own.
    except (OSError, RuntimeError, SafetensorError) as error:
        if not path.exists():
            raise WeightUpdateError(f"{path} is gone: the sender is two versions ahead") from None
        raise WeightUpdateError(f"{path} cannot be read: {error}") from None


def newest_update(folder: str | Path) -> tuple[int, FileSource] | None:
    """What a sender wrote last, for receivers that look by themselves.

    Args:
        folder: as this receiver sees it.

    Returns:
        Version and source; ``None`` where nothing was written yet.

    Raises:
        WeightUpdateError: what is there is no version of weights.
    """
    path = max(Path(folder).glob("weights-*.safetensors"), default=None)
    if path is None:
        return None
    with _opened(path) as file:
        source = FileSource(path, file.metadata() or {})
    return source.version, source


class FileWriter:
    """The trainer's end.

    Args:
        folder: is made where there is none.

    Attributes:
        folder: as given.
        last_version: of the last weights that were written, also by a sender before this one; 0
            where there are none.

    Raises:
        ResourceError: another sender writes to this folder.

    Example:
        >>> import tempfile
        >>> import torch
        >>> writer = FileWriter(tempfile.mkdtemp())
        >>> source = writer.write({"weight": torch.ones(2)}, version=4)
        >>> version, found = newest_update(writer.folder)
        >>> version, dict(found.receive()), found.digest == source.digest
        (4, {'weight': tensor([1., 1.])}, True)
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        # Held until this process ends, however it ends.
        self._lock = (self.folder / "writer.lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ResourceError(
                f"another sender writes its weights to {self.folder}; give each run a folder"
            ) from None
        remove_drafts(self.folder)
        self._name = uuid.uuid4().hex[:12]
        last = newest_update(self.folder)
        self.last_version, self._sequence = 0, 0
        if last is not None:
            self.last_version, path = last[0], last[1].path
            self._sequence = int(path.stem.removeprefix("weights-"))

    def write(
        self, weights: Mapping[str, Tensor], *, version: int, canary: CanaryTarget | None = None
    ) -> FileSource:
        """Write weights for receivers to find.

        Args:
            weights: name to tensor.
            version: their number.
            canary: what they compute, for receivers to check.

        Returns:
            Where they are.

        Raises:
            ResourceError: too little room on the disc.
        """
        tensors = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
        about = {
            "version": str(version),
            "digest": weights_digest(tensors),
            "writer": self._name,
            "canary": json.dumps(None if canary is None else canary.to_json()),
        }
        self._check_room(tensors)
        path = self._path(self._sequence + 1)
        with replacing(path) as draft:
            try:
                save_file(tensors, draft, metadata=about)
            except SafetensorError as error:  # of the disc, too
                raise ResourceError(f"{path} could not be written: {error}") from None
            # Safetensors makes files for this user alone; others may run the engines.
            draft.chmod(os.fstat(self._lock.fileno()).st_mode & 0o777)
            # Other machines must find the bytes when they find the name.
            with draft.open("rb") as file:
                os.fsync(file)
        self._sequence, self.last_version = self._sequence + 1, version
        self._path(self._sequence - _KEPT).unlink(missing_ok=True)
        return FileSource(path, about)

    def _check_room(self, tensors: Mapping[str, Tensor]) -> None:
        needed = sum(value.nbytes for value in tensors.values())
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise ResourceError(
                f"{self.folder} needs {needed} more bytes for these weights and has {free}"
            )

    def _path(self, sequence: int) -> Path:
        return self.folder / f"weights-{sequence:012d}.safetensors"

    def close(self) -> None:
        """Let another sender write here; what was written may still be read."""
        self._lock.close()


@register("weights", "files")
class FileWeights(EngineWeights):
    """Writes weights to a shared folder, and has engines read them from there.

    An engine that is built again later may read the same version again.

    Args:
        *backends: see :class:`~torchrl_llm.weights.EngineWeights`.
        folder: of the files; ``/dev/shm/...`` on one machine, a shared disc between machines.
        reader_folder: the same folder as the engines see it; by default by the same name.
        **options: see :class:`~torchrl_llm.weights.EngineWeights`.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from torchrl_llm.modules.backends import FakeBackend
        >>> trained = FakeBackend(vocab_size=16, eos_token_ids=(2,), seed=1).module
        >>> sampler = FakeBackend(vocab_size=16, eos_token_ids=(2,))
        >>> FileWeights(sampler, folder=tempfile.mkdtemp()).push_weights(trained)
        >>> torch.equal(sampler.module.head, trained.head)
        True
    """

    def __init__(
        self,
        *backends: Backend,
        folder: str | Path,
        reader_folder: str | Path | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*backends, **options)
        self._writer = FileWriter(folder)
        self._reader_folder = Path(folder if reader_folder is None else reader_folder)

    def close(self) -> None:
        """Let another run write to the folder."""
        self._writer.close()

    def _sender(self, weights: Weights, version: int) -> Sender:
        source = self._writer.write(engine_weights(weights, dtype=self._dtype), version=version)
        source.path = self._reader_folder / source.path.name
        return partial(update_backend, source=source, version=version)
