from __future__ import annotations

import math

import pytest
import torch

from torchrl_llm.functional import ppo_clip, reinforce, sapo

PRECISIONS = [(torch.float64, 1e-8), (torch.float32, 1e-5)]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "gradient"),
    [
        # inside: -r A, gradient with respect to log r is -r A
        (1.1, 2.0, -2.2, False, -2.2),
        (0.9, -1.0, 0.9, False, 0.9),
        # above the upper bound with a positive advantage: -1.2 A, no gradient
        (1.5, 2.0, -2.4, True, 0.0),
        # below the lower bound with a negative advantage: -0.8 A, no gradient
        (0.5, -1.0, 0.8, True, 0.0),
        # the pessimistic side is never clipped
        (1.5, -1.0, 1.5, False, 1.5),
        (0.5, 2.0, -1.0, False, -1.0),
        # no advantage, no loss
        (1.5, 0.0, 0.0, False, 0.0),
    ],
)
def test_ppo_clip_by_hand(ratio, advantage, loss, clipped, gradient):
    for dtype, tolerance in PRECISIONS:
        log_ratio = torch.tensor([ratio], dtype=dtype).log().requires_grad_()
        got, cut = ppo_clip(log_ratio, torch.tensor([advantage], dtype=dtype), 0.2, 0.2)
        got.sum().backward()
        assert got.dtype is dtype
        assert got.item() == pytest.approx(loss, abs=tolerance)
        assert cut.item() is clipped
        assert log_ratio.grad.item() == pytest.approx(gradient, abs=tolerance)


def test_bounds_are_two_numbers():
    loss, cut = ppo_clip(torch.tensor([1.25]).log(), torch.ones(1), 0.2, 0.28)
    assert loss.item() == pytest.approx(-1.25)
    assert not cut.item()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_ratios_beyond_float_range_stay_finite(advantage):
    log_ratio = torch.tensor([200.0, -200.0], requires_grad=True)
    loss, _ = ppo_clip(log_ratio, torch.full((2,), advantage), 0.2, 0.2)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert log_ratio.grad.isfinite().all()


LN3 = math.log(3)


@pytest.mark.parametrize(
    ("ratio", "advantage", "tau", "loss", "gradient"),
    [
        # sigmoid(0) = 1/2: -(4 / tau) A / 2; the gradient's weight 4 x 1/2 x 1/2 is one
        (1.0, 2.0, (1.0, 1.05), -4.0, -2.0),
        (1.0, -2.0, (1.0, 1.05), 4 / 1.05, 2.0),
        # sigmoid(ln 3) = 3/4: -(4 / 1) (3/4) A; weight 4 x 3/4 x 1/4 = 3/4, times r A
        (1 + LN3, 2.0, (1.0, 1.05), -6.0, -0.75 * (1 + LN3) * 2),
        # the other temperature: tau (r - 1) = ln 3 again, (4 / 1.05) (3/4)
        (1 + LN3 / 1.05, -1.0, (1.0, 1.05), 3 / 1.05, 0.75 * (1 + LN3 / 1.05)),
        # below one: sigmoid(-ln 3) = 1/4, (4 / 2) (1/4) = 1/2, and the weight is 3/4 again
        (1 - LN3 / 2, -1.0, (9.0, 2.0), 0.5, 0.75 * (1 - LN3 / 2)),
        # no advantage, no loss
        (1.7, 0.0, (1.0, 1.05), 0.0, 0.0),
    ],
)
def test_sapo_by_hand(ratio, advantage, tau, loss, gradient):
    for dtype, tolerance in PRECISIONS:
        log_ratio = torch.tensor([math.log(ratio)], dtype=dtype, requires_grad=True)
        got = sapo(log_ratio, torch.tensor([advantage], dtype=dtype), *tau)
        got.sum().backward()
        assert got.dtype is dtype
        assert got.item() == pytest.approx(loss, abs=tolerance)
        assert log_ratio.grad.item() == pytest.approx(gradient, abs=tolerance)


def test_sapo_takes_each_tokens_temperature_by_the_sign_of_its_advantage():
    log_ratio, advantage = torch.randn(50, dtype=torch.float64), torch.randn(50).double()
    expected = [
        -(4 / tau) / (1 + math.exp(-tau * (math.exp(x) - 1))) * a
        for x, a in zip(log_ratio.tolist(), advantage.tolist(), strict=True)
        for tau in [1.0 if a > 0 else 1.05]
    ]
    torch.testing.assert_close(
        sapo(log_ratio, advantage), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-8
    )


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_sapo_stays_finite_beyond_float_range(advantage):
    log_ratio = torch.tensor([200.0, -200.0], requires_grad=True)
    sapo(log_ratio, torch.full((2,), advantage)).sum().backward()
    # Far from one the gate is flat.
    assert log_ratio.grad.tolist() == [0.0, 0.0]


def test_at_ratio_one_ppo_and_reinforce_have_one_gradient():
    advantage = torch.tensor([3.0, -1.0])
    ratio = torch.zeros(2, requires_grad=True)
    ppo_clip(ratio, advantage, 0.2, 0.2)[0].sum().backward()
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    reinforce(log_probs, advantage).sum().backward()
    torch.testing.assert_close(ratio.grad, log_probs.grad)
