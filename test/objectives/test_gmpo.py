from __future__ import annotations

import math

import pytest
from objectives.rows_helper import BOTH, actor, by_hand

from torchrl_llm.errors import ConfigError
from torchrl_llm.objectives import GMPOLoss


@BOTH
class TestByHand:
    def test_the_lower_bound_acts_on_a_negative_advantage(self, dtype, tolerance):
        output, gradient = by_hand(GMPOLoss, dtype)
        # log 1.21 = 0.19 < 0.4: geometric mean sqrt(1.21) = 1.1, times -2. log 0.64 = -0.45 is
        # raised to -0.4. Mean of the two sequences.
        expected = (-2.2 + math.exp(-0.4)) / 2
        assert output.loss_objective.item() == pytest.approx(expected, abs=tolerance)
        assert gradient == pytest.approx([-0.55, -0.55, 0.0], abs=tolerance)
        assert output.clip_fraction.item() == pytest.approx(1 / 3)

    def test_the_upper_bound_acts_on_a_positive_one(self, dtype, tolerance):
        output, gradient = by_hand(GMPOLoss, dtype, clip_epsilon=(0.5, 0.1))
        # log 1.21 is cut to 0.1: exp((0.1 + 0) / 2); -0.45 is inside.
        mean = math.exp(0.05)
        expected = (-2 * mean + 0.64) / 2
        assert output.loss_objective.item() == pytest.approx(expected, abs=tolerance)
        # The cut token has no gradient, its neighbour keeps its own half.
        assert gradient == pytest.approx([0.0, -mean / 2, 0.32], abs=tolerance)


def test_the_defaults_and_what_is_refused():
    loss = GMPOLoss(actor())
    assert loss.clip_epsilon == (0.4, 0.4)
    assert loss.aggregation == "sequence_mean"
    # In log space a bound above one means something.
    loss.clip_epsilon = (1.5, 2.0)
    with pytest.raises(ConfigError, match="clip_epsilon must be"):
        loss.clip_epsilon = -0.1
