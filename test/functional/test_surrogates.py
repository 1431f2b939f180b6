from __future__ import annotations

import pytest
import torch

from torchrl_llm.functional import ppo_clip, reinforce


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
    log_ratio = torch.tensor([ratio]).log().requires_grad_()
    got, cut = ppo_clip(log_ratio, torch.tensor([advantage]), 0.2, 0.2)
    got.sum().backward()
    assert got.item() == pytest.approx(loss)
    assert cut.item() is clipped
    assert log_ratio.grad.item() == pytest.approx(gradient)


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


def test_reinforce_has_the_score_function_gradient():
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    reinforce(log_probs, torch.tensor([3.0, -1.0]), torch.tensor([0.5, 1.0])).sum().backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor([-1.5, 1.0]))


def test_at_ratio_one_ppo_and_reinforce_have_one_gradient():
    advantage = torch.tensor([3.0, -1.0])
    ratio = torch.zeros(2, requires_grad=True)
    ppo_clip(ratio, advantage, 0.2, 0.2)[0].sum().backward()
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    reinforce(log_probs, advantage).sum().backward()
    torch.testing.assert_close(ratio.grad, log_probs.grad)
