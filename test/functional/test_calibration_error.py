"""Expected calibration error of the scores of pairs."""

import math

import pytest
import torch

from torchrl_llm.functional import calibration_error


def margins(*shares):
    """Margins whose sigmoids are these."""
    return torch.tensor([math.log(p / (1 - p)) for p in shares], dtype=torch.float64)


@pytest.mark.parametrize(
    ("shares", "error"),
    [
        # Right 3 of 4 times with a confidence of 3/4.
        ((0.75, 0.75, 0.75, 0.25), 0.0),
        # Always right, and sure to 0.6: 0.4 too little. Two bins (0.6 and 0.9) of one pair each.
        ((0.61,) * 3, 0.39),
        ((0.61, 0.93), (0.39 + 0.07) / 2),
        # Wrong, and sure to 0.9.
        ((0.1,), 0.9),
        # One bin, 0.85 to 0.9: accuracy 1/2, mean confidence 0.87.
        ((0.86, 0.12), 0.37),
        # Two pairs in a bin, one in another: (2 * |1/2 - 0.87| + |1 - 0.62|) / 3.
        ((0.86, 0.12, 0.62), (2 * 0.37 + 0.38) / 3),
    ],
)
def test_values_by_hand(shares, error):
    assert calibration_error(margins(*shares)).item() == pytest.approx(error)


def test_equal_scores_are_right_half_of_the_time():
    assert calibration_error(torch.zeros(5)).item() == 0.0


def test_it_is_that_of_a_loop_over_bins():
    drawn = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 2 + 1
    confidence, right = torch.sigmoid(drawn.abs().double()), (drawn > 0).double()
    total = 0.0
    for number in range(10):
        low = 0.5 + number / 20
        inside = (confidence >= low) & (confidence < low + 0.05)
        if inside.any():
            gap = right[inside].mean() - confidence[inside].mean()
            total += inside.sum() / 500 * gap.abs()
    assert calibration_error(drawn).item() == pytest.approx(float(total))


def test_a_certain_model_is_in_the_last_bin():
    assert calibration_error(torch.tensor([1e4, 1e4])).item() == 0.0
    assert calibration_error(torch.tensor([-1e4])).item() == 1.0
