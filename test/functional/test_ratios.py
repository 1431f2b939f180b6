from __future__ import annotations

import torch

from torchrl_llm.functional import (
    geometric_log_ratio,
    masked_weights,
    sequence_log_ratio,
    truncated_weights,
)

VALUES = torch.tensor([0.1, -0.3, 0.2, 0.5])
ROWS = torch.tensor([0, 0, 0, 2])


def test_a_sequence_ratio_is_the_product_of_its_token_ratios():
    torch.testing.assert_close(sequence_log_ratio(VALUES, ROWS, 3), torch.tensor([0.0, 0.0, 0.5]))


def test_a_geometric_ratio_does_not_grow_with_length():
    got = geometric_log_ratio(VALUES.repeat(4), ROWS.repeat(4), 3)
    torch.testing.assert_close(got, geometric_log_ratio(VALUES, ROWS, 3))


def test_rows_without_tokens_are_neutral():
    assert geometric_log_ratio(VALUES, ROWS, 3)[1] == 0.0


def test_gradients_reach_each_token_with_its_share():
    values = VALUES.clone().requires_grad_()
    geometric_log_ratio(values, ROWS, 3).sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([1 / 3, 1 / 3, 1 / 3, 1.0]))


def test_correction_weights_are_constants():
    ratio = torch.tensor([0.0, 2.0, -2.0], requires_grad=True)
    cut, masked = truncated_weights(ratio, 2.0), masked_weights(ratio, 0.5, 2.0)
    assert not cut.requires_grad
    assert not masked.requires_grad
    # exp(2) = 7.39 is cut to 2, exp(-2) = 0.135 stays; masking drops both.
    torch.testing.assert_close(cut, torch.tensor([1.0, 2.0, 0.1353]), atol=1e-4, rtol=0)
    assert masked.tolist() == [1.0, 0.0, 0.0]
