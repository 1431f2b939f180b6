"""Weights through a shared folder, with a safetensors file per version.

A file gets its name when it is complete, and never changes afterwards. So neither side waits for
the other, and both sides can restart. No reader ever sees half a version, even if a process is
killed. The last two versions are kept. Each file contains its version number, its digest and its
expected log-probs.

On a single machine, a folder on ``/dev/shm`` avoids the disk. Between machines, use any shared file
system on which every machine sees the same flushed files.
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
    """One version in a shared folder. It can be opened repeatedly until two newer versions exist.

    Args:
        path: path of the file for the receiver.
        about: its header.

    Attributes:
        path: as given.
        version: version number of the weights.

    Raises:
        WeightUpdateError: the header belongs to a different kind of file.
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
                # On some file systems, mapped data disappears with the file.
                yield name, file.get_tensor(name).clone()


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    # torch has its own error if the file disappears while it is opened.
    except (OSError, RuntimeError, SafetensorError) as error:
        if not path.exists():
            raise WeightUpdateError(f"{path} is gone: the sender is two versions ahead") from None
        raise WeightUpdateError(f"{path} cannot be read: {error}") from None


def newest_update(folder: str | Path) -> tuple[int, FileSource] | None:
    """Return the last version that a sender wrote, for receivers that poll.

    Args:
        folder: path of the folder for this receiver.

    Returns:
        Version and source; ``None`` if nothing was written yet.

    Raises:
        WeightUpdateError: the file is not a version of weights.
    """
    path = max(Path(folder).glob("weights-*.safetensors"), default=None)
    if path is None:
        return None
    with _opened(path) as file:
        source = FileSource(path, file.metadata() or {})
    return source.version, source


class FileWriter:
    """The trainer's end: writes weights into a shared folder.

    Args:
        folder: created if it does not exist.

    Attributes:
        folder: as given.
        last_version: version of the last weights that this or an earlier sender wrote; 0 if there
            are none.

    Raises:
        ResourceError: a different sender uses this folder.

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
        # The lock is held until this process ends in any way.
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
        """Write weights for receivers.

        Args:
            weights: name to tensor.
            version: their number.
            canary: expected log-probs, for receivers to check.

        Returns:
            Their source.

        Raises:
            ResourceError: too little space on the disk.
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
            except SafetensorError as error:  # also errors of the disk
                raise ResourceError(f"{path} could not be written: {error}") from None
            # Safetensors creates files readable only by this user, but others may run the engines.
            draft.chmod(os.fstat(self._lock.fileno()).st_mode & 0o777)
            # Flush the bytes before the name appears on other machines.
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
        """Release the folder for a different sender; written versions stay readable."""
        self._lock.close()


@register("weights", "files")
class FileWeights(EngineWeights):
    """Writes weights to a shared folder, from which engines load them.

    A rebuilt engine can load the same version again.

    Args:
        *backends: see :class:`~torchrl_llm.weights.EngineWeights`.
        folder: folder of the files: ``/dev/shm/...`` on one machine, a shared disk between
            machines.
        reader_folder: path of the same folder for the engines; the same path by default.
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
        """Release the folder for a different run."""
        self._writer.close()

    def _sender(self, weights: Weights, version: int) -> Sender:
        source = self._writer.write(engine_weights(weights, dtype=self._dtype), version=version)
        source.path = self._reader_folder / source.path.name
        return partial(update_backend, source=source, version=version)
