"""Where losses meet: at ratio one, on responses of one token, and at the ends of their settings."""

from __future__ import annotations

import math
from functools import partial
from itertools import product

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
        # GSPO moves all tokens of a sequence alike, and GMPO too.
        by_token = [False] * (loss_type not in (GSPOLoss, GMPOLoss))
        for per_row, aggregation in product([True, *by_token], AGGREGATIONS):
            model, rows = batch(spread=0.0, per_row=per_row)
            settings = settings_of(aggregation)
            reinforce = ReinforceLoss(model, level="none", **settings)
            agree(loss_type(model, **settings), reinforce, rows, values=False)

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


def test_dr_grpo_without_its_divisor_is_the_sum_over_tokens():
    model, rows = batch()
    value, gradient = value_and_gradient(DrGRPOLoss(model, constant_length=1), rows)
    per_token = GRPOLoss(model, aggregation="none")(rows).loss_objective
    torch.testing.assert_close(value * 5, per_token.sum(), rtol=0, atol=1e-8)
    (summed,) = torch.autograd.grad(per_token.sum(), model.table)
    torch.testing.assert_close(gradient * 5, summed, rtol=0, atol=1e-8)


REINFORCE = partial(ReinforceLoss, aggregation="token_mean")
BOUNDED = partial(GRPOLoss, clip_epsilon=(0.2, 0.28))
WIDE = (0.0, 1e6)
ENDS = {
    "DAPO with the bounds of GRPO": (partial(DAPO, clip_epsilon=0.2), GRPOLoss),
    "REINFORCE++ and GRPO averaged as in its paper": (
        ReinforcePlusPlusLoss,
        partial(GRPOLoss, aggregation="sequence_mean"),
    ),
    "GSPO and its token variant": (
        partial(GSPOLoss, clip_epsilon=0.1),
        partial(GSPOTokenLoss, clip_epsilon=0.1),
    ),
    "CISPO without bound": (partial(CISPOLoss, clip_epsilon=(None, 1e6)), REINFORCE),
    "TOPR with wide bounds": (
        partial(TOPRLoss, positive_bounds=WIDE, negative_bounds=WIDE),
        partial(ReinforceLoss, level="sequence"),
    ),
}
ENDS_OF_GRADIENTS = {
    "GRPO without bounds": partial(GRPOLoss, clip_epsilon=(0.999999, 1e6)),
    # 4 p (1 - p) is 1 - (tau (r - 1) / 2)^2 near the middle.
    "SAPO with a flat gate": partial(
        SAPOLoss, tau_pos=1e-5, tau_neg=1e-5, aggregation="token_mean"
    ),
}
OF_ONE_TOKEN = {
    "GSPO": (partial(GSPOLoss, clip_epsilon=(0.2, 0.28)), BOUNDED),
    "GSPO's token variant": (partial(GSPOTokenLoss, clip_epsilon=(0.2, 0.28)), BOUNDED),
    "GMPO with its bounds in log space": (
        partial(GMPOLoss, clip_epsilon=(0.1, 0.3)),
        partial(GRPOLoss, clip_epsilon=(1 - math.exp(-0.1), math.exp(0.3) - 1)),
    ),
    "the weight of a sequence": (partial(ReinforceLoss, level="sequence"), ReinforceLoss),
}


@pytest.mark.parametrize(("first", "second"), ENDS.values(), ids=ENDS)
def test_at_the_ends_of_its_settings_a_loss_is_another(first, second):
    model, rows = batch()
    agree(first(model), second(model), rows)


@pytest.mark.parametrize("loss", ENDS_OF_GRADIENTS.values(), ids=ENDS_OF_GRADIENTS)
def test_at_the_ends_of_its_settings_a_loss_has_the_gradient_of_reinforce(loss):
    model, rows = batch()
    agree(loss(model), REINFORCE(model), rows, values=False)


@pytest.mark.parametrize(("first", "second"), OF_ONE_TOKEN.values(), ids=OF_ONE_TOKEN)
def test_of_responses_of_one_token_a_loss_is_another(first, second):
    model, rows = batch(lengths=(1, 1, 1, 1, 1, 1))
    agree(first(model), second(model), rows)
