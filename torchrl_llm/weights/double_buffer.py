"""Weights through a disc that sender and receivers share: two memory-mapped tensordicts.

The sender writes one of two slots and the receivers read the other, so neither waits for the other.
A slot has a header next to it, replaced as a whole before and after its tensors are written; a
reader that finds another header after reading than before throws away what it read. Together with
the digest in the header this means that no reader ever takes a half-written slot, whoever is killed
whenever. Both ends look at the headers alone to find the other, so either may be restarted.

On one machine put the folder on ``/dev/shm``: then nothing touches a disc. Between machines any
shared file system will do whose files, once flushed, look the same everywhere; a reader that still
sees old pages fails by the digest, and tries again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_llm._files import replacing
from torchrl_llm.errors import ConfigError, ResourceError, WeightUpdateError
from torchrl_llm.modules.backends.backend_port import Backend
from torchrl_llm.weights.canary_rule import CanaryTarget
from torchrl_llm.weights.fingerprint import weights_digest
from torchrl_llm.weights.weight_receiver import WeightReceiver
from torchrl_llm.weights.weight_source import WeightReceipt, WeightSource

_POLL_S = 0.05
_TRIES = 3


class BufferHeader(NamedTuple):
    """What is known of a slot.

    Attributes:
        writer: tells one sender from another.
        sequence: 1, 2, 3, ...; even ones lie in slot 0.
        version: of the weights.
        digest: of the weights; ``None`` while they are being written.
        canary: what they compute, as :meth:`~torchrl_llm.weights.CanaryTarget.to_json` says
            it; ``None`` where the sender does not know.
    """

    writer: str
    sequence: int
    version: int
    digest: str | None
    canary: dict[str, Any] | None = None

    @property
    def slot(self) -> int:
        """Which of the two."""
        return self.sequence % 2


def _header_path(folder: Path, slot: int) -> Path:
    return folder / f"slot{slot}.json"


def _read_header(folder: Path, slot: int) -> BufferHeader | None:
    path = _header_path(folder, slot)
    try:
        header = BufferHeader(*json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, OSError) as error:
        raise WeightUpdateError(f"{path} is no header of a slot ({error})") from None
    return header


def _newest(folder: Path) -> BufferHeader | None:
    """The header of the slot that was written last and is whole."""
    headers = [_read_header(folder, slot) for slot in (0, 1)]
    whole = [header for header in headers if header is not None and header.digest is not None]
    return max(whole, key=lambda header: header.sequence, default=None)


class DoubleBufferWriter:
    """The trainer's end.

    Args:
        folder: is made where there is none.
        num_threads: copy so many tensors at once.

    Attributes:
        folder: as given.
        last_version: of the last weights that were written whole, also by a sender before this one;
            0 where there are none.

    Raises:
        ConfigError: fewer than one thread.
        ResourceError: another sender writes to this folder.

    Example:
        >>> import tempfile
        >>> writer = DoubleBufferWriter(tempfile.mkdtemp())
        >>> header = writer.write({"weight": torch.ones(2)}, version=4)
        >>> source = DoubleBufferSource(writer.folder)
        >>> dict(source.receive()), source.digest == header.digest
        ({'weight': tensor([1., 1.])}, True)
    """

    def __init__(self, folder: str | Path, *, num_threads: int = 1) -> None:
        if num_threads < 1:
            raise ConfigError(f"num_threads must be at least 1, got {num_threads}")
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._num_threads = num_threads
        # Held until this process ends, however it ends.
        self._lock = (self.folder / "writer.lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ResourceError(
                f"another sender writes its weights to {self.folder}; give each run a folder"
            ) from None
        self._name = uuid.uuid4().hex[:12]
        self._slots: dict[int, TensorDictBase] = {}
        # A slot that the last sender left half-written is free; the whole one is not.
        last = _newest(self.folder)
        self._sequence = 0 if last is None else last.sequence
        self.last_version = 0 if last is None else last.version

    def write(
        self,
        weights: Mapping[str, Tensor],
        *,
        version: int,
        canary: CanaryTarget | None = None,
    ) -> BufferHeader:
        """Write weights for receivers to find.

        Args:
            weights: name to tensor.
            version: their number.
            canary: what they compute, for receivers to check.

        Returns:
            The header that receivers will see.

        Raises:
            ResourceError: too little room on the disc.
        """
        header = BufferHeader(self._name, self._sequence + 1, version, None)
        self._publish(header)
        slot = self._slot(header.slot, weights)
        _each(self._num_threads, lambda name: slot.get(name).copy_(weights[name]), list(weights))
        # Of what lies in the slot, so that a slot written by two would be found out.
        digest = weights_digest((name, slot.get(name)) for name in weights)
        _flush(self.folder / f"slot{header.slot}")
        told = None if canary is None else canary.to_json()
        header = header._replace(digest=digest, canary=told)
        self._publish(header)
        self._sequence, self.last_version = header.sequence, version
        return header

    def receipts(self) -> dict[str, WeightReceipt]:
        """What receivers said that they loaded last, by their names."""
        return {
            path.stem.removeprefix("receipt-"): WeightReceipt(*json.loads(path.read_text()))
            for path in sorted(self.folder.glob("receipt-*.json"))
        }

    def close(self) -> None:
        """Let another sender write here; what was written may still be read."""
        self._slots.clear()
        self._lock.close()

    def _publish(self, header: BufferHeader) -> None:
        with replacing(_header_path(self.folder, header.slot)) as draft:
            draft.write_text(json.dumps(header))

    def _slot(self, number: int, weights: Mapping[str, Tensor]) -> TensorDictBase:
        """The slot's tensordict, recreated where it has no place for just these weights."""
        path = self.folder / f"slot{number}"
        slot = self._slots.get(number)
        if slot is None or not _alike(slot, weights):
            self._slots.pop(number, None)
            # Readers that have the old files open keep them.
            shutil.rmtree(path, ignore_errors=True)
            needed = sum(value.numel() * value.element_size() for value in weights.values())
            free = shutil.disk_usage(self.folder).free
            if free < needed:
                # Writing to a mapped file on a full disc would end the process without a word.
                raise ResourceError(
                    f"{self.folder} needs {needed} more bytes for these weights and has {free}"
                )
            blank = {n: torch.empty(w.shape, dtype=w.dtype) for n, w in weights.items()}
            slot = TensorDict(blank, []).memmap(str(path), num_threads=self._num_threads)
            self._slots[number] = slot
        return slot


class DoubleBufferSource(WeightSource):
    """Weights that lie in a shared folder; they may be opened often, until they are overwritten.

    Args:
        folder: as this receiver sees it.
        sequence: which ones; ``None`` for the newest when it is opened.
        num_threads: copy so many tensors at once.
    """

    def __init__(
        self, folder: str | Path, *, sequence: int | None = None, num_threads: int = 1
    ) -> None:
        self._folder, self._sequence = Path(folder), sequence
        self._num_threads = num_threads

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`WeightSource.receive`; the tensors are copies, whole only at the end."""
        header = self._header()
        self.digest, self.counter = header.digest, header.writer
        try:
            path = self._folder / f"slot{header.slot}"
            _check_files(path)
            slot = TensorDict.load_memmap(str(path))
            names = sorted(slot.keys())
            copies = _each(self._num_threads, lambda name: slot.get(name).clone(), names)
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise WeightUpdateError(
                f"update {header.sequence} in {self._folder} cannot be read "
                f"({type(error).__name__}: {error})"
            ) from None
        if _read_header(self._folder, header.slot) != header:
            raise WeightUpdateError(
                f"update {header.sequence} in {self._folder} was overwritten while it was read; "
                "the sender is two updates ahead"
            )
        yield from zip(names, copies, strict=True)

    def _header(self) -> BufferHeader:
        if self._sequence is None:
            header = _newest(self._folder)
        else:
            header = _read_header(self._folder, self._sequence % 2)
        if header is None:
            raise WeightUpdateError(f"nothing was ever written to {self._folder}")
        if header.digest is None or self._sequence not in (None, header.sequence):
            raise WeightUpdateError(
                f"update {self._sequence} is not in {self._folder} any more (found "
                f"{header.sequence}); the sender is two updates ahead"
            )
        return header


def newest_update(
    folder: str | Path, *, num_threads: int = 1
) -> tuple[int, DoubleBufferSource] | None:
    """What a sender wrote last, for receivers that look by themselves.

    Args:
        folder: as this receiver sees it.
        num_threads: copy so many tensors at once.

    Returns:
        Version and source; ``None`` where nothing was written yet.
    """
    header = _newest(Path(folder))
    if header is None:
        return None
    source = DoubleBufferSource(folder, sequence=header.sequence, num_threads=num_threads)
    source.digest = header.digest
    if header.canary is not None:
        source.canary = CanaryTarget.from_json(header.canary)
    return header.version, source


class DoubleBufferReceiver(WeightReceiver):
    """Takes what a sender writes to a shared folder.

    Args:
        backend: gets the weights.
        folder: as this receiver sees it.
        num_threads: copy so many tensors at once.
        name: under which the sender finds its receipts; by default host and process.
    """

    def __init__(
        self,
        backend: Backend,
        folder: str | Path,
        *,
        num_threads: int = 1,
        name: str | None = None,
    ) -> None:
        super().__init__(backend)
        self._folder, self._num_threads = Path(folder), num_threads
        self._name = name or f"{os.uname().nodename}-{os.getpid()}"
        self._seen: BufferHeader | None = None

    def poll_and_apply(self, timeout: float = 180.0) -> bool:
        """See :meth:`WeightReceiver.poll_and_apply`."""
        deadline, tries = time.monotonic() + timeout, 0
        while True:
            header = _newest(self._folder)
            if header is not None and header != self._seen:
                tries += 1
                try:
                    self._take(header)
                    return True
                except WeightUpdateError:
                    # Overtaken by the sender, or a file system that was late: look again.
                    if tries == _TRIES:
                        self._seen = header
                        raise
            elif time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)

    def _take(self, header: BufferHeader) -> None:
        source = DoubleBufferSource(
            self._folder, sequence=header.sequence, num_threads=self._num_threads
        )
        receipts = self.apply_weights(source, version=header.version)
        self._seen = header
        with replacing(self._folder / f"receipt-{self._name}.json") as draft:
            draft.write_text(json.dumps(receipts[0]))


def _check_files(slot: Path) -> None:
    """Raise for a file that is missing or short; mapping it would recreate it, full of zeros."""
    for name, entry in json.loads((slot / "meta.json").read_text()).items():
        if not isinstance(entry, dict):
            continue
        dtype = getattr(torch, entry["dtype"].removeprefix("torch."))
        needed = torch.Size(entry["shape"]).numel() * dtype.itemsize
        if needed and (slot / f"{name}.memmap").stat().st_size < needed:
            raise ValueError(f"the file of {name!r} is too short")


def _alike(slot: TensorDictBase, weights: Mapping[str, Tensor]) -> bool:
    return set(slot.keys()) == set(weights) and all(
        slot.get(name).shape == value.shape and slot.get(name).dtype == value.dtype
        for name, value in weights.items()
    )


def _each(num_threads: int, call: Callable[[str], Tensor], names: list[str]) -> list[Tensor]:
    if num_threads == 1:
        return [call(name) for name in names]
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(call, names))


def _flush(folder: Path) -> None:
    """See to it that other machines find the bytes when they find the header."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
