"""What transforms that add columns to rows have in common."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from torchrl_llm.data.ragged import lazy_rows, ragged_rows, read_rows
from torchrl_llm.data.replay_buffers import ReplayBuffer
from torchrl_llm.data.row_transform import RowTransform, RowView
from torchrl_llm.errors import DataError


class Length(RowTransform):
    """Writes how many tokens were sampled, and their ids."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    @property
    def written(self):
        return ("next", "length")

    def columns(self, rows):
        self.seen += len(rows)
        masks = rows.sampled()
        full = rows.read(("tokens", "full"))
        return {
            self.written: [mask.sum().view(1) for mask in masks],
            ("next", "sampled", "ids"): [ids[mask] for ids, mask in zip(full, masks, strict=True)],
        }


def row(length, response, source=None, **columns):
    full = torch.arange(length)
    tokens = {"full": full, "response": full[length - response :]}
    masks = {"all_assistant_mask": torch.ones(length).bool()}
    td = TensorDict(tokens=tokens, masks=masks, **columns)
    if source is not None:
        td["trace"] = TensorDict({"source": torch.tensor(source)})
    return td


def sampled(td, next_rows=None):
    return [mask.int().tolist() for mask in RowView(td, next_rows).sampled()]


def test_only_what_was_sampled_in_the_turn_is_sampled():
    # 0 template, 1 prompt, 2 tool, 3 sampled, 4 forced; the first 3 is of an earlier turn.
    td = lazy_rows([row(7, 4, [1, 3, 0, 4, 3, 2, 3])])
    assert sampled(td) == [[0, 0, 0, 0, 1, 0, 1]]


def test_without_a_trace_the_assistant_mask_says_it_and_without_both_the_response():
    td = row(4, 2)
    td["masks", "all_assistant_mask"][3] = False
    assert sampled(lazy_rows([td])) == [[0, 0, 1, 0]]
    assert sampled(lazy_rows([td.exclude("masks")])) == [[0, 0, 1, 1]]


def test_a_response_without_tokens_has_no_sampled_one():
    assert sampled(lazy_rows([row(3, 0)])) == [[0, 0, 0]]


def test_rows_that_an_environment_does_not_step_have_nothing():
    td = TensorDict(
        tokens=ragged_rows({"full": [torch.arange(3)] * 2, "response": [torch.arange(2)] * 2}),
        _step=torch.tensor([[True], [False]]),
        batch_size=[2],
    )
    assert sampled(td, TensorDict(batch_size=[2])) == [[0, 1, 1], [0, 0, 0]]
    assert sampled(td) == [[0, 1, 1], [0, 1, 1]]


def test_what_is_missing_is_named():
    view = RowView(lazy_rows([TensorDict(a=torch.ones(1))]))
    assert view.read(("next", "reward")) is None
    with pytest.raises(DataError, match=r"reward.*append a reward"):
        view.read(("next", "reward"), "append a reward")


def test_ragged_and_dense_rows_are_written_in_place():
    rows = lazy_rows([row(3, 2), row(3, 1)])
    assert Length()(rows) is rows
    assert [r["next", "length"].tolist() for r in rows.unbind(0)] == [[2], [1]]
    dense = TensorDict(
        tokens=ragged_rows({"full": [torch.arange(3)] * 2, "response": [torch.arange(2)] * 2}),
        next=TensorDict(done=torch.ones(2, 1).bool(), batch_size=[2]),
        batch_size=[2],
    )
    Length()(dense)
    assert dense["next", "length"].tolist() == [[2], [2]]
    assert [ids.tolist() for ids in read_rows(dense, ("next", "sampled", "ids"))] == [[1, 2]] * 2


def test_rows_that_have_the_columns_pass():
    transform = Length()
    buffer = ReplayBuffer(transform=transform)
    buffer.extend([row(3, 2), row(4, 1)])
    transform(buffer[:])
    again = ReplayBuffer(transform=transform)
    again.extend([buffer[0], row(5, 3)])
    assert transform.seen == 3
    assert [r["next", "length"].item() for r in again[:].unbind(0)] == [2, 3]


def test_no_rows_are_no_work():
    assert Length()._inv_call(None) is None
