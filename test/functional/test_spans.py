from __future__ import annotations

import pytest
import torch

from torchrl_llm.functional import mask_to_spans, run_lengths, spans_to_mask


@pytest.mark.parametrize("bits", ["", "0", "1", "0110100", "111", "1001"])
def test_mask_to_spans_and_back_is_the_identity(bits):
    mask = torch.tensor([bit == "1" for bit in bits], dtype=torch.bool)
    assert torch.equal(spans_to_mask(mask_to_spans(mask), len(bits)), mask)


def test_spans_are_half_open():
    mask = torch.tensor([True, True, False, True])
    assert mask_to_spans(mask) == [(0, 2), (3, 4)]


def test_run_lengths_sum_to_the_row():
    values, counts = run_lengths(torch.tensor([1, 1, 2, 1]))
    assert values.tolist() == [1, 2, 1]
    assert counts.tolist() == [2, 1, 1]


def test_bad_spans_and_masks_are_refused():
    for span in ((2, 1), (0, 5), (-1, 2)):
        with pytest.raises(ValueError, match="not inside a row of 4"):
            spans_to_mask([span], 4)
    with pytest.raises(ValueError, match="mask must be bool"):
        mask_to_spans(torch.tensor([0, 1]))
