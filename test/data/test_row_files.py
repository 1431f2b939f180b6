"""Rows from files, objects and generators; loaders with a position."""

from __future__ import annotations

import gzip
import json
import sys
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from torchrl_llm.data import table_files
from torchrl_llm.data.row_files import (
    GeneratedRows,
    MappedRows,
    RowLoader,
    load_rows,
    plain_rows,
    read_jsonl,
)
from torchrl_llm.errors import DataError, MissingExtraError

ROWS = [{"query": letter} for letter in "abcde"]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n', encoding="utf-8")
    return path


def letters(loader):
    return [row["query"] for row in loader]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_parts_of_an_order_are_the_order(world):
    rows = [{"query": number} for number in range(7)]

    def endless(loader):
        while True:
            yield from loader

    first = RowLoader(rows, seed=3)
    order = [row["query"] for row, _ in zip(endless(first), range(30), strict=False)]
    loaders = [RowLoader(rows, seed=3) for _ in range(world)]
    for rank, loader in enumerate(loaders):
        loader.part = (rank, world)
    streams = [endless(loader) for loader in loaders]
    drawn = [next(stream)["query"] for _ in range(30 // world) for stream in streams]
    assert drawn == order[: len(drawn)]
    # The position is that of all parts: another number of them goes on there.
    positions = {loader.epoch * len(rows) + loader.index for loader in loaders}
    assert positions == {len(drawn)}
    alone = RowLoader(rows)
    alone.load_state_dict(loaders[0].state_dict())
    following = [row["query"] for row, _ in zip(endless(alone), range(2), strict=False)]
    assert following == order[len(drawn) : len(drawn) + 2] or len(drawn) + 2 > len(order)


def test_parts_of_a_batch_are_the_batch():
    rows = [{"query": number} for number in range(5)]
    loaders = [RowLoader(rows, seed=1, batch_size=3, collate_fn=list) for _ in range(2)]
    for rank, loader in enumerate(loaders):
        loader.part = (rank, 2)
    whole = list(RowLoader(rows, seed=1, batch_size=3, collate_fn=list))
    for batch, first, second in zip(whole, *loaders, strict=True):
        assert first == batch[::2]
        assert second == batch[1::2]


def test_a_file_is_read_line_by_line_and_empty_lines_are_skipped(file):
    assert read_jsonl(file, columns=["a"]) == [{"a": 1}, {"a": 2}]
    assert load_rows(file) == load_rows(str(file)) == [{"a": 1}, {"a": 2}]
    assert load_rows([file, str(file)]) == [{"a": 1}, {"a": 2}] * 2


def test_line_separators_inside_strings_do_not_break_a_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    text = "one\u2028two\x85three"
    path.write_text(json.dumps({"a": text}, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert read_jsonl(path) == [{"a": text}]


def test_a_missing_file_is_named_with_the_working_directory(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.jsonl.*working directory"):
        load_rows(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match=r"nowhere\.jsonl"):
        load_rows("nowhere.jsonl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"a": ', "line 3 is not JSON"),
        ("[1, 2]", "line 3 must be a JSON object, got list"),
        ("[" * 200_000, "line 3 is not JSON"),
        ('{"a": ' + "9" * 5000 + "}", "line 3 is not JSON"),
        ('{"b": 1}', r"line 3 lacks the column 'a'; it has \['b'\]"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path, line, message):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        read_jsonl(path, columns=["a"])


def test_an_empty_or_binary_file_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n")
    with pytest.raises(DataError, match="no rows"):
        read_jsonl(path)
    path.write_bytes(b"\xff\xfe{")
    with pytest.raises(DataError, match="not UTF-8"):
        read_jsonl(path)


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_of_objects_is_read_too(tmp_path, indent):
    path = tmp_path / "rows.json"
    rows = [{"a": 1, "b": "[x]\n"}, {"a": 2}]
    path.write_text("\n" + json.dumps(rows, indent=indent))
    assert load_rows(str(path), columns=["a"]) == rows
    with pytest.raises(DataError, match="element 2 lacks the column 'b'"):
        load_rows(path, columns=["b"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "element 1 must be a JSON object, got int"),
        ("[]", "has no rows"),
        ('[{"a": 1}', "the array in .* is not JSON"),
        ('[{"a": 1}]\n{"a": 2}', "the array in .* is not JSON"),
        ("[" * 200_000, "the array in .* is not JSON"),
    ],
)
def test_an_array_of_something_else_is_refused(tmp_path, text, message):
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_jsonl(path)


def test_a_gzip_file_is_unpacked_whatever_its_name(tmp_path):
    for name in ("rows.jsonl.gz", "rows.jsonl"):
        path = tmp_path / name
        path.write_bytes(gzip.compress(b'{"query": "a"}\n{"query": "\xc3\xa4"}\n'))
        assert load_rows(str(path)) == [{"query": "a"}, {"query": "\u00e4"}]
    with pytest.raises(DataError, match=r"cannot read the data file missing\.jsonl\.gz"):
        load_rows("missing.jsonl.gz")


@pytest.mark.parametrize("damage", [lambda d: d[:-9], lambda d: d[:2], lambda d: d[:20] + b"x" * 9])
def test_a_damaged_gzip_file_is_refused(tmp_path, damage):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(damage(gzip.compress(b'{"query": "abcdefghijklmnopqrstuvwxyz"}\n')))
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz is a damaged gzip file"):
        load_rows(path)


def test_sequences_are_taken_as_they_are_and_checked():
    assert load_rows(ROWS, columns=["query"]) is ROWS
    for rows, message in (
        (ROWS, "lacks the column 'answer'"),
        ([], "no rows"),
        ([1, 2], r"row 0 .* must be a dict"),
        ([{"answer": 1}, {"answer": 2}, 3], r"row 2 .* must be a dict, got int"),
        ([{"answer": 1}, {"b": 2}], r"row 1 .* lacks the column 'answer'"),
        (iter(ROWS), "from_dataloader"),
    ):
        with pytest.raises(DataError, match=message):
            load_rows(rows, columns=["answer"])


def test_columns_are_no_rows_and_splits_are_chosen():
    rows = [{"query": "Hi"}]
    assert load_rows({"train": rows, "test": []}) == rows
    frame = SimpleNamespace(keys=lambda: ["query"])  # pandas' are no mappings
    for columns in ({"query": ["Hi", "Ho"]}, frame):
        with pytest.raises(DataError, match=r'holds columns; .*to_dict\("records"\)'):
            load_rows(columns)


def test_the_hub_needs_the_datasets_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"torchrl_llm\[data\]"):
        load_rows("openai/gsm8k")


def test_a_hub_that_cannot_be_reached_points_to_local_files(monkeypatch):
    class Hub:
        @staticmethod
        def load_dataset(source, name):
            raise ConnectionError("offline")

    monkeypatch.setitem(sys.modules, "datasets", Hub)
    with pytest.raises(DataError, match=r"offline.*local copy.*path"):
        load_rows("openai/gsm8k", name="main")


def test_the_hub_gives_the_train_split_unless_another_is_named(monkeypatch):
    class Hub:
        @staticmethod
        def load_dataset(source, name):
            assert (source, name) == ("x/y", None)
            return {"train": [{"a": 1}], "test": [{"a": 2}]}

    monkeypatch.setitem(sys.modules, "datasets", Hub)
    assert load_rows("x/y") == [{"a": 1}]
    assert load_rows("x/y", split="test") == [{"a": 2}]


def test_generated_rows_are_a_sequence_by_index():
    rows = GeneratedRows(lambda i: {"query": i}, 3, offset=10)
    assert [row["query"] for row in rows] == [10, 11, 12]
    assert rows[-1]["query"] == 12
    assert rows[1:] == [{"query": 11}, {"query": 12}]
    with pytest.raises(IndexError):
        rows[3]
    with pytest.raises(DataError):
        GeneratedRows(lambda i: {}, 0)


def test_mapped_rows_are_mapped_when_read():
    rows = MappedRows(ROWS, lambda row: {"query": row["query"] * 2})
    assert rows[0] == {"query": "aa"}
    assert rows[3:] == [{"query": "dd"}, {"query": "ee"}]
    assert len(rows) == 5


def test_each_epoch_is_a_permutation_of_its_own_and_a_function_of_the_seed():
    loader, same, other = (RowLoader(ROWS * 4, seed=seed) for seed in (0, 0, 1))
    first, second = letters(loader), letters(loader)
    assert sorted(first) == sorted(second) == sorted("abcde" * 4)
    assert first != second
    assert letters(same) == first
    assert letters(other) != first
    loader.reset()
    assert letters(loader) == first
    loader.reset(seed=1)
    assert letters(loader) != first


def test_without_a_seed_torchs_seed_decides():
    torch.manual_seed(3)
    first = RowLoader(ROWS).seed
    torch.manual_seed(3)
    assert RowLoader(ROWS).seed == first


def test_a_loader_continues_from_a_saved_position():
    loader = RowLoader(ROWS, seed=0)
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    rest = letters(iterator) + letters(loader)
    other = RowLoader(ROWS, seed=5)
    other.load_state_dict(state)
    assert letters(other) + letters(other) == rest
    assert other.epoch == 2


def test_a_collate_function_sees_batches():
    def collate(rows):
        return {"query": [row["query"].upper() for row in rows]}

    loader = RowLoader(ROWS, shuffle=False, batch_size=2, collate_fn=collate)
    assert [batch["query"] for batch in loader] == [["A", "B"], ["C", "D"], ["E"]]
    assert len(loader) == 3
    with pytest.raises(DataError):
        RowLoader(ROWS, batch_size=0)


@pytest.mark.parametrize("kind", ["frame", "dataset", "parquet"])
def test_missing_cells_are_none_and_leave_whole_numbers_whole(tmp_path, kind):
    pandas = pytest.importorskip("pandas")
    datasets = pytest.importorskip("datasets")
    frame = pandas.DataFrame(
        {"q": ["a", "b", None], "n": [30, None, 4], "x": [1.5, None, 2.0], "y": [1.0, 2.0, 3.0]}
    )
    if kind == "frame":
        source = frame.to_dict("records")
    else:
        source = datasets.Dataset.from_pandas(frame)
        if kind == "parquet":
            source.to_parquet(tmp_path / "rows.parquet")
            source = tmp_path / "rows.parquet"
    rows = list(plain_rows(load_rows(source)))
    assert [row["q"] for row in rows] == ["a", "b", None]
    assert [repr(row["n"]) for row in rows] == ["30", "None", "4"]
    assert [row["x"] for row in rows] == [1.5, None, 2.0]  # meant as it is
    assert [repr(row["y"]) for row in rows] == ["1.0", "2.0", "3.0"]  # nothing is missing


@pytest.mark.parametrize("kind", ["list", "tensors", "dataset", "parquet"])
def test_floats_of_half_the_width_are_those_that_were_written(tmp_path, kind):
    rows = [{"price": np.float32(0.1)}, {"price": np.float32(3.14)}, {"price": None}]
    if kind == "tensors":
        rows = [{"price": torch.tensor(0.1)}, {"price": torch.tensor(3.14)}, {"price": None}]
    elif kind != "list":
        datasets = pytest.importorskip("datasets")
        features = datasets.Features(price=datasets.Value("float32"))
        table = datasets.Dataset.from_list(rows, features=features)
        rows = table if kind == "dataset" else tmp_path / "rows.parquet"
        if kind == "parquet":
            table.to_parquet(rows)
    # As doubles they are 0.10000000149011612 and 3.140000104904175.
    assert [row["price"] for row in plain_rows(load_rows(rows))] == [0.1, 3.14, None]


def test_a_row_of_a_file_still_knows_its_place_when_a_cell_has_changed(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"n": 3.0}\n{"n": null}\n')
    rows = plain_rows(load_rows(tmp_path / "rows.jsonl"))
    assert rows == [{"n": 3}, {"n": None}]
    assert rows[0].place.endswith("rows.jsonl, line 1")


def test_slices_of_mapped_rows_are_rows_whatever_their_source_gives_for_slices():
    class Columns(list):
        def __getitem__(self, at):
            return {"a": list(self)} if isinstance(at, slice) else list.__getitem__(self, at)

    rows = MappedRows(Columns([{"a": 1}, {"a": 2}, {"a": 3}]), dict)
    assert rows[1:] == [{"a": 2}, {"a": 3}]


def bomb(num_bytes):
    """A file of blanks, packed to a thousandth."""
    return gzip.compress(b'{"a": 1}\n' + b" " * num_bytes)


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.csv", "rows.json", "rows"])
def test_a_file_that_would_fill_the_memory_is_refused_before_it_does(name, tmp_path, monkeypatch):
    monkeypatch.setattr(table_files, "_LEAST_LIMIT", 1 << 20)
    (tmp_path / name).write_bytes(bomb(60 << 20))  # 60 kB, 60 MB
    tracemalloc.start()
    with pytest.raises(DataError, match=r"unpacks to more than 1[12],\d\d\d,\d\d\d: .*gunzip"):
        load_rows(str(tmp_path / name))
    assert tracemalloc.get_traced_memory()[1] < 40 << 20
    tracemalloc.stop()


def test_a_packed_file_may_be_as_large_as_text_can_be(tmp_path, monkeypatch):
    monkeypatch.setattr(table_files, "_LEAST_LIMIT", 100)
    rows = [{"question": f"What is {n}+{n}?", "answer": str(2 * n)} for n in range(2000)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    assert load_rows(str(tmp_path / "rows.jsonl.gz")) == rows
