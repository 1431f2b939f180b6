from __future__ import annotations

import math

import pytest
from objectives.rows_helper import BOTH, actor, by_hand

from torchrl_llm.objectives import TOPRLoss

LOGS = [-1 + math.log(1.21), -1.0, -1 + math.log(0.64)]


@BOTH
@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        # The good sequence counts as it is, the bad one with its ratio.
        ({}, (1.0, 0.64)),
        # The good one with its product of ratios, 1.21 x 1, at most 1.1 ...
        ({"positive_bounds": (0.0, 1.1)}, (1.1, 0.64)),
        ({"positive_bounds": (0.0, 2.0)}, (1.21, 0.64)),
        # ... and the bad one with at least 0.7.
        ({"negative_bounds": (0.7, 1.0)}, (1.0, 0.7)),
    ],
)
def test_by_hand(settings, weights, dtype, tolerance):
    output, gradient = by_hand(TOPRLoss, dtype, **settings)
    good, bad = weights
    # -sg(w) A log pi, summed over a sequence, mean over the two sequences.
    expected = -(2 * good * (LOGS[0] + LOGS[1]) - bad * LOGS[2]) / 2
    assert output.loss_objective.item() == pytest.approx(expected, abs=tolerance)
    assert gradient == pytest.approx([-good, -good, bad / 2], abs=tolerance)


def test_the_defaults_and_what_is_refused():
    loss = TOPRLoss(actor())
    assert (loss.positive_bounds, loss.negative_bounds) == ((1.0, 1.0), (0.0, 1.0))
    assert loss.aggregation == "sequence_sum"
