"""Stored rollouts of a run: files with one block per step, which are memory-mapped for reading.

A folder contains segments, ``steps_00000001.rows``, named after their first step. A segment
consists of blocks, one after the other, which are messages of :mod:`torchrl_llm.data.wire`. A
segment grows only at its end, and the next segment begins when it is full, so older segments may be
deleted. A block that a killed process has half written is at the end of the last segment, and is
not read.

:class:`RolloutStore` can read while a run writes: it contains the blocks that were complete when it
was opened. :class:`RolloutWriter` is for the one process that writes.

Next: :class:`torchrl_llm.collectors.StoredCollector` returns batches from a store,
:mod:`torchrl_llm.data.chat_export` exports chats from it.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, TensorDict

from torchrl_llm._files import plain_file, replacing
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.replay_buffers.trajectory_queues import trajectory_of
from torchrl_llm.data.safe_bytes import is_sound, read_head
from torchrl_llm.data.safe_values import MAX_ROWS
from torchrl_llm.data.wire import PackedRows, encode, pack_rows
from torchrl_llm.errors import DataError

FOLDER = "rollouts"
"""Name of the folder of rollouts in the folder of a run."""
CHANGED = (("trace", "mask_reason"), ("next", "reward_valid"))
"""Keys that training may change; the original of a changed value is below ``"collected"``."""
SEGMENT_BYTES = 1 << 26
"""Size in bytes after which the next segment begins."""
_SUFFIX = ".rows"
_OPEN_BLOCKS = 32
_CALLS = ("next", "tools", "calls")


class _Place(NamedTuple):
    """Position of a step's block: its file, and its bytes in the file."""

    step: int
    num_rows: int
    path: Path
    data: Any
    start: int
    end: int


class RolloutStore:
    """The rollouts of a run, opened for reading.

    The store contains the rows that the collector returned, one per turn, with ``"step"`` and their
    outcome. The outcome consists of ``"fate"`` (``trained``, ``filtered``, ``invalid``, ``stale``,
    ``truncated``, ``overlong``, or ``pending`` if the row still waited for its group), ``("trace",
    "mask_reason")`` as used in training, ``"advantage"`` if the row was trained, and further
    columns of the buffer's transforms. Times (``..._seconds``) are not stored.

    The tensors are views of the file: clone them before you change them. The store of a running run
    can be read; it does not contain rows that are written later.

    Args:
        folder: folder of a run, or its folder ``rollouts``.

    Raises:
        DataError: there are no rollouts, or they are damaged.

    Example:
        >>> import tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> writer = RolloutWriter(folder)
        >>> for step in (1, 2):
        ...     writer.append(step, [TensorDict(group_id=torch.tensor(step)) for _ in range(3)])
        >>> store = RolloutStore(folder)
        >>> len(store), store.steps(), store[-1]["group_id"].item(), store.rows(step=1).batch_size
        (6, [1, 2], 2, torch.Size([3]))
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = _rollouts_of(Path(folder))
        self._places: list[_Place] = []
        for path in _segments(self.folder):
            self._add(path)
        self._drop_torn_end()
        if not self._places:
            raise DataError(f"{self.folder} holds no whole step yet")
        self._ends = list(accumulate(place.num_rows for place in self._places))
        self._steps = torch.tensor([place.step for place in self._places]).unbind(0)
        self._at = {place.step: number for number, place in enumerate(self._places)}
        self._blocks: OrderedDict[int, PackedRows] = OrderedDict()

    def _add(self, path: Path) -> None:
        try:
            opened = plain_file(path).open("rb")
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        with opened as file:
            if not os.fstat(file.fileno()).st_size:
                return
            # A private copy: changing a row changes neither the file nor the rows of other readers.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        for place in _scan(path, data):
            if self._places and place.step <= (last := self._places[-1].step):
                raise DataError(f"{path} is damaged: step {place.step} follows {last}")
            self._places.append(place)

    def _drop_torn_end(self) -> None:
        """Drop a last block with the full length but no contents, as a power cut may leave it."""
        if not self._places:
            return
        last = self._places[-1]
        head = read_head(last.data, last.start)
        if last.end == len(last.data) and not is_sound(last.data, last.start, head):
            self._places.pop()

    # -- reading ----------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the steps that have rows, ascending."""
        return list(self._at)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            chosen = range(*index.indices(len(self)))
            if not chosen:
                raise IndexError(f"no rows in {index} of {len(self)}")
            return lazy_rows([self[at] for at in chosen])
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = bisect_right(self._ends, at)
        place = self._places[number]
        return self._row(number, at - self._ends[number] + place.num_rows)

    def _row(self, number: int, index: int) -> TensorDict:
        row = self._block(number)[index]
        row._tensordict["step"] = self._steps[number]
        return row

    def _block(self, number: int) -> PackedRows:
        block = self._blocks.get(number)
        if block is None:
            place = self._places[number]
            try:
                block = PackedRows.open(place.data, place.start)
            except DataError as error:
                raise DataError(f"step {place.step} of {place.path}: {error}") from None
            if len(block) != place.num_rows:
                raise DataError(f"step {place.step} of {place.path} has a different number of rows")
            self._blocks[number] = block
            if len(self._blocks) > _OPEN_BLOCKS:
                self._blocks.popitem(last=False)
        return block

    def about(self, step: int) -> dict[str, Any]:
        """Return values of a step: ``kept`` (``sample`` or ``all``), ``collected`` (a count).

        Args:
            step: one of :meth:`steps`.

        Raises:
            DataError: the store has no rows of that step.
        """
        return dict(self._block(self._number(step)).about)

    def _number(self, step: int) -> int:
        if step not in self._at:
            raise DataError(
                f"{self.folder} has no rows of step {step}; it has {len(self._at)} steps from "
                f"{self._places[0].step} to {self._places[-1].step}"
            )
        return self._at[step]

    def iterate(
        self,
        step: int | Iterable[int] | None = None,
        where: Callable[[TensorDict], bool] | None = None,
    ) -> Iterator[TensorDict]:
        """Iterate over rows, without loading all of them into memory.

        Args:
            step: one step, or several; ``None`` for all steps.
            where: function that returns true for rows to return; ``None`` for all rows.

        Raises:
            DataError: the store has no rows of that step, or they are damaged.
        """
        steps = self.steps() if step is None else [step] if isinstance(step, int) else step
        for number in map(self._number, steps):
            for index in range(self._places[number].num_rows):
                row = self._row(number, index)
                if where is None or where(row):
                    yield row

    def rows(
        self,
        step: int | Iterable[int] | None = None,
        where: Callable[[TensorDict], bool] | None = None,
    ) -> LazyStackedTensorDict:
        """Return a lazy stack of rows.

        Args:
            step: one step, or several; ``None`` for all steps.
            where: function that returns true for rows to return, such as ``lambda row: row["fate"]
                == "filtered"``; ``None`` for all rows.

        Raises:
            DataError: the store has no such rows, or they are damaged.
        """
        found = list(self.iterate(step, where))
        if not found:
            raise DataError(f"the filter leaves no row of {self.folder}")
        return lazy_rows(found)

    def trajectories(self, step: int) -> list[list[TensorDict]]:
        """Yield the turns of each trajectory of a step; a row without ``traj_id`` is one.

        Args:
            step: one of :meth:`steps`.

        Raises:
            DataError: the store has no rows of that step, or they are damaged.
        """
        found: dict[Any, list[TensorDict]] = {}
        for number, row in enumerate(self.iterate(step)):
            found.setdefault(trajectory_of(row) or number, []).append(row)
        return list(found.values())


class RolloutWriter:
    """Writes a folder of rollouts, from a single process; it removes half-written blocks.

    Args:
        folder: folder, which is created when the first rows are written.

    Attributes:
        damaged: one line for each damage that :meth:`cut` found.

    Raises:
        OSError: the folder cannot be read or repaired.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.damaged: list[str] = []
        self._path: Path | None = None
        self._size = 0

    def append(
        self, step: int, rows: Iterable[TensorDict], about: Mapping[str, Any] | None = None
    ) -> None:
        """Write the rows of a step after all others.

        Args:
            step: its number, above the numbers of earlier steps.
            rows: tensordicts without batch dimension, at least one.
            about: plain values to store with them.

        Raises:
            DataError: there are no rows, or a value has no safe form; the message names its key.
            OSError: the disk is full or the folder is read-only; earlier blocks stay intact.
        """
        data = _block(step, rows, about)
        if self._path is None or self._size + len(data) > SEGMENT_BYTES:
            self.folder.mkdir(parents=True, exist_ok=True)
            path, size = self.folder / f"steps_{step:08d}{_SUFFIX}", 0
        else:
            path, size = self._path, self._size
        with path.open("ab", buffering=0) as file:
            try:
                written = file.write(data)
                if written < len(data):
                    raise OSError(f"{written} of {len(data)} bytes were written; is the disk full?")
            except OSError:
                file.truncate(size)
                raise
        self._path, self._size = path, size + len(data)

    def flush(self) -> None:
        """Force written blocks to the disk, for a checkpoint that depends on them."""
        if self._path is not None:
            with self._path.open("rb") as file:
                os.fsync(file.fileno())

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each segment by its name, for :meth:`cut`."""
        return {path.name: path.stat().st_size for path in _segments(self.folder)}

    def cut(self, step: int, sizes: Mapping[str, int] | None = None) -> int | None:
        """Continue after a step: drop the rows of later steps and half-written blocks.

        A damaged segment is moved to a folder ``damaged_rollouts_<step>`` next to this folder;
        copies of its intact blocks stay in this folder. ``damaged`` then has a line for each
        damage.

        Args:
            step: the last step to keep.
            sizes: result of :meth:`sizes` after that step.

        Returns:
            The last remaining step; ``None`` if there is none.
        """
        self._path, self._size = None, 0
        last, sizes = None, sizes or {}
        gone = (self.folder / name for name in sizes if not (self.folder / name).exists())
        self.damaged = [f"{path} is gone, and with it its rollouts" for path in gone]
        for path in _segments(self.folder):
            try:
                data = plain_file(path).read_bytes()
                blocks, harm = _sound_blocks(path, data, step)
            except OSError as error:
                data, blocks, harm = b"", {}, f"{path} cannot be read: {error.strerror}"
            if harm is None and sum(map(len, blocks.values())) < sizes.get(path.name, 0):
                harm = f"{path} is shorter than it was"
            if harm is not None:
                aside = self.folder.with_name(f"damaged_{self.folder.name}_{step}")
                while (aside / path.name).exists():
                    aside = aside.with_name(f"{aside.name}_again")
                aside.mkdir(exist_ok=True)
                path.rename(aside / path.name)
                stay = f"{len(blocks)} whole steps of it stay"
                self.damaged.append(f"{harm}; it is now in {aside}, and {stay}")
            if not blocks:
                path.unlink(missing_ok=True)
                continue
            whole = b"".join(blocks.values())
            if harm is not None or len(whole) < len(data):
                # The file is not changed in place, because readers have it mapped.
                with replacing(path) as draft:
                    draft.write_bytes(whole)
            last, self._path, self._size = max(blocks), path, len(whole)
        return last


def _block(step: int, rows: Iterable[TensorDict], about: Mapping[str, Any] | None) -> bytes:
    """Write a step's rows as bytes, the same for the same rows: without ``..._seconds``."""
    packed = pack_rows(rows)
    if not packed.num_rows:
        raise DataError(f"no rows of step {step} to write")
    packed.columns = [
        c for c in packed.columns if c.kind == "node" or not c.path[-1].endswith("seconds")
    ]
    objects = packed.table.objects
    for column in packed.columns:
        for place in set(column.content) if column[:2] == (_CALLS, "object") else ():
            objects[place] = tuple(
                {name: fact for name, fact in call.items() if name != "seconds"}
                for call in objects[place]
            )
    return encode(packed, about, tags=(step, packed.num_rows))


def _rollouts_of(folder: Path) -> Path:
    """Return the folder with the segments: that of a run, or the given folder itself."""
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    inner = folder / FOLDER
    found = inner if inner.is_dir() else folder
    if not any(found.glob(f"*{_SUFFIX}")):
        raise DataError(
            f"{folder} holds no rollouts; a run keeps them with logging.rollouts=sample or all"
        )
    return found


def _segments(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"steps_*{_SUFFIX}"))


def _sound_blocks(path: Path, data: bytes, step: int) -> tuple[dict[int, bytes], str | None]:
    """Return the intact blocks up to a step, and the error in other blocks."""
    blocks, wrong = {}, []
    try:
        for place in _scan(path, data):
            if place.step > step:
                break
            if is_sound(data, place.start, read_head(data, place.start)):
                blocks[place.step] = data[place.start : place.end]
            else:
                wrong.append(place.step)
    except DataError as error:
        return blocks, str(error)
    told = f"{path} is damaged: the checksum of step {wrong[0]} is wrong" if wrong else None
    return blocks, told


def _scan(path: Path, data: Any) -> Iterator[_Place]:
    """Return the whole blocks of a segment."""
    start = 0
    while start < len(data):
        try:
            head = read_head(data, start)
            if head is not None and not 0 < head.tags[1] <= MAX_ROWS:
                raise DataError(f"{head.tags[1]} rows at byte {start} are impossible")
        except DataError as error:
            if not any(data[start:]):  # a power cut kept the length, not the contents
                return
            raise DataError(f"{path} is damaged: {error}") from None
        if head is None:
            return
        end = start + head.num_bytes
        yield _Place(*head.tags, path, data, start, end)
        start = end
