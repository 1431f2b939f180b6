"""Readers of data files by their kind: JSON lines, JSON, CSV, Parquet, and folders of them.

JSON and CSV are read here and always alike; Parquet and folders go through ``datasets``. Each
reader gives a sequence of dicts, and names file and line where something is wrong.

Next: :func:`torchrl_llm.data.row_files.load_rows` takes any source.
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
    """Row of a file: a dict that knows where it stands.

    Args:
        values: column to value.
        file: path and kind of place, ``rows.jsonl, line``.
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
    """Where a row stands, for errors.

    Args:
        row: of a table.
        otherwise: what is said of one that comes from no file of text.
    """
    return row.place if isinstance(row, FileRow) else otherwise


_JSON = (".jsonl", ".json", ".ndjson")
_CSV = {".csv": ",", ".tsv": "\t"}
_PARQUET = (".parquet",)
# Text is packed to a tenth, a bomb to a thousandth.
_LEAST_LIMIT, _MOST_TIMES = 1 << 26, 200
KINDS = (*_JSON, *_CSV, *_PARQUET)
"""Endings of the files that are read; ``.gz`` may follow those of text."""


def is_table(path: str) -> bool:
    """Whether a name ends as a data file's does.

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
    """Read a data file, of the kind that its name says; JSON lines where it says none.

    Args:
        path: a file, packed by gzip or not, or a folder: one that ``datasets`` has saved, or with
            data files, of which those named after ``split`` are taken.
        columns: names that every row must have.
        split: of a folder; ``None`` takes ``train`` where there is one.

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
            f"{error}. The end of a name says how a file is read: {', '.join(KINDS)}; others are "
            "JSON lines"
        ) from error


def read_jsonl(path: str | Path, *, columns: Iterable[str] = ()) -> list[FileRow]:
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
        path: the file, packed by gzip or not.
        columns: names that it must have.
        delimiter: what stands between values.

    Returns:
        One dict a line.

    Raises:
        DataError: as :func:`read_jsonl`; a line with more or fewer values than columns, or two
            columns of one name.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "qa.csv"
        >>> _ = path.write_text('question,answer\n"What is 1,000 + 1?","1,001"\n')
        >>> read_csv(path)
        [{'question': 'What is 1,000 + 1?', 'answer': '1,001'}]
    """
    path = Path(path).expanduser()
    text = _read_text(path)
    # The limit is the process's; a cell may hold a book.
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
                f"{path} names one column, {header[0]!r}: {delimiter!r} stands between values, and "
                f"not {other!r}; tabs do in a file whose name ends in .tsv"
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
    """Refuse a row that lacks a column.

    Args:
        row: column to value.
        columns: names that it must have.
        where: begins the message.

    Raises:
        DataError: names the first column that is missing, and those that there are.
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
            f"{path} has {len(data):,} bytes and unpacks to more than {most:,}: such a file is "
            "made to fill memory. If it is yours, unpack it (gunzip) and give what comes out"
        )
    return found


def _elements(text: str, path: Path) -> Iterator[tuple[str, int, Any]]:
    """Where each part of a file stands (path and kind of place, number), and the part."""
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
    # Not JSON, a number of thousands of digits, or brackets without end.
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}") from error


def _read_folder(path: Path, split: str | None) -> Sequence[Row]:
    datasets = require("datasets", extra="data", feature=f"reading the folder {path}")
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        try:
            return choose_split(datasets.load_from_disk(str(path)), split)
        except Exception as error:  # whatever the package raises for what it cannot read
            raise DataError(f"{path} cannot be read as a saved dataset: {error}") from error
    if not any(is_table(file.name) for file in path.rglob("*")):
        raise DataError(f"the folder {path} has no data files ({', '.join(KINDS)})")
    return choose_split(_load(str(path), str(path)), split)


def _load(builder: str, what: str, **arguments: Any) -> Any:
    """What ``datasets`` makes of local files."""
    datasets = require("datasets", extra="data", feature=f"reading {what}")
    if "data_files" in arguments and not Path(what).is_file():
        raise DataError(f"cannot read the data file {what}: there is none (in {Path.cwd()})")
    try:
        return datasets.load_dataset(builder, **arguments)
    except Exception as error:  # whatever the package raises for what it cannot read
        raise DataError(f"{what} cannot be read: {type(error).__name__}: {error}") from error


def choose_split(loaded: Any, split: str | None) -> Sequence[Row]:
    """One split of what ``datasets`` has loaded.

    Args:
        loaded: a dataset, or a mapping of names to datasets.
        split: a name; ``None`` takes ``train`` where there is one, else the first.

    Raises:
        DataError: there is no such split.
    """
    if not hasattr(loaded, "keys"):
        return loaded
    chosen = split or ("train" if "train" in loaded else next(iter(loaded)))
    if chosen not in loaded:
        raise DataError(f"there is no split {chosen!r}; there are {sorted(loaded)}")
    return loaded[chosen]
