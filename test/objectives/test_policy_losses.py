"""What holds for every policy-gradient loss, whatever its formula."""

from __future__ import annotations

import math

import pytest
import torch
from objectives.rows_helper import actor, double, make_row, make_rows, pad, two_rows

from torchrl_llm.functional import Normalizer
from torchrl_llm.modules.backends.token_scorer import CausalScorer
from torchrl_llm.objectives import (
    DAPO,
    CISPOLoss,
    Correction,
    DrGRPOLoss,
    GMPOLoss,
    GRPOLoss,
    GSPOLoss,
    GSPOTokenLoss,
    ReinforceLoss,
    ReinforcePlusPlusLoss,
    SAPOLoss,
    TOPRLoss,
    check_invariance,
)

LOSSES = {
    "GRPO": GRPOLoss,
    "DAPO": DAPO,
    "DAPO over prompts": lambda actor, **s: DAPO(actor, aggregation="prompt_mean", **s),
    "Dr. GRPO": lambda actor, **s: DrGRPOLoss(actor, constant_length=4, **s),
    "GSPO": lambda actor, **s: GSPOLoss(actor, clip_epsilon=0.1, **s),
    "GSPO token": lambda actor, **s: GSPOTokenLoss(actor, clip_epsilon=0.1, **s),
    "GMPO": GMPOLoss,
    "CISPO": CISPOLoss,
    "SAPO": SAPOLoss,
    "REINFORCE": ReinforceLoss,
    "REINFORCE over sequences": lambda actor, **s: ReinforceLoss(
        actor, level="sequence", truncation=3.0, **s
    ),
    "REINFORCE++": ReinforcePlusPlusLoss,
    "TOPR": TOPRLoss,
}
every_loss = pytest.mark.parametrize("make", LOSSES.values(), ids=LOSSES)


def rows_of_all_kinds():
    """A usual row, a response of one token, one masked in part, one masked in full."""
    return make_rows(
        make_row([5, 1, 2, 7], 1, advantage=1.5, old=-5.5, group=0, ref=-5.0, prox=-5.6),
        make_row([5, 6, 3], 2, advantage=-2.0, old=-5.9, group=0, ref=-5.2, prox=-5.7),
        make_row(
            [5, 9, 4, 4, 8, 6],
            2,
            advantage=-0.5,
            old=-5.7,
            reason=[1, 1, 0, 5, 0, 0],
            group=1,
            ref=-5.6,
            prox=-5.8,
        ),
        make_row(
            [5, 4, 4], 1, advantage=9.0, reason=[1, 5, 5], group=1, ref=-5.0, prox=-1.0, old=-40.0
        ),
    )


@every_loss
def test_layouts_splits_orders_and_junk_have_no_influence(make, make_tiny_model):
    settings = {
        "kl_to_ref_coeff": 0.1,
        "entropy_coeff": 0.01,
        "correction": Correction(type="mis", level="geometric", bounds=(0.5, 2.0)),
    }
    loss = make(CausalScorer(make_tiny_model()), **settings)
    report = check_invariance(loss, rows_of_all_kinds())
    assert {"micro-batches", "order", "junk", "naive"} <= report.deviations.keys()


@every_loss
def test_padding_has_no_influence(make):
    for side in ["left", "right"]:
        rows = [
            *two_rows(group=0).tensordicts,
            make_row([5, 1, 2, 3, 1], 2, advantage=0.3, group=1),
        ]
        dense = pad(rows, side, junk=3)
        dense["group_id"] = torch.tensor([0, 0, 1])
        first, second = actor(), actor()
        outputs = [make(first)(make_rows(*rows)), make(second)(dense)]
        for output in outputs:
            output.total_loss().backward()
        torch.testing.assert_close(outputs[0].metrics(), outputs[1].metrics())
        torch.testing.assert_close(first.table.grad, second.table.grad)


@every_loss
def test_groups_of_equal_rewards_teach_nothing(make):
    model = actor()
    rows = make_rows(
        make_row([5, 1, 2], 1, advantage=0.0, group=0), make_row([5, 3], 1, advantage=0.0, group=0)
    )
    output = make(model)(rows)
    output.total_loss().backward()
    assert output.loss_objective.item() == 0.0
    assert not model.table.grad.any()


@every_loss
def test_a_micro_batch_in_which_nothing_counts_adds_nothing(make, make_tiny_model):
    rows = make_rows(make_row([5, 1, 2], 1, reason=[1, 5, 5], ref=-1.0, group=0))
    normalizer = Normalizer(10, 3, {0: 4, 1: 6})
    for policy in (actor(), CausalScorer(make_tiny_model())):
        output = make(policy, kl_to_ref_coeff=0.1)(rows, normalizer=normalizer)
        output.total_loss().backward()
        assert all(value == 0.0 for value in output.metrics().values())
        assert all(not p.grad.any() for p in policy.parameters() if p.grad is not None)


@every_loss
def test_far_from_the_sampler_everything_stays_finite(make):
    for advantage in [1.0, -1.0]:
        rows = make_rows(
            make_row([5, 1, 2], 1, advantage=advantage, old=-200.0, group=0),
            make_row([5, 3], 1, advantage=advantage, old=0.0, group=0),
        )
        model = actor(t3=-200.0)
        output = make(model)(rows)
        output.loss_objective.backward()
        assert output.loss_objective.isfinite()
        assert model.table.grad.isfinite().all()


@every_loss
def test_rows_in_float64_stay_so(make):
    model = actor().double()
    output = make(model, kl_to_ref_coeff=0.1)(double(two_rows(group=0, ref=-2.0)))
    assert output.total_loss().dtype is torch.float64
    single = make(actor(), kl_to_ref_coeff=0.1)(two_rows(group=0, ref=-2.0))
    assert single.total_loss().dtype is torch.float32
    assert output.total_loss().item() == pytest.approx(single.total_loss().item(), abs=1e-5)


@every_loss
def test_what_all_losses_share_is_handed_on(make):
    model = actor()
    loss = make(
        model,
        kl_to_ref_coeff=0.5,
        kl_estimator="k2",
        entropy_coeff=0.2,
        kl_to_inference_coeff=0.3,
        kl_mask_threshold=5.0,
        masking_strategy="rlhf",
    )
    output = loss(two_rows(group=0, ref=-1.0))
    # k2 of ratios 1, 2, 1/2 to the reference and to the sampler, averaged as the objective.
    assert output.kl_to_ref.item() == pytest.approx(2 * math.log(2) ** 2 / 2 / 3)
    assert output.loss_kl_to_ref > 0
    assert output.loss_kl_to_inference > 0
    assert output.loss_entropy < 0
    with pytest.raises(TypeError, match="kl_to_ref_coef"):
        make(model, kl_to_ref_coef=0.5)
