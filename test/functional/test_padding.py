from __future__ import annotations

import pytest
import torch

from torchrl_llm.functional import flatten_padded, length_mask, pad_flat, row_index


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_back_is_the_identity(side):
    lengths = [3, 0, 2]
    values = torch.arange(10.0).view(5, 2)
    dense = pad_flat(values, lengths, -1.0, side=side)
    mask = length_mask(lengths, side=side)
    assert dense.shape == (3, 3, 2)
    assert torch.equal(flatten_padded(dense, mask), values)
    assert (dense[~mask] == -1.0).all()


def test_left_padding_puts_the_gap_first():
    assert pad_flat(torch.tensor([1, 2, 3]), [2, 1], side="left").tolist() == [[1, 2], [0, 3]]


def test_gradients_pass_through_padding():
    values = torch.ones(3, requires_grad=True)
    (pad_flat(values, [2, 1]) * torch.tensor([[1.0, 2.0], [3.0, 99.0]])).sum().backward()
    assert values.grad.tolist() == [1.0, 2.0, 3.0]


def test_masks_come_from_lengths():
    assert length_mask([1, 2], 3).int().tolist() == [[1, 0, 0], [1, 1, 0]]
    with pytest.raises(ValueError, match="more than max_length=1"):
        length_mask([1, 2], 1)


def test_row_index_skips_empty_rows():
    assert row_index([2, 0, 1]).tolist() == [0, 0, 2]
