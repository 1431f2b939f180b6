from __future__ import annotations

import math

import pytest
from objectives.rows_helper import BOTH, actor, by_hand

from torchrl_llm.objectives import SAPOLoss


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


@BOTH
def test_by_hand(dtype, tolerance):
    output, gradient = by_hand(SAPOLoss, dtype)
    # A = 2, tau = 1: -4 sigmoid(0.21) x 2 and -4 x 1/2 x 2; A = -1, tau = 1.05:
    # (4 / 1.05) sigmoid(1.05 x -0.36). Means over tokens, then over the two sequences.
    p, q = sigmoid(0.21), sigmoid(-1.05 * 0.36)
    expected = ((-8 * p - 4) / 2 + 4 / 1.05 * q) / 2
    assert output.loss_objective.item() == pytest.approx(expected, abs=tolerance)
    # -r A 4 p (1 - p), over 2 tokens and 2 sequences; at ratio one the factor is one.
    assert gradient == pytest.approx(
        [-1.21 * 2 * 4 * p * (1 - p) / 4, -2 / 4, 0.64 * 4 * q * (1 - q) / 2], abs=tolerance
    )
    assert output.clip_fraction.item() == 0.0


def test_the_defaults_and_what_is_refused():
    loss = SAPOLoss(actor())
    assert (loss.tau_pos, loss.tau_neg, loss.aggregation) == (1.0, 1.05, "sequence_mean")
    with pytest.raises(TypeError, match="clip_epsilon"):
        SAPOLoss(actor(), clip_epsilon=0.2)
