"""Chats and columns behave as plain lists of immutable values, whatever tensordict does to them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack

from torchrl_llm.data.chat import Chat
from torchrl_llm.data.column import Column
from torchrl_llm.data.record import TokenRecord


def chats(n=4):
    return [Chat([{"role": "user", "content": str(i)}]) for i in range(n)]


def batch(n=4):
    return TensorDict({"x": torch.arange(n), "h": {"p": Column.of(chats(n))}}, batch_size=[n])


def contents(td):
    def flat(value):
        return [flat(v) for v in value] if isinstance(value, list) else value[0]["content"]

    column = td.get(("h", "p"))
    return flat(column.tolist() if hasattr(column, "tolist") else column)


def test_a_chat_cannot_be_changed():
    source = {"role": "user", "content": "a"}
    chat = Chat([source])
    source["content"] = "b"
    chat[0]["content"] = "c"
    next(iter(chat))["content"] = "d"
    assert chat[0]["content"] == "a"
    with pytest.raises(AttributeError, match="immutable"):
        chat.messages = ()


def test_copies_of_a_chat_are_the_chat_and_pickles_keep_the_record():
    record = TokenRecord.from_prompt(torch.tensor([1, 2]), torch.tensor([0, 1]), 1)
    chat = Chat([{"role": "user", "content": "a"}], record)
    assert copy.deepcopy(chat) is chat
    assert copy.copy(chat) is chat
    back = pickle.loads(pickle.dumps(chat))
    assert back == chat
    assert back.record.token_ids.tolist() == [1, 2]


def test_appending_keeps_the_record_and_cutting_below_it_drops_it():
    record = TokenRecord.from_prompt(torch.tensor([1]), torch.tensor([1]), 2)
    chat = Chat([{"role": "user", "content": c} for c in "ab"], record)
    longer = chat + [{"role": "tool", "content": "c"}]
    assert longer.record is record
    assert longer[:2].record is record
    assert longer[:1].record is None
    assert longer[1:].record is None


OPERATIONS = {
    "clone": (lambda t: t.clone(), ["0", "1", "2", "3"]),
    "list": (lambda t: t[[0, 2]], ["0", "2"]),
    "mask": (lambda t: t[torch.tensor([True, False, True, True])], ["0", "2", "3"]),
    "index": (lambda t: t[torch.tensor([3, 0])], ["3", "0"]),
    "slice": (lambda t: t[1:], ["1", "2", "3"]),
    "cat": (lambda t: torch.cat([t, t[:1]]), ["0", "1", "2", "3", "0"]),
    "stack": (lambda t: torch.stack([t[:2], t[2:]]), [["0", "1"], ["2", "3"]]),
    "stack_dim_1": (lambda t: torch.stack([t[:2], t[2:]], 1), [["0", "2"], ["1", "3"]]),
    "lazy_stack": (lambda t: lazy_stack([t[:2], t[2:]]), [["0", "1"], ["2", "3"]]),
    "view": (lambda t: t.view(-1), ["0", "1", "2", "3"]),
    "reshape": (lambda t: t.reshape(2, 2), [["0", "1"], ["2", "3"]]),
    "reshape_clone": (lambda t: t.reshape(2, 2).clone(), [["0", "1"], ["2", "3"]]),
    "unsqueeze": (lambda t: t.unsqueeze(0), [["0", "1", "2", "3"]]),
    "expand": (lambda t: t[:2].expand(2, 2), [["0", "1"], ["0", "1"]]),
    "split": (lambda t: t.split(2)[1], ["2", "3"]),
    "rows": (lambda t: lazy_stack(list(t.unbind(0))), ["0", "1", "2", "3"]),
    "pickle": (lambda t: pickle.loads(pickle.dumps(t)), ["0", "1", "2", "3"]),
    "pickle_2d": (lambda t: pickle.loads(pickle.dumps(t.reshape(2, 2))), [["0", "1"], ["2", "3"]]),
    "deepcopy": (lambda t: copy.deepcopy(t), ["0", "1", "2", "3"]),
    "lock": (lambda t: t.lock_().clone(), ["0", "1", "2", "3"]),
    "apply": (lambda t: t.apply(lambda x: x + 1), ["0", "1", "2", "3"]),
    "to": (lambda t: t.to("cpu"), ["0", "1", "2", "3"]),
    "where": (
        lambda t: torch.where(torch.tensor([True, False, True, True]), t, t[[3, 3, 3, 3]]),
        ["0", "3", "2", "3"],
    ),
    "select": (lambda t: t.select(("h", "p")), ["0", "1", "2", "3"]),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("stock", [False, True], ids=["column", "nontensorstack"])
def test_every_operation_agrees_with_plain_lists(name, stock):
    operation, expected = OPERATIONS[name]
    td = batch()
    if stock:
        td["h", "p"] = NonTensorStack(*td.get(("h", "p")).unbind(0))
    assert contents(operation(td)) == expected


def test_one_row_gives_the_object_itself():
    td = batch()
    assert td[1]["h", "p"] == td.get(("h", "p")).tolist()[1]


def test_setting_a_new_column_does_not_touch_the_clone():
    td = batch()
    other = td.clone()
    other.set(("h", "p"), Column.of(chats(5)[1:]))
    assert contents(td) == ["0", "1", "2", "3"]
    assert contents(other) == ["1", "2", "3", "4"]


def test_where_picks_rows_and_can_write_into_its_own_column():
    condition = torch.tensor([True, False, True])
    a, b = Column.of(["a", "b", "c"]), Column.of(["x", "y", "z"])
    assert a.where(condition, b).tolist() == ["a", "y", "c"]
    assert a.tolist() == ["a", "b", "c"]
    assert a.where(condition, b, out=a) is a
    assert a.tolist() == ["a", "y", "c"]
    # an ordinary stack goes the ordinary way
    assert Column.of(["a", "b", "c"]).where(condition, NonTensorStack("x", "y", "z")).tolist() == [
        "a",
        "y",
        "c",
    ]


def test_where_inside_a_tensordict_keeps_what_only_one_side_has():
    td = TensorDict(x=Column.of(["a", "b"]), batch_size=[2])
    other = TensorDict(y=Column.of(["c", "d"]), batch_size=[2])
    td.where(torch.tensor([True, False]), other=other, out=td, pad=0)
    assert list(td["x"]) == ["a", "b"]
    assert list(td["y"]) == ["c", "d"]
