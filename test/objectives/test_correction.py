"""Corrections of a sampler that differs from the trainer, worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from objectives.rows_helper import LOG2, TableActor, make_row, make_rows

from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.objectives import Correction, GRPOLoss

LOG4 = 2 * LOG2


def loss_and_rows(correction, **settings):
    """Sampled at -1. Current minus proximal is 0; proximal over sampled is 2, 1/4 and 8.

    Advantages are 1 for the row of ids 1 and 2, and -2 for that of id 3.
    """
    table = torch.full((8,), -9.0)
    table[1:4] = -1 + torch.tensor([LOG2, -LOG4, 3 * LOG2])
    prox = ([0.0, *(-1 + torch.tensor([LOG2, -LOG4])).tolist()], [0.0, 0.0, -1 + 3 * LOG2])
    rows = make_rows(
        make_row([5, 1, 2], 1, advantage=1.0, prox=prox[0]),
        make_row([5, 6, 3], 2, advantage=-2.0, prox=prox[1]),
    )
    return GRPOLoss(TableActor(table), correction=correction, **settings), rows


CASES = [
    # Weights of the three tokens; the loss is -(w1 + w2 - 2 w3) / 3.
    (Correction(), [1.0, 1.0, 1.0]),
    (Correction(type="tis"), [2.0, 0.25, 2.0]),
    (Correction(type="tis", bounds=(0.0, 4.0)), [2.0, 0.25, 4.0]),
    (Correction(type="tis", bounds=(0.5, 4.0)), [2.0, 0.5, 4.0]),
    # The row's product is 2 x 1/4.
    (Correction(type="tis", level="sequence"), [0.5, 0.5, 2.0]),
    # Its geometric mean is sqrt(1/2).
    (Correction(type="tis", level="geometric"), [0.5**0.5, 0.5**0.5, 2.0]),
    (Correction(type="mis"), [2.0, 0.25, 0.0]),
    (Correction(type="mis", bounds=(0.5, 9.0)), [2.0, 0.0, 8.0]),
    (Correction(type="mis", level="sequence"), [0.5, 0.5, 0.0]),
    (Correction(type="mis", level="geometric", bounds=(0.9, 9.0)), [0.0, 0.0, 8.0]),
    (Correction(type="icepop"), [2.0, 0.0, 0.0]),
    # A mask of whole sequences, on top of any type.
    (Correction(sequence_bounds=(0.5, 2.0)), [1.0, 1.0, 0.0]),
    (Correction(type="tis", sequence_bounds=(0.9, 10.0)), [0.0, 0.0, 2.0]),
]


@pytest.mark.parametrize(("correction", "weights"), CASES)
def test_value_gradient_and_metrics_by_hand(correction, weights):
    loss, rows = loss_and_rows(correction)
    output = loss(rows)
    w1, w2, w3 = weights
    assert output.loss_objective.item() == pytest.approx(-(w1 + w2 - 2 * w3) / 3, abs=1e-6)
    assert output.correction_masked.item() == pytest.approx(weights.count(0.0) / 3)
    output.total_loss().backward()
    # The ratio to the proximal policy is 1, so d(-w r A) / d log pi = -w A; weights are constants.
    gradient = loss.actor_network.table.grad[1:4]
    expected = torch.tensor([-w1, -w2, 2 * w3]) / 3
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-5)


def test_the_mismatch_is_that_of_proximal_and_sampler_whatever_the_current_policy_is():
    loss, rows = loss_and_rows(Correction())
    with torch.no_grad():
        loss.actor_network.table -= 0.1
    output = loss(rows)
    # log w: log 2, -2 log 2, 3 log 2; k1 = -log w, k3 = w - 1 - log w.
    assert output.mismatch_k1.item() == pytest.approx(-2 * LOG2 / 3, rel=1e-5)
    assert output.mismatch_k3.item() == pytest.approx((2 + 0.25 + 8 - 3 - 2 * LOG2) / 3, rel=1e-5)
    # The ratio is to the proximal policy: sampled minus current has nothing to do with it.
    assert output.kl_approx.item() == pytest.approx(0.1, rel=1e-4)
    # Weights of current over sampled: 2, 1/4, 8, all times e^-0.1.
    assert output.ESS.item() == pytest.approx(10.25**2 / (3 * (4 + 1 / 16 + 64)), rel=1e-5)
    assert GRPOLoss(loss.actor_network)(rows).mismatch_k1 is None


def test_the_ratio_is_to_the_proximal_policy_and_is_clipped_there():
    loss, rows = loss_and_rows(Correction(type="tis"))
    with torch.no_grad():
        loss.actor_network.table += LOG2
    output = loss(rows)
    # Ratio 2 everywhere: min(2, 1.2) x 1 for ids 1 and 2; min(2 x -2, 1.2 x -2) for id 3.
    expected = -(1.2 * 2.0 + 1.2 * 0.25 - 4.0 * 2.0) / 3
    assert output.loss_objective.item() == pytest.approx(expected, rel=1e-5)
    assert output.clip_fraction.item() == pytest.approx(2 / 3)


def test_the_current_policy_can_stand_for_the_proximal_one():
    loss, rows = loss_and_rows(Correction(type="tis", proximal="current"))
    stored, _ = loss_and_rows(Correction(type="tis"))
    expected = stored(rows)
    for row in rows.tensordicts:
        del row["prox_log_probs"]
    output = loss(rows)
    assert output.loss_objective.item() == pytest.approx(expected.loss_objective.item())
    output.total_loss().backward()
    expected.total_loss().backward()
    torch.testing.assert_close(loss.actor_network.table.grad, stored.actor_network.table.grad)
    assert output.clip_fraction.item() == 0.0


def test_without_a_mismatch_it_changes_nothing():
    rows = make_rows(make_row([5, 1, 2], 1, prox=-1.0), make_row([5, 3], 1, prox=-1.0))
    table = torch.linspace(-2, -0.5, 8)
    expected = GRPOLoss(TableActor(table))(rows).loss_objective
    for correction, _ in CASES:
        got = GRPOLoss(TableActor(table), correction=correction)(rows)
        assert got.loss_objective == expected
        assert got.correction_masked == got.mismatch_k1 == got.mismatch_k3 == 0.0


def test_a_sequence_is_weighed_as_a_whole_however_the_batch_is_cut():
    loss, rows = loss_and_rows(Correction(type="mis", level="sequence"))
    whole = loss(rows)
    normalizer = loss.normalizer(rows)
    parts = sum(loss(rows[b : b + 1], normalizer=normalizer).loss_objective for b in (0, 1))
    torch.testing.assert_close(parts, whole.loss_objective)


def test_tokens_far_from_the_sampler_are_dropped_by_the_sampler_whatever_the_ratio_is_to():
    # Current over sampled: 2, 1/4, 8. log(2)^2 / 2 = 0.24, log(4)^2 / 2 = 0.96, log(8)^2 / 2 = 2.2.
    loss, rows = loss_and_rows(Correction(), kl_mask_threshold=0.5)
    assert loss(rows).loss_objective.item() == pytest.approx(-1 / 3)


def test_divergences_are_not_weighted():
    loss, rows = loss_and_rows(Correction(type="icepop"), kl_to_inference_coeff=1.0)
    # k3 of sampled over current ratios 1/2, 4, 1/8: each is r - 1 - log r.
    expected = (0.5 + 4 + 0.125 - 3 + LOG2 - LOG4 + 3 * LOG2) / 3
    assert loss(rows).loss_kl_to_inference.item() == pytest.approx(expected, rel=1e-5)


class TestRefusals:
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_values_that_are_not_finite(self, bad):
        loss, rows = loss_and_rows(Correction())
        assert ("prox_log_probs", "full") in loss.in_keys
        rows.tensordicts[1]["prox_log_probs", "full"][2] = bad
        with pytest.raises(DataError, match=r"prox_log_probs.*NaN or infinite.*rows \[1\]"):
            loss(rows)
        rows.tensordicts[1]["prox_log_probs", "full"][:] = torch.tensor([bad, bad, -1.0])
        assert loss(rows).loss_objective.isfinite()

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"level": "sequence"}, "no meaning for type='none'"),
            ({"type": "icepop", "level": "sequence"}, "no meaning for type='icepop'"),
            ({"bounds": (0.5, 2.0)}, "no effect with type='none'"),
        ],
    )
    def test_settings_that_are_impossible_or_without_effect(self, settings, message):
        with pytest.raises(ConfigError, match=message):
            Correction(**settings)

    def test_a_name_where_a_correction_belongs(self):
        with pytest.raises(ConfigError, match="must be a Correction, got 'tis'"):
            GRPOLoss(TableActor([0.0]), correction="tis")
