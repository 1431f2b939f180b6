from __future__ import annotations

import pytest
import torch
from functional.surrogates.rows import ragged

from torchrl_llm.functional import cispo, reinforce, sequence_weights, topr, truncated_weights

PRECISIONS = [(torch.float64, 1e-8), (torch.float32, 1e-5)]


def test_reinforce_has_the_score_function_gradient():
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    reinforce(log_probs, torch.tensor([3.0, -1.0]), torch.tensor([0.5, 1.0])).sum().backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor([-1.5, 1.0]))


def test_weights_and_advantages_are_constants():
    log_ratio, log_probs, advantage, row = ragged()
    advantage = advantage.clone().requires_grad_()
    for loss in (
        reinforce(log_probs, advantage, log_ratio.exp()),
        reinforce(log_probs, advantage, sequence_weights(log_ratio, row, 6)),
        cispo(log_probs, log_ratio, advantage)[0],
        topr(log_probs, log_ratio, advantage, row, 6)[0],
    ):
        inputs = (log_probs, log_ratio, advantage)
        through = torch.autograd.grad(loss.sum(), inputs, allow_unused=True)
        assert through[0] is not None
        assert through[1] is None
        assert through[2] is None


def test_weights_of_sequences_by_hand():
    for dtype, tolerance in PRECISIONS:
        # Products: 2 x 3 = 6, cut to 5; 1/2; 4 x 1/4 = 1.
        ratios = torch.tensor([2.0, 3.0, 0.5, 4.0, 0.25], dtype=dtype)
        weights = sequence_weights(ratios.log(), torch.tensor([0, 0, 1, 2, 2]), 3, 5.0)
        assert weights.dtype is dtype
        assert weights.tolist() == pytest.approx([5.0, 5.0, 0.5, 1.0, 1.0], abs=tolerance)


def test_reinforce_over_sequences_is_the_importance_weighted_score_of_whole_sequences():
    # -mean_i sg(exp(L - L_old)) A L, with L the log-prob of a sequence: the seed's formula.
    log_ratio, log_probs, advantage, row = ragged()
    weights = sequence_weights(log_ratio, row, 6)
    (reinforce(log_probs, advantage, weights).sum() / 5).backward()
    twin = log_probs.detach().clone().requires_grad_()
    old = log_probs.detach() - log_ratio.detach()
    total = 0.0
    for index in (0, 1, 2, 4, 5):
        tokens = row == index
        joint = twin[tokens].sum()
        weight = (joint - old[tokens].sum()).exp().detach()
        total = total - weight * advantage[tokens][0] * joint / 5
    total.backward()
    torch.testing.assert_close(log_probs.grad, twin.grad, rtol=0, atol=1e-8)


def test_weights_of_sequences_stay_finite():
    row = torch.zeros(100, dtype=torch.int64)
    weights = sequence_weights(torch.full((100,), 5.0), row, 1)
    assert weights.isfinite().all()
    assert truncated_weights(torch.tensor([500.0]), 2.0).item() == 2.0


@pytest.mark.parametrize(
    ("ratio", "low", "weight", "clipped"),
    [
        (1.0, None, 1.0, False),
        (1.1, None, 1.1, False),
        (1.5, None, 1.2, True),
        # The paper has no lower bound ...
        (0.5, None, 0.5, False),
        # ... and with one, small weights are raised.
        (0.5, 0.2, 0.8, True),
        (0.9, 0.2, 0.9, False),
    ],
)
def test_cispo_by_hand(ratio, low, weight, clipped):
    for advantage in [2.0, -3.0]:
        for dtype, tolerance in PRECISIONS:
            # -sg(w) A log pi at log pi = -0.7: 0.7 w A, with gradient -w A, cut or not.
            log_probs = torch.tensor([-0.7], dtype=dtype, requires_grad=True)
            log_ratio = torch.tensor([ratio], dtype=dtype).log()
            got, cut = cispo(log_probs, log_ratio, torch.tensor([advantage], dtype=dtype), low, 0.2)
            got.sum().backward()
            assert got.dtype is dtype
            assert got.item() == pytest.approx(0.7 * weight * advantage, abs=tolerance)
            assert cut.item() is clipped
            assert log_probs.grad.item() == pytest.approx(-weight * advantage, abs=tolerance)


@pytest.mark.parametrize(
    ("ratios", "advantage", "weight", "clipped"),
    [
        # Good sequences: weight 1 whatever their ratio.
        ((2.0, 3.0), 1.5, 1.0, True),
        ((0.5, 0.5), 1.5, 1.0, True),
        # Bad ones: the product of their ratios, at most 1.
        ((0.5, 0.5), -2.0, 0.25, False),
        ((2.0, 3.0), -2.0, 1.0, True),
        ((2.0, 0.25), -2.0, 0.5, False),
        # Reward zero is on the good side, and adds nothing.
        ((0.5, 0.5), 0.0, 1.0, True),
    ],
)
def test_topr_by_hand(ratios, advantage, weight, clipped):
    for dtype, tolerance in PRECISIONS:
        log_probs = torch.tensor([-0.7, -0.2], dtype=dtype, requires_grad=True)
        advantages = torch.full((2,), advantage, dtype=dtype)
        log_ratio = torch.tensor(ratios, dtype=dtype).log()
        got, cut = topr(log_probs, log_ratio, advantages, torch.tensor([0, 0]), 1)
        got.sum().backward()
        assert got.dtype is dtype
        # -w A (log pi_1 + log pi_2) = 0.9 w A.
        assert got.sum().item() == pytest.approx(0.9 * weight * advantage, abs=tolerance)
        assert cut.tolist() == [clipped, clipped]
        assert log_probs.grad.tolist() == pytest.approx([-weight * advantage] * 2, abs=tolerance)


def test_topr_with_the_same_bounds_for_both_signs_is_truncated_importance_sampling():
    log_ratio, log_probs, advantage, row = ragged()
    got, _ = topr(log_probs, log_ratio, advantage, row, 6, (0.0, 1.0), (0.0, 1.0))
    expected = reinforce(log_probs, advantage, sequence_weights(log_ratio, row, 6, 1.0))
    torch.testing.assert_close(got, expected)


def test_ratios_beyond_float_range_stay_finite():
    log_ratio, row = torch.tensor([200.0, -200.0]), torch.tensor([0, 1])
    log_probs = torch.tensor([-1.0, -300.0])
    for advantage in (torch.ones(2), -torch.ones(2), torch.zeros(2)):
        assert cispo(log_probs, log_ratio, advantage)[0].isfinite().all()
        assert topr(log_probs, log_ratio, advantage, row, 2)[0].isfinite().all()
