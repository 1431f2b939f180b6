from __future__ import annotations

import math

import pytest
from objectives.rows_helper import BOTH, LOG2, actor, by_hand, make_row, make_rows

from torchrl_llm.errors import ConfigError
from torchrl_llm.objectives import CISPOLoss, CISPOLossOutput


@BOTH
class TestByHand:
    def test_large_weights_are_cut_and_small_ones_are_not(self, dtype, tolerance):
        output, gradient = by_hand(CISPOLoss, dtype)
        # -sg(w) A log pi with weights 1.2 (of 1.21), 1, 0.64 and log pi = -1 + log r.
        logs = [-1 + math.log(1.21), -1.0, -1 + math.log(0.64)]
        expected = -(1.2 * 2 * logs[0] + 2 * logs[1] - 0.64 * logs[2]) / 3
        assert output.loss_objective.item() == pytest.approx(expected, abs=tolerance)
        assert gradient == pytest.approx([-2.4 / 3, -2 / 3, 0.64 / 3], abs=tolerance)
        assert output.clip_fraction.item() == pytest.approx(1 / 3)
        assert isinstance(output, CISPOLossOutput)

    def test_with_a_lower_bound(self, dtype, tolerance):
        _, gradient = by_hand(CISPOLoss, dtype, clip_epsilon=0.2)
        assert gradient == pytest.approx([-2.4 / 3, -2 / 3, 0.8 / 3], abs=tolerance)


def test_defect_05_tokens_whose_weight_is_cut_keep_their_gradient():
    for advantage in (1.0, -1.0):
        model = actor(t1=-1.0 + 3 * LOG2)
        rows = make_rows(make_row([5, 1], 1, advantage=advantage))
        CISPOLoss(model)(rows).total_loss().backward()
        assert model.table.grad[1].item() == pytest.approx(-1.2 * advantage)


def test_the_defaults_and_what_is_refused():
    loss = CISPOLoss(actor())
    assert loss.clip_epsilon == (None, 0.2)
    assert loss.aggregation == "token_mean"
    loss.clip_epsilon = (None, 4.0)
    for bad in (None, (0.1, None), (1.1, 0.2), -0.2):
        with pytest.raises(ConfigError, match="clip_epsilon must be"):
            loss.clip_epsilon = bad
