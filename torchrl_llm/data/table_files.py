"""Readers of data files: JSON lines, JSON, CSV, Parquet, and folders of them.

This module reads JSON and CSV files; ``datasets`` reads Parquet and folders. Each reader returns a
sequence of dicts, and its errors name file and line.

Next: :func:`torchrl_llm.data.row_files.load_rows` reads any source.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl_llm._imports import require
from torchrl_llm._registry import refuse_foreign
from torchrl_llm.errors import DataError

Row = Mapping[str, Any]


class FileRow(dict):
    """Row of a file: a dict with its location.

    Args:
        values: column to value.
        file: path and unit, ``rows.jsonl, line``.
        number: of the line or element, from 1.

    Example:
        >>> row = FileRow({"a": 1}, "rows.jsonl, line", 7)
        >>> row, row.place
        ({'a': 1}, 'rows.jsonl, line 7')
    """

    __slots__ = ("file", "number")

    def __init__(self, values: Row, file: str, number: int) -> None:
        super().__init__(values)
        self.file, self.number = file, number

    @property
    def place(self) -> str:
        """Path and line, for errors."""
        return f"{self.file} {self.number}"


def place_of(row: Any, otherwise: str) -> str:
    """Location of a row, for errors.

    Args:
        row: a row of a table.
        otherwise: the result for a row that is not from a text file.
    """
    return row.place if isinstance(row, FileRow) else otherwise


_JSON = (".jsonl", ".json", ".ndjson")
_CSV = {".csv": ",", ".tsv": "\t"}
_PARQUET = (".parquet",)
# Text compresses to a tenth, a decompression bomb to a thousandth.
_LEAST_LIMIT, _MOST_TIMES = 1 << 26, 200
KINDS = (*_JSON, *_CSV, *_PARQUET)
"""Supported file extensions; ``.gz`` may follow those of text files."""


def is_table(path: str) -> bool:
    """Whether a file name has a supported extension.

    Args:
        path: the name of a file.

    Example:
        >>> is_table("rows.csv.gz"), is_table("openai/gsm8k")
        (True, False)
    """
    return Path(path.removesuffix(".gz")).suffix.lower() in KINDS


def read_table(
    path: str | Path, *, columns: Iterable[str] = (), split: str | None = None
) -> Sequence[Row]:
    """Read a data file in the format of its extension; as JSON lines if the extension is unknown.

    Args:
        path: a file, compressed by gzip or not, or a folder: either saved by ``datasets``, or with
            data files, of which those named after ``split`` are read.
        columns: names that every row must have.
        split: of a folder; ``None`` selects ``train`` if it exists.

    Returns:
        A sequence of dicts.

    Raises:
        DataError: missing, empty or malformed data, or a missing column.
        MissingExtraError: for Parquet and folders without the package ``datasets``.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        return _read_folder(path, split)
    kind = Path(path.name.removesuffix(".gz")).suffix.lower()
    if kind in _CSV:
        return read_csv(path, columns=columns, delimiter=_CSV[kind])
    if kind in _PARQUET:
        return _load("parquet", str(path), data_files=str(path), split="train")
    try:
        return read_jsonl(path, columns=columns)
    except DataError as error:
        if kind in _JSON:
            raise
        raise DataError(
            f"{error}. The extension determines how a file is read: {', '.join(KINDS)}; others are "
            "JSON lines"
        ) from error


def read_jsonl(path: str | Path, *, columns: Iterable[str] = ()) -> list[FileRow]:
    """Read a JSON-lines file (one object per line, empty lines skipped) or an array of objects.

    Args:
        path: the file; gzip files are recognized by their first bytes and unpacked.
        columns: names that every row must have.

    Returns:
        One dict per line, or per element of the array.

    Raises:
        DataError: the file is missing, empty or a damaged gzip file, or a line is not a JSON object
            or lacks a column; the message then has file and line (or element).
    """
    path, columns = Path(path).expanduser(), tuple(columns)
    rows = []
    for file, number, row in _elements(_read_text(path), path):
        if not isinstance(row, dict):
            raise DataError(f"{file} {number} must be a JSON object, got {type(row).__name__}")
        rows.append(FileRow(row, file, number))
        check_columns(row, columns, rows[-1].place)
    if not rows:
        raise DataError(f"the data file {path} has no rows")
    return rows


def read_csv(
    path: str | Path, *, columns: Iterable[str] = (), delimiter: str = ","
) -> list[dict[str, str]]:
    r"""Read a CSV file whose first line names the columns; every value is a string.

    Args:
        path: the file, compressed by gzip or not.
        columns: names of columns that it must have.
        delimiter: separator of values.

    Returns:
        One dict per line.

    Raises:
        DataError: as :func:`read_jsonl`; a line has more or fewer values than columns, or two
            columns have the same name.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "qa.csv"
        >>> _ = path.write_text('question,answer\n"What is 1,000 + 1?","1,001"\n')
        >>> read_csv(path)
        [{'question': 'What is 1,000 + 1?', 'answer': '1,001'}]
    """
    path = Path(path).expanduser()
    text = _read_text(path)
    # The limit applies to the process; a cell may contain a book.
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows: list[dict[str, str]] = []
    file = f"{path}, line"
    try:
        header = next(lines, [])
        if not any(header):
            raise DataError(f"the data file {path} has no rows: its first line names no columns")
        other = next((sign for sign in ";\t|," if sign in header[0]), delimiter)
        if len(header) == 1 and other != delimiter:
            raise DataError(
                f"{path} names one column, {header[0]!r}: the separator is {delimiter!r}, "
                f"not {other!r}; it is a tab in files with the extension .tsv"
            )
        if len(set(header)) < len(header):
            raise DataError(f"{path} has two columns of one name: {header}")
        check_columns(dict.fromkeys(header), tuple(columns), f"{path}")
        before = lines.line_num
        for values in lines:
            number, before = before + 1, lines.line_num
            if not values:
                continue
            if len(values) != len(header):
                raise DataError(
                    f"{path}, line {lines.line_num} has {len(values)} values for the "
                    f"{len(header)} columns {header}; a value with a {delimiter!r} needs quotes"
                )
            rows.append(FileRow(zip(header, values, strict=True), file, number))
    except csv.Error as error:
        raise DataError(f"{path}, line {lines.line_num} is not CSV: {error}") from error
    if not rows:
        raise DataError(f"the data file {path} has no rows below its header")
    return rows


def check_columns(row: Row, columns: Sequence[str], where: str) -> None:
    """Raise if a row lacks a column.

    Args:
        row: column to value.
        columns: names that it must have.
        where: beginning of the message.

    Raises:
        DataError: a column is missing; the message names the first one and the existing columns.
    """
    missing = [name for name in columns if name not in row]
    if missing:
        raise DataError(f"{where} lacks the column {missing[0]!r}; it has {sorted(row)}")


def _read_text(path: Path) -> str:
    if path.exists() and not path.is_file():  # a device may have no end, a pipe no beginning
        refuse_foreign(str(path), "which is no plain file and not read")
    try:
        data = path.read_bytes()
        data = _unpacked(data, path) if data.startswith(b"\x1f\x8b") else data
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is a damaged gzip file: {error}") from error
    except OSError as error:
        raise DataError(
            f"cannot read the data file {path}: {error.strerror} (working directory {Path.cwd()})"
        ) from error


def _unpacked(data: bytes, path: Path) -> bytes:
    most = max(_LEAST_LIMIT, _MOST_TIMES * len(data))
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise DataError(
            f"{path} has {len(data):,} bytes and unpacks to more than {most:,}: it may be "
            "a decompression bomb. If you trust it, unpack it (gunzip) and pass the result"
        )
    return found


def _elements(text: str, path: Path) -> Iterator[tuple[str, int, Any]]:
    """The location of each part of a file (path and unit, number), and the part."""
    if text.lstrip().startswith("["):
        file = f"{path}, element"
        for number, value in enumerate(_parsed(text, f"the array in {path}"), 1):
            yield file, number, value
        return
    file = f"{path}, line"
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield file, number, _parsed(line, f"{file} {number}")


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    # Not JSON, a number with thousands of digits, or too many nested brackets.
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}") from error


def _read_folder(path: Path, split: str | None) -> Sequence[Row]:
    datasets = require("datasets", extra="data", feature=f"reading the folder {path}")
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        try:
            return choose_split(datasets.load_from_disk(str(path)), split)
        except Exception as error:  # the package raises any exception for unreadable files
            raise DataError(f"{path} cannot be read as a saved dataset: {error}") from error
    if not any(is_table(file.name) for file in path.rglob("*")):
        raise DataError(f"the folder {path} has no data files ({', '.join(KINDS)})")
    return choose_split(_load(str(path), str(path)), split)


def _load(builder: str, what: str, **arguments: Any) -> Any:
    """Load local files with ``datasets``."""
    datasets = require("datasets", extra="data", feature=f"reading {what}")
    if "data_files" in arguments and not Path(what).is_file():
        raise DataError(f"cannot read the data file {what}: it does not exist (in {Path.cwd()})")
    try:
        return datasets.load_dataset(builder, **arguments)
    except Exception as error:  # the package raises any exception for unreadable files
        raise DataError(f"{what} cannot be read: {type(error).__name__}: {error}") from error


def choose_split(loaded: Any, split: str | None) -> Sequence[Row]:
    """Select one split of a dataset that ``datasets`` loaded.

    Args:
        loaded: a dataset, or a mapping of names to datasets.
        split: a name; ``None`` selects ``train`` if it exists, else the first.

    Raises:
        DataError: there is no such split.
    """
    if not hasattr(loaded, "keys"):
        return loaded
    chosen = split or ("train" if "train" in loaded else next(iter(loaded)))
    if chosen not in loaded:
        raise DataError(f"there is no split {chosen!r}; there are {sorted(loaded)}")
    return loaded[chosen]
