from __future__ import annotations

import contextlib
import json
import struct
import zlib

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

from torchrl_llm.data import Chat, ChatHistory, History
from torchrl_llm.data.ragged import lazy_rows
from torchrl_llm.data.record import TokenRecord
from torchrl_llm.data.rollout_store import RolloutStore, RolloutWriter
from torchrl_llm.data.safe_bytes import HEAD_BYTES, from_bytes, to_bytes
from torchrl_llm.errors import DataError
from torchrl_llm.tools.tool_call import ToolCall, ToolResult


def same(left, right) -> bool:
    """Whether two rows hold the same, types and classes included."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, NonTensorData):
        a, b = left.data, right.data
        if isinstance(a, Chat) and a.record is not None:
            pairs = a.record.columns(), b.record.columns()
            if any(not torch.equal(pairs[0][name], pairs[1][name]) for name in pairs[0]):
                return False
            if a.record.finish_reason is not b.record.finish_reason:
                return False
        return type(a) is type(b) and a == b
    inner = [node._tensordict for node in (left, right)]
    if isinstance(inner[0], TensorDict):
        return same(*inner)
    return set(inner[0]) == set(inner[1]) and all(same(inner[0][k], inner[1][k]) for k in inner[0])


def make_row(number: int, length: int = 3, **more) -> TensorDict:
    ids = torch.arange(length) + number
    asked = [{"role": "user", "content": f"<b>{number}</b> 😀 é"}]
    record = TokenRecord.from_prompt(ids, torch.ones(length), 1)
    full = Chat(
        [
            *asked,
            {
                "role": "assistant",
                "content": "yes",
                "tool_calls": [{"name": "f", "arguments": {"a": [1, None]}}],
            },
        ]
    )
    history = ChatHistory(
        prompt=History.from_chats([asked])[0],
        full=History.from_chats([list(full)])[0],
        batch_size=[],
    )
    row = TensorDict(
        tokens={"full": ids, "prompt": ids[:1], "response": ids[1:]},
        query=f"<b>{number}</b>",
        traj_id=torch.tensor(number),
        next={"reward": torch.full((1, 1), float(number)), "done": torch.tensor([True])},
        nothing=torch.zeros(0, 2),
        half=torch.tensor([1.5, number], dtype=torch.bfloat16),
        **more,
    )
    row.set("chat", NonTensorData(full.with_record(record)))
    row.set("history", history)
    return row


@pytest.fixture
def folder(tmp_path):
    writer = RolloutWriter(tmp_path / "rollouts")
    for step in (1, 2, 4):
        writer.append(step, [make_row(10 * step + i, 2 + i) for i in range(3)], {"kept": "all"})
    return tmp_path


def test_rows_come_back_as_they_were_written(folder):
    store = RolloutStore(folder)
    assert len(store) == 9
    assert store.steps() == [1, 2, 4]
    for step in store.steps():
        for i, row in enumerate(store.rows(step=step).tensordicts):
            assert row._tensordict.pop("step") == step
            assert same(row, make_row(10 * step + i, 2 + i))
    assert store.about(2) == {"kept": "all"}


def test_rows_may_differ_in_their_keys_classes_and_dtypes(tmp_path):
    rows = [
        make_row(0, advantage=torch.ones(1, 1)),
        make_row(1),
        make_row(2, advantage=torch.ones(3, 1, dtype=torch.float64), error={"type": "Bad"}),
        TensorDict(value=NonTensorData({"a": (1, 2.5, None), "b": {3}, "c": b"x"})),
        TensorDict(stack=lazy_rows([TensorDict(a=torch.ones(n)) for n in (1, 2)])),
    ]
    RolloutWriter(tmp_path).append(1, rows)
    found = [row.exclude("step") for row in RolloutStore(tmp_path)[:].tensordicts]
    assert all(same(*pair) for pair in zip(found[:4], rows[:4], strict=True))
    assert isinstance(found[4]["stack"], LazyStackedTensorDict)
    assert found[4]["stack"][1]["a"].tolist() == [1, 1]


def test_rows_by_index_filter_and_trajectory(folder):
    store = RolloutStore(folder / "rollouts")
    assert [store[i]["traj_id"].item() for i in (0, 3, -1)] == [10, 20, 42]
    assert store[2:5]["traj_id"].tolist() == [12, 20, 21]
    assert [r["traj_id"].item() for r in store.iterate([4, 1])] == [40, 41, 42, 10, 11, 12]
    odd = store.rows(where=lambda row: row["traj_id"] % 2 == 1)
    assert odd["traj_id"].tolist() == [11, 21, 41]
    assert [len(turns) for turns in store.trajectories(step=2)] == [1, 1, 1]
    for index in (9, -10):
        with pytest.raises(IndexError):
            store[index]
    with pytest.raises(DataError, match="no rows of step 3"):
        store.rows(step=3)


def test_a_torn_end_is_not_read_and_is_cut(folder):
    (segment,) = (folder / "rollouts").iterdir()
    whole = segment.read_bytes()
    sizes = []
    for kept in range(len(whole) - 1, len(whole) * 2 // 3, -97):
        segment.write_bytes(whole[:kept])
        sizes.append(len(RolloutStore(folder)))
    assert set(sizes) == {6}
    assert RolloutWriter(segment.parent).cut(9) == 2
    assert RolloutStore(folder).steps() == [1, 2]
    assert whole.startswith(segment.read_bytes())


def test_a_power_cut_that_left_zeros_at_the_end_is_a_torn_end(folder):
    (segment,) = (folder / "rollouts").iterdir()
    whole = segment.read_bytes()
    begin = whole.rindex(b"tensors1")
    for zeros in (begin, begin + 200):
        segment.write_bytes(whole[:zeros] + bytes(len(whole) - zeros))
        assert RolloutStore(folder).steps() == [1, 2]


def test_a_store_is_cut_back_bit_for_bit_while_it_is_read(folder, monkeypatch):
    (segment,) = (folder / "rollouts").iterdir()
    whole, reader = segment.read_bytes(), RolloutStore(folder)
    writer = RolloutWriter(segment.parent)
    assert writer.cut(2) == 2
    assert len(reader.rows(step=4)) == 3  # the reader keeps the file that it opened
    writer.append(4, [make_row(40 + i, 2 + i) for i in range(3)], {"kept": "all"})
    assert segment.read_bytes() == whole
    assert writer.cut(0) is None
    assert not list(segment.parent.iterdir())


def test_segments_end_where_they_are_full_and_old_ones_may_be_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr("torchrl_llm.data.rollout_store.SEGMENT_BYTES", 7_000)
    writer = RolloutWriter(tmp_path)
    for step in range(1, 9):
        writer.append(step, [make_row(step)])
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) > 2
    assert RolloutStore(tmp_path).steps() == list(range(1, 9))
    whole = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    again = RolloutWriter(tmp_path)
    assert again.cut(3) == 3
    for step in range(4, 9):
        again.append(step, [make_row(step)])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == whole
    (tmp_path / names[0]).unlink()
    assert RolloutStore(tmp_path)[-1]["traj_id"] == 8


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_damaged_is_told_or_read_as_it_was(folder, seed):
    (segment,) = (folder / "rollouts").iterdir()
    whole = segment.read_bytes()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(40):
        at = int(torch.randint(len(whole), (), generator=generator))
        data = bytearray(whole)
        data[at] ^= 1 << int(torch.randint(8, (), generator=generator))
        segment.write_bytes(data)
        # Only the last block may be missing: it is not told from one that was half written.
        with contextlib.suppress(DataError):
            assert len(list(RolloutStore(folder).iterate())) == 6


def _block(folder, *rows) -> bytes:
    """The bytes of a step with these rows."""
    writer = RolloutWriter(folder)
    writer.append(1, rows)
    data = writer._path.read_bytes()
    writer._path.unlink()
    return data


def test_a_hostile_block_is_told(tmp_path):
    """Well formed, with the right checksums, and with claims that its bytes do not hold."""
    head, about, tensors = from_bytes(_block(tmp_path, make_row(1), make_row(2)))
    refused = 0
    for seed in range(60):
        changed = _spoil(json.loads(json.dumps(about)), torch.Generator().manual_seed(seed))
        (tmp_path / "steps_00000001.rows").write_bytes(to_bytes(changed, tensors, tags=head.tags))
        try:
            assert all(isinstance(row, TensorDict) for row in RolloutStore(tmp_path).iterate())
        except DataError:
            refused += 1
    assert refused > 30


def _spoil(header, generator):
    """The header with one of its values, anywhere, exchanged for another."""
    node = header
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = keys[int(torch.randint(len(keys), (), generator=generator))]
        if not isinstance(node[key], (dict, list)) or not node[key]:
            others = [-1, 1 << 50, None, "x", [], {}, 3, True, ["tensor", 0]]
            node[key] = others[int(torch.randint(len(others), (), generator=generator))]
            return header
        node = node[key]


@pytest.mark.parametrize("tags", [(1, 3), (1, 1 << 60), (1, 0)])
def test_a_block_that_claims_another_number_of_rows_is_told(tmp_path, tags):
    _, about, tensors = from_bytes(_block(tmp_path, make_row(1), make_row(2)))
    (tmp_path / "steps_00000001.rows").write_bytes(to_bytes(about, tensors, tags=tags))
    with pytest.raises(DataError, match=r"different number of rows|are impossible"):
        list(RolloutStore(tmp_path).iterate())


@pytest.mark.parametrize("num_bytes", [-8, 0, 8, 44])
def test_a_head_of_an_impossible_length_is_told(tmp_path, num_bytes):
    data = _block(tmp_path, make_row(1))
    head = struct.pack("<8sqqqI", b"tensors1", 1, 1, num_bytes, 0)
    block = head + zlib.crc32(head).to_bytes(4, "little") + data[HEAD_BYTES:]
    (tmp_path / "steps_00000001.rows").write_bytes(block)
    with pytest.raises(DataError, match="damaged: no message"):
        RolloutStore(tmp_path)


def test_what_has_no_safe_form_is_told_by_its_key(tmp_path):
    with pytest.raises(DataError, match=r"key \('thing',\)"):
        RolloutWriter(tmp_path).append(1, [TensorDict(thing=NonTensorData(object()))])


def test_a_folder_without_rollouts_is_told(tmp_path):
    with pytest.raises(DataError, match=r"logging\.rollouts"):
        RolloutStore(tmp_path)
    with pytest.raises(DataError, match="no folder"):
        RolloutStore(tmp_path / "absent")


def test_a_part_of_a_reward_that_is_called_seconds_is_kept_without_its_time(tmp_path):
    part = {"value": torch.tensor(-0.5), "seconds": torch.tensor(0.1)}
    row = TensorDict(next=TensorDict(rewards=TensorDict({"seconds": TensorDict(part)})))
    RolloutWriter(tmp_path).append(1, [row])
    kept = RolloutStore(tmp_path)[0]["next", "rewards", "seconds"]
    assert set(kept.keys()) == {"value"}
    assert kept["value"] == -0.5


def test_equal_runs_write_equal_rollouts_whatever_their_tools_took(tmp_path):
    def row(seconds):
        record = ToolResult(ToolCall("add", {"a": 1}), "3", seconds=seconds).record()
        tools = TensorDict(calls=NonTensorData((record,)), num_calls=torch.tensor(1))
        made = make_row(0, meta=NonTensorData({"limit": 5, "seconds": 30}))  # the data's own
        made["next"] = TensorDict(tools=tools, reward_seconds=torch.tensor(seconds))
        return made

    data = _block(tmp_path, row(0.25))
    assert data == _block(tmp_path, row(7.5))
    RolloutWriter(tmp_path).append(1, [row(7.5)])
    read = RolloutStore(tmp_path)[0]
    assert read["meta"] == {"limit": 5, "seconds": 30}
    wanted = row(0.25)["next", "tools", "calls"][0]
    assert read["next", "tools", "calls"] == ({k: wanted[k] for k in wanted if k != "seconds"},)
