"""Where losses meet: at ratio one, on responses of one token, and at the ends of their settings."""

from __future__ import annotations

import math

import pytest
import torch
from objectives.rows_helper import TableActor, double, make_row, make_rows

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
)

LOSSES = [
    *(GRPOLoss, DAPO, DrGRPOLoss, GSPOLoss, GSPOTokenLoss, GMPOLoss, CISPOLoss, SAPOLoss),
    *(ReinforceLoss, ReinforcePlusPlusLoss, TOPRLoss),
]
AGGREGATIONS = ["token_mean", "prompt_mean", "sequence_mean", "sequence_sum", "constant"]


def batch(seed=0, spread=0.3, lengths=(4, 1, 3, 2, 6), per_row=True):
    """Rows sampled at log-probs ``old`` off the table's by ``spread``; float64."""
    generator = torch.Generator().manual_seed(seed)
    table = -torch.rand(8, generator=generator, dtype=torch.float64) - 0.5
    rows = []
    for index, length in enumerate(lengths):
        ids = [5, *torch.randint(0, 8, (length,), generator=generator).tolist()]
        noise = spread * torch.randn(length + 1, generator=generator, dtype=torch.float64)
        size = 1 if per_row else length + 1
        row = double(
            make_row(
                ids, 1, advantage=torch.randn(size, generator=generator), group=index // 2, prox=0.0
            )
        )
        row["log_probs", "full"] = table[torch.tensor(ids)] + noise
        rows.append(row)
    model = TableActor(torch.zeros(8)).double()
    with torch.no_grad():
        model.table.copy_(table)
    return model, make_rows(*rows)


def settings_of(aggregation):
    length = {"constant_length": 5} if aggregation == "constant" else {}
    return {"aggregation": aggregation, **length}


def value_and_gradient(loss, rows):
    total = loss(rows).total_loss()
    parameters = [p for p in loss.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    flat = [
        torch.zeros_like(p) if g is None else g for g, p in zip(gradients, parameters, strict=True)
    ]
    return total.detach(), torch.cat([g.flatten() for g in flat])


def agree(first, second, rows, *, values=True):
    (value, gradient), (other_value, other_gradient) = (
        value_and_gradient(loss, rows) for loss in (first, second)
    )
    torch.testing.assert_close(gradient, other_gradient, rtol=0, atol=1e-8)
    assert gradient.abs().sum() > 0
    if values:
        torch.testing.assert_close(value, other_value, rtol=0, atol=1e-8)


class TestRatioOne:
    @pytest.mark.parametrize("loss_type", LOSSES)
    def test_every_loss_has_the_gradient_of_reinforce(self, loss_type):
        for aggregation in AGGREGATIONS:
            model, rows = batch(spread=0.0)
            settings = settings_of(aggregation)
            agree(
                loss_type(model, **settings),
                ReinforceLoss(model, level="none", **settings),
                rows,
                values=False,
            )

    @pytest.mark.parametrize("loss_type", [t for t in LOSSES if t not in (GSPOLoss, GMPOLoss)])
    def test_with_an_advantage_for_each_token(self, loss_type):
        # GSPO moves all tokens of a sequence alike, and GMPO too.
        model, rows = batch(spread=0.0, per_row=False)
        settings = settings_of("sequence_mean")
        agree(
            loss_type(model, **settings),
            ReinforceLoss(model, level="none", **settings),
            rows,
            values=False,
        )

    @pytest.mark.parametrize("loss_type", LOSSES)
    def test_nothing_is_clipped(self, loss_type):
        model, rows = batch(spread=0.0)
        settings = settings_of("constant")
        output = loss_type(model, **settings)(rows)
        assert output.clip_fraction == 0.0
        assert output.ESS.item() == pytest.approx(1.0)

    @pytest.mark.parametrize(
        ("loss_type", "level"),
        # One gradient for a whole sequence can only have the mean of its tokens' weights.
        [(t, "sequence") for t in LOSSES]
        + [(t, "token") for t in LOSSES if t not in (GSPOLoss, GMPOLoss)],
    )
    def test_a_sampler_that_differs_is_a_weight_before_the_first_update(self, loss_type, level):
        # The ratio to the current policy itself is one; what the sampler did is in the weight.
        model, rows = batch(spread=0.2)
        settings = settings_of("sequence_sum")
        correction = Correction(type="tis", level=level, bounds=(0.0, 1.1), proximal="current")
        agree(
            loss_type(model, **settings, correction=correction),
            ReinforceLoss(model, level=level, truncation=1.1, **settings),
            rows,
            values=False,
        )

    @pytest.mark.parametrize("loss_type", LOSSES)
    def test_of_a_model(self, loss_type, make_tiny_model):
        model = CausalScorer(make_tiny_model()).double()
        rows = make_rows(
            make_row([5, 1, 2, 7], 2, advantage=0.5),
            make_row([9, 3], 1, advantage=-2.0),
            make_row([4, 8, 8, 6, 2], 1, advantage=1.5),
        )
        rows = double(rows)
        with torch.no_grad():
            for row in rows.tensordicts:
                mask = torch.arange(row["tokens", "full"].shape[0]) > 0
                scores = model.token_scores([row["tokens", "full"]], [mask])
                row["log_probs", "full"][1:] = scores.log_probs
        settings = settings_of("constant")
        gradients = [
            value_and_gradient(loss, rows)[1]
            for loss in (loss_type(model, **settings), ReinforceLoss(model, **settings))
        ]
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


class TestResponsesOfOneToken:
    ONES = (1, 1, 1, 1, 1, 1)

    @pytest.mark.parametrize("loss_type", [GSPOLoss, GSPOTokenLoss])
    def test_gspo_is_grpo(self, loss_type):
        model, rows = batch(lengths=self.ONES)
        agree(
            loss_type(model, clip_epsilon=(0.2, 0.28)),
            GRPOLoss(model, clip_epsilon=(0.2, 0.28)),
            rows,
        )

    def test_gmpo_is_grpo_with_the_bounds_out_of_log_space(self):
        model, rows = batch(lengths=self.ONES)
        bounds = (1 - math.exp(-0.1), math.exp(0.3) - 1)
        agree(GMPOLoss(model, clip_epsilon=(0.1, 0.3)), GRPOLoss(model, clip_epsilon=bounds), rows)

    def test_a_weight_of_the_sequence_is_that_of_its_token(self):
        model, rows = batch(lengths=self.ONES)
        agree(ReinforceLoss(model, level="sequence"), ReinforceLoss(model, level="token"), rows)


class TestEndsOfSettings:
    def test_dr_grpo_without_its_divisor_is_the_sum_over_tokens(self):
        model, rows = batch()
        value, gradient = value_and_gradient(DrGRPOLoss(model, constant_length=1), rows)
        per_token = GRPOLoss(model, aggregation="none")(rows).loss_objective
        torch.testing.assert_close(value * 5, per_token.sum(), rtol=0, atol=1e-8)
        (summed,) = torch.autograd.grad(per_token.sum(), model.table)
        torch.testing.assert_close(gradient * 5, summed, rtol=0, atol=1e-8)

    def test_dapo_with_the_bounds_of_grpo_is_grpo(self):
        model, rows = batch()
        agree(DAPO(model, clip_epsilon=0.2), GRPOLoss(model), rows)

    def test_reinforce_plus_plus_is_grpo_averaged_as_in_its_paper(self):
        model, rows = batch()
        agree(ReinforcePlusPlusLoss(model), GRPOLoss(model, aggregation="sequence_mean"), rows)

    def test_gspo_and_its_token_variant_are_one_for_one_advantage_a_row(self):
        model, rows = batch()
        agree(GSPOLoss(model, clip_epsilon=0.1), GSPOTokenLoss(model, clip_epsilon=0.1), rows)

    def test_cispo_without_bound_is_importance_weighted_reinforce(self):
        model, rows = batch()
        agree(
            CISPOLoss(model, clip_epsilon=(None, 1e6)),
            ReinforceLoss(model, aggregation="token_mean"),
            rows,
        )

    def test_grpo_without_bounds_has_the_same_gradient(self):
        model, rows = batch()
        agree(
            GRPOLoss(model, clip_epsilon=(0.999999, 1e6)),
            ReinforceLoss(model, aggregation="token_mean"),
            rows,
            values=False,
        )

    def test_sapo_with_a_flat_gate_has_the_same_gradient(self):
        # 4 p (1 - p) is 1 - (tau (r - 1) / 2)^2 near the middle.
        model, rows = batch()
        agree(
            SAPOLoss(model, tau_pos=1e-5, tau_neg=1e-5, aggregation="token_mean"),
            ReinforceLoss(model, aggregation="token_mean"),
            rows,
            values=False,
        )

    def test_topr_with_wide_bounds_is_reinforce_over_sequences(self):
        model, rows = batch()
        wide = (0.0, 1e6)
        agree(
            TOPRLoss(model, positive_bounds=wide, negative_bounds=wide),
            ReinforceLoss(model, level="sequence"),
            rows,
        )
