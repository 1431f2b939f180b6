"""Rows of a dataset, from a file, Python objects or the hub, and their order in training.

Every dataset of this package is **a sequence of rows, each a dict**, with ``len()`` and integer
indexing. Task environments expect ``query`` (the user's message, or a list of messages) and
whatever their reward reads, usually ``answer``. A generated task is a dataset whose rows are
computed from their index (:class:`GeneratedRows`), so it can be shuffled, split and resumed like a
file.

Next: :class:`torchrl_llm.envs.transforms.DataLoadingPrimer` writes the rows into an environment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchrl_llm._imports import require
from torchrl_llm.data import table_cells, table_files
from torchrl_llm.data.row_order import ROW_ID, RowOrder, shuffled
from torchrl_llm.data.table_files import Row, read_jsonl
from torchrl_llm.errors import ConfigError, DataError

__all__ = ["GeneratedRows", "MappedRows", "Row", "RowLoader", "load_rows", "read_jsonl"]


def load_rows(
    source: Any, *, columns: Iterable[str] = (), name: str | None = None, split: str | None = None
) -> Sequence[Row]:
    """Load the rows of a dataset from Python objects, files or the hub.

    Args:
        source: a sequence of dicts (used unchanged; every row of a list or tuple is checked, but
            only the first one of other sequences, such as a ``datasets.Dataset``); the path of a
            file (a ``Path``, or a string that ends in ``.jsonl``, ``.json``, ``.csv``, ``.tsv`` or
            ``.parquet``, text formats also with ``.gz``; any other existing file is read as JSON
            lines); a folder; a sequence of such paths, whose rows follow each other; or the id of a
            dataset on the Hugging Face hub.
        columns: names that rows must have.
        name: configuration of a hub dataset.
        split: split of a hub dataset or a folder; ``None`` uses ``train`` if it exists.

    Returns:
        A sequence of dicts.

    Raises:
        DataError: the source is missing, malformed or empty, or a column is missing.
        MissingExtraError: a hub dataset needs the ``datasets`` package.

    Example:
        >>> load_rows([{"query": "Hi"}], columns=["query"])
        [{'query': 'Hi'}]
    """
    columns = tuple(columns)
    if isinstance(source, Path) or (isinstance(source, str) and _is_path(source)):
        rows = table_files.read_table(source, columns=columns, split=split)
        return rows if isinstance(rows, list) else load_rows(rows, columns=columns)
    if isinstance(source, str):
        return _load_hub(source, columns, name, split)
    if hasattr(source, "keys"):
        _check_not_columns(source)
        source = table_files.choose_split(source, split)
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise DataError(
            "a dataset is a sequence of dicts, a path or a hub id, "
            f"got {type(source).__name__}; pass an iterable to DatasetChatEnv.from_dataloader"
        )
    if not len(source):
        raise DataError("the dataset has no rows")
    first = source[0]
    if isinstance(first, (str, Path)):
        return [row for path in source for row in load_rows(Path(path), columns=columns)]
    # Other sequences may compute their rows, or read them.
    for number, row in enumerate(source if isinstance(source, (list, tuple)) else [first]):
        where = f"row {number} of the dataset"
        if not isinstance(row, Mapping):
            raise DataError(f"{where} must be a dict, got {type(row).__name__}")
        table_files.check_columns(row, columns, where)
    features = getattr(source, "features", None) or {}
    if any(map(table_cells.holds_structs, features.values())):
        return MappedRows(source, partial(_unpadded, features))
    return source


def _unpadded(features: Mapping[str, Any], row: Row) -> Row:
    return {
        name: table_cells.without_padding(value, features.get(name)) for name, value in row.items()
    }


def plain_rows(rows: Sequence[Row]) -> Sequence[Row]:
    """Convert rows to plain cells, see :mod:`torchrl_llm.data.table_cells`.

    Args:
        rows: of :func:`load_rows`.

    Returns:
        As many rows. The result for a list is a list. For another sequence, it is a sequence that
        converts each row when it is read; float columns are inspected immediately.
    """
    if isinstance(rows, (list, tuple)):
        if not (columns := table_cells.uncertain_columns(rows)):
            return list(rows)
        whole = table_cells.whole_columns(rows, columns)
        return [table_cells.plain_row(row, whole, columns) for row in rows]
    table = rows.rows if isinstance(rows, MappedRows) else rows
    whole, narrow = [], {}
    for name, feature in (getattr(table, "features", None) or {}).items():
        dtype = str(getattr(feature, "dtype", ""))
        if dtype.startswith("float"):
            cells = table.data.column(name).to_pylist()
            whole += table_cells.whole_columns([{name: cell} for cell in cells], [name])
        if dtype in ("float16", "float32"):
            narrow[name] = getattr(np, dtype)
    return MappedRows(rows, partial(table_cells.plain_row, whole=whole, narrow=narrow))


def _check_not_columns(source: Any) -> None:
    """Reject a mapping of columns; a ``DatasetDict`` or a mapping of splits to rows passes."""
    if isinstance(source, Mapping):
        values = next(iter(source.values()), ())
        is_plain = isinstance(values, (list, tuple)) and len(values) > 0
        has_columns = is_plain and not isinstance(values[0], Mapping)
    else:
        has_columns = True  # a frame of pandas
    if has_columns:
        raise DataError(
            f"a dataset is a sequence of dicts, and this {type(source).__name__} holds columns; "
            'of a pandas frame, pass frame.to_dict("records")'
        )


def _is_path(source: str) -> bool:
    return table_files.is_table(source) or Path(source).expanduser().exists()


def _load_hub(
    source: str, columns: Sequence[str], name: str | None, split: str | None
) -> Sequence[Row]:
    datasets = require("datasets", extra="data", feature=f"loading {source!r} from the hub")
    try:
        loaded = table_files.choose_split(datasets.load_dataset(source, name), split)
    except Exception as error:  # the network, the hub or the loader may raise any exception
        raise DataError(
            f"cannot load {source!r} (configuration {name!r}, split {split!r}) from the hub: "
            f"{error}. For a local copy, pass the path of its file or folder, which must exist"
        ) from error
    return load_rows(loaded, columns=columns)


class MappedRows(Sequence):
    """Rows of a sequence; a function is applied to each row when it is read.

    Args:
        rows: the rows.
        function: row to row.

    Example:
        >>> MappedRows([{"question": "Hi"}], lambda row: {"query": row["question"]})[0]
        {'query': 'Hi'}
    """

    def __init__(self, rows: Sequence[Any], function: Callable[[Any], Row]) -> None:
        self.rows = rows
        self.function = function

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        return self.function(self.rows[index])


class GeneratedRows(MappedRows):
    """A finite dataset whose rows are computed from their index.

    Args:
        make_row: function from index to row. It must depend only on the index; otherwise a resumed
            run would get different rows. Use separate index ranges for train and held-out sets.
        num_rows: length of the dataset.
        offset: number that is added to every index for ``make_row``.

    Example:
        >>> make_row = lambda i: {"query": f"{i} + 1", "answer": f"{i + 1}"}
        >>> rows = GeneratedRows(make_row, 3, offset=10)
        >>> len(rows), rows[0]["query"], rows[-1]["answer"]
        (3, '10 + 1', '13')
    """

    def __init__(self, make_row: Callable[[int], Row], num_rows: int, *, offset: int = 0) -> None:
        if num_rows < 1:
            raise DataError(f"a dataset needs at least one row, got num_rows={num_rows}")
        super().__init__(range(offset, offset + num_rows), make_row)


class RowLoader:
    """Iterates over rows, one epoch per iteration; its position can be saved.

    Args:
        rows: the dataset.
        shuffle: whether each epoch has its own order, which depends only on ``seed`` and the number
            of the epoch.
        seed: seed of the orders; ``None`` draws one from torch's generator.
        batch_size: number of rows per call of ``collate_fn``.
        collate_fn: function from a list of rows to one mapping of columns, each with a value per
            row, as for ``torch.utils.data.DataLoader``. ``None`` returns the rows unchanged.
        order: an order that depends on results, instead of passes over all rows. Rows then have
            their index in the dataset as ``"row_id"``, under which results are recorded.

    Raises:
        ConfigError: an order is combined with ``shuffle=False`` or a ``collate_fn``, which it would
            ignore.

    Attributes:
        part: ``(number, count)`` of this loader if several loaders share an order; ``(0, 1)`` for a
            single loader. The loader reads every ``count``-th row, of the order or of each batch.
            Its position counts the rows of all loaders together. It can be set at the start.

    Example:
        >>> loader = RowLoader([{"query": q} for q in "abc"], shuffle=False)
        >>> first = next(iter(loader)); state = loader.state_dict()
        >>> [row["query"] for row in loader], loader.epoch
        (['b', 'c'], 1)
        >>> loader.load_state_dict(state); next(iter(loader))["query"]
        'b'
    """

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        shuffle: bool = True,
        seed: int | None = None,
        batch_size: int = 1,
        collate_fn: Callable[[list[Row]], Mapping[str, Any]] | None = None,
        order: RowOrder | None = None,
    ) -> None:
        if batch_size < 1:
            raise DataError(f"rows are read at least one at a time, got batch_size={batch_size}")
        if order is not None and not (shuffle and collate_fn is None):
            raise ConfigError("an order draws rows one by one: no shuffle=False, no collate_fn")
        self.rows = rows
        self.shuffle = shuffle
        self.seed = int(torch.randint(2**31, ())) if seed is None else seed
        self.batch_size = batch_size if collate_fn is not None else None
        self.collate_fn = collate_fn
        self.part = (0, 1)
        self.epoch = 0
        self.index = 0
        self.order = order
        if order is not None:
            order.begin(len(rows))

    def __len__(self) -> int:
        return -(-len(self.rows) // (self.batch_size or 1))

    def __iter__(self) -> Iterator[Any]:
        if self.order is not None:
            yield from self._ordered(self.order)
            return
        order = self._order()
        first, step = self.part
        if self.collate_fn is None:
            # The next rows of all parts are adjacent from ``index``, also across epochs.
            while self.index + first < len(order):
                row = self.rows[order[self.index + first]]
                self.index += step
                yield row
            self.epoch, self.index = self.epoch + 1, self.index - len(order)
            return
        while self.index < len(order):
            chosen = order[self.index : self.index + self.batch_size]
            self.index += len(chosen)
            yield self.collate_fn([self.rows[i] for i in chosen[first::step]])
        self.epoch, self.index = self.epoch + 1, 0

    def _order(self) -> Sequence[int]:
        if not self.shuffle:
            return range(len(self.rows))
        # The order of an epoch depends on two numbers, so a position also consists of two numbers.
        return shuffled(len(self.rows), self.seed, self.epoch).tolist()

    def _ordered(self, order: RowOrder) -> Iterator[Row]:
        """Yield the rows that an order draws in a pass; passes without rows are skipped."""
        first, step = self.part
        drawn = False
        while True:
            chosen: list[int] = []  # the rows that all parts draw together
            is_over = False
            while len(chosen) < step:
                found = order.draw(self.seed, self.epoch, self.index)
                if found is not None:
                    row, self.index = found
                    chosen.append(row)
                    continue
                self.epoch, self.index = self.epoch + 1, 0
                is_over = bool(chosen)
                if drawn and not chosen:
                    return
            drawn = True
            yield {**self.rows[chosen[first]], ROW_ID: torch.tensor(chosen[first])}
            if is_over:
                return

    def reset(self, seed: int | None = None) -> None:
        """Start again, with a new seed if one is given; an order keeps its results."""
        self.seed = self.seed if seed is None else seed
        self.epoch = self.index = 0

    def state_dict(self) -> dict[str, int]:
        """Return seed and position; an order has its own state."""
        if self.index < 0:  # a later part reaches the end of an epoch before the others
            return {
                "seed": self.seed,
                "epoch": self.epoch - 1,
                "index": self.index + len(self.rows),
            }
        return {"seed": self.seed, "epoch": self.epoch, "index": self.index}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at a saved position; a running iterator must be created again."""
        self.seed, self.epoch, self.index = state["seed"], state["epoch"], state["index"]
