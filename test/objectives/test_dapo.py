from __future__ import annotations

import pytest
import torch
from objectives.rows_helper import BOTH, actor, by_hand, make_row, make_rows, two_rows

from torchrl_llm.errors import ConfigError
from torchrl_llm.objectives import DAPO, DAPOLossOutput, GRPOLoss


@BOTH
def test_by_hand(dtype, tolerance):
    output, gradient = by_hand(DAPO, dtype)
    # Ratios 1.21, 1 (A = 2) and 0.64 (A = -1). 1.21 <= 1.28 is inside: min(r A, clip(r) A) is
    # 2.42 and 2; 0.64 < 0.8: -0.8. Mean over the three tokens.
    assert output.loss_objective.item() == pytest.approx(-(2.42 + 2 - 0.8) / 3, abs=tolerance)
    # -r A / 3 inside, nothing outside.
    assert gradient == pytest.approx([-2.42 / 3, -2 / 3, 0.0], abs=tolerance)
    assert output.clip_fraction.item() == pytest.approx(1 / 3)
    assert isinstance(output, DAPOLossOutput)


def test_the_upper_bound_is_wider_than_that_of_grpo():
    # 1.21 is outside of GRPO's 1.2.
    output, gradient = by_hand(GRPOLoss, torch.float64)
    assert output.loss_objective.item() == pytest.approx(-(2.4 + 2 - 0.8) / 3)
    assert gradient[0] == 0.0


def test_a_long_response_weighs_by_its_length():
    rows = make_rows(make_row([5, 1], 1, advantage=1.0), make_row([5, 1, 1, 1], 1, advantage=-1.0))
    # All ratios are one: (1 - 3) / 4.
    assert DAPO(actor())(rows).loss_objective.item() == pytest.approx(0.5)


def test_the_mean_may_be_taken_within_the_group_of_each_prompt():
    rows = make_rows(
        make_row([5, 1], 1, advantage=1.0, group=7),
        make_row([5, 1, 1, 1], 1, advantage=-1.0, group=7),
        make_row([5, 1, 1], 1, advantage=3.0, group=8),
    )
    # Group 7: -(1 - 3) / 4; group 8: -3.
    loss = DAPO(actor(), aggregation="prompt_mean")(rows).loss_objective
    assert loss.item() == pytest.approx((0.5 - 3) / 2)


def test_bounds_may_be_set_and_arguments_that_do_not_exist_fail():
    loss = DAPO(actor(), clip_epsilon=0.2)
    assert loss.clip_epsilon == (0.2, 0.2)
    assert loss(two_rows()).loss_objective == GRPOLoss(actor())(two_rows()).loss_objective
    with pytest.raises(TypeError, match="clip_epsilom"):
        DAPO(actor(), clip_epsilom=0.2)
    with pytest.raises(ConfigError, match="clip_epsilon"):
        DAPO(actor(), clip_epsilon=(1.5, 0.2))
