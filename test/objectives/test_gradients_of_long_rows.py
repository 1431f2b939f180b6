"""Gradients of the losses with one ratio a row, at 100,000 tokens a row."""

from __future__ import annotations

import pytest
import torch
from objectives.rows_helper import TableActor, make_row, make_rows

from torchrl_llm.objectives import GMPOLoss, GSPOLoss, GSPOTokenLoss

LENGTHS = (100_000, 2, 100_000)
ADVANTAGES = (1.0, -2.0, -0.7)
WITHIN = 1e-6


@pytest.fixture(scope="module")
def batch():
    """Rows in which each token occurs once, and an actor with log-probs near those sampled."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(1, 1 + sum(LENGTHS))
    old = torch.randn(len(ids), generator=generator) - 3
    table = torch.zeros(1 + len(ids))
    table[1:] = old + torch.randn(len(ids), generator=generator) * 0.2
    rows = [
        make_row([0, *own.tolist()], 1, advantage=a, old=torch.cat([torch.zeros(1), before]))
        for own, before, a in zip(ids.split(LENGTHS), old.split(LENGTHS), ADVANTAGES, strict=True)
    ]
    return make_rows(*rows), table, old


def gspo_row(log_ratio, advantage):
    return -log_ratio.mean().exp() * advantage


def gmpo_row(log_ratio, advantage):
    bounded = log_ratio.clamp(max=0.4) if advantage > 0 else log_ratio.clamp(min=-0.4)
    return -bounded.mean().exp() * advantage


@pytest.mark.parametrize(
    ("loss_type", "of_row", "bounds"),
    [(GSPOLoss, gspo_row, 0.3), (GSPOTokenLoss, gspo_row, 0.3), (GMPOLoss, gmpo_row, 0.4)],
)
def test_gradients_are_within_a_millionth_of_float64(batch, loss_type, of_row, bounds):
    rows, table, old = batch
    actor = TableActor(table)
    output = loss_type(actor, clip_epsilon=bounds)(rows)
    output.total_loss().backward()

    exact = table[1:].double().requires_grad_()
    log_ratios = (exact - old.double()).split(LENGTHS)
    expected = sum(map(of_row, log_ratios, ADVANTAGES)) / 3
    expected.backward()
    assert output.loss_objective.dtype is torch.float32
    assert output.loss_objective.item() == pytest.approx(expected.item(), rel=WITHIN)
    torch.testing.assert_close(actor.table.grad[1:].double(), exact.grad, rtol=WITHIN, atol=0.0)


def test_a_batch_whose_rows_cancel_has_the_loss_of_float64():
    # 1e-3 is what is left of 100,000 tokens with -1 and as many with 0.998.
    ids = list(range(1, 100_001))
    rows = make_rows(
        make_row([0, *ids], 1, advantage=1.0), make_row([0, *ids], 1, advantage=-0.998)
    )
    for aggregation in ("token_mean", "sequence_mean"):
        loss = GSPOLoss(TableActor(torch.full((100_001,), -1.0)), aggregation=aggregation)
        expected = -(1 - torch.tensor(0.998).double().item()) / 2
        assert loss(rows).loss_objective.item() == pytest.approx(expected, rel=1e-5)
