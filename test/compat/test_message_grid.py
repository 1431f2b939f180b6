"""Shape, indices and functions of torch over batch and messages, as in TorchRL.

The values are what TorchRL 0.14.1 gives for the same expressions on the same conversations.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from torchrl_llm.data.chat import Chat
from torchrl_llm.data.history import History
from torchrl_llm.data.record import TokenRecord
from torchrl_llm.errors import DataError


def chat(words):
    return [{"role": ("user", "assistant")[i % 2], "content": w} for i, w in enumerate(words)]


def message(content):
    return History(role="user", content=content)


ONE = History.from_chats(chat("abc"))
DENSE = History.from_chats([chat("abc"), chat("def")])
RAGGED = History.from_chats([chat("abc"), chat("de")])
MASK = torch.tensor([[True, False, True], [False, True, False]])
COLUMNS = torch.tensor([True, False, True])
PAIR = History(role=["user", "user"], content=["x", "y"], batch_size=[2])

SAME = {
    "message": (lambda: message("m"), [], "m"),
    "conversation": (lambda: ONE, [3], ["a", "b", "c"]),
    "last": (lambda: DENSE[..., -1], [2], ["c", "f"]),
    "last of ragged": (lambda: RAGGED[..., -1], [2], ["c", "e"]),
    "all but last": (lambda: RAGGED[..., :-1], [2, -1], [["a", "b"], ["d"]]),
    "row, then last": (lambda: DENSE[0][..., -1], [], "c"),
    "last of one": (lambda: ONE[-1], [], "c"),
    "dots of one": (lambda: ONE[..., 1:], [2], ["b", "c"]),
    "pairs": (lambda: DENSE[[0, 1], [1, 2]], [2], ["b", "f"]),
    "pairs of ragged": (lambda: RAGGED[[0, 1], [-1, -1]], [2], ["c", "e"]),
    "columns": (lambda: DENSE[:, [0, 2]], [2, 2], [["a", "c"], ["d", "f"]]),
    "mask": (lambda: DENSE[MASK], [3], ["a", "c", "e"]),
    "mask of columns": (lambda: DENSE[:, COLUMNS], [2, 2], [["a", "c"], ["d", "f"]]),
    "mask of one": (lambda: ONE[COLUMNS], [2], ["a", "c"]),
    "new last": (lambda: ONE[..., None], [3, 1], [["a"], ["b"], ["c"]]),
    "cat": (lambda: torch.cat([RAGGED, DENSE], -1), [2, -1], [[*"abcabc"], [*"dedef"]]),
    "cat of two": (lambda: torch.cat([ONE, ONE[:1]], 0), [4], [*"abca"]),
    "cat of rows": (lambda: torch.cat([DENSE[:1], RAGGED]), [3, -1], [[*"abc"], [*"abc"], [*"de"]]),
    "stack messages": (lambda: torch.stack([message("x"), message("y")], -1), [2], ["x", "y"]),
    "stack rows": (lambda: torch.stack([ONE, ONE]), [2, 3], [[*"abc"], [*"abc"]]),
    "stack last": (lambda: torch.stack([ONE, ONE], -1), [3, 2], [[*"aa"], [*"bb"], [*"cc"]]),
    "lazy": (lambda: lazy_stack([ONE, ONE[:1]]), [2, -1], [[*"abc"], ["a"]]),
    "lazy last": (lambda: lazy_stack([ONE, ONE], -1), [3, 2], [[*"aa"], [*"bb"], [*"cc"]]),
    "lazy rows": (lambda: lazy_stack([ONE, ONE[:1]], -2), [2, -1], [[*"abc"], ["a"]]),
    "lazy middle": (lambda: lazy_stack([DENSE[:, :1]], -2), [2, 1, 1], [[["a"]], [["d"]]]),
    "lazy messages": (lambda: lazy_stack([message("x"), message("y")], -1), [2], ["x", "y"]),
    "flatten": (lambda: DENSE.flatten(), [6], [*"abcdef"]),
    "reshape": (lambda: DENSE.reshape(-1), [6], [*"abcdef"]),
    "transpose": (lambda: DENSE.transpose(0, -1), [3, 2], [[*"ad"], [*"be"], [*"cf"]]),
    "permute": (lambda: torch.permute(DENSE, (1, 0)), [3, 2], [[*"ad"], [*"be"], [*"cf"]]),
    "unsqueeze": (lambda: RAGGED.unsqueeze(1), [2, 1, -1], [[[*"abc"]], [[*"de"]]]),
    "squeeze": (lambda: DENSE[:, :1].squeeze(-1), [2], ["a", "d"]),
    "expand": (lambda: DENSE[:, :1].expand(2, 3), [2, 3], [[*"aaa"], [*"ddd"]]),
    "repeat": (lambda: DENSE.repeat(1, 2), [2, 6], [[*"abcabc"], [*"defdef"]]),
    "interleave": (lambda: DENSE.repeat_interleave(2, -1), [2, 6], [[*"aabbcc"], [*"ddeeff"]]),
    "masked_select": (lambda: DENSE.masked_select(MASK), [3], ["a", "c", "e"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_shape_and_content_are_torchrls(name):
    make, shape, content = SAME[name]
    made = make()
    assert list(made.shape) == shape
    assert made.content == content
    assert (made.ndim, made.dim(), made.size()) == (len(shape), len(shape), made.shape)
    sizes = [size for size in shape if size != -1]
    assert (made.batch_dims, list(made.batch_size)) == (len(sizes), sizes)
    assert -1 not in TensorDict({}, batch_size=made.batch_size).batch_size
    made.batch_size = shape


@pytest.mark.parametrize(
    ("make", "contents"),
    [
        (lambda: DENSE.unbind(-1), [["a", "d"], ["b", "e"], ["c", "f"]]),
        (lambda: torch.unbind(DENSE, 1), [["a", "d"], ["b", "e"], ["c", "f"]]),
        (lambda: RAGGED.unbind(-2), [["a", "b", "c"], ["d", "e"]]),
        (lambda: ONE.unbind(0), ["a", "b", "c"]),
        (lambda: DENSE.split(2, -1), [[["a", "b"], ["d", "e"]], [["c"], ["f"]]]),
        (lambda: ONE.split([1, 2], 0), [["a"], ["b", "c"]]),
        (lambda: RAGGED.split(1), [[["a", "b", "c"]], [["d", "e"]]]),
        (lambda: DENSE.chunk(2, -1), [[["a", "b"], ["d", "e"]], [["c"], ["f"]]]),
    ],
)
def test_what_is_taken_apart_is_as_in_torchrl(make, contents):
    assert [part.content for part in make()] == contents


@pytest.mark.parametrize(
    "make",
    [
        lambda: RAGGED.unbind(-1),
        lambda: RAGGED.split(1, -1),
        lambda: RAGGED.chunk(2, 1),
        lambda: RAGGED.flatten(),
        lambda: RAGGED.transpose(0, 1),
        lambda: RAGGED.reshape(-1),
        lambda: RAGGED[..., None],
        lambda: RAGGED[MASK],
        lambda: torch.stack([RAGGED, RAGGED], -1),
    ],
)
def test_what_needs_equally_many_messages_says_what_to_write(make):
    with pytest.raises(DataError, match=r"equally many messages.*h\[\.\.\., -1\]"):
        make()


def test_equality_is_by_message():
    other = DENSE[[0, 0]]
    assert (other == DENSE).tolist() == [[True, True, True], [False, False, False]]
    assert (message("a") == ONE).tolist() == [True, False, False]
    assert (RAGGED[[0, 0]] == RAGGED).tolist() == [True, False]
    assert DENSE.numel() == 6
    assert RAGGED.numel() == 5


def test_what_is_appended_to_a_row_reaches_its_batch():
    batch = History.from_chats([chat("abc"), chat("de")])
    for row in batch.unbind(0):
        row.append(message("new"))
    assert batch.content == [[*"abc", "new"], [*"de", "new"]]
    batch[0].append(message("more"))
    td = TensorDict(h=batch, batch_size=[2])
    td[1]["h"].append(message("end"))
    for row in td.unbind(0):
        row["h"].extend(ONE[:1])
    assert td["h"].content == [[*"abc", "new", "more", "a"], [*"de", "new", "end", "a"]]
    for free in (batch[0].clone(), copy.deepcopy(batch[0]), pickle.loads(pickle.dumps(batch[0]))):
        free.append(message("alone"))
    assert "alone" not in batch.content[0]


def test_a_row_of_a_batch_that_has_changed_is_taken_again():
    batch = History.from_chats([chat("a"), chat("b")])
    row = batch[0]
    batch.append(PAIR)
    with pytest.raises(DataError, match="take it again"):
        row.append(message("lost"))
    assert batch.content == [["a", "x"], ["b", "y"]]


def test_changes_that_cannot_be_had_name_a_way_out():
    batch = History.from_chats([chat("abc")])
    for change in (lambda m: setattr(m, "content", "x"), lambda m: m.set("content", "x")):
        with pytest.raises(AttributeError, match=r"h.replace\(content=...\) gives"):
            change(batch[0, 0])
    with pytest.raises(DataError, match="append takes a History or a message dict, got str"):
        batch.append("hi")
    with pytest.raises(DataError, match="do not change in place"):
        batch[..., -1] = message("x")
    with pytest.raises(DataError, match=r"its shape \[1, 3\] and cannot be set to \[1\]"):
        batch.batch_size = [1]
    with pytest.raises(DataError, match="write it with transpose"):
        torch.movedim(batch, 0, 1)


def test_rows_that_stay_whole_keep_their_record():
    record = TokenRecord.from_prompt(torch.tensor([1, 2]), torch.tensor([1, 1]), 2)
    batch = History.of([Chat(chat("ab"), record), Chat(chat("cd"))])
    assert batch.reshape(2, 1, 2)[0, 0].chats[0].record is record
    assert torch.cat([batch, DENSE], -1).chats[0].record is record
    assert batch.transpose(0, 1).chats[0].record is None


def test_tensordicts_of_ragged_rows_stack_densely():
    td = TensorDict(h=RAGGED, batch_size=[2])
    stacked = torch.stack([td, TensorDict(h=DENSE, batch_size=[2])])
    assert type(stacked) is TensorDict
    assert stacked["h"].content == [[[*"abc"], [*"de"]], [[*"abc"], [*"def"]]]
    assert td.reshape(2, 1)["h"].content == [[[*"abc"]], [[*"de"]]]
    assert TensorDict(h=DENSE, batch_size=[2, 3])[..., -1]["h"].content == ["c", "f"]
    assert TensorDict(h=DENSE, batch_size=[2, 3]).reshape(-1)["h"].content == [*"abcdef"]


def test_fields_are_keys_that_are_read_copied_and_replaced():
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    batch = DENSE.replace(tool_calls=[[None, [call], None], [None] * 3])
    assert sorted(batch.keys()) == ["content", "is_complete", "role", "tool_calls"]
    assert dict(batch.items())["content"].tolist() == DENSE.content
    assert batch.to_dict()["tool_responses"] is None
    td = TensorDict(h=batch, batch_size=[2])
    assert td["h", "role"] == batch.role
    assert td.get(("h", "tool_responses"), "none") == "none"
    for other in (RAGGED, batch, ONE, message("x"), batch[:, -1], batch.reshape(1, 2, 3)):
        made = other.to_tensordict()
        assert (made.batch_size, made["role"]) == (other.shape, other.role)
        assert History.from_tensordict(made).content == other.content
        assert History.from_dict(other.to_dict()).tool_calls == other.tool_calls
        assert td.clone()["h"].chats == batch.chats
    turned = RAGGED.replace(content=[["x", "y", "z"], ["v", "w"]])
    assert (turned.content, turned.role) == ([["x", "y", "z"], ["v", "w"]], RAGGED.role)
    assert message("a").replace(role="tool").role == "tool"
    with pytest.raises(DataError, match="one value a message"):
        RAGGED.replace(content=[["x"], ["v", "w"]])
    with pytest.raises(DataError, match="colour"):
        ONE.replace(colour="x")


def test_nested_lists_of_chats_are_batches():
    deep = History.from_chats([[chat("ab"), chat("cd")], [chat("ef"), chat("gh")]])
    assert (deep.shape, deep.content[1]) == ((2, 2, 2), [["e", "f"], ["g", "h"]])
