"""Ragged rows and token records keep each value with its token."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import TensorDict

from torchrl_llm.data.enums import FinishReason, Source
from torchrl_llm.data.ragged import (
    lazy_rows,
    pad_rows,
    ragged_rows,
    read_rows,
    spread_rows,
    unpad_rows,
    write_rows,
)
from torchrl_llm.data.record import TokenRecord
from torchrl_llm.data.views import Tokens


def rows():
    return [torch.tensor([1, 2, 3]), torch.tensor([4]), torch.tensor([], dtype=torch.int64)]


def values(tensors):
    return [t.tolist() for t in tensors]


def test_reading_gives_back_what_was_written_in_every_nesting():
    node = ragged_rows({"full": rows()})
    td = TensorDict({"tokens": node}, batch_size=[3])
    typed = TensorDict({"tokens": Tokens._from_tensordict(node)}, batch_size=[3])
    unbound = lazy_rows(list(typed.unbind(0)))
    for holder in (td, typed, unbound, pickle.loads(pickle.dumps(typed))):
        assert values(read_rows(holder, ("tokens", "full"))) == [[1, 2, 3], [4], []]
    assert values(read_rows(Tokens._from_tensordict(node), "full")) == [[1, 2, 3], [4], []]


def test_reading_a_missing_column_raises_or_gives_the_default():
    td = TensorDict({"tokens": ragged_rows({"full": rows()})}, batch_size=[3])
    for key in ("x", ("tokens", "x"), ("x", "full")):
        assert read_rows(td, key, None) is None
        with pytest.raises(KeyError, match="missing"):
            read_rows(td, key)


def test_dense_columns_are_read_row_by_row():
    td = TensorDict({"a": torch.tensor([[1, 2], [3, 4]])}, batch_size=[2])
    assert values(read_rows(td, "a")) == [[1, 2], [3, 4]]


def test_writing_adds_a_column_to_lazy_and_to_dense_tensordicts():
    td = TensorDict({"tokens": ragged_rows({"full": rows()})}, batch_size=[3])
    write_rows(td, ("tokens", "again"), rows())
    write_rows(td, ("other", "full"), rows())
    assert values(read_rows(td, ("tokens", "again"))) == [[1, 2, 3], [4], []]
    assert values(read_rows(td, ("other", "full"))) == [[1, 2, 3], [4], []]
    with pytest.raises(KeyError, match="nested"):
        write_rows(td, "top", rows())


@pytest.mark.parametrize("side", ["left", "right"])
def test_unpadding_undoes_padding_even_where_pad_is_a_token(side):
    padded = pad_rows(rows(), 4, side=side)
    mask = pad_rows([torch.ones(len(r), dtype=torch.bool) for r in rows()], False, side=side)
    assert values(unpad_rows(padded, mask)) == [[1, 2, 3], [4], []]
    assert torch.equal(spread_rows(rows(), mask, 4), padded)


def test_a_record_follows_two_turns_token_by_token():
    record = TokenRecord.from_prompt(torch.tensor([7, 8]), torch.tensor([0, 1]), 1)
    record = record.respond(torch.tensor([9, 2]), torch.tensor([-0.5, -0.25]), 3, FinishReason.STOP)
    assert record.response_start == 2
    record = record.extend(torch.tensor([6, 5]), torch.tensor([Source.TOOL, Source.TEMPLATE]), 3)
    assert record.finish_reason is None
    record = record.respond(torch.tensor([1]), torch.tensor([-1.0]), 4, FinishReason.LENGTH)
    assert record.token_ids.tolist() == [7, 8, 9, 2, 6, 5, 1]
    assert record.source.tolist() == [0, 1, 3, 3, 2, 0, 3]
    assert record.turn.tolist() == [-1, -1, 0, 0, -1, -1, 1]
    assert record.policy_version.tolist() == [-1, -1, 3, 3, -1, -1, 4]
    assert record.log_probs.tolist() == [0.0, 0.0, -0.5, -0.25, 0.0, 0.0, -1.0]
    assert (record.num_messages, record.num_turns, record.response_start) == (4, 2, 6)
    assert record.turn.dtype == torch.int16
    assert record.policy_version.dtype == torch.int32
