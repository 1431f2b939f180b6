"""Rows to flat values and back."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack

from torchrl_llm.data import Chat, FinishReason, History, Support, TokenRecord
from torchrl_llm.data.nodes import cell, leaf, new_node, own_rows, typed_node
from torchrl_llm.data.ragged import lazy_rows, ragged_rows, read_rows
from torchrl_llm.data.rollouts import split_batch
from torchrl_llm.data.wire import PackedRows, encode, pack_rows


def _chat(length: int, answer: str) -> Chat:
    record = TokenRecord.from_prompt(torch.arange(length), torch.ones(length), 1, earlier_turns=2)
    record = record.respond(torch.tensor([9, 8]), torch.tensor([-0.5, -1.5]), 3, FinishReason.STOP)
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]
    return Chat(messages, record)


def _rows() -> list[TensorDict]:
    rows = split_batch(
        TensorDict(
            {
                "history": TensorDict(
                    {"full": History.of([_chat(2, "a"), _chat(5, "bc")])}, batch_size=[2]
                ),
                "tokens": ragged_rows({"full": [torch.arange(4), torch.arange(7)]}),
                "group_id": torch.tensor([4, 5]),
                "next": TensorDict({"reward": torch.tensor([[[0.5]], [[1.0]]])}, batch_size=[2]),
            },
            batch_size=[2],
        )
    )
    rows[1]["error"] = TensorDict({"message": NonTensorData("boom")})
    return rows


def test_kept_ids_of_a_record_come_back_where_it_has_them():
    kept = Support(torch.tensor([9, 7, 8], dtype=torch.int32), torch.tensor([2, 1]).int())
    prompt = TokenRecord.from_prompt(torch.arange(3), torch.ones(3), 1)
    with_ids = prompt.respond(
        torch.tensor([9, 8]), torch.tensor([-0.5, 0.0]), 3, FinishReason.STOP, kept
    )
    chats = [Chat([{"role": "user", "content": "q"}], r) for r in (with_ids, prompt)]
    rows = split_batch(TensorDict({"history": History.of(chats)}, batch_size=[2]))
    back = pickle.loads(pickle.dumps(pack_rows(rows))).unpack()
    one, other = (chat.record for chat in back["history"].chats)
    assert one.support.counts.tolist() == [0, 0, 0, 2, 1]
    assert one.support.token_ids.tolist() == [9, 7, 8]
    assert one.support.token_ids.dtype == torch.int32
    assert other.support is None


def test_rows_come_back_with_tensors_objects_records_and_types():
    rows = pickle.loads(pickle.dumps(pack_rows(_rows()))).unpack()

    assert [ids.tolist() for ids in read_rows(rows, ("tokens", "full"))] == [
        list(range(4)),
        list(range(7)),
    ]
    assert rows["group_id"].tolist() == [4, 5]
    assert rows["next", "reward"].shape == (2, 1, 1)
    assert isinstance(rows["history", "full"], History)
    chats = rows["history", "full"].chats
    assert [chat[-1]["content"] for chat in chats] == ["a", "bc"]
    record = chats[1].record
    assert record.token_ids.tolist() == [0, 1, 2, 3, 4, 9, 8]
    assert record.log_probs.tolist() == [0, 0, 0, 0, 0, -0.5, -1.5]
    assert record.policy_version.tolist() == [-1] * 5 + [3, 3]
    assert (record.num_messages, record.response_start, record.earlier_turns) == (2, 5, 2)
    assert record.finish_reason is FinishReason.STOP
    assert record.turn.dtype == torch.int16


def test_a_key_that_only_some_rows_have_stays_with_them():
    rows = pack_rows(_rows()).unpack().unbind(0)

    assert "error" not in rows[0].keys()
    assert rows[1]["error", "message"] == "boom"


def test_one_record_shared_by_two_chats_is_sent_once():
    chat = _chat(3, "a")
    row = TensorDict({"a": NonTensorData(chat), "b": NonTensorData(chat + [{"role": "tool"}])})
    packed = pack_rows([row])

    assert len(packed.table.records) == 1
    back = packed.unpack()[0]
    assert back["a"].record is back["b"].record
    assert len(back["b"]) == 3


def test_chats_without_a_record_and_empty_tensors_survive():
    row = TensorDict({"chat": NonTensorData(Chat([{"role": "user"}])), "ids": torch.zeros(0)})
    back = pack_rows([row, row.clone()]).unpack()

    assert back[1]["chat"].record is None
    assert back[0]["ids"].shape == (0,)


def test_tensors_that_cannot_be_joined_are_kept_one_by_one():
    rows = [TensorDict({"x": torch.ones(2, 3)}), TensorDict({"x": torch.ones(4, dtype=torch.int8)})]
    back = pack_rows(rows).unpack()

    assert back[0]["x"].shape == (2, 3)
    assert back[1]["x"].dtype == torch.int8


def test_a_node_with_a_batch_of_its_own_is_kept_whole():
    node = lazy_stack([TensorDict({"y": torch.ones(1)}), TensorDict({"y": torch.ones(2)})])
    back = pack_rows([TensorDict({"node": node})]).unpack()[0]

    assert [row["y"].shape[0] for row in back["node"].unbind(0)] == [1, 2]


def test_no_rows_pack_and_a_batch_with_two_dims_is_refused():
    assert pack_rows([]).num_rows == 0
    with pytest.raises(ValueError, match="at least one"):
        pack_rows([]).unpack()
    with pytest.raises(ValueError, match="one batch dimension"):
        pack_rows(TensorDict(batch_size=[2, 2]))


def test_views_pickle_their_own_part_only():
    whole = torch.randn(1000, 10)
    rows = lazy_rows([TensorDict({"x": part}) for part in whole.unbind(0)[:10]])

    assert len(pickle.dumps(pack_rows(rows))) < 4_000  # the storage alone is 40,000 bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_floats_that_numpy_does_not_know_are_pickled(dtype):
    rows = [TensorDict(x=torch.tensor([0.5, 2.0]).to(dtype)) for _ in range(2)]
    back = pickle.loads(pickle.dumps(pack_rows(rows))).unpack()[1]["x"]
    assert back.dtype == dtype
    assert back.float().tolist() == [0.5, 2.0]


def test_rows_that_were_read_are_pickled_as_before_they_were():
    packed = pack_rows([TensorDict(ids=torch.ones(n), m=NonTensorData(str(n))) for n in range(50)])
    before = pickle.dumps(packed)
    packed.unpack()
    assert len(pickle.dumps(packed)) <= len(before)


@pytest.mark.parametrize("form", [bytes, bytearray])
def test_rows_that_were_opened_go_on_to_another_process_read_or_not(form):
    rows = _rows()
    opened = PackedRows.open(form(encode(pack_rows(rows), {"worker": "a"})))
    for _ in range(2):
        there = pickle.loads(pickle.dumps(opened))
        assert there.about == {"worker": "a"}
        for row, sent in zip(there.unpack(), rows, strict=True):
            assert row["history", "full"].chats == sent["history", "full"].chats
            record = row["history", "full"].chats[0].record
            assert record.token_ids.equal(sent["history", "full"].chats[0].record.token_ids)
            assert row["tokens", "full"].equal(sent["tokens", "full"])
        opened.unpack()


def test_own_rows_copies_views_of_large_storages_and_leaves_the_rest():
    whole, small, single = torch.arange(10_000), torch.arange(100), torch.arange(3)
    node = TensorDict({"b": whole[5:9], "c": small[:2]})
    row = TensorDict({"a": whole[:2], "node": node, "c": single})
    (owned,) = own_rows([row])

    assert owned["a"].untyped_storage().nbytes() == 16
    assert owned["node", "b"].untyped_storage().nbytes() == 32
    assert owned["node", "b"].tolist() == [5, 6, 7, 8]
    assert owned["node", "c"].data_ptr() == small.data_ptr()
    assert owned["c"].data_ptr() == single.data_ptr()


def test_unpacked_rows_with_own_memory_are_no_views_of_much():
    packed = pack_rows(ragged_rows({"x": [torch.arange(3), torch.arange(5000)]}))
    small = own_rows(packed.unpack().unbind(0))[0]["x"]

    assert small.untyped_storage().nbytes() == 24


def test_cheap_cells_and_views_equal_those_of_the_public_constructors():
    """Guards the private names of tensordict that they are built with."""
    quick, public = cell("text"), NonTensorData("text")
    assert quick.data == public.data == "text"
    assert TensorDict({"a": quick})["a"] == "text"
    assert quick.__dict__.keys() == public.__dict__.keys()
    assert quick._non_tensordict == public._non_tensordict

    built, unsafe = new_node({"a": quick}), TensorDict._new_unsafe({"a": quick}, torch.Size([]))
    assert built.__dict__.keys() == unsafe.__dict__.keys()
    assert type(built._tensordict) is type(unsafe._tensordict)
    assert built.set("b", torch.ones(2)).clone()["b"].tolist() == [1, 1]

    node = TensorDict({"messages": cell(_chat(2, "a"))})
    assert typed_node(History, node).content == History._from_tensordict(node).content
    assert pickle.loads(pickle.dumps(typed_node(History, node))).content == ["q", "a"]


def test_leaf_reads_like_get():
    row = _rows()[1]
    for path in [("tokens", "full"), ("next", "reward"), ("group_id",)]:
        assert torch.equal(leaf(row, path), row.get(path))
    assert leaf(row, ("history", "full", "messages")).data[-1]["content"] == "bc"
    assert leaf(row, ("nothing", "here")) is None
    assert leaf(row, ("next", "nothing")) is None


def test_defect_33_a_pickled_history_is_no_larger_than_its_message_dicts():
    """TorchRL's pickles to 2.3 times the list of dicts."""
    roles = ("user", "assistant", "tool", "assistant")
    chats = [
        [{"role": role, "content": f"message {i} of chat {n}"} for i, role in enumerate(roles)]
        for n in range(256)
    ]
    batch = TensorDict({"history": History.from_chats(chats)}, batch_size=[256])
    rows = split_batch(batch)

    assert len(pickle.dumps(pack_rows(rows))) < 1.2 * len(pickle.dumps(chats))
