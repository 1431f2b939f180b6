from __future__ import annotations

import math

import torch

from torchrl_llm.functional import k1, k2, k3

P = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
Q = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)


def expectation(estimate):
    return (P * estimate((Q / P).log())).sum()


def test_k1_and_k3_have_the_divergence_of_p_from_q_as_expectation():
    divergence = (P * (P / Q).log()).sum()
    torch.testing.assert_close(expectation(k1), divergence)
    torch.testing.assert_close(expectation(k3), divergence)


def test_k2_is_close_for_close_distributions():
    divergence = (P * (P / Q).log()).sum()
    assert abs(expectation(k2) - divergence) < 0.05


def test_values_by_hand():
    # log q - log p = log 2: k1 = -log 2, k2 = (log 2)^2 / 2, k3 = 2 - 1 - log 2.
    ratio = torch.tensor(math.log(2), dtype=torch.float64)
    torch.testing.assert_close(k1(ratio).item(), -math.log(2))
    torch.testing.assert_close(k2(ratio).item(), math.log(2) ** 2 / 2)
    torch.testing.assert_close(k3(ratio).item(), 1 - math.log(2))


def test_k3_is_never_negative_and_zero_only_at_zero():
    values = k3(torch.linspace(-5, 5, 101))
    assert (values >= 0).all()
    assert (values == 0).sum() == 1


def test_gradient_of_k3_points_towards_the_reference():
    # log_ratio = ref - cur; d k3 / d cur = 1 - exp(ref - cur): negative where cur is too low.
    cur = torch.tensor([-2.0, -0.5], requires_grad=True)
    k3(torch.tensor([-1.0, -1.0]) - cur).sum().backward()
    torch.testing.assert_close(cur.grad, 1 - torch.tensor([1.0, -0.5]).exp())
