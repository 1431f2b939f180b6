"""Rows of a data set from where they lie: a JSON-lines file, Python objects, or the hub.

What every data set of this package is: **a sequence of rows, each a dict**, with ``len()`` and
integer indexing.

Next: :mod:`torchrl_llm.data.row_files` hands rows to an environment,
:mod:`torchrl_llm.compat.tokenized_dataset` makes tokens of them.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl_llm._imports import require
from torchrl_llm.errors import DataError

Row = Mapping[str, Any]


def read_jsonl(path: str | Path, *, columns: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Read a JSON-lines file: one object a line, empty lines skipped; or an array of objects.

    Args:
        path: the file; one that begins as gzip files do is unpacked, whatever its name.
        columns: names that every row must have.

    Returns:
        One dict a line, or one an element of the array.

    Raises:
        DataError: when the file is missing, empty or a damaged gzip file, or, naming file and
            line (or element), when a line is not a JSON object or lacks a column.
    """
    path = Path(path).expanduser()
    columns = tuple(columns)
    try:
        text = _unpacked(path.read_bytes()).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is a damaged gzip file: {error}") from error
    except OSError as error:
        raise DataError(
            f"cannot read the data file {path}: {error.strerror} (working directory {Path.cwd()})"
        ) from error
    rows = []
    for where, row in _elements(text, path):
        if not isinstance(row, dict):
            raise DataError(f"{where} must be a JSON object, got {type(row).__name__}")
        _check_columns(row, columns, where)
        rows.append(row)
    if not rows:
        raise DataError(f"the data file {path} has no rows")
    return rows


def _elements(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    """What a file holds, and where each of it stands."""
    if text.lstrip().startswith("["):
        for number, value in enumerate(_parsed(text, f"the array in {path}"), 1):
            yield f"{path}, element {number}", value
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, _parsed(line, where)


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    # Not JSON, a number of thousands of digits, or brackets without end.
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}") from error


def _unpacked(data: bytes) -> bytes:
    return gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data


def _check_columns(row: Row, columns: Sequence[str], where: str) -> None:
    missing = [name for name in columns if name not in row]
    if missing:
        raise DataError(f"{where} lacks the column {missing[0]!r}; it has {sorted(row)}")


def load_rows(
    source: Any, *, columns: Iterable[str] = (), name: str | None = None, split: str | None = None
) -> Sequence[Row]:
    """Rows of a data set, wherever it is.

    Args:
        source: a sequence of dicts (used as it is; of a list or tuple every row is checked, of
            another sequence the first); the path of a
            JSON-lines file or of a JSON array (an existing file, a ``Path``, or a string ending in
            ``.jsonl``, ``.json`` or either with ``.gz``); a sequence of such paths, whose rows
            follow each other; or the id of a data set on the Hugging Face hub.
        columns: names that rows must have.
        name: configuration of a hub data set.
        split: split of a hub data set; ``None`` takes ``train`` where there is one.

    Returns:
        A sequence of dicts.

    Raises:
        DataError: for a missing, malformed or empty source, or a missing column.
        MissingExtraError: when a hub data set is asked for without the ``datasets`` package.

    Example:
        >>> load_rows([{"query": "Hi"}], columns=["query"])
        [{'query': 'Hi'}]
    """
    columns = tuple(columns)
    if isinstance(source, Path) or (isinstance(source, str) and _is_file_name(source)):
        return read_jsonl(source, columns=columns)
    if isinstance(source, str):
        return _load_hub(source, columns, name, split)
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise DataError(
            "a data set is a sequence of dicts, a path or a hub id, "
            f"got {type(source).__name__}; pass an iterable to DatasetChatEnv.from_dataloader"
        )
    if not len(source):
        raise DataError("the data set has no rows")
    first = source[0]
    if isinstance(first, (str, Path)):
        return [row for path in source for row in read_jsonl(path, columns=columns)]
    # Another kind of sequence may compute its rows, or read them.
    for number, row in enumerate(source if isinstance(source, (list, tuple)) else [first]):
        where = f"row {number} of the data set"
        if not isinstance(row, Mapping):
            raise DataError(f"{where} must be a dict, got {type(row).__name__}")
        _check_columns(row, columns, where)
    return source


def _is_file_name(source: str) -> bool:
    named_so = source.removesuffix(".gz").endswith((".jsonl", ".json"))
    return named_so or Path(source).expanduser().is_file()


def _load_hub(
    source: str, columns: Sequence[str], name: str | None, split: str | None
) -> Sequence[Row]:
    datasets = require("datasets", extra="data", feature=f"loading {source!r} from the hub")
    try:
        loaded = datasets.load_dataset(source, name)
        if hasattr(loaded, "keys"):
            loaded = loaded[split or ("train" if "train" in loaded else next(iter(loaded)))]
    except Exception as error:  # whatever the network, the hub or the loader raises
        raise DataError(
            f"cannot load {source!r} (configuration {name!r}, split {split!r}) from the hub: "
            f"{error}. For a local copy, pass its JSON-lines file as data_files"
        ) from error
    return load_rows(loaded, columns=columns)
