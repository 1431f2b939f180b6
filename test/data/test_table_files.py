"""Files of every kind become the same rows; what is wrong is named with its file and line."""

from __future__ import annotations

import gzip
import json

import pytest

from torchrl_llm.data.row_files import load_rows
from torchrl_llm.data.table_files import is_table, read_csv
from torchrl_llm.errors import DataError, MissingExtraError

ROWS = [{"question": 'Say "a, b"\nplease', "answer": "ä"}, {"question": "2", "answer": "3"}]


def write(path, rows):
    """The rows as a file of the kind that its name says."""
    import csv
    import io

    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return path
    if kind in ("csv", "tsv"):
        text = io.StringIO()
        writer = csv.DictWriter(text, rows[0], delimiter="\t" if kind == "tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)
        text = text.getvalue()
    else:
        text = json.dumps(rows) if kind == "json" else "\n".join(map(json.dumps, rows))
    data = text.encode("utf-8-sig")
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize(
    "name", ["a.csv", "a.tsv", "a.csv.gz", "a.json", "a.jsonl", "a.jsonl.gz", "a.parquet"]
)
def test_a_file_of_any_kind_gives_the_same_rows(name, tmp_path):
    if name == "a.parquet":
        pytest.importorskip("datasets")
    path = write(tmp_path / name, ROWS)
    assert is_table(name)
    for source in (path, str(path), [path, path]):
        rows = load_rows(source, columns=["question", "answer"])
        assert [dict(row) for row in rows] == ROWS * (2 if isinstance(source, list) else 1)


def test_a_folder_gives_the_files_of_its_split(tmp_path):
    pytest.importorskip("datasets")
    write(tmp_path / "train.csv", ROWS)
    write(tmp_path / "test.csv", ROWS[1:])
    assert len(load_rows(tmp_path)) == 2
    assert load_rows(str(tmp_path), split="test")[0]["question"] in ("2", 2)
    with pytest.raises(DataError, match=r"no split 'dev'; there are \['test', 'train'\]"):
        load_rows(tmp_path, split="dev")


def test_a_saved_dataset_and_one_in_memory_are_rows(tmp_path):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(ROWS)
    made.save_to_disk(tmp_path / "saved")
    both = datasets.DatasetDict({"train": made, "test": made.select([1])})
    for source, split, number in (
        (tmp_path / "saved", None, 2),
        (made, None, 2),
        (both, None, 2),
        (both, "test", 1),
    ):
        rows = load_rows(source, split=split, columns=["question"])
        assert len(rows) == number
        assert rows[number - 1]["answer"] == "3"


BROKEN = {
    "no header": ("", "names no columns"),
    "no rows": ("a,b\n", "no rows below its header"),
    "two columns of one name": ("a,a\n1,2\n", "two columns of one name"),
    "a missing value": ("a,b\n1,2\n3\n", "line 3 has 1 values for the 2 columns"),
    "an unquoted comma": ("a,b\n1,2,3\n", "line 2 has 3 values.*needs quotes"),
    "an open quote": ('a,b\n"1,2\n', "line 2 is not CSV"),
    "another delimiter": ("a;b\n1;2,5\n", "one column, 'a;b': the separator is ','.*not ';'"),
    "a missing column": ("b\n1\n", "lacks the column 'a'; it has \\['b'\\]"),
}


def test_a_cell_of_a_csv_file_may_hold_a_book(tmp_path):
    book = "a word " * 50_000
    path = tmp_path / "rows.csv"
    path.write_text(f'a,b\n"{book}",1\n')
    assert read_csv(path) == [{"a": book, "b": "1"}]


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_csv_file_is_named_with_its_line(what, tmp_path):
    text, message = BROKEN[what]
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message) as refused:
        read_csv(path, columns=["a"])
    assert str(path) in str(refused.value)


def test_a_folder_without_data_and_a_damaged_parquet_file_are_errors_of_data(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no data files"):
        load_rows(tmp_path / "empty")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match=r"rows\.parquet cannot be read"):
        load_rows(tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="it does not exist"):
        load_rows(tmp_path / "other.parquet")


def test_parquet_without_its_package_names_the_extra(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(MissingExtraError, match=r"torchrl_llm\[data\]"):
        load_rows(path)
