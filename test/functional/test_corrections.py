from __future__ import annotations

import math

import pytest
import torch

from torchrl_llm.functional import (
    level_log_ratio,
    masked_weights,
    sequence_mask,
    truncated_weights,
)
from torchrl_llm.functional.ratios import LEVELS

# Ratios 2, 1/4 in the first row, 3 in the second, none in the third.
RATIOS = torch.tensor([2.0, 0.25, 3.0], dtype=torch.double)
ROWS = torch.tensor([0, 0, 1])


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [2.0, 0.25, 3.0]),
        # 2 x 1/4 for both tokens of the row.
        ("sequence", [0.5, 0.5, 3.0]),
        # sqrt(2 x 1/4).
        ("geometric", [math.sqrt(0.5), math.sqrt(0.5), 3.0]),
    ],
)
def test_ratios_of_a_level_by_hand(level, expected):
    got = level_log_ratio(RATIOS.log(), ROWS, 3, level).exp()
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.double), atol=1e-12, rtol=0)


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match="token, sequence, geometric"):
        level_log_ratio(RATIOS, ROWS, 3, "row")


def test_whole_sequences_are_masked_by_their_geometric_mean():
    # sqrt(1/2) = 0.707 is inside [0.7, 2], 3 is not.
    assert sequence_mask(RATIOS.log(), ROWS, 3, 0.7, 2.0).tolist() == [True, True, False]
    assert sequence_mask(RATIOS.log(), ROWS, 3, 0.8, 4.0).tolist() == [False, False, True]


def test_a_ratio_of_zero_probability_is_masked_and_none_overflows():
    log_ratio = torch.tensor([-1e4, 1e4, 0.0])
    assert truncated_weights(log_ratio, 2.0).tolist() == [0.0, 2.0, 1.0]
    assert masked_weights(log_ratio, 0.0, 2.0).tolist() == [0.0, 0.0, 1.0]
    assert sequence_mask(log_ratio, torch.arange(3), 3, 0.5, 2.0).tolist() == [False, False, True]


@pytest.mark.parametrize("level", LEVELS)
def test_they_compile_in_one_graph(level):
    def weights(log_ratio, rows):
        kept = sequence_mask(log_ratio, rows, 3, 0.5, 2.0)
        return kept * masked_weights(level_log_ratio(log_ratio, rows, 3, level), 0.5, 2.0)

    compiled = torch.compile(weights, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(RATIOS.log(), ROWS), weights(RATIOS.log(), ROWS))
