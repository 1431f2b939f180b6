from __future__ import annotations

import math

import pytest
from objectives.rows_helper import BOTH, actor, by_hand, make_row, make_rows

from torchrl_llm.errors import ConfigError
from torchrl_llm.objectives import ReinforceLoss, ReinforcePlusPlusLoss

LOGS = [-1 + math.log(1.21), -1.0, -1 + math.log(0.64)]


@BOTH
@pytest.mark.parametrize(
    ("settings", "weights", "clipped"),
    [
        ({"level": "none"}, (1.0, 1.0, 1.0), 0.0),
        ({}, (1.21, 1.0, 0.64), 0.0),
        ({"truncation": 1.1}, (1.1, 1.0, 0.64), 1 / 3),
        # The product over a sequence: 1.21 x 1 for both of its tokens.
        ({"level": "sequence"}, (1.21, 1.21, 0.64), 0.0),
        ({"level": "sequence", "truncation": 1.1}, (1.1, 1.1, 0.64), 2 / 3),
        # A ratio that is the bound is not cut by it.
        ({"truncation": 1.0}, (1.0, 1.0, 0.64), 1 / 3),
    ],
)
def test_by_hand(settings, weights, clipped, dtype, tolerance):
    output, gradient = by_hand(ReinforceLoss, dtype, **settings)
    # -sg(w) A log pi, summed over a sequence, mean over the two sequences.
    w = weights
    expected = -(2 * w[0] * LOGS[0] + 2 * w[1] * LOGS[1] - w[2] * LOGS[2]) / 2
    assert output.loss_objective.item() == pytest.approx(expected, abs=tolerance)
    assert gradient == pytest.approx([-w[0], -w[1], w[2] / 2], abs=tolerance)
    assert output.clip_fraction.item() == pytest.approx(clipped)


def test_weights_without_bound_stay_finite():
    rows = make_rows(make_row([5] + [1] * 400, 1, advantage=0.0, old=-9.0))
    for level in ("token", "sequence"):
        output = ReinforceLoss(actor(), level=level)(rows)
        assert output.loss_objective.item() == 0.0


def test_what_is_refused():
    with pytest.raises(ConfigError, match="no effect"):
        ReinforceLoss(actor(), level="none", truncation=2.0)
    with pytest.raises(TypeError, match="clip_epsilon"):
        ReinforceLoss(actor(), clip_epsilon=0.2)


@BOTH
def test_reinforce_plus_plus_by_hand(dtype, tolerance):
    output, gradient = by_hand(ReinforcePlusPlusLoss, dtype)
    # PPO's clip at 0.2: 2.4, 2 and -0.8. Means over tokens, then over the two sequences.
    assert output.loss_objective.item() == pytest.approx(-(2.2 - 0.8) / 2, abs=tolerance)
    assert gradient == pytest.approx([0.0, -2 / 4, 0.0], abs=tolerance)
