"""Values and gradients of the policy losses on three rows, worked by hand.

The tokens of ids 1 and 2 are one sequence with ratios 1.21 and 1 and advantage 2, that of id 3 is
another with ratio 0.64 and advantage -1; a third row is masked.
"""

from __future__ import annotations

import math

import pytest
import torch
from objectives.rows_helper import (
    BOTH,
    LOG2,
    actor,
    by_hand,
    make_row,
    make_rows,
    three_rows,
    two_rows,
)

from torchrl_llm.errors import ConfigError
from torchrl_llm.objectives import (
    DAPO,
    CISPOLoss,
    CISPOLossOutput,
    DAPOLossOutput,
    DrGRPOLoss,
    GMPOLoss,
    GRPOLoss,
    GSPOLoss,
    GSPOTokenLoss,
    ReinforceLoss,
    ReinforcePlusPlusLoss,
    SAPOLoss,
    TOPRLoss,
)

LOGS = [-1 + math.log(1.21), -1.0, -1 + math.log(0.64)]
MEAN = math.exp(0.05)


def weighted(*weights):
    """Of -sg(w) A log pi, summed over a sequence, mean over the two sequences."""
    terms = [a * w * log for a, w, log in zip((2, 2, -1), weights, LOGS, strict=True)]
    return -sum(terms) / 2, [-weights[0], -weights[1], weights[2] / 2]


def soft():
    """Of SAPO: A = 2, tau = 1, and A = -1, tau = 1.05."""
    p, q = (1 / (1 + math.exp(-x)) for x in (0.21, -1.05 * 0.36))
    # -4 p x 2 and -4 x 1/2 x 2; (4 / 1.05) q. Means over tokens, then over the two sequences.
    value = ((-8 * p - 4) / 2 + 4 / 1.05 * q) / 2
    # -r A 4 p (1 - p), over 2 tokens and 2 sequences; at ratio one the factor is one.
    return value, [-1.21 * 2 * 4 * p * (1 - p) / 4, -2 / 4, 0.64 * 4 * q * (1 - q) / 2]


# Loss, settings, value and gradient of ids 1, 2 and 3, fraction that is clipped.
CASES = [
    # 1.21 <= 1.28 is inside: min(r A, clip(r) A) is 2.42 and 2; 0.64 < 0.8: -0.8. Token mean, and
    # -r A / 3 inside, nothing outside. 1.21 is outside of GRPO's 1.2.
    (DAPO, {}, -(2.42 + 2 - 0.8) / 3, [-2.42 / 3, -2 / 3, 0.0], 1 / 3),
    (GRPOLoss, {}, -(2.4 + 2 - 0.8) / 3, [0.0, -2 / 3, 0.0], 2 / 3),
    # Two sequences count, each over a length of 4; Ludic's form, a mean over sequences of sums.
    (DrGRPOLoss, {"constant_length": 4}, -(2.4 + 2 - 0.8) / 8, [0.0, -2 / 8, 0.0], 2 / 3),
    (DrGRPOLoss, {"aggregation": "sequence_sum"}, -(2.4 + 2 - 0.8) / 2, [0.0, -1.0, 0.0], 2 / 3),
    (DrGRPOLoss, {"constant_length": 1}, -(2.4 + 2 - 0.8) / 2, [0.0, -1.0, 0.0], 2 / 3),
    # PPO's clip at 0.2. Means over tokens, then over the two sequences.
    (ReinforcePlusPlusLoss, {}, -(2.2 - 0.8) / 2, [0.0, -2 / 4, 0.0], 2 / 3),
    # -sg(w) A log pi with weights 1.2 (of 1.21), 1, 0.64; with a lower bound 0.8.
    (CISPOLoss, {}, weighted(1.2, 1.0, 0.64)[0] * 2 / 3, [-2.4 / 3, -2 / 3, 0.64 / 3], 1 / 3),
    (
        *(CISPOLoss, {"clip_epsilon": 0.2}, weighted(1.2, 1.0, 0.8)[0] * 2 / 3),
        *([-2.4 / 3, -2 / 3, 0.8 / 3], 2 / 3),
    ),
    # log 1.21 = 0.19 < 0.4: geometric mean sqrt(1.21) = 1.1, times -2. log 0.64 = -0.45 is raised
    # to -0.4. Mean of the two sequences.
    (GMPOLoss, {}, (-2.2 + math.exp(-0.4)) / 2, [-0.55, -0.55, 0.0], 1 / 3),
    # log 1.21 is cut to 0.1: exp((0.1 + 0) / 2); -0.45 is inside. The cut token has no gradient,
    # its neighbour keeps its own half.
    (
        *(GMPOLoss, {"clip_epsilon": (0.5, 0.1)}, (-2 * MEAN + 0.64) / 2),
        *([0.0, -MEAN / 2, 0.32], 1 / 3),
    ),
    *(
        case
        for loss_type in (GSPOLoss, GSPOTokenLoss)
        for case in (
            # s = sqrt(1.21 x 1) = 1.1, A = 2: -2.2. s = 0.64 < 0.8, A = -1: 0.8. Mean of sequences,
            # and -s A / (2 tokens x 2 sequences) for both tokens of the first.
            (loss_type, {"clip_epsilon": 0.2}, (-2.2 + 0.8) / 2, [-0.55, -0.55, 0.0], 1 / 3),
            # 1.1 > 1 + 4e-4 and 0.64 < 1 - 3e-4: both are cut.
            (loss_type, {}, (-1.0004 * 2 + 0.9997) / 2, [0.0, 0.0, 0.0], 1.0),
        )
    ),
    # 1.21 x 1 = 1.21 < 1.3; 0.64 < 0.7. Of the product each token has the whole derivative:
    # -1.21 x 2 / 2, in the token variant half.
    (
        *(GSPOLoss, {"clip_epsilon": 0.3, "level": "sequence"}, (-2.42 + 0.7) / 2),
        *([-1.21, -1.21, 0.0], 1 / 3),
    ),
    (
        *(GSPOTokenLoss, {"clip_epsilon": 0.3, "level": "sequence"}, (-2.42 + 0.7) / 2),
        *([-0.605, -0.605, 0.0], 1 / 3),
    ),
    (SAPOLoss, {}, *soft(), 0.0),
    # The good sequence counts as it is, the bad one with its ratio; the good one with its product
    # of ratios, 1.21 x 1, at most 1.1, and the bad one with at least 0.7.
    (TOPRLoss, {}, *weighted(1.0, 1.0, 0.64), None),
    (TOPRLoss, {"positive_bounds": (0.0, 1.1)}, *weighted(1.1, 1.1, 0.64), None),
    (TOPRLoss, {"positive_bounds": (0.0, 2.0)}, *weighted(1.21, 1.21, 0.64), None),
    (TOPRLoss, {"negative_bounds": (0.7, 1.0)}, *weighted(1.0, 1.0, 0.7), None),
    (ReinforceLoss, {"level": "none"}, *weighted(1.0, 1.0, 1.0), 0.0),
    (ReinforceLoss, {}, *weighted(1.21, 1.0, 0.64), 0.0),
    (ReinforceLoss, {"truncation": 1.1}, *weighted(1.1, 1.0, 0.64), 1 / 3),
    # The product over a sequence: 1.21 x 1 for both of its tokens.
    (ReinforceLoss, {"level": "sequence"}, *weighted(1.21, 1.21, 0.64), 0.0),
    (
        *(ReinforceLoss, {"level": "sequence", "truncation": 1.1}),
        *(*weighted(1.1, 1.1, 0.64), 2 / 3),
    ),
    # A ratio that is the bound is not cut by it.
    (ReinforceLoss, {"truncation": 1.0}, *weighted(1.0, 1.0, 0.64), 1 / 3),
]


@BOTH
@pytest.mark.parametrize(("loss_type", "settings", "value", "gradient", "clipped"), CASES)
def test_three_rows_by_hand(loss_type, settings, value, gradient, clipped, dtype, tolerance):
    output, found = by_hand(loss_type, dtype, **settings)
    assert output.loss_objective.item() == pytest.approx(value, abs=tolerance)
    assert found == pytest.approx(gradient, abs=tolerance)
    assert clipped is None or output.clip_fraction.item() == pytest.approx(clipped)
    named = {CISPOLoss: CISPOLossOutput, DAPO: DAPOLossOutput}.get(loss_type, object)
    assert isinstance(output, named)


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        (CISPOLoss, {"clip_epsilon": (None, 0.2), "aggregation": "token_mean"}),
        (GMPOLoss, {"clip_epsilon": (0.4, 0.4), "aggregation": "sequence_mean"}),
        (GSPOLoss, {"clip_epsilon": (3e-4, 4e-4), "aggregation": "sequence_mean"}),
        (SAPOLoss, {"tau_pos": 1.0, "tau_neg": 1.05, "aggregation": "sequence_mean"}),
        (TOPRLoss, {"positive_bounds": (1.0, 1.0), "negative_bounds": (0.0, 1.0)}),
        (TOPRLoss, {"aggregation": "sequence_sum"}),
    ],
)
def test_the_defaults_are_those_of_the_papers(loss_type, expected):
    loss = loss_type(actor())
    assert {name: getattr(loss, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("loss_type", "settings", "error", "message"),
    [
        *((CISPOLoss, {"clip_epsilon": bad}, ConfigError, "clip_epsilon must be")
          for bad in (None, (0.1, None), (1.1, 0.2), -0.2)),
        *((GSPOLoss, {"clip_epsilon": bad}, ConfigError, "clip_epsilon must be")
          for bad in (1.5, (0.1, -0.1), (0.1, 0.2, 0.3), (None, 0.2))),
        (GMPOLoss, {"clip_epsilon": -0.1}, ConfigError, "clip_epsilon must be"),
        (DAPO, {"clip_epsilon": (1.5, 0.2)}, ConfigError, "clip_epsilon"),
        (DAPO, {"clip_epsilom": 0.2}, TypeError, "clip_epsilom"),
        (GSPOLoss, {"length_normalize": False}, TypeError, "length_normalize"),
        (SAPOLoss, {"clip_epsilon": 0.2}, TypeError, "clip_epsilon"),
        (ReinforceLoss, {"clip_epsilon": 0.2}, TypeError, "clip_epsilon"),
        (ReinforceLoss, {"level": "none", "truncation": 2.0}, ConfigError, "no effect"),
        (DrGRPOLoss, {}, ConfigError, "constant_length"),
        (DrGRPOLoss, {"aggregation": "token_mean", "constant_length": 4}, ConfigError,
         "constant_length"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(loss_type, settings, error, message):
    with pytest.raises(error, match=message):
        loss_type(actor(), **settings)
    if error is ConfigError and "clip_epsilon" in settings:
        loss = loss_type(actor())
        before = loss.clip_epsilon
        with pytest.raises(error, match=message):
            loss.clip_epsilon = settings["clip_epsilon"]
        assert loss.clip_epsilon == before


def test_bounds_may_be_changed_within_what_they_mean():
    loss = GSPOLoss(actor())
    loss.clip_epsilon = 0.1
    assert loss.clip_epsilon == (0.1, 0.1)
    CISPOLoss(actor()).clip_epsilon = (None, 4.0)
    # In log space a bound above one means something.
    GMPOLoss(actor()).clip_epsilon = (1.5, 2.0)
    loss = DAPO(actor(), clip_epsilon=0.2)
    assert loss.clip_epsilon == (0.2, 0.2)
    assert loss(two_rows()).loss_objective == GRPOLoss(actor())(two_rows()).loss_objective


def test_defect_05_tokens_whose_weight_is_cut_keep_their_gradient():
    for advantage in (1.0, -1.0):
        model = actor(t1=-1.0 + 3 * LOG2)
        rows = make_rows(make_row([5, 1], 1, advantage=advantage))
        CISPOLoss(model)(rows).total_loss().backward()
        assert model.table.grad[1].item() == pytest.approx(-1.2 * advantage)


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


def test_advantages_of_tokens_move_their_tokens_in_the_token_variant_alone():
    # Advantages 1 and 3 on the tokens of the first sequence, s = 1.1.
    rows = three_rows(torch.float64, first=[9.0, 1.0, 3.0])
    for loss_type, expected in (
        # through s alone: -s (1 + 3) / 2 / (2 x 2 sequences) for both
        (GSPOLoss, [-0.55, -0.55, 0.0]),
        # -s A_t / (2 x 2)
        (GSPOTokenLoss, [-0.275, -0.825, 0.0]),
    ):
        output, gradient = by_hand(loss_type, torch.float64, rows, clip_epsilon=0.2)
        assert output.loss_objective.item() == pytest.approx((-2.2 + 0.8) / 2, abs=1e-8)
        assert gradient == pytest.approx(expected, abs=1e-8)


def test_weights_without_bound_stay_finite():
    rows = make_rows(make_row([5] + [1] * 400, 1, advantage=0.0, old=-9.0))
    for level in ("token", "sequence"):
        output = ReinforceLoss(actor(), level=level)(rows)
        assert output.loss_objective.item() == 0.0
