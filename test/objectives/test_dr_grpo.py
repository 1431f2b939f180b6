from __future__ import annotations

import pytest
import torch
from objectives.rows_helper import BOTH, actor, by_hand, two_rows

from torchrl_llm.errors import ConfigError
from torchrl_llm.objectives import DrGRPOLoss


@BOTH
def test_by_hand(dtype, tolerance):
    output, gradient = by_hand(DrGRPOLoss, dtype, constant_length=4)
    # min(r A, clip(r) A): 1.21 is cut to 1.2, 0.64 to 0.8: 2.4, 2 and -0.8. Two sequences count,
    # each over a length of 4.
    assert output.loss_objective.item() == pytest.approx(-(2.4 + 2 - 0.8) / 8, abs=tolerance)
    assert gradient == pytest.approx([0.0, -2 / 8, 0.0], abs=tolerance)


def test_without_the_divisor_it_is_the_sum_over_tokens():
    # Ludic's form, a mean over sequences of sums.
    output, gradient = by_hand(DrGRPOLoss, torch.float64, aggregation="sequence_sum")
    assert output.loss_objective.item() == pytest.approx(-(2.4 + 2 - 0.8) / 2, abs=1e-8)
    assert gradient == pytest.approx([0.0, -1.0, 0.0], abs=1e-8)
    one, _ = by_hand(DrGRPOLoss, torch.float64, constant_length=1)
    assert one.loss_objective.item() == output.loss_objective.item()


def test_the_length_is_needed_and_may_not_be_without_effect():
    with pytest.raises(ConfigError, match="constant_length"):
        DrGRPOLoss(actor())
    with pytest.raises(ConfigError, match="constant_length"):
        DrGRPOLoss(actor(), aggregation="token_mean", constant_length=4)
    assert DrGRPOLoss(actor(), constant_length=8)(two_rows()).loss_objective.isfinite()
